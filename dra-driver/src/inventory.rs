//! What a node has, as plain data: the answer of [`Hardware`] to "what is
//! there", compared, stored and drawn by everything else.
//!
//! [`Hardware`]: crate::hardware::Hardware

use serde::{Deserialize, Serialize};

use crate::names::{PciAddress, ProfileName};

/// An amount of memory in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Bytes(pub u64);

impl Bytes {
    /// NVML gives a profile's memory in MiB.
    pub const fn from_mib(mib: u64) -> Self {
        Self(mib.saturating_mul(1 << 20))
    }
}

/// A node's GPUs at one instant, in PCI order.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Inventory {
    /// The driver's version as NVML gives it, `580.95.05`.
    pub driver_version: String,
    /// The highest CUDA version the driver serves, as major and minor.
    pub cuda_version: (u32, u32),
    /// The GPUs that answered.
    pub gpus: Vec<Gpu>,
    /// The GPUs that are there but could not be read. One of them never hides
    /// the others.
    pub unreadable: Vec<UnreadableGpu>,
}

impl Inventory {
    /// The GPU at an address.
    pub fn gpu(&self, pci: PciAddress) -> Option<&Gpu> {
        self.gpus.iter().find(|gpu| gpu.pci == pci)
    }
}

/// A GPU that NVML counts but could not describe.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnreadableGpu {
    /// NVML's index of it at that instant, for messages only.
    pub index: u32,
    /// Its address, where at least that could be read.
    pub pci: Option<PciAddress>,
    /// What failed, as a sentence.
    pub error: String,
    /// Whether the driver says that it is lost, so that nothing runs on it.
    #[serde(default)]
    pub lost: bool,
}

/// One physical GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    /// Its PCI address, which is its identity here.
    pub pci: PciAddress,
    /// The number in `/dev/nvidia<minor>`. It may change with a reboot.
    pub minor: u32,
    /// `GPU-…`.
    pub uuid: String,
    /// NVML's product name, `NVIDIA H100 80GB HBM3`.
    pub product: String,
    /// NVML's brand, `Nvidia`.
    pub brand: Told<String>,
    /// The chip's generation.
    pub architecture: Architecture,
    /// CUDA compute capability as major and minor.
    pub compute_capability: (u32, u32),
    /// The board's memory, the same in every MIG mode.
    pub memory: Bytes,
    /// How it reaches the host's pageable memory: `HMM`, `ATS` or `None`.
    pub addressing_mode: Told<String>,
    /// The NUMA node from sysfs; absent where sysfs says -1.
    pub numa_node: Option<u32>,
    /// `pci<domain>:<bus>`, the first component of the device's sysfs path.
    pub pcie_root: Option<String>,
    /// Whether this is a vGPU guest, where modes cannot be changed.
    pub vgpu_guest: bool,
    /// What else NVML tells of the board.
    #[serde(default)]
    pub facts: BoardFacts,
    /// Absent where the GPU has no MIG profiles (L4, T4).
    pub mig: Option<Mig>,
}

/// The answer to a question on which nothing depends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum Told<T> {
    /// It is so.
    Known(T),
    /// The GPU has no such thing, or its driver knows of none.
    #[default]
    HasNone,
    /// That cannot be told now. What was published of it stays.
    NotNow,
}

impl<T> Told<T> {
    /// What it is, where it is known.
    pub fn known(&self) -> Option<&T> {
        match self {
            Self::Known(value) => Some(value),
            Self::HasNone | Self::NotNow => None,
        }
    }
}

/// What is good to know of a board and nothing depends on.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct BoardFacts {
    /// The serial number, as on the board's label; GPUs of one board share it.
    pub serial: Told<String>,
    /// Whether ECC is on. It changes with a reset only.
    pub ecc: Told<bool>,
    /// How many NVLinks are up. In MIG mode they may be down.
    pub nvlinks: Told<u32>,
    /// Which GPUs, of this node and others, the NVLinks reach:
    /// `<cluster UUID>.<clique>`.
    pub nvlink_clique: Told<String>,
}

/// The chip's generation. The order is that of their appearance.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Architecture {
    /// V100.
    Volta,
    /// T4.
    Turing,
    /// A100, A30: a MIG mode change needs a GPU reset.
    Ampere,
    /// L4, L40S.
    Ada,
    /// H100, H200: a MIG mode change needs no reset, and a reboot clears it.
    Hopper,
    /// B200, RTX PRO 6000.
    Blackwell,
    /// Anything newer, under NVML's number.
    Newer(u32),
    /// Anything older, or a driver that does not say.
    Unknown,
}

impl Architecture {
    /// The name NVIDIA's driver publishes.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Volta => "Volta",
            Self::Turing => "Turing",
            Self::Ampere => "Ampere",
            Self::Ada => "Ada Lovelace",
            Self::Hopper => "Hopper",
            Self::Blackwell => "Blackwell",
            Self::Newer(_) | Self::Unknown => "Unknown",
        }
    }

    /// Whether the MIG mode changes without a GPU reset.
    pub fn changes_mig_mode_live(&self) -> bool {
        matches!(self, Self::Hopper | Self::Blackwell | Self::Newer(_))
    }
}

/// A GPU's MIG mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum MigMode {
    /// The GPU serves whole.
    Disabled,
    /// The GPU serves partitions.
    Enabled,
}

/// What a MIG-capable GPU says about MIG.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mig {
    /// The mode the GPU is in.
    pub current: MigMode,
    /// The mode it will be in after its next reset.
    pub pending: MigMode,
    /// The profiles it can serve, ordered by id. They do not depend on the
    /// mode nor on what is created.
    pub profiles: Vec<Profile>,
    /// The GPU instances that exist, ordered by id; listed per profile, so
    /// that one without a compute instance is seen.
    pub instances: Vec<GpuInstance>,
}

impl Mig {
    /// The profile of an id.
    pub fn profile(&self, id: ProfileId) -> Option<&Profile> {
        self.profiles.iter().find(|profile| profile.id == id)
    }
}

/// A GPU instance profile id (`nvidia-smi mig -lgip`, column ID). It is not
/// NVML's profile *enum*, and means different things on different models.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ProfileId(pub u32);

/// A kind of GPU instance.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Profile {
    /// What identifies it on this model.
    pub id: ProfileId,
    /// What it is called.
    pub name: ProfileName,
    /// The memory of an instance.
    pub memory: Bytes,
    /// Compute slices, the `g` of the name.
    pub compute_slices: u32,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Copy engines.
    pub copy_engines: u32,
    /// NVDEC engines.
    pub decoders: u32,
    /// NVENC engines.
    pub encoders: u32,
    /// NVJPG engines.
    pub jpeg_engines: u32,
    /// Optical flow engines.
    pub ofa_engines: u32,
    /// How many the GPU can hold at once.
    pub max_instances: u32,
    /// Where it can be created, ordered by start.
    pub placements: Vec<Placement>,
}

/// The memory slices a GPU instance occupies: `size` of them from `start`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Placement {
    /// The first memory slice.
    pub start: u32,
    /// How many.
    pub size: u32,
}

impl Placement {
    /// Whether two placements share a memory slice.
    pub fn overlaps(self, other: Self) -> bool {
        self.start < other.start.saturating_add(other.size)
            && other.start < self.start.saturating_add(self.size)
    }
}

/// A GPU instance's id. The hardware reuses it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct GpuInstanceId(pub u32);

/// A compute instance's id within its GPU instance. The hardware reuses it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ComputeInstanceId(pub u32);

/// A GPU instance that exists.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuInstance {
    /// Its id.
    pub id: GpuInstanceId,
    /// The profile it was made of.
    pub profile: ProfileId,
    /// The memory slices it occupies.
    pub placement: Placement,
    /// The compute instances in it, ordered by id.
    pub compute_instances: Vec<ComputeInstance>,
}

/// A compute instance that exists.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ComputeInstance {
    /// Its id.
    pub id: ComputeInstanceId,
    /// Whether it spans its whole GPU instance.
    pub full: bool,
    /// `MIG-…`. The hardware may give the same one again.
    pub uuid: String,
}
