//! What steps do to hardware. Each can be repeated after a crash at any
//! instant: it looks at what is there first, and records what undo needs as
//! soon as it is known.
//!
//! The caller holds the GPU's lock.

use kerf_dra_driver::hardware::{Hardware, HardwareError, HardwareErrorKind};
use kerf_dra_driver::inventory::GpuInstance;
use kerf_dra_driver::names::PciAddress;
use kerf_dra_driver::step::{MigModeStep, PartitionProgress, PartitionStep};

use crate::store::StoreError;

/// A step that could not be done or undone.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    /// The hardware refused.
    #[error("{}", with_holders(source, holders))]
    Hardware {
        /// Why.
        #[source]
        source: HardwareError,
        /// Who uses the GPU, where that is the reason.
        holders: Vec<String>,
    },
    /// The journal could not be written, so nothing was done.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A device or step of a later version.
    #[error(
        "the entry has a device or step that this version does not know; the version that wrote it can undo it"
    )]
    Unknown,
}

impl StepError {
    /// Whether the call may still take effect.
    pub(crate) fn is_timeout(&self) -> bool {
        matches!(self, Self::Hardware { source, .. } if source.kind == HardwareErrorKind::Timeout)
    }
}

fn with_holders(source: &HardwareError, holders: &[String]) -> String {
    if holders.is_empty() {
        source.to_string()
    } else {
        format!("{source}; used by {}; it can go on when these are gone", holders.join(", "))
    }
}

/// Names who is in the way, if that is what the error says.
pub(crate) fn explain(hardware: &dyn Hardware, gpu: PciAddress, source: HardwareError) -> StepError {
    let holders = match source.kind {
        HardwareErrorKind::InUse => hardware.holders(gpu).unwrap_or_default(),
        _ => Vec::new(),
    };
    StepError::Hardware { source, holders: holders.iter().map(ToString::to_string).collect() }
}

/// Brings a GPU into a mode.
pub(crate) fn set_mig_mode(hardware: &dyn Hardware, step: &MigModeStep) -> Result<(), StepError> {
    let failed = |error| explain(hardware, step.gpu, error);
    let (current, _) = hardware.mig_mode(step.gpu).map_err(failed)?;
    if current == step.mode {
        return Ok(());
    }
    hardware.set_mig_mode(step.gpu, step.mode).map_err(failed)
}

/// The first half of making a partition: its intent, from what is there now.
pub(crate) fn intend(hardware: &dyn Hardware, step: &mut PartitionStep) -> Result<(), StepError> {
    let found = hardware.gpu_instances(step.gpu).map_err(|error| explain(hardware, step.gpu, error))?;
    let in_the_way = found.iter().filter(|instance| instance.placement.overlaps(step.placement));
    step.progress = PartitionProgress::Intent { existing: in_the_way.map(|instance| instance.id).collect() };
    Ok(())
}

/// The second half, as far as it is to be done.
pub(crate) fn create(hardware: &dyn Hardware, step: &mut PartitionStep) -> Result<(), StepError> {
    if !matches!(step.progress, PartitionProgress::Created { .. }) {
        create_instance(hardware, step)?;
    }
    create_compute_instance(hardware, step)
}

/// The GPU instance of a partition in intent.
///
/// An answer that says the call failed rewrites the intent, so that an
/// instance which somebody else makes there later is not taken for ours. No
/// answer in time says nothing: the call may still take effect.
fn create_instance(hardware: &dyn Hardware, step: &mut PartitionStep) -> Result<(), StepError> {
    match hardware.create_gpu_instance(step.gpu, step.profile, step.placement) {
        Ok(instance) => {
            step.progress = PartitionProgress::Created { instance };
            Ok(())
        }
        Err(error) => {
            if error.kind != HardwareErrorKind::Timeout {
                step.progress = PartitionProgress::Absent;
            }
            Err(explain(hardware, step.gpu, error))
        }
    }
}

/// The compute instance of a partition whose GPU instance is there.
fn create_compute_instance(hardware: &dyn Hardware, step: &mut PartitionStep) -> Result<(), StepError> {
    let PartitionProgress::Created { instance } = step.progress else { return Ok(()) };
    let made = hardware
        .create_compute_instance(step.gpu, instance)
        .map_err(|error| explain(hardware, step.gpu, error))?;
    step.progress = PartitionProgress::Ready { instance, compute_instance: made.id, uuid: made.uuid };
    Ok(())
}

/// Takes a partition away, as far as it is there and ours.
///
/// `resumed` is whether an earlier attempt may have taken its compute instance;
/// `others` tells whether an instance was made for another entry; `record`
/// writes the journal.
pub(crate) fn undo_partition(
    hardware: &dyn Hardware,
    step: &mut PartitionStep,
    resumed: bool,
    others: &dyn Fn(&GpuInstance) -> bool,
    record: &mut dyn FnMut(&PartitionStep) -> Result<(), StoreError>,
) -> Result<(), StepError> {
    if !step.occupies() {
        return Ok(());
    }
    let gpu = step.gpu;
    let failed = |error| explain(hardware, gpu, error);
    let found = hardware.gpu_instances(gpu).map_err(failed)?;
    let is_ours = |instance: &GpuInstance| {
        if resumed { step.owns_rest(instance) } else { step.owns(instance) }
    };
    let Some(instance) = found.into_iter().find(|instance| is_ours(instance) && !others(instance)) else {
        step.progress = PartitionProgress::Absent;
        return Ok(());
    };
    if matches!(step.progress, PartitionProgress::Intent { .. }) {
        // Adopted: from here on it is known by its id.
        step.progress = PartitionProgress::Created { instance: instance.id };
        record(step)?;
    }
    for compute in &instance.compute_instances {
        missing(hardware.destroy_compute_instance(gpu, instance.id, compute.id)).map_err(failed)?;
    }
    let answer = hardware.destroy_gpu_instance(gpu, instance.id);
    if missing(answer.clone()).map_err(failed)? {
        // It was there a moment ago. If it still is, the answer was wrong, and
        // to believe it would leave an instance that nobody owns.
        let left = hardware.gpu_instances(gpu).map_err(failed)?;
        if left.iter().any(|left| left.id == instance.id && left.placement == instance.placement) {
            answer.map_err(failed)?;
        }
    }
    step.progress = PartitionProgress::Absent;
    Ok(())
}

/// Whether what was to be destroyed is said not to be there any more.
fn missing(answer: Result<(), HardwareError>) -> Result<bool, HardwareError> {
    match answer {
        Ok(()) => Ok(false),
        Err(error) if error.kind == HardwareErrorKind::NotFound => Ok(true),
        Err(error) => Err(error),
    }
}
