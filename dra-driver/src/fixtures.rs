//! GPUs for tests, with the numbers of real ones, so that a test reads as its
//! sentence. Other crates get them with the feature `fixtures`.
//!
//! The numbers are those of NVIDIA's MIG user guide, restated. Nothing here
//! looks at hardware.

#![expect(
    clippy::unwrap_used,
    clippy::missing_panics_doc,
    reason = "names and addresses that tests write down themselves"
)]

pub mod allocator;

use std::collections::BTreeSet;

use crate::inventory::{
    Architecture, BoardFacts, Bytes, ComputeInstance, ComputeInstanceId, Gpu, GpuInstance, GpuInstanceId,
    Inventory, Mig, MigMode, Placement, Profile, ProfileId, Told,
};
use crate::model::{ForeignPartitions, ProfileFilter, Settings};
use crate::names::{DeviceName, DriverName, PciAddress, ProfileName};

/// A model of GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Model {
    /// A100-SXM4-40GB: MIG, mode kept.
    A100,
    /// H100 80GB HBM3: MIG, mode managed.
    H100,
    /// A30: MIG with four memory slices, mode kept.
    A30,
    /// L4: no MIG.
    L4,
}

impl Model {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::A100, Self::H100, Self::A30, Self::L4];
}

/// Default settings on the node `node-1`.
pub fn settings() -> Settings {
    Settings {
        driver: DriverName::DEFAULT.parse().unwrap(),
        node: "node-1".to_owned(),
        mig_mode: None,
        mig_profiles: ProfileFilter::All,
        foreign_partitions: ForeignPartitions::Publish,
    }
}

/// A node with these GPUs.
pub fn inventory(gpus: impl IntoIterator<Item = Gpu>) -> Inventory {
    Inventory {
        driver_version: "580.95.05".to_owned(),
        cuda_version: (13, 0),
        gpus: gpus.into_iter().collect(),
        unreadable: Vec::new(),
    }
}

/// An address, `0000:65:00.0`.
pub fn pci(text: &str) -> PciAddress {
    text.parse().unwrap()
}

/// Device names, as texts.
pub fn names<'a>(names: impl IntoIterator<Item = &'a str>) -> BTreeSet<DeviceName> {
    names.into_iter().map(|name| DeviceName::parse(name).unwrap()).collect()
}

/// A GPU with MIG off.
pub fn gpu(model: Model, address: &str) -> Gpu {
    let pci = pci(address);
    let (product, architecture, compute_capability, mib) = match model {
        Model::A100 => ("NVIDIA A100-SXM4-40GB", Architecture::Ampere, (8, 0), 40_960),
        Model::H100 => ("NVIDIA H100 80GB HBM3", Architecture::Hopper, (9, 0), 81_559),
        Model::A30 => ("NVIDIA A30", Architecture::Ampere, (8, 0), 24_576),
        Model::L4 => ("NVIDIA L4", Architecture::Ada, (8, 9), 23_034),
    };
    let profiles = profiles(model);
    Gpu {
        pci,
        minor: 0,
        uuid: format!("GPU-00000000-0000-0000-0000-{:08x}{:02x}{:02x}", pci.domain, pci.bus, pci.device),
        product: product.to_owned(),
        brand: Told::Known("Nvidia".to_owned()),
        architecture,
        compute_capability,
        memory: Bytes::from_mib(mib),
        addressing_mode: Told::Known("None".to_owned()),
        numa_node: Some(0),
        pcie_root: Some(format!("pci{:04x}:{:02x}", pci.domain, pci.bus & 0xf0)),
        vgpu_guest: false,
        facts: BoardFacts {
            serial: Told::Known(format!("13220{:08}", pci.bus)),
            ecc: Told::Known(true),
            nvlinks: match model {
                Model::A100 => Told::Known(12),
                Model::H100 => Told::Known(18),
                Model::A30 | Model::L4 => Told::HasNone,
            },
            // As in a rack whose NVLinks leave the node.
            nvlink_clique: match model {
                Model::H100 => Told::Known("6f9619ff-8b86-d011-b42d-00cf4fc964ff.4294967295".to_owned()),
                Model::A100 | Model::A30 | Model::L4 => Told::HasNone,
            },
        },
        mig: (!profiles.is_empty()).then_some(Mig {
            current: MigMode::Disabled,
            pending: MigMode::Disabled,
            profiles,
            instances: Vec::new(),
        }),
    }
}

/// The same GPU with MIG on.
#[must_use]
pub fn mig_on(mut gpu: Gpu) -> Gpu {
    if let Some(mig) = &mut gpu.mig {
        mig.current = MigMode::Enabled;
        mig.pending = MigMode::Enabled;
    }
    gpu
}

/// A GPU instance with one full compute instance.
pub fn instance(gpu: &Gpu, profile: &str, start: u32) -> GpuInstance {
    let profiles = gpu.mig.iter().flat_map(|mig| &mig.profiles);
    let (profile, placement) = profiles
        .filter(|known| known.name.as_str() == profile)
        .flat_map(|known| known.placements.iter().map(|placement| (known.id, *placement)))
        .find(|(_, placement)| placement.start == start)
        .unwrap();
    GpuInstance {
        id: GpuInstanceId(start + 1),
        profile,
        placement,
        compute_instances: vec![ComputeInstance {
            id: ComputeInstanceId(0),
            full: true,
            uuid: format!("MIG-00000000-0000-0000-0000-{:08}{start:04}", profile.0),
        }],
    }
}

/// The GPU instance profiles of a model.
pub fn profiles(model: Model) -> Vec<Profile> {
    const ONE: &[u32] = &[0, 1, 2, 3, 4, 5, 6];
    // id, name, MiB, [compute slices, multiprocessors, copy, decoders, jpeg,
    // ofa, maximum], placement size, starts
    type Row = (u32, &'static str, u64, [u32; 7], u32, &'static [u32]);
    let rows: &[Row] = match model {
        Model::A100 => &[
            (0, "7g.40gb", 40_320, [7, 98, 7, 5, 1, 1, 1], 8, &[0]),
            (5, "4g.20gb", 20_096, [4, 56, 4, 2, 0, 0, 1], 4, &[0]),
            (9, "3g.20gb", 20_096, [3, 42, 3, 2, 0, 0, 2], 4, &[0, 4]),
            (14, "2g.10gb", 9_984, [2, 28, 2, 1, 0, 0, 3], 2, &[0, 2, 4]),
            (15, "1g.10gb", 9_984, [1, 14, 1, 1, 0, 0, 4], 2, &[0, 2, 4, 6]),
            (19, "1g.5gb", 4_864, [1, 14, 1, 0, 0, 0, 7], 1, ONE),
            (20, "1g.5gb+me", 4_864, [1, 14, 1, 1, 1, 1, 1], 1, ONE),
        ],
        Model::H100 => &[
            (0, "7g.80gb", 81_152, [7, 132, 8, 7, 7, 1, 1], 8, &[0]),
            (5, "4g.40gb", 40_448, [4, 64, 4, 4, 4, 0, 1], 4, &[0]),
            (9, "3g.40gb", 40_448, [3, 60, 3, 3, 3, 0, 2], 4, &[0, 4]),
            (14, "2g.20gb", 20_096, [2, 32, 2, 2, 2, 0, 3], 2, &[0, 2, 4]),
            (15, "1g.20gb", 20_096, [1, 26, 1, 1, 1, 0, 4], 2, &[0, 2, 4, 6]),
            (19, "1g.10gb", 9_984, [1, 16, 1, 1, 1, 0, 7], 1, ONE),
            (20, "1g.10gb+me", 9_984, [1, 16, 1, 1, 1, 1, 1], 1, ONE),
        ],
        Model::A30 => &[
            (0, "4g.24gb", 24_000, [4, 56, 4, 4, 1, 1, 1], 4, &[0]),
            (5, "2g.12gb", 11_968, [2, 28, 2, 2, 0, 0, 2], 2, &[0, 2]),
            (6, "2g.12gb+me", 11_968, [2, 28, 2, 2, 1, 1, 1], 2, &[0, 2]),
            (14, "1g.6gb", 5_952, [1, 14, 1, 0, 0, 0, 4], 1, &[0, 1, 2, 3]),
            (21, "1g.6gb+me", 5_952, [1, 14, 1, 1, 1, 1, 1], 1, &[0, 1, 2, 3]),
        ],
        Model::L4 => &[],
    };
    rows.iter().map(|row| profile(*row)).collect()
}

fn profile(
    (id, name, mib, [compute_slices, multiprocessors, copy, decoders, jpeg, ofa, max], size, starts): (
        u32,
        &str,
        u64,
        [u32; 7],
        u32,
        &[u32],
    ),
) -> Profile {
    Profile {
        id: ProfileId(id),
        name: ProfileName::new(name).unwrap(),
        memory: Bytes::from_mib(mib),
        compute_slices,
        multiprocessors,
        copy_engines: copy,
        decoders,
        encoders: 0,
        jpeg_engines: jpeg,
        ofa_engines: ofa,
        max_instances: max,
        placements: starts.iter().map(|start| Placement { start: *start, size }).collect(),
    }
}
