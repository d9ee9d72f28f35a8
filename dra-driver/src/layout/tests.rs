use std::collections::{BTreeSet, HashSet};

use k8s_openapi::api::resource::v1::ResourceSliceSpec;
use proptest::prelude::*;

use super::*;
use crate::fixtures::{Model, gpu, instance, inventory, mig_on, names, pci, settings};
use crate::inventory::{Gpu, GpuInstance, MigMode};
use crate::model::GpuModel;
use crate::published::merge;

fn record(gpu: &Gpu, foreign: &[GpuInstance], held: &BTreeSet<DeviceName>) -> GpuRecord {
    let model = GpuModel::of(&settings(), &inventory([gpu.clone()]), gpu, foreign);
    merge(gpu.pci, None, Some(&model), held).expect("a GPU that is there")
}

fn plain(gpus: &[Gpu]) -> Vec<GpuRecord> {
    gpus.iter().map(|gpu| record(gpu, &[], &BTreeSet::new())).collect()
}

fn device_names(slice: &ResourceSliceSpec) -> Vec<&str> {
    slice.devices.iter().flatten().map(|device| device.name.as_str()).collect()
}

fn label(text: &str, max: usize) -> bool {
    let byte = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    !text.is_empty()
        && text.len() <= max
        && text.bytes().all(byte)
        && !text.starts_with('-')
        && !text.ends_with('-')
}

fn subdomain(text: &str, max: usize) -> bool {
    text.len() <= max && text.split('.').all(|part| label(part, 63))
}

fn qualified(key: &str) -> bool {
    let (domain, id) = key.rsplit_once('/').map_or((None, key), |(domain, id)| (Some(domain), id));
    let identifier = id.len() <= 32
        && id.starts_with(|first: char| first.is_ascii_alphabetic() || first == '_')
        && id.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    identifier && domain.is_none_or(|domain| subdomain(domain, 63))
}

/// What the API server checks, and what makes a pool whole for the allocator.
fn check_api_limits(slices: &[ResourceSliceSpec]) {
    assert!(!slices.is_empty(), "even an empty pool has a slice");
    let (mut set_names, mut seen) = (BTreeMap::new(), HashSet::new());
    for slice in slices {
        assert!(subdomain(&slice.driver, 63));
        assert!(slice.pool.name.len() <= 253 && slice.pool.name.split('/').all(|part| subdomain(part, 253)));
        assert_eq!(slice.pool.resource_slice_count, i64::try_from(slices.len()).expect("a count"));
        assert!(slice.devices.is_none() || slice.shared_counters.is_none(), "devices or counters, not both");
        let sets = slice.shared_counters.as_deref().unwrap_or_default();
        assert!(sets.len() <= 8);
        for set in sets {
            assert!(label(&set.name, 63) && (1..=32).contains(&set.counters.len()));
            assert!(set.counters.keys().all(|name| label(name, 63)));
            assert!(set_names.insert(set.name.clone(), set.counters.clone()).is_none(), "{} twice", set.name);
        }
    }
    for slice in slices {
        let devices = slice.devices.as_deref().unwrap_or_default();
        assert!(devices.len() <= 64);
        let mut consumed = 0;
        for device in devices {
            assert!(label(&device.name, 63) && seen.insert(device.name.clone()), "{}", device.name);
            let (attributes, capacity) =
                (device.attributes.iter().flatten(), device.capacity.iter().flatten());
            assert!(attributes.clone().count() + capacity.clone().count() <= 32);
            assert!(
                attributes.clone().all(|(key, _)| qualified(key))
                    && capacity.clone().all(|(key, _)| qualified(key))
            );
            for (_, value) in attributes {
                let text = value.string.as_deref().or(value.version.as_deref()).unwrap_or_default();
                assert!(text.len() <= 64);
                let kinds = [
                    value.string.is_some(),
                    value.version.is_some(),
                    value.int.is_some(),
                    value.bool.is_some(),
                ];
                assert_eq!(kinds.iter().filter(|kind| **kind).count(), 1, "an attribute has one value");
            }
            assert!(device.taints.iter().flatten().count() <= 16);
            let mut keys = HashSet::new();
            for taint in device.taints.iter().flatten() {
                assert!(keys.insert(taint.key.clone()), "{} twice", taint.key);
                let (domain, name) = taint.key.split_once('/').expect("a qualified key");
                assert!(subdomain(domain, 253) && label(name, 63));
                assert!(taint.value.as_deref().is_none_or(|value| label(value, 63)));
                assert_eq!(taint.effect, "NoSchedule");
            }
            let consumptions = device.consumes_counters.as_deref().unwrap_or_default();
            assert!(consumptions.len() <= 2);
            for consumption in consumptions {
                let set = &set_names[&consumption.counter_set];
                assert!((1..=32).contains(&consumption.counters.len()));
                assert!(consumption.counters.keys().all(|name| set.contains_key(name)), "{}", device.name);
                consumed += consumption.counters.len();
            }
        }
        assert!(consumed <= 2048);
    }
}

/// The order and chunk rules.
fn check_rules(slices: &[ResourceSliceSpec]) {
    let kind = |slice: &ResourceSliceSpec| {
        let types: BTreeSet<&str> = slice
            .devices
            .iter()
            .flatten()
            .filter_map(|device| device.attributes.as_ref()?.get("type")?.string.as_deref())
            .collect();
        match (slice.shared_counters.is_some(), types.len(), types.first().copied()) {
            (true, 0, None) => 0,
            (false, 1, Some("gpu")) => 1,
            (false, 1, Some("mig")) => 2,
            (false, 0, None) if slices.len() == 1 => 3,
            other => panic!("a slice of {other:?}"),
        }
    };
    let kinds: Vec<_> = slices.iter().map(kind).collect();
    assert!(kinds.is_sorted(), "counters, then whole GPUs, then partitions: {kinds:?}");
    let gpu = |name: &str| DeviceName::parse(name).expect("a name").gpu().expect("a GPU");
    let of_kind = |wanted: i32| {
        slices.iter().zip(&kinds).filter(move |(_, kind)| **kind == wanted).map(|(slice, _)| slice)
    };
    let wholes: Vec<PciAddress> = of_kind(1).flat_map(device_names).map(gpu).collect();
    assert!(wholes.is_sorted_by(|left, right| left > right), "the last GPU first");
    let partitions: Vec<PciAddress> = of_kind(2).flat_map(device_names).map(gpu).collect();
    assert!(partitions.is_sorted(), "the first GPU first");
    for pci in partitions.iter().collect::<BTreeSet<_>>() {
        let slices =
            of_kind(2).filter(|slice| device_names(slice).iter().any(|name| gpu(name) == *pci)).count();
        assert_eq!(slices, 1, "the partitions of {pci} in one slice");
    }
}

#[derive(Debug, Clone)]
struct Drawn {
    gpu: Gpu,
    foreign: Vec<GpuInstance>,
}

fn drawn_gpu(index: usize, model: Model, mig: bool, foreign: &[u8]) -> Drawn {
    let gpu = gpu(model, &format!("0000:{:02x}:00.0", 2 * index + 1));
    let gpu = if mig { mig_on(gpu) } else { gpu };
    let possible: Vec<(String, u32)> = gpu
        .mig
        .iter()
        .flat_map(|mig| &mig.profiles)
        .flat_map(|profile| profile.placements.iter().map(|at| (profile.name.to_string(), at.start)))
        .collect();
    let mut instances: Vec<GpuInstance> = Vec::new();
    for pick in foreign.iter().filter(|_| mig && !possible.is_empty()) {
        let (profile, start) = &possible[usize::from(*pick) % possible.len()];
        let next = instance(&gpu, profile, *start);
        if instances.iter().all(|other| !other.placement.overlaps(next.placement)) {
            instances.push(next);
        }
    }
    Drawn { gpu, foreign: instances }
}

fn nodes() -> impl Strategy<Value = Vec<Drawn>> {
    let one = (0..4_usize, any::<bool>(), prop::collection::vec(any::<u8>(), 0..3));
    prop::collection::vec(one, 1..=64).prop_map(|gpus| {
        gpus.into_iter()
            .enumerate()
            .map(|(index, (model, mig, foreign))| drawn_gpu(index, Model::ALL[model], mig, &foreign))
            .collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_slices_of_any_node_keep_every_api_limit_and_every_rule(
        node in nodes(),
        holds in prop::collection::vec(any::<prop::sample::Index>(), 0..20),
        troubled in any::<prop::sample::Index>(),
    ) {
        let none = BTreeSet::new();
        let records: Vec<_> = node.iter().map(|drawn| record(&drawn.gpu, &drawn.foreign, &none)).collect();
        let all: Vec<DeviceName> = records.iter().flat_map(|record| record.devices.keys().cloned()).collect();
        let held: BTreeSet<DeviceName> =
            holds.iter().filter(|_| !all.is_empty()).map(|index| index.get(&all).clone()).collect();
        let records: Vec<_> = node.iter().map(|drawn| record(&drawn.gpu, &drawn.foreign, &held)).collect();
        let quiet = layout(&settings(), &records, &Conditions::default());
        check_api_limits(&quiet);
        check_rules(&quiet);
        let shuffled: Vec<_> = records.iter().rev().cloned().collect();
        prop_assert_eq!(&layout(&settings(), &shuffled, &Conditions::default()), &quiet);
        check_api_limits(&layout_without_counters(&settings(), &records, &Conditions::default(), &held));

        // The worst that can happen to one GPU touches its slices only.
        let record = troubled.get(&records);
        let mut conditions = Conditions::default();
        conditions.quarantined.insert(record.pci);
        conditions.mode_stuck.insert(record.pci, MigMode::Enabled);
        let loud = layout(&settings(), &records, &conditions);
        check_api_limits(&loud);
        prop_assert_eq!(loud.len(), quiet.len());
        let own: BTreeSet<&str> = record.devices.keys().map(DeviceName::as_str).collect();
        for (before, after) in quiet.iter().zip(&loud) {
            prop_assert_eq!(device_names(before), device_names(after));
            let concerned = device_names(before).iter().any(|name| own.contains(name));
            prop_assert_eq!(before != after, concerned);
        }

        // A GPU that is lost loses nothing that was published.
        let lost = merge(record.pci, Some(record), None, &held).expect("it was published");
        let records: Vec<_> =
            records.iter().map(|other| if other.pci == lost.pci { lost.clone() } else { other.clone() }).collect();
        let after = layout(&settings(), &records, &Conditions::default());
        check_api_limits(&after);
        for (before, after) in quiet.iter().zip(&after) {
            prop_assert_eq!(device_names(before), device_names(after));
            prop_assert_eq!(&before.shared_counters, &after.shared_counters);
        }
    }
}

#[test]
fn a_node_of_any_size_keeps_every_api_limit() {
    for count in [1, 2, 8, 9, 16, 63, 64] {
        for model in Model::ALL {
            let gpus: Vec<Gpu> = (0..count).map(|index| drawn_gpu(index, model, true, &[]).gpu).collect();
            let slices = layout(&settings(), &plain(&gpus), &Conditions::default());
            check_api_limits(&slices);
            check_rules(&slices);
            let counters = slices.iter().filter(|slice| slice.shared_counters.is_some()).count();
            assert_eq!(counters, count.div_ceil(8));
        }
    }
}

#[test]
fn the_slices_of_an_h100_and_an_l4() {
    let records = plain(&[gpu(Model::H100, "0000:65:00.0"), gpu(Model::L4, "0000:ca:00.0")]);
    insta::assert_json_snapshot!(layout(&settings(), &records, &Conditions::default()));
}

#[test]
fn an_empty_pool_has_one_empty_slice() {
    let slices = layout(&settings(), &[], &Conditions::default());
    assert_eq!(slices.len(), 1);
    assert!(slices[0].devices.is_none() && slices[0].shared_counters.is_none());
    assert_eq!(slices[0].pool.name, "node-1/gpu");
}

#[test]
fn small_profiles_come_first_and_within_one_the_places_that_prevent_least() {
    let records = plain(&[mig_on(gpu(Model::A100, "0000:65:00.0"))]);
    let slices = layout(&settings(), &records, &Conditions::default());
    let order: Vec<&str> = slices
        .iter()
        .flat_map(device_names)
        .filter_map(|name| name.strip_prefix("gpu-0000-65-00-0-mig-"))
        .collect();
    assert_eq!(
        order,
        [
            "1g-5gb-6",
            "1g-5gb-5",
            "1g-5gb-4",
            "1g-5gb-3",
            "1g-5gb-2",
            "1g-5gb-1",
            "1g-5gb-0",
            "1g-5gb-me-6",
            "1g-5gb-me-5",
            "1g-5gb-me-4",
            "1g-5gb-me-3",
            "1g-5gb-me-2",
            "1g-5gb-me-1",
            "1g-5gb-me-0",
            "1g-10gb-6",
            "1g-10gb-4",
            "1g-10gb-2",
            "1g-10gb-0",
            "2g-10gb-4",
            "2g-10gb-2",
            "2g-10gb-0",
            "3g-20gb-4",
            "3g-20gb-0",
            "4g-20gb-0",
            "7g-40gb-0",
        ]
    );
}

#[test]
fn a_gpu_with_more_partitions_than_a_slice_takes_spills_over() {
    let mut a100 = mig_on(gpu(Model::A100, "0000:65:00.0"));
    let mig = a100.mig.as_mut().expect("MIG");
    let profiles = mig.profiles.clone();
    for round in 0..3 {
        for profile in &profiles {
            let mut more = profile.clone();
            more.id = crate::inventory::ProfileId(100 + 10 * round + profile.id.0);
            more.name = crate::names::ProfileName::new(&format!("{}{round}", profile.name)).expect("a name");
            mig.profiles.push(more);
        }
    }
    let slices = layout(&settings(), &plain(&[a100]), &Conditions::default());
    check_api_limits(&slices);
    assert_eq!(slices.iter().map(|slice| device_names(slice).len()).collect::<Vec<_>>(), [0, 64, 36]);
}

#[test]
fn without_counters_nothing_that_needs_them_can_be_given_out() {
    let gpus = [
        gpu(Model::H100, "0000:01:00.0"),
        mig_on(gpu(Model::H100, "0000:02:00.0")),
        gpu(Model::L4, "0000:03:00.0"),
    ];
    let held = names(["gpu-0000-02-00-0-mig-1g-10gb-6"]);
    let foreign = [instance(&gpus[1], "3g.40gb", 0)];
    let records =
        [record(&gpus[0], &[], &held), record(&gpus[1], &foreign, &held), record(&gpus[2], &[], &held)];
    let slices = layout_without_counters(&settings(), &records, &Conditions::default(), &held);
    check_api_limits(&slices);
    let devices: Vec<(&str, bool)> = slices
        .iter()
        .flat_map(|slice| slice.devices.iter().flatten())
        .map(|device| (device.name.as_str(), device.taints.is_some()))
        .collect();
    assert_eq!(
        devices,
        [
            ("gpu-0000-03-00-0", false),
            ("gpu-0000-01-00-0", false),
            ("gpu-0000-02-00-0-mig-1g-10gb-6", true),
            ("gpu-0000-02-00-0-mig-3g-40gb-0", false),
        ]
    );
    assert!(slices.iter().all(|slice| slice.shared_counters.is_none()));
    assert!(
        slices.iter().flat_map(|slice| slice.devices.iter().flatten()).all(|d| d.consumes_counters.is_none())
    );
}

#[test]
fn a_stuck_mode_taints_the_devices_that_need_it() {
    let records = plain(&[gpu(Model::H100, "0000:65:00.0")]);
    let stuck = pci("0000:65:00.0");
    let tainted = |mode: MigMode| -> BTreeSet<String> {
        let mut conditions = Conditions::default();
        conditions.mode_stuck.insert(stuck, mode);
        layout(&settings(), &records, &conditions)
            .into_iter()
            .flat_map(|slice| slice.devices.unwrap_or_default())
            .filter(|device| device.taints.is_some())
            .map(|device| device.name)
            .collect()
    };
    assert_eq!(tainted(MigMode::Disabled), BTreeSet::from(["gpu-0000-65-00-0".to_owned()]));
    assert_eq!(tainted(MigMode::Enabled).len(), 25);
}

#[test]
fn beside_a_foreign_instance_with_the_only_media_engine_nothing_that_needs_it_is_free() {
    let gpu = mig_on(gpu(Model::H100, "0000:65:00.0"));
    let record = record(&gpu, &[instance(&gpu, "1g.10gb+me", 0)], &BTreeSet::new());
    let slices = layout(&settings(), &[record], &Conditions::default());
    let free = crate::fixtures::allocator::offers(&slices, &BTreeSet::new());
    let free: BTreeSet<&str> = free.iter().map(|device| device.name.as_str()).collect();
    let with_engine: Vec<&&str> = free.iter().filter(|name| name.contains("-me-")).collect();
    // As it is, it may be given out.
    assert_eq!(with_engine, [&"gpu-0000-65-00-0-mig-1g-10gb-me-0"]);
    for place in 1..7 {
        let name = format!("gpu-0000-65-00-0-mig-1g-10gb-{place}");
        assert!(free.contains(name.as_str()), "{name} needs no such engine");
    }
}
