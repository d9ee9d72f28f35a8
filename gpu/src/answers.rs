//! What a GPU answers of itself, whole and unfiltered: a record of a model.

use kerf_dra_driver::hardware::HardwareError;
use kerf_dra_driver::inventory::{BoardFacts, Bytes, GpuInstanceId};
use kerf_dra_driver::names::{PciAddress, ProfileName};

use crate::describe;
use crate::hardware::NvmlHardware;
pub use crate::nvml::{BoardNumbers, ComputeProfile};
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
    pub numbers: BoardNumbers,
    /// What else NVML tells of the board.
    pub facts: BoardFacts,
    /// The memory slices that placements count; 0 without MIG.
    pub memory_slices: u32,
    /// The GPU instance profiles, with what depends on the instances that exist.
    pub profiles: Vec<ProfileAnswers>,
}

/// A GPU instance profile.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProfileAnswers {
    /// What NVML says of it.
    pub profile: GpuProfile,
    /// What it is called, also by a driver that does not say.
    pub name: Option<ProfileName>,
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
        self.with(|session| (0..session.gpu_count()?).map(|index| ask(session, index)).collect())
            .map_err(|failure| failure.during("read what the GPUs answer"))
    }
}

fn ask(session: &Session, index: u32) -> Result<Answers, Failure> {
    let gpu = session.gpu_by_index(index)?;
    let pci: PciAddress = gpu.pci()?;
    let memory = gpu.memory()?;
    let (known, instances) = match gpu.mig_mode() {
        Ok((current, _)) => {
            let known = session.read_profiles(pci, &gpu)?;
            let instances = describe::instances(current, pci, &gpu, &known)?;
            (known, instances)
        }
        Err(failure) if failure.is_not_supported() => Default::default(),
        Err(failure) => return Err(failure),
    };
    let memory_slices = known.memory_slices();
    let mut profiles = Vec::new();
    for profile in known.profiles.iter().cloned() {
        let of = instances.iter().filter(|instance| instance.profile == profile.id);
        let instances: Vec<GpuInstanceId> = of.map(|instance| instance.id).collect();
        let compute = instances.first().map(|id| gpu.compute_profiles_of(*id)).transpose()?;
        let name = profile.name_on(memory, memory_slices);
        profiles.push(ProfileAnswers { profile, name, compute: compute.unwrap_or_default(), instances });
    }
    Ok(Answers {
        name: gpu.name()?,
        compute_capability: gpu.compute_capability()?,
        memory,
        numbers: gpu.board_numbers()?,
        facts: gpu.board_facts(),
        memory_slices,
        profiles,
    })
}
