//! What is said of a cluster of one or two nodes.

use std::collections::BTreeSet;
use std::sync::Arc;

use k8s_openapi::api::resource::v1::ResourceSlice;
use serde_json::{Value, json};

use super::*;
use crate::fixtures::{self, Model, gpu, inventory, settings};
use crate::inventory::{Gpu, MigMode};
use crate::layout::layout;
use crate::model::{GpuModel, Settings};
use crate::names::gpu_pool;
use crate::published::merge;
use crate::taint::Conditions;

const WHOLE: &str = "gpu-0000-17-00-0";

/// The slices of a node, as the API server would hold them.
fn node(name: &str, gpus: &[Gpu], conditions: &Conditions) -> Vec<ResourceSlice> {
    let settings = Settings { node: name.to_owned(), ..settings() };
    let records: Vec<_> = gpus
        .iter()
        .map(|gpu| {
            let model = GpuModel::of(&settings, &inventory([gpu.clone()]), gpu, &[]);
            merge(gpu.pci, None, Some(&model), &BTreeSet::new()).expect("a GPU that is there")
        })
        .collect();
    let specs = layout(&settings, &records, conditions);
    let mut slices: Vec<ResourceSlice> =
        specs.into_iter().map(|spec| ResourceSlice { spec, ..ResourceSlice::default() }).collect();
    for (number, slice) in slices.iter_mut().enumerate() {
        slice.metadata.name = Some(format!("{name}-{number:02}"));
    }
    slices
}

fn h100() -> Vec<Gpu> {
    vec![gpu(Model::H100, "0000:17:00.0")]
}

fn claim(name: &str, spec: &Value, status: &Value) -> SeenClaim {
    let claim = json!({
        "metadata": {
            "namespace": "team", "name": name, "uid": format!("uid-{name}"),
            "creationTimestamp": "2026-11-30T10:00:00Z",
        },
        "spec": spec,
        "status": status,
    });
    serde_json::from_value(claim).expect("a claim")
}

/// A claim that holds devices of `node-1`, for a pod.
fn holding(name: &str, devices: &[&str]) -> SeenClaim {
    let results: Vec<Value> = devices
        .iter()
        .map(|device| {
            json!({"request": "r", "driver": "gpu.nvidia.com", "pool": gpu_pool("node-1"), "device": device})
        })
        .collect();
    let status = json!({
        "allocation": {"devices": {"results": results}},
        "reservedFor": [{"resource": "pods", "name": format!("{name}-pod"), "uid": "u"}],
    });
    claim(name, &json!({}), &status)
}

/// A claim that waits for so many devices of a class.
fn waiting(class: &str, count: usize) -> SeenClaim {
    asking(&json!({"deviceClassName": class, "allocationMode": "ExactCount", "count": count}))
}

/// A claim that waits with one request.
fn asking(exactly: &Value) -> SeenClaim {
    claim("waits", &json!({"devices": {"requests": [{"name": "r", "exactly": exactly}]}}), &json!({}))
}

fn status(slices: &[ResourceSlice], claims: &[SeenClaim]) -> ClusterStatus {
    let now = "2026-11-30T10:02:03Z".parse().expect("a time");
    let mut keeper = SliceKeeper::default();
    let slices: Vec<SeenSlice> = slices
        .iter()
        .map(|slice| serde_json::to_value(slice).and_then(serde_json::from_value).expect("a slice"))
        .map(|slice| keeper.keep(slice))
        .collect();
    ClusterStatus::of(&settings().driver, "0.1.0", &slices, claims, now)
}

/// Why the one claim that waits does so.
fn why(slices: &[ResourceSlice], claims: &[SeenClaim]) -> String {
    let [waiting] = status(slices, claims).waiting.try_into().expect("one claim waits");
    waiting.requests.first().expect("a request").why.clone()
}

fn free(gpu: &GpuDevices, profile: Option<&str>) -> usize {
    gpu.free.iter().find(|free| free.profile.as_deref() == profile).map_or(0, |free| free.count)
}

#[test]
fn what_is_free_beside_a_held_partition_is_what_its_gpu_leaves() {
    let slices = node("node-1", &h100(), &Conditions::default());
    let part = "gpu-0000-17-00-0-mig-3g-40gb-0";
    let status = status(&slices, &[holding("train", &[part])]);
    let [node] = status.nodes.as_slice() else { panic!("one node: {status:?}") };
    let [gpu] = node.gpus.as_slice() else { panic!("one GPU: {node:?}") };
    assert!(node.complete && node.node == "node-1" && gpu.product == "NVIDIA H100 80GB HBM3");
    assert_eq!(gpu.memory, fixtures::gpu(Model::H100, "0000:17:00.0").memory);
    assert_eq!(free(gpu, None), 0, "the whole GPU overlaps the partition");
    assert_eq!(free(gpu, Some("3g.40gb")), 1);
    assert_eq!(free(gpu, Some("1g.10gb")), 3);
    assert_eq!(free(gpu, Some("7g.80gb")), 0);
    let [held] = gpu.held.as_slice() else { panic!("one holding: {gpu:?}") };
    assert_eq!((held.device.as_str(), held.profile.as_deref()), (part, Some("3g.40gb")));
    assert_eq!(
        (held.claim.to_string().as_str(), held.pods.as_slice()),
        ("team/train", &["train-pod".to_owned()][..])
    );
}

#[test]
fn a_pool_of_which_a_slice_is_missing_gives_nothing() {
    let mut slices = node("node-1", &h100(), &Conditions::default());
    slices.pop();
    let status = status(&slices, &[]);
    assert!(!status.nodes[0].complete);
    assert!(status.nodes[0].gpus.iter().all(|gpu| gpu.free.is_empty()));
}

#[test]
fn slices_of_an_older_generation_do_not_count() {
    let mut slices = node("node-1", &h100(), &Conditions::default());
    let mut old = node("node-1", &[gpu(Model::L4, "0000:65:00.0")], &Conditions::default());
    for slice in &mut slices {
        slice.spec.pool.generation = 2;
    }
    old.append(&mut slices);
    let gpus = status(&old, &[]).nodes[0].gpus.clone();
    assert_eq!(gpus.len(), 1);
    assert_eq!((gpus[0].name.as_str(), free(&gpus[0], None)), (WHOLE, 1));
}

#[test]
fn what_claims_hold_of_a_node_that_is_gone_is_told() {
    let status = status(&[], &[holding("train", &[WHOLE])]);
    assert_eq!((status.nodes[0].node.as_str(), status.nodes[0].complete), ("node-1", false));
    assert_eq!(status.nodes[0].gpus[0].held[0].device.as_str(), WHOLE);
}

#[test]
fn administrative_access_leaves_a_device_free() {
    let slices = node("node-1", &h100(), &Conditions::default());
    let status = json!({"allocation": {"devices": {"results": [{
        "request": "r", "driver": "gpu.nvidia.com", "pool": "node-1/gpu", "device": WHOLE, "adminAccess": true
    }]}}});
    let status = self::status(&slices, &[claim("admin", &json!({}), &status)]);
    let gpu = &status.nodes[0].gpus[0];
    assert!(gpu.held[0].admin_access);
    assert_eq!(free(gpu, None), 1);
}

#[test]
fn a_claim_waits_for_what_nobody_publishes() {
    let slices = node("node-1", &h100(), &Conditions::default());
    let why = why(&slices, &[waiting("mig-1g.5gb.nvidia.com", 1)]);
    assert!(why.starts_with("no node publishes such a device"), "{why}");
    assert!(why.ends_with("no such class (`kubectl get deviceclass mig-1g.5gb.nvidia.com`)"), "{why}");
}

#[test]
fn a_claim_waits_for_what_others_hold_or_overlap() {
    let slices = node("node-1", &h100(), &Conditions::default());
    let small = holding("small", &["gpu-0000-17-00-0-mig-1g-10gb-0"]);
    assert_eq!(
        why(&slices, &[small, waiting("gpu.nvidia.com", 1)]),
        "none of 1 is free: each is held, or overlaps what is held on its GPU"
    );
}

#[test]
fn a_claim_waits_for_more_than_one_node_has() {
    let mut slices = node("node-1", &h100(), &Conditions::default());
    slices.extend(node(
        "node-2",
        &[gpu(Model::H100, "0000:17:00.0"), gpu(Model::L4, "0000:65:00.0")],
        &Conditions::default(),
    ));
    assert_eq!(
        why(&slices, &[waiting("gpu.nvidia.com", 3)]),
        "no node has 3 such devices: node-2 has most, 2"
    );
    assert_eq!(
        why(&slices, &[holding("train", &[WHOLE]), waiting("gpu.nvidia.com", 3)]),
        "no node has 3 such devices: node-2 has most, 2"
    );
    let held = json!({"allocation": {"devices": {"results": [
        {"request": "r", "driver": "gpu.nvidia.com", "pool": "node-2/gpu", "device": WHOLE},
    ]}}});
    assert_eq!(
        why(&slices, &[claim("train", &json!({}), &held), waiting("gpu.nvidia.com", 2)]),
        "2 are needed on one node, and node-1 has most that are free: 1"
    );
    let why = why(&slices, &[waiting("gpu.nvidia.com", 2)]);
    assert!(why.starts_with("2 could be allocated on node-2"), "{why}");
}

#[test]
fn a_claim_waits_for_what_is_tainted_and_the_taint_is_named() {
    let stuck = Conditions {
        mode_stuck: [(fixtures::pci("0000:17:00.0"), MigMode::Disabled)].into(),
        ..Conditions::default()
    };
    let slices = node("node-1", &h100(), &stuck);
    assert_eq!(
        why(&slices, &[waiting("gpu.nvidia.com", 1)]),
        "none of 1 is free: all have a taint: gpu.nvidia.com/mode-stuck=disabled (1)"
    );
    // Partitions need the other mode.
    let why = why(&slices, &[waiting("mig.nvidia.com", 1)]);
    assert!(why.contains("could be allocated on node-1"), "{why}");
    assert_eq!(
        status(&slices, &[]).nodes[0].gpus[0].conditions,
        ["1 device is not given out: gpu.nvidia.com/mode-stuck=disabled"]
    );
}

#[test]
fn a_profile_with_a_plus_is_told_by_its_class() {
    let slices = node("node-1", &h100(), &Conditions::default());
    let why = why(&slices, &[waiting("mig-1g.10gb.me.nvidia.com", 2)]);
    assert_eq!(why, "no node has 2 such devices that fit beside each other: node-1 has most, 1");
}

#[test]
fn all_partitions_of_a_node_can_be_had_by_no_claim() {
    let slices = node("node-1", &h100(), &Conditions::default());
    let all = |class: &str| asking(&json!({"deviceClassName": class, "allocationMode": "All"}));
    let reason = why(&slices, &[all("mig-1g.10gb.nvidia.com")]);
    assert!(reason.starts_with("7 could be allocated on node-1"), "{reason}");
    let reason = why(&slices, &[all("mig.nvidia.com")]);
    assert!(reason.starts_with("all of a node are asked for, and on no node do they fit"), "{reason}");
    let reason = why(&slices, &[holding("train", &[WHOLE]), all("gpu.nvidia.com")]);
    assert_eq!(reason, "all of a node are needed, and on each some of the 1 are held or have a taint");
}

#[test]
fn a_claim_that_tolerates_taints_is_not_told_that_they_are_the_reason() {
    let stuck = Conditions {
        mode_stuck: [(fixtures::pci("0000:17:00.0"), MigMode::Disabled)].into(),
        ..Conditions::default()
    };
    let tolerating = json!({"deviceClassName": "gpu.nvidia.com", "tolerations": [{"operator": "Exists"}]});
    let reason = why(&node("node-1", &h100(), &stuck), &[asking(&tolerating)]);
    assert!(reason.ends_with("; whether it tolerates the taints is not evaluated"), "{reason}");
    let reason = why(&node("node-1", &h100(), &Conditions::default()), &[asking(&tolerating)]);
    assert!(reason.starts_with("1 could be allocated on node-1: another request"), "{reason}");
}

#[test]
fn a_cluster_without_the_driver_is_told_so() {
    let note =
        "no ResourceSlices of gpu.nvidia.com: is kerf running on a node, and is this the right cluster?";
    assert_eq!(status(&[], &[]).notes, [note]);
    assert_eq!(status(&node("node-1", &h100(), &Conditions::default()), &[]).notes, Vec::<String>::new());
}

#[test]
fn only_claims_that_hold_or_wait_for_devices_of_the_driver_concern_it() {
    let driver = settings().driver;
    assert!(holding("train", &[WHOLE]).concerns(&driver));
    assert!(waiting("mig-1g.10gb.nvidia.com", 1).concerns(&driver));
    assert!(!waiting("fpga.example.com", 1).concerns(&driver));
    let of_another = json!({"allocation": {"devices": {"results": [
        {"request": "r", "driver": "fpga.example.com", "pool": "p", "device": "d"},
    ]}}});
    let asks =
        json!({"devices": {"requests": [{"name": "r", "exactly": {"deviceClassName": "gpu.nvidia.com"}}]}});
    assert!(!claim("held", &asks, &of_another).concerns(&driver));
}

#[test]
fn equal_gpus_of_many_nodes_share_what_is_kept_of_them() {
    let mut keeper = SliceKeeper::default();
    let mut keep = |name: &str| -> Vec<SeenSlice> {
        node(name, &h100(), &Conditions::default())
            .iter()
            .map(|slice| serde_json::to_value(slice).and_then(serde_json::from_value).expect("a slice"))
            .map(|slice| keeper.keep(slice))
            .collect()
    };
    let (one, other) = (keep("node-1"), keep("node-2"));
    let devices =
        |slices: &[SeenSlice]| slices.iter().flat_map(|slice| slice.devices.clone()).collect::<Vec<_>>();
    let mut partitions = 0;
    for (one, other) in devices(&one).iter().zip(&devices(&other)) {
        assert_eq!(one.name, other.name);
        for ((set, amounts), (other_set, others)) in one.costs.iter().zip(&other.costs) {
            assert!(Arc::ptr_eq(set, other_set) && Arc::ptr_eq(amounts, others), "{}", one.name);
            partitions += 1;
        }
    }
    assert!(partitions > 20, "{partitions}");
}

#[test]
fn alternatives_are_told_one_by_one_and_other_drivers_claims_not_at_all() {
    let slices = node("node-1", &h100(), &Conditions::default());
    let spec = json!({"devices": {"requests": [{"name": "r", "firstAvailable": [
        {"name": "large", "deviceClassName": "mig-7g.80gb.nvidia.com"},
        {"name": "other", "deviceClassName": "fpga.example.com"},
    ]}]}});
    let status = status(
        &slices,
        &[claim("waits", &spec, &json!({})), waiting("fpga.example.com", 1), holding("train", &[WHOLE])],
    );
    let [waits] = status.waiting.as_slice() else { panic!("one claim waits: {:?}", status.waiting) };
    let requests: Vec<_> =
        waits.requests.iter().map(|request| (request.request.as_str(), request.published)).collect();
    assert_eq!(requests, [("r/large", Some(1)), ("r/other", None)]);
    assert_eq!((waits.since.as_str(), waits.waited_seconds), ("2026-11-30T10:00:00Z", 123));
}

#[test]
fn pods_that_name_a_claim_are_found_among_those_that_wait() {
    let mut status = status(&[], &[waiting("gpu.nvidia.com", 1)]);
    let pod = |name: &str, claim: &str| -> PendingPod {
        serde_json::from_value(json!({
            "metadata": {"name": name}, "spec": {"resourceClaims": [{"name": "c", "resourceClaimName": claim}]},
        }))
        .expect("a pod")
    };
    status.name_pods("other", &[pod("elsewhere", "waits")]);
    status.name_pods("team", &[pod("user", "waits"), pod("stranger", "another")]);
    assert_eq!(status.waiting[0].pods, Some(vec!["user".to_owned()]));
}

#[test]
fn of_a_claim_that_no_pod_uses_only_that_is_told() {
    let slices = node("node-1", &h100(), &Conditions::default());
    let mut status = status(&slices, &[waiting("gpu.nvidia.com", 1)]);
    let why = |status: &ClusterStatus| status.waiting[0].requests[0].why.clone();
    status.name_pods("other", &[]);
    assert_eq!(status.waiting[0].pods, None, "the pods of its namespace are not known");
    assert!(why(&status).starts_with("1 could be allocated"));
    status.name_pods("team", &[]);
    assert_eq!(status.waiting[0].pods, Some(Vec::new()));
    assert_eq!(why(&status), "no pod that waits names it: it is allocated when a pod needs it");
    assert_eq!(status.waiting_beside_free(0).count(), 0);
}

#[test]
fn the_schedulers_last_sentence_counts_in_whichever_field_its_time_stands() {
    let event = |message: &str, times: Value| -> PodEvent {
        let mut event = times;
        event["metadata"] = json!({"creationTimestamp": "2026-11-30T09:00:00Z"});
        event["message"] = json!(message);
        serde_json::from_value(event).expect("an event")
    };
    let events = vec![
        event("first", json!({"lastTimestamp": "2026-11-30T10:00:00Z", "eventTime": null})),
        event("last", json!({"series": {"count": 2, "lastObservedTime": "2026-11-30T10:02:00.000001Z"}})),
        event("second", json!({"eventTime": "2026-11-30T10:01:00.5Z", "lastTimestamp": null})),
        event("oldest", json!({})),
    ];
    let last = SchedulerEvent::last("pod", events).expect("an event");
    assert_eq!((last.message.as_str(), last.pod.as_str()), ("last", "pod"));
    assert_eq!(last.at.as_deref(), Some("2026-11-30T10:02:00.000001Z"));
    assert_eq!(SchedulerEvent::last("pod", Vec::new()), None);
}

#[test]
fn a_config_nested_too_deeply_hides_no_claim() {
    let nested = "{\"a\":".repeat(1_000) + "0" + &"}".repeat(1_000);
    let config = format!("[{{\"opaque\":{{\"parameters\":{nested}}}}}]");
    let result = format!("{{\"driver\":\"gpu.nvidia.com\",\"pool\":\"p\",\"device\":\"{WHOLE}\"}}");
    let text = format!(
        "{{\"metadata\":{{\"name\":\"c\",\"managedFields\":{nested}}},\"spec\":{{\"devices\":{{\"config\":{config}}}}},\
         \"status\":{{\"allocation\":{{\"devices\":{{\"config\":{config},\"results\":[{result}]}}}}}}}}"
    );
    let claim: SeenClaim = serde_json::from_str(&text).expect("a claim");
    assert_eq!((claim.name().name.as_str(), claim.holdings(&settings().driver).count()), ("c", 1));
}

#[test]
fn the_json_is_as_it_is_documented() {
    let slices = node("node-1", &[gpu(Model::L4, "0000:17:00.0")], &Conditions::default());
    let status = status(&slices, &[holding("train", &[WHOLE]), waiting("gpu.nvidia.com", 1)]);
    insta::assert_json_snapshot!(status);
}
