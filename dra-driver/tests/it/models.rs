//! That the counters of every known model admit the sets of partitions that
//! hardware can hold, and no other.
//!
//! What hardware can hold is told by names and memory slices alone, so that no
//! engine count proves itself.

use std::collections::BTreeMap;

use kerf_dra_driver::inventory::{
    Architecture, BoardFacts, Bytes, Gpu, Inventory, Mig, MigMode, Placement, Profile, ProfileId, Told,
};
use kerf_dra_driver::model::{Counters, ForeignPartitions, GpuModel, ModelDevice, ProfileFilter, Settings};
use kerf_dra_driver::names::{DriverName, ProfileName};
use serde::Deserialize;

#[derive(Deserialize)]
struct Known {
    memory_mib: u64,
    mig: Option<KnownMig>,
}

#[derive(Deserialize)]
struct KnownMig {
    profiles: Vec<KnownProfile>,
}

#[derive(Deserialize)]
struct KnownProfile {
    id: u32,
    name: String,
    memory_mib: u64,
    slices: u32,
    multiprocessors: u32,
    copy_engines: u32,
    decoders: u32,
    encoders: u32,
    jpeg_engines: u32,
    ofa_engines: u32,
    max_instances: u32,
    starts: Vec<u32>,
    size: u32,
}

/// The GPUs with MIG, in MIG mode, by the emulator's key.
fn gpus() -> BTreeMap<String, Gpu> {
    let text = include_str!("../../../native/emulator/models.json");
    let known: BTreeMap<String, Known> = serde_json::from_str(text).unwrap();
    let with_mig =
        known.into_iter().filter_map(|(key, known)| Some((key, gpu(known.memory_mib, known.mig.as_ref()?))));
    with_mig.collect()
}

fn gpu(memory_mib: u64, mig: &KnownMig) -> Gpu {
    Gpu {
        pci: "0000:65:00.0".parse().unwrap(),
        minor: 0,
        uuid: "GPU-0".to_owned(),
        product: "NVIDIA".to_owned(),
        brand: Told::Known("Nvidia".to_owned()),
        architecture: Architecture::Unknown,
        compute_capability: (0, 0),
        memory: Bytes::from_mib(memory_mib),
        addressing_mode: Told::HasNone,
        numa_node: None,
        pcie_root: None,
        vgpu_guest: false,
        facts: BoardFacts::default(),
        mig: Some(Mig {
            current: MigMode::Enabled,
            pending: MigMode::Enabled,
            profiles: mig.profiles.iter().map(profile).collect(),
            instances: Vec::new(),
        }),
    }
}

fn profile(known: &KnownProfile) -> Profile {
    Profile {
        id: ProfileId(known.id),
        name: ProfileName::new(&known.name).unwrap(),
        memory: Bytes::from_mib(known.memory_mib),
        compute_slices: known.slices,
        multiprocessors: known.multiprocessors,
        copy_engines: known.copy_engines,
        decoders: known.decoders,
        encoders: known.encoders,
        jpeg_engines: known.jpeg_engines,
        ofa_engines: known.ofa_engines,
        max_instances: known.max_instances,
        placements: known.starts.iter().map(|start| Placement { start: *start, size: known.size }).collect(),
    }
}

fn published(gpu: &Gpu) -> GpuModel {
    let settings = Settings {
        driver: DriverName::DEFAULT.parse().unwrap(),
        node: "node-1".to_owned(),
        mig_mode: None,
        mig_profiles: ProfileFilter::All,
        foreign_partitions: ForeignPartitions::Publish,
    };
    GpuModel::of(&settings, &Inventory::default(), gpu, &[])
}

/// A profile's name, read: `2g.48gb+me.all` has 2 compute slices and the
/// attribute `+me.all`.
fn read(name: &ProfileName) -> (u32, &str) {
    let (slices, rest) = name.as_str().split_once("g.").unwrap();
    (slices.parse().unwrap(), rest.split_once("gb").unwrap().1)
}

/// Whether partitions may stand together: they share no memory slice, have no
/// more compute slices than the GPU, and of `+me` and `+me.all` there is one,
/// the latter leaving nothing to any but `-me`.
fn legal(compute_slices: u32, set: &[&ModelDevice]) -> bool {
    let partitions: Vec<_> = set.iter().filter_map(|device| device.partition()).collect();
    let apart = partitions.iter().enumerate().all(|(at, one)| {
        partitions.iter().skip(at + 1).all(|other| !one.placement.overlaps(other.placement))
    });
    let names: Vec<_> = partitions.iter().map(|partition| read(&partition.profile_name)).collect();
    let with = |wanted: &dyn Fn(&str) -> bool| names.iter().filter(|(_, of)| wanted(of)).count();
    apart
        && names.iter().map(|(slices, _)| slices).sum::<u32>() <= compute_slices
        && with(&|of| of.starts_with("+me")) <= 1
        && (with(&|of| of == "+me.all") == 0 || with(&|of| of == "-me") + 1 == set.len())
}

/// Tries every partition beside every legal set.
fn explore<'model>(
    partitions: &[&'model ModelDevice],
    compute_slices: u32,
    left: &Counters,
    set: &mut Vec<&'model ModelDevice>,
    from: usize,
) {
    for (at, device) in partitions.iter().enumerate() {
        set.push(device);
        let allowed = legal(compute_slices, set);
        assert_eq!(
            left.covers(&device.consumes),
            allowed,
            "{:?}",
            set.iter().map(|of| of.partition()).collect::<Vec<_>>()
        );
        if allowed && at >= from {
            let mut left = left.clone();
            left.take(&device.consumes);
            explore(partitions, compute_slices, &left, set, at + 1);
        }
        set.pop();
    }
}

#[test]
fn every_placement_of_every_known_model_is_a_device_of_its_own() {
    for (key, gpu) in gpus() {
        let model = published(&gpu);
        let placements: usize =
            gpu.mig.iter().flat_map(|mig| &mig.profiles).map(|of| of.placements.len()).sum();
        let partitions = model.devices.values().filter(|device| device.partition().is_some()).count();
        assert_eq!(partitions, placements, "{key}: two of them have one name");
        assert!(model.counters.iter().count() <= 32, "{key}: the API takes 32 counters");
    }
}

#[test]
fn the_counters_of_every_known_model_admit_what_hardware_holds_and_nothing_else() {
    for (_, gpu) in gpus() {
        let model = published(&gpu);
        let partitions: Vec<&ModelDevice> =
            model.devices.values().filter(|device| device.partition().is_some()).collect();
        let compute_slices =
            gpu.mig.iter().flat_map(|mig| &mig.profiles).map(|of| read(&of.name).0).max().unwrap();
        explore(&partitions, compute_slices, &model.counters, &mut Vec::new(), 0);
    }
}
