//! The steps of a plan as data: what is to be done to a GPU, and what is known
//! of how far it came.
//!
//! Effects are elsewhere (`kubelet-plugin`); this is what is written into the
//! journal, so every state says what undo may rely on.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::inventory::{
    ComputeInstance, ComputeInstanceId, GpuInstance, GpuInstanceId, MigMode, Placement, ProfileId,
};
use crate::names::{PciAddress, ProfileName};

/// One step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "step", rename_all = "camelCase")]
pub enum Step {
    /// Brings a GPU into a MIG mode. It is never undone: the mode stays as it
    /// was last needed.
    MigMode(MigModeStep),
    /// Makes a partition.
    Partition(PartitionStep),
    /// A step of a later version. It is kept, and can be neither done nor
    /// undone here.
    #[serde(untagged)]
    Unknown(Value),
}

/// Parameters of [`Step::MigMode`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MigModeStep {
    /// The GPU.
    pub gpu: PciAddress,
    /// The mode it must be in.
    pub mode: MigMode,
}

/// Parameters and progress of [`Step::Partition`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PartitionStep {
    /// The GPU.
    pub gpu: PciAddress,
    /// What identifies the profile.
    pub profile: ProfileId,
    /// What it is called.
    pub profile_name: ProfileName,
    /// Where it is to be.
    pub placement: Placement,
    /// How far it came.
    pub progress: PartitionProgress,
}

/// How far a partition came. Instance ids mean something only during the boot
/// in which the entry was written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "camelCase")]
pub enum PartitionProgress {
    /// Nothing was called for it.
    Planned,
    /// The create call may have been made. A GPU instance at this profile and
    /// placement that is not in `existing` is ours.
    Intent {
        /// The GPU instances that were in the way of the placement before the
        /// call. Others are left out: when one of them goes, its id is given
        /// again, and may be given to ours.
        existing: Vec<GpuInstanceId>,
    },
    /// The GPU instance is there; a compute instance may be.
    #[serde(rename_all = "camelCase")]
    Created {
        /// Its id.
        instance: GpuInstanceId,
    },
    /// All of it is there.
    #[serde(rename_all = "camelCase")]
    Ready {
        /// The GPU instance.
        instance: GpuInstanceId,
        /// The compute instance in it.
        compute_instance: ComputeInstanceId,
        /// The compute instance's UUID.
        uuid: String,
    },
    /// There is nothing of it: it was not created, or was undone.
    Absent,
}

impl PartitionStep {
    /// Whether an instance is of this profile at this placement.
    pub fn describes(&self, instance: &GpuInstance) -> bool {
        instance.profile == self.profile && instance.placement == self.placement
    }

    /// Whether an existing instance is the one this step made.
    pub fn owns(&self, instance: &GpuInstance) -> bool {
        if !self.describes(instance) {
            return false;
        }
        match &self.progress {
            PartitionProgress::Planned | PartitionProgress::Absent => false,
            PartitionProgress::Intent { existing } => !existing.contains(&instance.id),
            PartitionProgress::Created { instance: id } => instance.id == *id,
            PartitionProgress::Ready { instance: id, compute_instance, uuid } => {
                // The UUID must agree: ids alone are given again by the
                // hardware.
                let is_ours = |found: &ComputeInstance| found.id == *compute_instance && found.uuid == *uuid;
                instance.id == *id && instance.compute_instances.iter().any(is_ours)
            }
        }
    }

    /// Whether an existing instance is, or is the rest of, the one this step
    /// made, while it is being undone: its compute instance goes first.
    pub fn owns_rest(&self, instance: &GpuInstance) -> bool {
        let is_rest = |id: &GpuInstanceId| {
            self.describes(instance) && instance.id == *id && instance.compute_instances.is_empty()
        };
        self.owns(instance)
            || matches!(&self.progress, PartitionProgress::Ready { instance: id, .. } if is_rest(id))
    }

    /// Whether it may have something on the hardware.
    pub fn occupies(&self) -> bool {
        !matches!(self.progress, PartitionProgress::Planned | PartitionProgress::Absent)
    }

    /// What it is called in messages and logs.
    pub fn label(&self) -> String {
        format!("partition {} at {} of {}", self.profile_name, self.placement.start, self.gpu)
    }
}
