mod nvidia;

use std::collections::BTreeSet;

use super::*;
use crate::fixtures::{Model, gpu, instance, inventory, mig_on, settings};
use crate::inventory::{Architecture, BoardFacts, Bytes, Told};

fn model(gpu: &Gpu) -> GpuModel {
    model_with(&settings(), gpu, &[])
}

fn model_with(settings: &Settings, gpu: &Gpu, foreign: &[GpuInstance]) -> GpuModel {
    GpuModel::of(settings, &inventory([gpu.clone()]), gpu, foreign)
}

fn device_names(model: &GpuModel) -> Vec<&str> {
    model.devices.keys().map(DeviceName::as_str).collect()
}

/// What the hardware takes: no memory slice twice, no profile more often than
/// it may, one instance with all media engines (`+me`).
fn legal(gpu: &Gpu, set: &[&Partition]) -> bool {
    let Some(mig) = &gpu.mig else { return false };
    let apart = set
        .iter()
        .enumerate()
        .all(|(index, one)| set.iter().skip(index + 1).all(|other| !one.placement.overlaps(other.placement)));
    let within = mig.profiles.iter().all(|profile| {
        set.iter().filter(|partition| partition.profile == profile.id).count()
            <= profile.max_instances as usize
    });
    let with_media = set.iter().filter(|partition| partition.profile_name.as_str().ends_with("+me")).count();
    apart && within && with_media <= 1
}

/// Every set that counters or hardware take is reached from a smaller one that
/// both take, so it is enough to compare each step.
fn compare_all_sets(gpu: &Gpu) -> usize {
    fn extend(
        gpu: &Gpu,
        devices: &[(&Partition, &Counters)],
        set: &mut Vec<usize>,
        left: &Counters,
        count: &mut usize,
    ) {
        *count += 1;
        for next in set.last().map_or(0, |last| last + 1)..devices.len() {
            let (partition, cost) = devices[next];
            let partitions: Vec<&Partition> =
                set.iter().map(|index| devices[*index].0).chain([partition]).collect();
            let fits = left.covers(cost);
            assert_eq!(fits, legal(gpu, &partitions), "{partitions:#?}");
            if fits {
                let mut left = left.clone();
                left.take(cost);
                set.push(next);
                extend(gpu, devices, set, &left, count);
                set.pop();
            }
        }
    }
    let model = model(gpu);
    let devices: Vec<_> =
        model.devices.values().filter_map(|device| Some((device.partition()?, &device.consumes))).collect();
    let mut count = 0;
    extend(gpu, &devices, &mut Vec::new(), &model.counters, &mut count);
    count
}

#[test]
fn the_counters_admit_exactly_the_sets_of_partitions_that_the_hardware_does() {
    // Of the 5,536 sets without an overlap these have at most one `+me`.
    assert_eq!(compare_all_sets(&mig_on(gpu(Model::A100, "0000:65:00.0"))), 2_319);
    assert_eq!(compare_all_sets(&gpu(Model::H100, "0000:65:00.0")), 2_319);
    assert_eq!(compare_all_sets(&mig_on(gpu(Model::A30, "0000:65:00.0"))), 76);
}

#[test]
fn a_whole_gpu_and_a_partition_never_fit_together() {
    let gpu = gpu(Model::H100, "0000:65:00.0");
    let model = model(&gpu);
    let whole = &model.devices[&DeviceName::whole(gpu.pci)].consumes;
    let mut left = model.counters.clone();
    left.take(whole);
    assert!(left.iter().all(|(_, value)| value == 0), "a whole GPU consumes everything: {left:?}");
    for (name, device) in model.devices.iter().filter(|(_, device)| device.partition().is_some()) {
        assert!(!left.covers(&device.consumes), "{name} beside the whole GPU");
        let mut left = model.counters.clone();
        left.take(&device.consumes);
        assert!(!left.covers(whole), "the whole GPU beside {name}");
    }
}

#[test]
fn a_gpu_without_mig_has_memory_only() {
    let model = model(&gpu(Model::L4, "0000:17:00.0"));
    assert_eq!(model.counters.iter().collect::<Vec<_>>(), [("memory", 23_034 << 20)]);
    assert_eq!(device_names(&model), ["gpu-0000-17-00-0"]);
}

#[test]
fn memory_of_the_counter_set_is_the_larger_of_board_and_profiles() {
    let mut gpu = gpu(Model::H100, "0000:65:00.0");
    assert_eq!(model(&gpu).counters.get("memory"), 81_559 << 20);
    gpu.memory = Bytes::from_mib(80_000);
    assert_eq!(model(&gpu).counters.get("memory"), 81_152 << 20);
}

#[test]
fn a_kept_mode_publishes_what_it_serves_and_a_managed_one_both() {
    let whole =
        |model: &GpuModel| model.devices.values().filter(|device| device.partition().is_none()).count();
    let a100 = gpu(Model::A100, "0000:65:00.0");
    assert_eq!((whole(&model(&a100)), model(&a100).devices.len()), (1, 1));
    let a100 = mig_on(a100);
    assert_eq!((whole(&model(&a100)), model(&a100).devices.len()), (0, 25));
    let mut h100 = gpu(Model::H100, "0000:65:00.0");
    for gpu in [h100.clone(), mig_on(h100.clone())] {
        assert_eq!((whole(&model(&gpu)), model(&gpu).devices.len()), (1, 26));
    }
    let keep = Settings { mig_mode: Some(MigModePolicy::Keep), ..settings() };
    assert_eq!(model_with(&keep, &h100, &[]).devices.len(), 1);
    let manage = Settings { mig_mode: Some(MigModePolicy::Manage), ..settings() };
    assert_eq!(model_with(&manage, &a100, &[]).devices.len(), 25, "Ampere keeps its mode whatever is chosen");
    h100.vgpu_guest = true;
    assert_eq!(
        model_with(&manage, &h100, &[]).devices.len(),
        1,
        "a vGPU guest keeps its mode whatever is chosen"
    );
}

#[test]
fn a_vgpu_in_mig_mode_has_the_partitions_that_its_hypervisor_made_and_no_other() {
    let mut guest = mig_on(gpu(Model::H100, "0000:65:00.0"));
    guest.vgpu_guest = true;
    assert_eq!(device_names(&model(&guest)), [""; 0]);
    let made = instance(&guest, "3g.40gb", 4);
    let model = model_with(&settings(), &guest, std::slice::from_ref(&made));
    assert_eq!(device_names(&model), ["gpu-0000-65-00-0-mig-3g-40gb-4"]);
    let mut bare = made;
    bare.compute_instances.clear();
    assert_eq!(model_with(&settings(), &guest, &[bare]).devices.len(), 0, "without a compute instance");
}

#[test]
fn what_is_published_of_a_managed_gpu_does_not_tell_the_mode_it_is_in() {
    let off = gpu(Model::H100, "0000:65:00.0");
    assert_eq!(model(&off).devices, model(&mig_on(off)).devices);
}

#[test]
fn a_gpu_says_whether_it_has_mig_and_what_becomes_of_its_mode() {
    let said = |settings: &Settings, gpu: Gpu| {
        let model = model_with(settings, &gpu, &[]);
        let attributes = &model.devices[&DeviceName::whole(gpu.pci)].attributes;
        (attributes.get("migCapable").cloned(), attributes.get("migMode").cloned())
    };
    let (yes, no) = (Some(AttributeValue::Bool(true)), Some(AttributeValue::Bool(false)));
    let mode = |text: &str| Some(AttributeValue::String(text.to_owned()));
    let keep = Settings { mig_mode: Some(MigModePolicy::Keep), ..settings() };
    let of = |model| gpu(model, "0000:65:00.0");
    assert_eq!(said(&settings(), of(Model::H100)), (yes.clone(), mode("Managed")));
    assert_eq!(said(&settings(), mig_on(of(Model::H100))), (yes.clone(), mode("Managed")));
    assert_eq!(said(&keep, of(Model::H100)), (yes.clone(), mode("Disabled")));
    assert_eq!(said(&settings(), of(Model::A100)), (yes, mode("Disabled")));
    assert_eq!(said(&settings(), of(Model::L4)), (no, None));
}

#[test]
fn what_nvml_does_not_tell_of_a_board_is_left_out() {
    let mut silent = gpu(Model::H100, "0000:65:00.0");
    silent.facts = BoardFacts::default();
    let model = model(&silent);
    for device in model.devices.values() {
        for key in ["serial", "eccEnabled", "nvlinks", "nvlinkClique"] {
            assert!(!device.attributes.contains_key(key), "{key}");
        }
    }
}

#[test]
fn only_admitted_profiles_are_published_and_the_counters_stay() {
    let h100 = gpu(Model::H100, "0000:65:00.0");
    let filtered = Settings { mig_profiles: "1g.10gb+me,3g.40gb".parse().expect("names"), ..settings() };
    let model_filtered = model_with(&filtered, &h100, &[]);
    assert_eq!(model_filtered.devices.len(), 1 + 7 + 2);
    assert_eq!(model_filtered.counters, model(&h100).counters);
    let none = Settings { mig_profiles: "none".parse().expect("none"), ..settings() };
    assert_eq!(device_names(&model_with(&none, &h100, &[])), ["gpu-0000-65-00-0"]);
}

#[test]
fn a_foreign_instance_with_one_full_compute_instance_is_a_static_partition() {
    let a100 = mig_on(gpu(Model::A100, "0000:65:00.0"));
    let name = DeviceName::parse("gpu-0000-65-00-0-mig-3g-20gb-4").expect("a name");
    let foreign = instance(&a100, "3g.20gb", 4);
    let with = model_with(&settings(), &a100, std::slice::from_ref(&foreign));
    let device = &with.devices[&name];
    assert!(device.consumes.is_empty() && !device.reserves.is_empty());
    assert!(matches!(&device.attributes["uuid"], AttributeValue::String(uuid) if uuid.starts_with("MIG-")));
    assert_eq!(with.foreign[0].cost.get("multiprocessors"), 42);
    let same_names = device_names(&with) == device_names(&model(&a100));
    assert!(same_names, "a static partition has the name of its placement");

    let ignore = Settings { foreign_partitions: ForeignPartitions::Ignore, ..settings() };
    let mut partial = foreign.clone();
    partial.compute_instances[0].full = false;
    let mut bare = foreign.clone();
    bare.compute_instances.clear();
    for model in [
        model_with(&ignore, &a100, std::slice::from_ref(&foreign)),
        model_with(&settings(), &a100, &[partial]),
        model_with(&settings(), &a100, &[bare]),
    ] {
        assert!(!model.devices[&name].attributes.contains_key("uuid"));
        assert_eq!(model.foreign.len(), 1, "it takes its place all the same");
    }
}

#[test]
fn beside_a_foreign_instance_of_an_unknown_profile_nothing_is_left() {
    let a100 = mig_on(gpu(Model::A100, "0000:65:00.0"));
    let mut foreign = instance(&a100, "1g.5gb", 4);
    foreign.profile = ProfileId(999);
    let model = model_with(&settings(), &a100, &[foreign]);
    assert_eq!(model.foreign[0].cost, model.counters);
}

#[test]
fn versions_are_semantic_or_left_out() {
    for (text, version) in [
        ("580.95.05", Some("580.95.5")),
        ("580.126.20", Some("580.126.20")),
        ("580.95", Some("580.95.0")),
        ("0", Some("0.0.0")),
        ("580.95.05.1", None),
        ("580.+5.1", None),
        ("580..1", None),
        ("N/A", None),
        ("", None),
        ("99999999999999999999.1.1", None),
    ] {
        assert_eq!(attributes::semantic_version(text).as_deref(), version, "{text}");
    }
}

#[test]
fn what_nvml_says_never_makes_a_device_that_the_api_refuses() {
    let mut odd = gpu(Model::H100, "fffffff0:ff:1f.7");
    odd.product = "ü".repeat(40);
    odd.uuid = "x".repeat(65);
    odd.facts.serial = Told::Known("x".repeat(65));
    odd.memory = Bytes(0);
    odd.architecture = Architecture::Newer(99);
    let mig = odd.mig.as_mut().expect("MIG");
    mig.profiles[0].placements = vec![
        Placement { start: u32::MAX, size: u32::MAX },
        Placement { start: 0, size: 0 },
        Placement { start: 20, size: 6 },
    ];
    let mut twin = mig.profiles[5].clone();
    twin.id = ProfileId(77);
    mig.profiles.push(twin);
    let model = model(&odd);
    assert_eq!(model.devices.len(), 25, "the impossible placements and the twins are not published");
    let whole = &model.devices[&DeviceName::whole(odd.pci)];
    assert!(!whole.attributes.contains_key("uuid") && whole.capacity.is_empty());
    assert!(!whole.attributes.contains_key("serial"));
    assert!(matches!(&whole.attributes["productName"], AttributeValue::String(name) if name.len() == 64));
    assert!(model.counters.iter().count() <= 32);

    let mig = odd.mig.as_mut().expect("MIG");
    mig.profiles.iter_mut().for_each(|profile| profile.placements.clear());
    assert_eq!(self::model(&odd).devices.len(), 1, "without a placement it is a GPU without MIG");
}

/// The name of an attribute's type in the API.
fn kind_of(value: &AttributeValue) -> &'static str {
    match value {
        AttributeValue::String(_) => "string",
        AttributeValue::Version(_) => "version",
        AttributeValue::Int(_) => "int",
        AttributeValue::Bool(_) => "bool",
    }
}

/// The rows of a table of a page, by their first cell.
fn rows(page: &'static str, section: &str) -> BTreeMap<&'static str, Vec<&'static str>> {
    let (_, rest) = page.split_once(&format!("\n## {section}\n")).expect("the section");
    let rows = rest.split("\n## ").next().unwrap_or_default().lines().filter(|line| line.starts_with("| `"));
    let cells = |row: &'static str| row.trim_matches('|').split(" | ").map(str::trim).collect::<Vec<_>>();
    rows.map(|row| (cells(row)[0].trim_matches('`'), cells(row)[1..].to_vec())).collect()
}

fn documented(section: &str) -> BTreeMap<&'static str, Vec<&'static str>> {
    rows(include_str!("../../../docs/claims.md"), section)
}

#[test]
fn the_page_of_claims_lists_exactly_what_is_published() {
    let mut attributes: BTreeMap<String, (&str, BTreeSet<&str>)> = BTreeMap::new();
    let mut capacities: BTreeMap<String, BTreeSet<&str>> = BTreeMap::new();
    let mut add = |model: &GpuModel| {
        for device in model.devices.values() {
            let of = if device.partition().is_some() { device_type::MIG } else { device_type::GPU };
            for (key, value) in &device.attributes {
                let kind = kind_of(value);
                let known = attributes.entry(key.clone()).or_insert((kind, BTreeSet::new()));
                assert_eq!(known.0, kind, "{key}");
                known.1.insert(of);
            }
            for name in device.capacity.keys() {
                capacities.entry(name.clone()).or_default().insert(of);
            }
        }
    };
    for kind in Model::ALL {
        add(&model(&gpu(kind, "0000:65:00.0")));
    }
    // What somebody else made is there, and has a UUID.
    let h100 = mig_on(gpu(Model::H100, "0000:65:00.0"));
    add(&model_with(&settings(), &h100, &[instance(&h100, "1g.10gb", 0)]));

    let devices = |of: &BTreeSet<&str>| of.iter().copied().collect::<Vec<_>>().join(", ");
    let published: Vec<String> =
        attributes.iter().map(|(key, (kind, of))| format!("{key} {kind} {}", devices(of))).collect();
    let page: Vec<String> =
        documented("Attributes").iter().map(|(key, row)| format!("{key} {} {}", row[0], row[1])).collect();
    assert_eq!(page, published);
    let published: Vec<String> =
        capacities.iter().map(|(name, of)| format!("{name} {}", devices(of))).collect();
    let page: Vec<String> =
        documented("Capacities").iter().map(|(name, row)| format!("{name} {}", row[0])).collect();
    assert_eq!(page, published);
}
