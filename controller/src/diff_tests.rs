use k8s_openapi::api::resource::v1::CounterSet;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use proptest::prelude::*;

use super::*;

fn identity() -> Identity {
    let driver = "gpu.nvidia.com".parse().expect("a driver name");
    Identity { driver, node: "node-1".to_owned() }
}

fn owner() -> OwnerReference {
    node_owner("node-1", "uid-1")
}

fn device(name: &str, memory: &str) -> Device {
    let value = DeviceCapacity { value: Quantity(memory.to_owned()), ..DeviceCapacity::default() };
    Device {
        name: name.to_owned(),
        capacity: Some(BTreeMap::from([("memory".to_owned(), value)])),
        ..Device::default()
    }
}

fn tainted(mut device: Device, value: &str) -> Device {
    device.taints = Some(vec![DeviceTaint {
        key: "gpu.nvidia.com/foreign".to_owned(),
        value: Some(value.to_owned()),
        effect: "NoSchedule".to_owned(),
        time_added: None,
    }]);
    device
}

fn slice_of(devices: &[Device]) -> ResourceSliceSpec {
    ResourceSliceSpec { devices: Some(devices.to_vec()), ..ResourceSliceSpec::default() }
}

fn pool_of(slices: impl IntoIterator<Item = ResourceSliceSpec>) -> Vec<ResourceSliceSpec> {
    let named = |mut slice: ResourceSliceSpec| {
        slice.pool.name = "node-1/gpu".to_owned();
        slice
    };
    slices.into_iter().map(named).collect()
}

/// A pool of one device a slice.
fn pool(memories: &[&str]) -> Vec<ResourceSliceSpec> {
    let slices = memories.iter().enumerate();
    let slices = slices.map(|(index, memory)| slice_of(&[device(&format!("gpu-{index}"), memory)]));
    pool_of(slices)
}

/// What an API server does with a plan, in the plan's order.
fn carry_out(plan: PoolPlan, stored: &mut Vec<ResourceSlice>, counter: &mut u32) {
    let name = |slice: &ResourceSlice| slice.metadata.name.clone();
    for gone in plan.deletes {
        stored.retain(|slice| name(slice) != name(&gone));
    }
    for new in plan.updates {
        let old = stored.iter_mut().find(|slice| name(slice) == name(&new));
        *old.expect("an updated slice exists") = new;
    }
    for mut new in plan.creates {
        *counter += 1;
        let prefix = new.metadata.generate_name.clone().expect("a generated name");
        new.metadata.name = Some(format!("{prefix}{counter:05}"));
        stored.push(new);
    }
}

fn plan(pool: &[ResourceSliceSpec], stored: &[ResourceSlice]) -> PoolPlan {
    plan_pool(&identity(), &owner(), pool, &stored.iter().collect::<Vec<_>>())
}

fn published(pool: &[ResourceSliceSpec]) -> Vec<ResourceSlice> {
    let mut stored = Vec::new();
    carry_out(plan(pool, &stored), &mut stored, &mut 0);
    assert!(plan(pool, &stored).is_empty(), "published pools need nothing");
    stored
}

#[test]
fn a_new_pool_is_created_in_order_at_generation_one_under_the_node() {
    let plan = plan(&pool(&["1Gi", "2Gi"]), &[]);
    assert_eq!((plan.generation, plan.creates.len()), (1, 2));
    let names: Vec<_> =
        plan.creates.iter().filter_map(|slice| slice.metadata.generate_name.as_deref()).collect();
    assert_eq!(names, ["00000-gpu.nvidia.com-node-1-", "00001-gpu.nvidia.com-node-1-"]);
    for slice in &plan.creates {
        assert_eq!(slice.spec.pool.resource_slice_count, 2);
        assert_eq!(slice.spec.node_name.as_deref(), Some("node-1"));
        assert!(is_owned_by(slice, &owner()));
    }
}

#[test]
fn a_long_node_name_leaves_a_slice_name_that_the_api_server_takes() {
    for node in ["n".repeat(63), format!("{}.{}", "n".repeat(36), "m".repeat(60)), "é".repeat(60)] {
        let identity = Identity { node, ..identity() };
        let plan = plan_pool(&identity, &owner(), &pool(&["1Gi"]), &[]);
        let prefix = plan.creates[0].metadata.generate_name.clone().expect("a generated name");
        assert!(prefix.len() <= 58 && prefix.starts_with("00000-gpu.nvidia.com-"), "{prefix}");
        assert!(!prefix.ends_with('.'), "{prefix}");
    }
}

#[test]
fn one_changed_slice_is_one_update_of_the_same_generation() {
    let stored = published(&pool(&["1Gi", "2Gi", "3Gi"]));
    let plan = plan(&pool(&["1Gi", "2Gi", "4Gi"]), &stored);
    assert_eq!((plan.generation, plan.updates.len()), (1, 1));
    assert!(plan.deletes.is_empty() && plan.creates.is_empty());
}

#[test]
fn two_changed_slices_bump_the_generation_of_all() {
    let stored = published(&pool(&["1Gi", "2Gi", "3Gi"]));
    let plan = plan(&pool(&["1Gi", "5Gi", "4Gi"]), &stored);
    assert_eq!((plan.generation, plan.updates.len()), (2, 3));
}

#[test]
fn taints_of_all_slices_are_updates_of_the_same_generation() {
    let slices = |value: Option<&str>| {
        let names = ["a", "b", "c"].map(|name| device(name, "1Gi"));
        pool_of(names.map(|device| match value {
            Some(value) => slice_of(&[tainted(device, value)]),
            None => slice_of(&[device]),
        }))
    };
    let stored = published(&slices(None));
    let plan = plan(&slices(Some("x")), &stored);
    assert_eq!((plan.generation, plan.updates.len()), (1, 3));
}

#[test]
fn another_count_bumps_the_generation_of_all() {
    let stored = published(&pool(&["1Gi", "2Gi", "3Gi"]));
    let shrink = plan(&pool(&["1Gi", "2Gi"]), &stored);
    assert_eq!((shrink.generation, shrink.deletes.len(), shrink.updates.len()), (2, 1, 2));
    let grow = plan(&pool(&["1Gi", "2Gi", "3Gi", "4Gi"]), &stored);
    assert_eq!((grow.generation, grow.updates.len(), grow.creates.len()), (2, 3, 1));
}

#[test]
fn a_shrink_from_two_to_one_keeps_the_generation() {
    let stored = published(&pool(&["1Gi", "2Gi"]));
    let plan = plan(&pool(&["1Gi"]), &stored);
    assert_eq!((plan.generation, plan.deletes.len(), plan.updates.len()), (1, 1, 1));
}

#[test]
fn a_missing_slice_is_created_and_the_generation_bumped() {
    let mut stored = published(&pool(&["1Gi", "2Gi"]));
    stored.remove(0);
    let plan = plan(&pool(&["1Gi", "2Gi"]), &stored);
    assert_eq!((plan.generation, plan.updates.len(), plan.creates.len()), (2, 1, 1));
}

#[test]
fn old_generations_other_names_and_duplicates_are_deleted() {
    let wanted = pool(&["1Gi", "2Gi"]);
    let mut stored = published(&wanted);
    for (name, generation) in [
        ("00000-gpu.nvidia.com-node-1-zzzzz", 1),
        ("00001-gpu.nvidia.com-node-1-old", 0),
        ("00007-gpu.nvidia.com-node-1-far", 1),
        ("node-1-gpu.nvidia.com-abcde", 1),
        ("+0001-gpu.nvidia.com-node-1-x", 1),
    ] {
        let mut extra = stored[0].clone();
        extra.metadata.name = Some(name.to_owned());
        extra.spec.pool.generation = generation;
        stored.push(extra);
    }
    let plan = plan(&wanted, &stored);
    assert_eq!((plan.deletes.len(), plan.updates.len(), plan.creates.len()), (5, 0, 0));
}

#[test]
fn device_order_matters_and_spelling_of_quantities_does_not() {
    let (a, b) = (device("a", "1024Mi"), device("b", "1Gi"));
    let sent = slice_of(&[a.clone(), b.clone()]);
    assert!(same_spec(&sent, &slice_of(&[device("a", "1Gi"), device("b", "1Gi")])));
    assert!(!same_spec(&sent, &slice_of(&[b, a.clone()])));
    assert!(!same_spec(&slice_of(&[a]), &slice_of(&[device("a", "1025Mi")])));
}

#[test]
fn counters_are_compared_by_amount_too() {
    let counters = |value: &str| ResourceSliceSpec {
        shared_counters: Some(vec![CounterSet {
            name: "gpu".to_owned(),
            counters: BTreeMap::from([("memory".to_owned(), Counter { value: Quantity(value.to_owned()) })]),
        }]),
        devices: Some(Vec::new()),
        ..ResourceSliceSpec::default()
    };
    assert!(same_spec(&counters("1024Mi"), &counters("1Gi")));
    assert!(!same_spec(&counters("1024Mi"), &counters("2Gi")));
}

#[test]
fn the_time_of_a_taint_that_stays_is_kept_and_a_new_taint_gets_none() {
    let at = |seconds| Time(Timestamp::from_second(seconds).expect("a time"));
    let wanted = pool_of([slice_of(&[tainted(device("a", "1Gi"), "x")])]);
    let mut stored = published(&wanted);
    stored[0].spec.devices.as_mut().expect("devices")[0].taints.as_mut().expect("taints")[0].time_added =
        Some(at(1000));
    assert!(plan(&wanted, &stored).is_empty(), "the server's time is no difference");

    let bigger = pool_of([slice_of(&[tainted(device("a", "2Gi"), "x")])]);
    let time = |plan: &PoolPlan| {
        let devices = plan.updates[0].spec.devices.as_ref().expect("devices");
        devices[0].taints.as_ref().expect("taints")[0].time_added.clone()
    };
    assert_eq!(time(&plan(&bigger, &stored)), Some(at(1000)));
    let other = pool_of([slice_of(&[tainted(device("a", "1Gi"), "y")])]);
    assert_eq!(time(&plan(&other, &stored)), None);

    let mut explicit = stored[0].spec.clone();
    let taint = &mut explicit.devices.as_mut().expect("devices")[0].taints.as_mut().expect("taints")[0];
    taint.time_added = Some(at(1001));
    assert!(same_spec(&explicit, &stored[0].spec));
    explicit.devices.as_mut().expect("devices")[0].taints.as_mut().expect("taints")[0].time_added =
        Some(at(1002));
    assert!(!same_spec(&explicit, &stored[0].spec));
}

#[test]
fn another_node_uid_changes_owners_and_no_generation() {
    let wanted = pool(&["1Gi", "2Gi"]);
    let stored = published(&wanted);
    let owner = node_owner("node-1", "uid-2");
    let plan = plan_pool(&identity(), &owner, &wanted, &stored.iter().collect::<Vec<_>>());
    assert_eq!((plan.generation, plan.updates.len(), plan.creates.len()), (1, 2, 0));
    assert!(plan.updates.iter().all(|slice| is_owned_by(slice, &owner)));
}

/// What a reader sees: the complete pool of the newest generation, or none.
fn visible(stored: &[ResourceSlice]) -> Option<Vec<ResourceSliceSpec>> {
    let newest = stored.iter().map(|slice| slice.spec.pool.generation).max()?;
    let mut slices: Vec<_> = stored.iter().filter(|slice| slice.spec.pool.generation == newest).collect();
    slices.sort_by(|left, right| left.metadata.name.cmp(&right.metadata.name));
    let complete = slices.iter().all(|slice| {
        usize::try_from(slice.spec.pool.resource_slice_count).is_ok_and(|count| count == slices.len())
    });
    complete.then(|| slices.iter().map(|slice| slice.spec.clone()).collect())
}

fn devices_of<S: std::borrow::Borrow<ResourceSliceSpec>>(specs: &[S]) -> Vec<Device> {
    specs.iter().flat_map(|spec| spec.borrow().devices.clone().unwrap_or_default()).collect()
}

fn any_pool() -> impl Strategy<Value = Vec<ResourceSliceSpec>> {
    let memories = prop::collection::vec(0_u8..3, 1..6);
    memories.prop_map(|memories| {
        let texts: Vec<String> = memories.iter().map(|memory| format!("{}Gi", memory + 1)).collect();
        pool(&texts.iter().map(String::as_str).collect::<Vec<_>>())
    })
}

proptest! {
    #[test]
    fn a_reader_sees_the_old_pool_or_the_new_one_or_none_at_every_write(
        old in any_pool(), new in any_pool(), lost in any::<prop::sample::Index>(), lose in any::<bool>(),
    ) {
        let mut stored = published(&old);
        if lose {
            let index = lost.index(stored.len());
            stored.remove(index);
        }
        let (before, after) = (devices_of(&old), devices_of(&new));
        let plan = plan(&new, &stored);
        let mut counter = 1000;
        let mut steps = Vec::new();
        let one = |plan: PoolPlan| plan;
        steps.extend(plan.deletes.into_iter().map(|it| one(PoolPlan { deletes: vec![it], ..PoolPlan::default() })));
        steps.extend(plan.updates.into_iter().map(|it| one(PoolPlan { updates: vec![it], ..PoolPlan::default() })));
        steps.extend(plan.creates.into_iter().map(|it| one(PoolPlan { creates: vec![it], ..PoolPlan::default() })));
        for step in steps {
            carry_out(step, &mut stored, &mut counter);
            if let Some(seen) = visible(&stored) {
                let seen = devices_of(&seen);
                prop_assert!(seen == before || seen == after, "{seen:?}");
            }
        }
        let seen = visible(&stored).map(|specs| devices_of(&specs));
        prop_assert_eq!(seen, Some(after));
        prop_assert!(super::tests::plan(&new, &stored).is_empty());
    }
}
