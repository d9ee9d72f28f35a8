//! What each GPU model is: the numbers NVML reports for it, read from a data
//! file. A new model is an entry in `models.json`, never code.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// All known models, by key (`h100-80`).
pub type Models = BTreeMap<String, Model>;

/// The models compiled in.
///
/// # Errors
/// The data file does not parse; a test proves that it does.
pub fn built_in() -> Result<Models, serde_json::Error> {
    serde_json::from_str(include_str!("../models.json"))
}

/// The model of a key.
///
/// # Errors
/// A sentence that names those there are.
pub fn find<'models>(models: &'models Models, key: &str) -> Result<&'models Model, String> {
    let known = || models.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
    models.get(key).ok_or_else(|| format!("no model `{key}`; known: {}", known()))
}

/// One GPU model.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Model {
    /// The product name NVML reports.
    pub name: String,
    /// PCI device id, such as `0x2330`.
    pub pci_device_id: String,
    /// PCI subsystem id with its vendor, such as `0x16c110de`.
    pub pci_subsystem_id: String,
    /// `NVML_DEVICE_ARCH_*`.
    pub architecture: u32,
    /// CUDA compute capability, major and minor.
    pub compute_capability: (i32, i32),
    /// `NVML_BRAND_*`.
    pub brand: u32,
    /// The board's memory as NVML reports it.
    pub memory_mib: u64,
    /// Default power limit.
    pub power_limit_w: u32,
    /// Whether ECC is on from the factory; absent where the board has none.
    #[serde(default)]
    pub ecc: Option<bool>,
    /// Its NVLinks; 0 where it has none.
    #[serde(default)]
    pub nvlinks: u32,
    /// Where the numbers were read or seen.
    #[serde(default)]
    pub sources: Vec<String>,
    /// Which numbers nobody has seen, and what they follow from.
    #[serde(default)]
    pub derived: Vec<String>,
    /// MIG, where the model has it.
    pub mig: Option<Mig>,
}

impl Model {
    /// PCI device and vendor id as NVML packs them.
    pub fn packed_device_id(&self) -> u32 {
        (hex(&self.pci_device_id) << 16) | 0x10de
    }

    /// PCI subsystem id as NVML packs it.
    pub fn packed_subsystem_id(&self) -> u32 {
        hex(&self.pci_subsystem_id)
    }
}

fn hex(text: &str) -> u32 {
    u32::from_str_radix(text.trim_start_matches("0x"), 16).unwrap_or(0)
}

/// How a MIG mode change takes effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ModeRule {
    /// The mode is pending until the GPU is reset; it survives a reboot (Ampere).
    NeedsReset,
    /// The mode changes at once; a reboot turns it off (Hopper and later).
    Live,
}

/// MIG of one model.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Mig {
    /// How a mode change takes effect.
    pub mode: ModeRule,
    /// Memory slices of the board.
    pub memory_slices: u32,
    /// Most MIG devices a GPU can have.
    pub max_devices: u32,
    /// Multiprocessors of one compute slice in a partial compute instance.
    pub slice_multiprocessors: u32,
    /// GPU instance profiles.
    pub profiles: Vec<Profile>,
    /// Compute instance profiles; a GPU instance profile names those it allows.
    pub compute_profiles: Vec<ComputeProfile>,
}

impl Mig {
    /// A GPU instance profile by its id.
    pub fn profile(&self, id: u32) -> Option<&Profile> {
        self.profiles.iter().find(|profile| profile.id == id)
    }

    /// The profile that spans the GPU: its numbers are the GPU's totals.
    pub fn whole(&self) -> Option<&Profile> {
        self.profiles.iter().max_by_key(|profile| (profile.size, profile.slices))
    }

    /// The compute instance profile that spans a GPU instance of a profile.
    pub fn full_compute(&self, instance: &Profile) -> Option<&ComputeProfile> {
        let spans =
            |full: &&ComputeProfile| full.slices == instance.slices && instance.compute.contains(&full.id);
        self.compute_profiles.iter().find(spans)
    }

    /// A compute instance profile by its id.
    pub fn compute_profile(&self, id: u32) -> Option<&ComputeProfile> {
        self.compute_profiles.iter().find(|profile| profile.id == id)
    }
}

/// A GPU instance profile.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Profile {
    /// The id that `nvidia-smi mig -lgip` shows and create calls take.
    pub id: u32,
    /// `NVML_GPU_INSTANCE_PROFILE_*`, the argument of profile queries.
    pub profile: u32,
    /// The name without the `MIG ` prefix.
    pub name: String,
    /// Memory of an instance.
    pub memory_mib: u64,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Compute slices.
    pub slices: u32,
    /// Copy engines.
    pub copy_engines: u32,
    /// Video decoders.
    pub decoders: u32,
    /// Video encoders.
    pub encoders: u32,
    /// JPEG engines.
    pub jpeg_engines: u32,
    /// Optical flow engines.
    pub ofa_engines: u32,
    /// Most instances of this profile on one GPU.
    pub max_instances: u32,
    /// Memory slices at which an instance may start.
    pub starts: Vec<u32>,
    /// Memory slices of an instance.
    pub size: u32,
    /// First and last instance id the hardware gives to this profile.
    pub instance_ids: (u32, u32),
    /// Ids of the compute instance profiles it allows.
    pub compute: Vec<u32>,
}

/// A compute instance profile.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ComputeProfile {
    /// The id that create calls take.
    pub id: u32,
    /// `NVML_COMPUTE_INSTANCE_PROFILE_*`, the argument of profile queries.
    pub profile: u32,
    /// Compute slices.
    pub slices: u32,
}

impl ComputeProfile {
    /// Compute slices at which it may start in a GPU instance.
    pub fn starts(&self, instance: &Profile) -> Vec<u32> {
        let align = self.slices.next_power_of_two() as usize;
        (0..instance.slices).step_by(align).filter(|start| start + self.slices <= instance.slices).collect()
    }

    /// Its name in a GPU instance of a profile, without the `MIG ` prefix.
    pub fn name(&self, instance: &Profile) -> String {
        if self.slices == instance.slices {
            instance.name.clone()
        } else {
            format!("{}c.{}", self.slices, instance.name)
        }
    }

    /// Its multiprocessors in a GPU instance of a profile.
    pub fn multiprocessors(&self, mig: &Mig, instance: &Profile) -> u32 {
        if self.slices == instance.slices {
            instance.multiprocessors
        } else {
            (self.slices * mig.slice_multiprocessors).min(instance.multiprocessors)
        }
    }
}
