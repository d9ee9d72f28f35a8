//! What a GPU answers of itself, whole and unfiltered: a record of a model.

use kerf_dra_driver::hardware::HardwareError;
use kerf_dra_driver::inventory::{Bytes, GpuInstanceId};
use kerf_dra_driver::names::PciAddress;

use crate::hardware::NvmlHardware;
pub use crate::nvml::{Board, ComputeProfile};
use crate::nvml::{Failure, GpuProfile, Session};

/// A GPU's answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answers {
    /// The product's name.
    pub name: String,
    /// CUDA compute capability.
    pub compute_capability: (u32, u32),
    /// The board's memory.
    pub memory: Bytes,
    /// Plain numbers.
    pub board: Board,
    /// The GPU instance profiles, with what depends on the instances that exist.
    pub profiles: Vec<ProfileAnswers>,
}

/// A GPU instance profile.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProfileAnswers {
    /// What NVML says of it.
    pub profile: GpuProfile,
    /// The compute instance profiles; none where no instance of it exists, for
    /// NVML tells them of an instance only.
    pub compute: Vec<ComputeProfile>,
    /// The ids of the instances of it that exist.
    pub instances: Vec<GpuInstanceId>,
}

impl NvmlHardware {
    /// The answers of every GPU that NVML counts, in its order. Nothing is made
    /// or changed.
    pub fn answers(&self) -> Result<Vec<Answers>, HardwareError> {
        self.with_session(|session| (0..session.gpu_count()?).map(|index| ask(session, index)).collect())
            .map_err(|failure| failure.during("read what the GPUs answer"))
    }
}

fn ask(session: &Session, index: u32) -> Result<Answers, Failure> {
    let gpu = session.gpu_by_index(index)?;
    let pci: PciAddress = gpu.pci()?;
    let known = match gpu.mig_mode() {
        Ok(_) => gpu.mig_profiles()?,
        Err(failure) if failure.is_not_supported() => crate::nvml::GpuProfiles::default(),
        Err(failure) => return Err(failure),
    };
    // With MIG off there are none, and NVML refuses to be asked.
    let instances = match gpu.mig_mode() {
        Ok((current, _)) => {
            crate::describe::instances(current, pci, &gpu, &std::sync::Arc::new(known.clone()))?
        }
        Err(_) => Vec::new(),
    };
    let mut profiles = Vec::new();
    for profile in known.profiles {
        let of = instances.iter().filter(|instance| instance.profile == profile.id);
        let instances: Vec<GpuInstanceId> = of.map(|instance| instance.id).collect();
        let compute = instances.first().map(|id| gpu.compute_profiles_of(*id)).transpose()?;
        profiles.push(ProfileAnswers { profile, compute: compute.unwrap_or_default(), instances });
    }
    Ok(Answers {
        name: gpu.name()?,
        compute_capability: gpu.compute_capability()?,
        memory: gpu.memory()?,
        board: gpu.board()?,
        profiles,
    })
}
