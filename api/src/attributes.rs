//! Every key under which kerf publishes something, in one table.
//!
//! A key without a domain belongs to the domain of the driver name. The keys
//! are those of NVIDIA's driver, so that classes and selectors written for it
//! work unchanged, and a few of ours. This module owns spelling only; it knows
//! no values.

/// Attribute keys in the driver's own domain.
pub mod attribute {
    /// What kind of device this is, see [`device_type`](super::device_type).
    pub const TYPE: &str = "type";
    /// `GPU-…` or `MIG-…`; absent while a partition does not exist.
    pub const UUID: &str = "uuid";
    /// The UUID of a partition's GPU, for `matchAttribute`.
    pub const PARENT_UUID: &str = "parentUUID";
    /// A partition's MIG profile, `1g.10gb+me`.
    pub const PROFILE: &str = "profile";
    /// NVML's product name.
    pub const PRODUCT_NAME: &str = "productName";
    /// NVML's brand.
    pub const BRAND: &str = "brand";
    /// The chip's generation.
    pub const ARCHITECTURE: &str = "architecture";
    /// Version: the CUDA compute capability.
    pub const CUDA_COMPUTE_CAPABILITY: &str = "cudaComputeCapability";
    /// Version: the driver's.
    pub const DRIVER_VERSION: &str = "driverVersion";
    /// Version: the highest CUDA version the driver serves.
    pub const CUDA_DRIVER_VERSION: &str = "cudaDriverVersion";
    /// `HMM`, `ATS` or `None`.
    pub const ADDRESSING_MODE: &str = "addressingMode";
    /// Standard: the PCI address, `0000:65:00.0`.
    pub const PCI_BUS_ID: &str = "resource.kubernetes.io/pciBusID";
    /// Standard: the PCIe root, `pci0000:64`.
    pub const PCIE_ROOT: &str = "resource.kubernetes.io/pcieRoot";
    /// Standard, integer: the NUMA node.
    pub const NUMA_NODE: &str = "resource.kubernetes.io/numaNode";
    /// Ours: the serial number of the board.
    pub const SERIAL: &str = "serial";
    /// Ours, boolean: whether ECC is on.
    pub const ECC_ENABLED: &str = "eccEnabled";
    /// Ours, boolean: whether a GPU has MIG.
    pub const MIG_CAPABLE: &str = "migCapable";
    /// Ours: what becomes of a GPU's MIG mode, see [`mig_mode`](super::mig_mode).
    pub const MIG_MODE: &str = "migMode";
    /// Ours, integer: how many of a GPU's NVLinks are up.
    pub const NVLINKS: &str = "nvlinks";
    /// Ours: fabric and clique of a GPU's NVLinks, `<cluster UUID>.<clique>`.
    pub const NVLINK_CLIQUE: &str = "nvlinkClique";
}

/// The values of [`attribute::MIG_MODE`]. The mode a managed GPU is in is not
/// among them: slices must not change with each prepare.
pub mod mig_mode {
    /// kerf turns it on and off as claims need it.
    pub const MANAGED: &str = "Managed";
    /// It is off and stays so.
    pub const DISABLED: &str = "Disabled";
}

/// The values of [`attribute::TYPE`].
pub mod device_type {
    /// A whole GPU.
    pub const GPU: &str = "gpu";
    /// A MIG partition.
    pub const MIG: &str = "mig";
}

/// Marks that Kubernetes sets and kerf reads.
pub mod marker {
    /// Annotation of a claim made from a template: its name in the pod.
    pub const POD_CLAIM_NAME: &str = "resource.kubernetes.io/pod-claim-name";
    /// Annotation of a claim that the scheduler made for extended resources.
    pub const EXTENDED_RESOURCE_CLAIM: &str = "resource.kubernetes.io/extended-resource-claim";
    /// Label of a namespace whose claims may ask for admin access.
    pub const ADMIN_ACCESS: &str = "resource.kubernetes.io/admin-access";
}

/// What a GPU is divided into, under the two spellings the API asks for: a
/// capacity is a C identifier, a counter a DNS label.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Amount {
    /// Bytes of memory.
    Memory,
    /// Streaming multiprocessors.
    Multiprocessors,
    /// Copy engines.
    CopyEngines,
    /// NVDEC engines.
    Decoders,
    /// NVENC engines.
    Encoders,
    /// NVJPG engines.
    JpegEngines,
    /// Optical flow engines.
    OfaEngines,
}

impl Amount {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Memory,
        Self::Multiprocessors,
        Self::CopyEngines,
        Self::Decoders,
        Self::Encoders,
        Self::JpegEngines,
        Self::OfaEngines,
    ];

    /// Its name among a device's capacities.
    pub const fn capacity(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Multiprocessors => "multiprocessors",
            Self::CopyEngines => "copyEngines",
            Self::Decoders => "decoders",
            Self::Encoders => "encoders",
            Self::JpegEngines => "jpegEngines",
            Self::OfaEngines => "ofaEngines",
        }
    }

    /// Its name among a GPU's counters, the same for every GPU.
    pub const fn counter(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Multiprocessors => "multiprocessors",
            Self::CopyEngines => "copy-engines",
            Self::Decoders => "decoders",
            Self::Encoders => "encoders",
            Self::JpegEngines => "jpeg-engines",
            Self::OfaEngines => "ofa-engines",
        }
    }
}

/// The counter of one memory slice, `memory-slice-<i>`. It counts to one.
pub fn memory_slice_counter(index: u32) -> String {
    format!("memory-slice-{index}")
}
