//! What has to be done for a claim, decided from values alone.
//!
//! The node refuses by itself what cannot be in use at once: schedulers have
//! given one device to two claims before. A refusal names the device, who
//! holds it, and what would help.

use crate::claim::{ALLOCATE_ANEW, Allocated, Claim, ClaimName};
use crate::inventory::{Gpu, GpuInstance, Inventory, Mig, MigMode, Placement, Profile};
use crate::journal::{BootId, Device, Entry};
use crate::model::{ForeignPartitions, MigModePolicy, Settings};
use crate::names::{ClaimUid, DeviceName, PciAddress};
use crate::step::{MigModeStep, PartitionProgress, PartitionStep, Step};

/// What has to be done for a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// What each result is on the hardware, in the order of the allocation.
    pub devices: Vec<Device>,
    /// What is to be done, in this order.
    pub steps: Vec<Step>,
}

/// Why a claim cannot be served now.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The GPU is not there.
    #[error("device `{device}`: GPU {gpu} is not there{}; `kerf status` in the node's kerf pod tells of it, and it is given out again when it answers", why.as_deref().map(|why| format!(" ({why})")).unwrap_or_default())]
    NoGpu {
        /// The device.
        device: DeviceName,
        /// Its GPU.
        gpu: PciAddress,
        /// What is known about it.
        why: Option<String>,
    },
    /// The GPU has no such device.
    #[error("device `{device}`: GPU {gpu} ({product}) has no such device; {ALLOCATE_ANEW}")]
    NoDevice {
        /// The device.
        device: DeviceName,
        /// Its GPU.
        gpu: PciAddress,
        /// The GPU's product.
        product: String,
    },
    /// Another claim has it, or something that overlaps it.
    #[error(
        "device `{device}` is held by claim {holder} (UID {uid}){}; it can be prepared when that claim's pod \
         is gone", error.as_deref().map(|error| format!(", which could not be undone: {error}")).unwrap_or_default()
    )]
    Held {
        /// The device.
        device: DeviceName,
        /// Who has it.
        holder: ClaimName,
        /// The holder's UID.
        uid: ClaimUid,
        /// Why the holder is still there, where it should not be.
        error: Option<String>,
    },
    /// Two results of the claim itself.
    #[error("devices `{device}` and `{other}` of the claim cannot be in use at once; {ALLOCATE_ANEW}")]
    WithinClaim {
        /// One.
        device: DeviceName,
        /// The other.
        other: DeviceName,
    },
    /// A GPU instance that is in no journal entry.
    #[error(
        "device `{device}` is occupied by {instance} of GPU {gpu}, which this driver did not make and will not \
         destroy; whoever made it can remove it"
    )]
    Foreign {
        /// The device.
        device: DeviceName,
        /// The GPU.
        gpu: PciAddress,
        /// What is there.
        instance: String,
    },
    /// The GPU's mode is another one and stays as it is.
    #[error(
        "device `{device}` needs GPU {gpu} with MIG {}, but it is {} and its mode is kept as it is; an \
         administrator can change it when the GPU is idle", mode_word(*.needed), mode_word(.needed.other())
    )]
    ModeKept {
        /// The device.
        device: DeviceName,
        /// The GPU.
        gpu: PciAddress,
        /// The mode it needs.
        needed: MigMode,
    },
    /// The GPU's mode is another one and in use.
    #[error(
        "device `{device}` needs GPU {gpu} with MIG {}, but the mode cannot change while these are there: {}; it \
         can be prepared when they are gone",
        mode_word(*.needed), holders.join(", ")
    )]
    ModeInUse {
        /// The device.
        device: DeviceName,
        /// The GPU.
        gpu: PciAddress,
        /// The mode it needs.
        needed: MigMode,
        /// What is there.
        holders: Vec<String>,
    },
    /// Administrative access is not served yet.
    #[error(
        "device `{device}`: a device for administrative access is not yet supported by this driver; remove \
         `adminAccess` from the request"
    )]
    AdminAccess {
        /// The device.
        device: DeviceName,
    },
    /// A shared device is not served yet.
    #[error("device `{device}`: shares of a device are not yet supported by this driver; {ALLOCATE_ANEW}")]
    Share {
        /// The device.
        device: DeviceName,
    },
}

fn mode_word(mode: MigMode) -> &'static str {
    match mode {
        MigMode::Enabled => "enabled",
        MigMode::Disabled => "disabled",
    }
}

impl MigMode {
    /// The other one.
    #[must_use]
    pub fn other(self) -> Self {
        match self {
            Self::Enabled => Self::Disabled,
            Self::Disabled => Self::Enabled,
        }
    }
}

/// What a plan is made from, beside the claim.
#[derive(Debug, Clone, Copy)]
pub struct Situation<'a> {
    /// The operator's choices.
    pub settings: &'a Settings,
    /// What is there; of the claim's GPUs, as read under their locks.
    pub inventory: &'a Inventory,
    /// The entries that touch the claim's GPUs.
    pub entries: &'a [Entry],
    /// The running boot.
    pub boot: &'a BootId,
}

impl Plan {
    /// Decides what has to be done for a claim.
    ///
    /// # Errors
    /// The first thing that is in the way.
    pub fn for_claim(claim: &Claim, situation: Situation<'_>) -> Result<Self, Refusal> {
        let mut plan = Self { devices: Vec::new(), steps: Vec::new() };
        let mut makes = Vec::new();
        for allocated in &claim.allocation {
            let device = plan.add(claim, allocated, situation, &mut makes)?;
            let earlier =
                plan.devices.iter().zip(&claim.allocation).find(|(earlier, _)| earlier.overlaps(&device));
            if let Some((_, other)) = earlier {
                return Err(Refusal::WithinClaim {
                    device: allocated.device.clone(),
                    other: other.device.clone(),
                });
            }
            plan.devices.push(device);
        }
        // Modes first: nothing can be made in the other one.
        plan.steps.append(&mut makes);
        Ok(plan)
    }

    fn add(
        &mut self,
        claim: &Claim,
        allocated: &Allocated,
        situation: Situation<'_>,
        makes: &mut Vec<Step>,
    ) -> Result<Device, Refusal> {
        let name = &allocated.device;
        if allocated.admin_access {
            return Err(Refusal::AdminAccess { device: name.clone() });
        }
        if allocated.share_id.is_some() {
            return Err(Refusal::Share { device: name.clone() });
        }
        let gpu = find_gpu(name, situation.inventory)?;
        let context = Context { claim, name, gpu, situation };
        if *name == DeviceName::whole(gpu.pci) {
            let device = Device::Whole { gpu: gpu.pci };
            context.refuse_held(&device)?;
            self.need_mode(&context, MigMode::Disabled)?;
            return Ok(device);
        }
        let (mig, profile, placement) = find_placement(gpu, name).ok_or_else(|| Refusal::NoDevice {
            device: name.clone(),
            gpu: gpu.pci,
            product: gpu.product.clone(),
        })?;
        let device = Device::Partition { gpu: gpu.pci, profile: profile.id, placement };
        context.refuse_held(&device)?;
        if let Some(fixed) = context.foreign_at(mig, profile, placement)? {
            return Ok(fixed);
        }
        self.need_mode(&context, MigMode::Enabled)?;
        makes.push(Step::Partition(PartitionStep {
            gpu: gpu.pci,
            profile: profile.id,
            profile_name: profile.name.clone(),
            placement,
            progress: PartitionProgress::Planned,
        }));
        Ok(device)
    }

    fn need_mode(&mut self, context: &Context<'_>, needed: MigMode) -> Result<(), Refusal> {
        let gpu = context.gpu;
        let step = Step::MigMode(MigModeStep { gpu: gpu.pci, mode: needed });
        let Some(mig) = gpu.mig.as_ref().filter(|mig| mig.current != needed) else { return Ok(()) };
        if self.steps.contains(&step) {
            return Ok(());
        }
        if context.situation.settings.mig_mode_policy(gpu) == MigModePolicy::Keep {
            return Err(Refusal::ModeKept { device: context.name.clone(), gpu: gpu.pci, needed });
        }
        let mut holders: Vec<String> = context
            .others()
            .filter(|entry| {
                entry.occupied(context.situation.boot).iter().any(|device| device.may_be_on(gpu.pci))
            })
            .map(|entry| format!("claim {}", entry.claim))
            .collect();
        holders.extend(
            mig.instances
                .iter()
                .filter(|found| !context.is_owned(found))
                .map(|found| format!("a foreign {}", describe(mig, found))),
        );
        if !holders.is_empty() {
            return Err(Refusal::ModeInUse { device: context.name.clone(), gpu: gpu.pci, needed, holders });
        }
        self.steps.push(step);
        Ok(())
    }
}

/// One result being planned.
struct Context<'a> {
    claim: &'a Claim,
    name: &'a DeviceName,
    gpu: &'a Gpu,
    situation: Situation<'a>,
}

impl<'a> Context<'a> {
    fn others(&self) -> impl Iterator<Item = &'a Entry> {
        let uid = &self.claim.uid;
        self.situation.entries.iter().filter(move |entry| entry.uid != *uid)
    }

    fn is_owned(&self, instance: &GpuInstance) -> bool {
        self.situation.entries.iter().any(|entry| entry.owns(self.situation.boot, self.gpu.pci, instance))
    }

    fn refuse_held(&self, device: &Device) -> Result<(), Refusal> {
        let holder = self.others().find(|entry| {
            entry.occupied(self.situation.boot).iter().any(|occupied| occupied.overlaps(device))
        });
        match holder {
            None => Ok(()),
            Some(entry) => Err(Refusal::Held {
                device: self.name.clone(),
                holder: entry.claim.clone(),
                uid: entry.uid.clone(),
                error: entry.error.clone(),
            }),
        }
    }

    /// What somebody else has at a placement: exactly the partition, ready to
    /// be used, or something in its way.
    fn foreign_at(
        &self,
        mig: &Mig,
        profile: &Profile,
        placement: Placement,
    ) -> Result<Option<Device>, Refusal> {
        let in_the_way = mig
            .instances
            .iter()
            .filter(|instance| !self.is_owned(instance))
            .find(|instance| instance.placement.overlaps(placement));
        let Some(instance) = in_the_way else { return Ok(None) };
        let exact = instance.profile == profile.id && instance.placement == placement;
        match instance.compute_instances.as_slice() {
            [only]
                if exact
                    && only.full
                    && self.situation.settings.foreign_partitions == ForeignPartitions::Publish =>
            {
                Ok(Some(Device::Fixed {
                    gpu: self.gpu.pci,
                    profile: profile.id,
                    placement,
                    instance: instance.id,
                    compute_instance: only.id,
                    uuid: only.uuid.clone(),
                }))
            }
            _ => Err(Refusal::Foreign {
                device: self.name.clone(),
                gpu: self.gpu.pci,
                instance: describe(mig, instance),
            }),
        }
    }
}

fn find_gpu<'a>(name: &DeviceName, inventory: &'a Inventory) -> Result<&'a Gpu, Refusal> {
    // The claim was resolved, so the name has an address; one that has not is
    // treated like a GPU that is not there.
    let pci = name.gpu().unwrap_or(PciAddress { domain: 0, bus: 0, device: 0, function: 0 });
    inventory.gpu(pci).ok_or_else(|| Refusal::NoGpu {
        device: name.clone(),
        gpu: pci,
        why: inventory
            .unreadable
            .iter()
            .find(|unreadable| unreadable.pci == Some(pci))
            .map(|unreadable| unreadable.error.clone()),
    })
}

/// The partition that a device name means on a GPU.
pub fn find_placement<'a>(gpu: &'a Gpu, name: &DeviceName) -> Option<(&'a Mig, &'a Profile, Placement)> {
    let mig = gpu.mig.as_ref()?;
    mig.profiles.iter().find_map(|profile| {
        let placement = profile
            .placements
            .iter()
            .find(|placement| DeviceName::partition(gpu.pci, &profile.name, placement.start) == *name)?;
        Some((mig, profile, *placement))
    })
}

fn describe(mig: &Mig, instance: &GpuInstance) -> String {
    let name = mig
        .profile(instance.profile)
        .map_or_else(|| format!("of profile id {}", instance.profile.0), |profile| profile.name.to_string());
    format!("GPU instance {} ({name} at {})", instance.id.0, instance.placement.start)
}

#[cfg(test)]
mod tests;
