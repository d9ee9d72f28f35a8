//! The publisher's promises, each against the API server in this process.

use std::sync::Arc;
use std::time::Duration;

use axum::http::{Method, StatusCode};
use k8s_openapi::api::resource::v1::{
    Counter, CounterSet, Device, DeviceCounterConsumption, DeviceTaint, ResourcePool, ResourceSlice,
    ResourceSliceSpec,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kerf_controller::dropped::Feature;
use kerf_controller::{DesiredPools, Identity, Phase, PublishStatus, Publisher, Timing};
use kerf_dra_driver::layout::PackedSlice;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::fake_api::{FakeApi, Store};

/// Far longer than anything here takes.
const LIMIT: Duration = Duration::from_mins(1);

fn device(name: &str) -> Device {
    Device { name: name.to_owned(), ..Device::default() }
}

fn taint(mut device: Device) -> Device {
    device.taints = Some(vec![DeviceTaint {
        key: "gpu.nvidia.com/foreign".to_owned(),
        effect: "NoSchedule".to_owned(),
        ..DeviceTaint::default()
    }]);
    device
}

fn devices(devices: Vec<Device>) -> ResourceSliceSpec {
    ResourceSliceSpec { devices: Some(devices), ..ResourceSliceSpec::default() }
}

fn pool(slices: Vec<ResourceSliceSpec>) -> Arc<DesiredPools> {
    let named = |mut slice: ResourceSliceSpec| {
        slice.pool.name.push_str("node-1/gpu");
        PackedSlice::pack(&slice).unwrap()
    };
    Arc::new(slices.into_iter().map(named).collect())
}

/// A pool of `count` slices with one device each.
fn plain(count: usize) -> Arc<DesiredPools> {
    pool((0..count).map(|index| devices(vec![device(&format!("gpu-{index}"))])).collect())
}

/// A counter slice and a slice of one partition that consumes of it.
fn partitioned() -> Arc<DesiredPools> {
    let counters = || {
        let value = Quantity("1024Mi".to_owned());
        [("memory".to_owned(), Counter { value })].into()
    };
    let set = CounterSet { name: "gpu-0".to_owned(), counters: counters() };
    let counter_slice =
        ResourceSliceSpec { shared_counters: Some(vec![set]), ..ResourceSliceSpec::default() };
    let consumption = DeviceCounterConsumption {
        counter_set: "gpu-0".to_owned(),
        counters: counters(),
        ..DeviceCounterConsumption::default()
    };
    let partition = Device { consumes_counters: Some(vec![consumption]), ..device("gpu-0-mig") };
    pool(vec![counter_slice, devices(vec![partition]), devices(vec![device("other")])])
}

/// A publisher that runs, and the two ends to talk to it.
struct Running {
    api: FakeApi,
    desired: watch::Sender<Option<Arc<DesiredPools>>>,
    may_publish: watch::Sender<bool>,
    status: watch::Receiver<PublishStatus>,
    cancel: CancellationToken,
    task: tokio::task::JoinHandle<()>,
}

/// As a publisher's, but short.
fn quick() -> Timing {
    Timing {
        verify: Duration::from_hours(1),
        spacing: Duration::from_millis(5),
        first_retry: Duration::from_millis(5),
        last_retry: Duration::from_millis(50),
        ..Timing::default()
    }
}

impl Running {
    fn start(api: &FakeApi) -> Self {
        Self::start_with(api, Duration::from_hours(1), true)
    }

    fn start_with(api: &FakeApi, verify: Duration, may_publish: bool) -> Self {
        let timing = Timing { verify, ..quick() };
        Self::start_timed(api, timing, may_publish)
    }

    fn start_timed(api: &FakeApi, timing: Timing, may_publish: bool) -> Self {
        let identity = Identity { driver: "gpu.nvidia.com".parse().unwrap(), node: "node-1".to_owned() };
        let (desired, desired_receiver) = watch::channel(None);
        let (may_publish, may_publish_receiver) = watch::channel(may_publish);
        let (publisher, status) =
            Publisher::with_timing(api.client(), identity, desired_receiver, may_publish_receiver, timing);
        let cancel = CancellationToken::new();
        let task = tokio::spawn(publisher.run(cancel.clone()));
        Self { api: api.clone(), desired, may_publish, status, cancel, task }
    }

    async fn publish(&mut self, pools: &Arc<DesiredPools>) -> PublishStatus {
        self.desired.send_replace(Some(pools.clone()));
        self.stored(pools).await
    }

    /// Waits until exactly these pools were seen stored.
    async fn stored(&mut self, pools: &Arc<DesiredPools>) -> PublishStatus {
        self.until("these pools are stored", |status| {
            status.phase == Phase::Stored
                && status.stored.as_ref().is_some_and(|stored| Arc::ptr_eq(stored, pools))
        })
        .await
    }

    async fn until(&mut self, what: &str, holds: impl FnMut(&PublishStatus) -> bool) -> PublishStatus {
        let last = self.status.clone();
        let waited = tokio::time::timeout(LIMIT, self.status.wait_for(holds)).await;
        waited.unwrap_or_else(|_| panic!("never: {what}; {:#?}", last.borrow())).unwrap().clone()
    }

    /// Waits until the store is as described.
    async fn until_stored(&self, what: &str, holds: impl Fn(&Store) -> bool) {
        let wait = async {
            while !self.api.with(|store| holds(store)) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let in_time = tokio::time::timeout(LIMIT, wait).await.is_ok();
        assert!(in_time, "never: {what}; {:#?}", self.api.with(|store| store.requests.clone()));
    }

    /// Waits until a foreign change was undone and seen undone.
    async fn repaired(&mut self, repairs: u64) -> PublishStatus {
        self.until("the change is undone", |status| {
            status.repairs == repairs && status.phase == Phase::Stored
        })
        .await
    }

    /// Waits until the watch is open, so that what follows comes as an event.
    async fn watching(&self) {
        let watches =
            |store: &Store| store.requests.iter().any(|request| request == "GET WATCHresourceslices");
        self.until_stored("the watch is open", watches).await;
    }

    async fn stop(self) {
        self.cancel.cancel();
        self.task.await.unwrap();
    }
}

fn device_names(store: &Store) -> Vec<String> {
    let devices = store.slices.values().flat_map(|slice| slice.spec.devices.iter().flatten());
    devices.map(|device| device.name.clone()).collect()
}

fn consistent(store: &Store, count: usize) -> bool {
    let generations: std::collections::BTreeSet<_> =
        store.slices.values().map(|slice| slice.spec.pool.generation).collect();
    store.slices.len() == count && generations.len() == 1
}

fn foreign_slice(pool: &str, name: &str) -> ResourceSlice {
    ResourceSlice {
        metadata: ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() },
        spec: ResourceSliceSpec {
            driver: "gpu.nvidia.com".to_owned(),
            node_name: Some("node-1".to_owned()),
            pool: ResourcePool { name: pool.to_owned(), generation: 7, resource_slice_count: 1 },
            devices: Some(vec![device("gpu-0")]),
            ..ResourceSliceSpec::default()
        },
    }
}

#[tokio::test]
async fn what_is_desired_is_stored_in_order_and_nothing_is_written_afterwards() {
    let api = FakeApi::new();
    let mut running = Running::start_with(&api, Duration::from_millis(5), true);
    let status = running.publish(&plain(3)).await;
    assert_eq!((status.generation, status.slices, status.writes), (1, 3, 3));
    assert!(status.is_ready() && status.missing().is_none());
    api.with(|store| assert_eq!(device_names(store), ["gpu-0", "gpu-1", "gpu-2"]));

    // Many looks later, nothing more was written.
    let lists = |store: &Store| store.requests.iter().filter(|it| *it == "GET resourceslices").count();
    let before = api.with(|store| lists(store));
    running.until_stored("it looked ten times more", |store| lists(store) > before + 10).await;
    api.with(|store| assert_eq!(store.writes(), 3));
    running.stop().await;
    api.with(|store| assert_eq!(store.slices.len(), 3, "slices stay when the publisher ends"));
}

#[tokio::test]
async fn own_writes_are_no_news() {
    let api = FakeApi::new();
    let mut running = Running::start(&api);
    running.publish(&plain(2)).await;
    running.watching().await;
    running.publish(&plain(3)).await;
    // A foreign event comes after all own events on the same watch.
    api.with(|store| store.delete(&store.names()[0]));
    running.repaired(1).await;
    api.with(|store| {
        // At the start, for the watch, once after the watch began; then two for
        // each publication and two for the repair.
        let lists = store.requests.iter().filter(|it| *it == "GET resourceslices").count();
        assert!(lists <= 9, "{lists}: {:#?}", store.requests);
    });
    running.stop().await;
}

#[tokio::test]
async fn a_deleted_slice_comes_back() {
    let api = FakeApi::new();
    let mut running = Running::start(&api);
    running.publish(&plain(3)).await;
    running.watching().await;
    api.with(|store| store.delete(&store.names()[1]));
    running.repaired(1).await;
    api.with(|store| {
        assert!(consistent(store, 3));
        assert_eq!(device_names(store), ["gpu-0", "gpu-1", "gpu-2"]);
    });
    running.stop().await;
}

#[tokio::test]
async fn an_edited_slice_is_restored() {
    let api = FakeApi::new();
    let mut running = Running::start(&api);
    running.publish(&plain(2)).await;
    running.watching().await;
    let edit = |slice: &mut ResourceSlice| slice.spec.devices = Some(vec![device("stolen")]);
    api.with(|store| store.edit(&store.names()[1], edit));
    let status = running.repaired(1).await;
    assert_eq!(status.generation, 1);
    api.with(|store| assert_eq!(device_names(store), ["gpu-0", "gpu-1"]));
    running.stop().await;
}

#[tokio::test]
async fn endless_editing_is_bounded_and_named() {
    let api = FakeApi::new();
    let mut running = Running::start(&api);
    running.publish(&plain(2)).await;
    running.watching().await;
    for _ in 0..100 {
        let edit = |slice: &mut ResourceSlice| slice.spec.devices = Some(vec![device("stolen")]);
        api.with(|store| store.edit(&store.names()[1], edit));
        let fought = |status: &PublishStatus| matches!(status.phase, Phase::Contended);
        let undone = |store: &Store| device_names(store) == ["gpu-0", "gpu-1"];
        while !api.with(|store| undone(store)) && !fought(&running.status.borrow()) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        if fought(&running.status.borrow()) {
            break;
        }
    }
    let status = running.until("it gives in", |status| status.phase == Phase::Contended).await;
    assert!(status.repairs <= 6 && !status.is_ready());
    assert!(status.missing().unwrap().contains("somebody keeps changing"));
    running.stop().await;
}

#[tokio::test]
async fn a_taint_writes_one_slice_and_keeps_the_generation() {
    let api = FakeApi::new();
    let mut running = Running::start(&api);
    running.publish(&plain(2)).await;
    let tainted = pool(vec![devices(vec![device("gpu-0")]), devices(vec![taint(device("gpu-1"))])]);
    let status = running.publish(&tainted).await;
    assert_eq!((status.generation, status.writes), (1, 3));
    running.stop().await;
}

#[tokio::test]
async fn another_count_of_slices_bumps_the_generation() {
    let api = FakeApi::new();
    let mut running = Running::start(&api);
    running.publish(&plain(2)).await;
    assert_eq!(running.publish(&plain(3)).await.generation, 2);
    api.with(|store| assert!(consistent(store, 3)));
    assert_eq!(running.publish(&plain(2)).await.generation, 3);
    api.with(|store| assert!(consistent(store, 2)));
    running.stop().await;
}

#[tokio::test]
async fn a_kubelet_that_wipes_right_after_an_update_is_noticed() {
    let api = FakeApi::new();
    let mut running = Running::start(&api);
    running.publish(&plain(2)).await;
    api.with(|store| store.after_update = Some(Box::new(Store::wipe)));
    let tainted = pool(vec![devices(vec![device("gpu-0")]), devices(vec![taint(device("gpu-1"))])]);
    running.publish(&tainted).await;
    api.with(|store| {
        assert!(store.after_update.is_none());
        assert!(consistent(store, 2));
    });
    running.stop().await;
}

#[tokio::test]
async fn a_wipe_that_the_watch_missed_is_found_by_looking() {
    let api = FakeApi::new();
    let mut running = Running::start_with(&api, Duration::from_millis(20), true);
    running.publish(&plain(2)).await;
    api.with(|store| {
        store.wipe();
        store.forget();
    });
    running.repaired(1).await;
    api.with(|store| assert!(consistent(store, 2)));
    running.stop().await;
}

#[tokio::test]
async fn an_expired_watch_begins_anew_and_still_sees_changes() {
    let api = FakeApi::new();
    let mut running = Running::start(&api);
    running.publish(&plain(2)).await;
    running.watching().await;
    api.with(|store| {
        store.wipe();
        store.expire_watches();
    });
    running.until_stored("the slices are back", |store| consistent(store, 2)).await;
    running.stop().await;
}

#[tokio::test]
async fn watches_that_end_at_once_are_opened_after_pauses_and_changes_are_still_seen() {
    let api = FakeApi::new();
    api.with(|store| store.cut_watches = true);
    let watches =
        |store: &Store| store.requests.iter().filter(|request| *request == "GET WATCHresourceslices").count();
    let pause = Duration::from_hours(1);
    let mut running =
        Running::start_timed(&api, Timing { first_retry: pause, last_retry: pause, ..quick() }, true);
    for count in 1..20 {
        running.publish(&plain(count)).await;
        running.watching().await;
    }
    assert_eq!(api.with(|store| watches(store)), 1);
    running.stop().await;

    let mut running = Running::start(&api);
    running.publish(&plain(2)).await;
    running.until_stored("several are cut short", |store| watches(store) > 4).await;
    api.with(|store| {
        store.wipe();
        store.cut_watches = false;
    });
    running.repaired(1).await;
    running.stop().await;
}

#[tokio::test]
async fn a_node_of_another_uid_becomes_the_owner() {
    let api = FakeApi::new();
    let mut running = Running::start(&api);
    running.publish(&plain(2)).await;
    running.watching().await;
    api.with(|store| {
        store.set_node("node-1", "node-uid-2");
        // The garbage collector takes one slice of the old node away.
        store.delete(&store.names()[0]);
    });
    running.repaired(1).await;
    api.with(|store| {
        for slice in store.slices.values() {
            let owners = slice.metadata.owner_references.as_ref().unwrap();
            assert_eq!((owners.len(), owners[0].uid.as_str()), (1, "node-uid-2"));
        }
    });
    running.stop().await;
}

#[tokio::test]
async fn pools_of_a_former_driver_are_removed_and_other_nodes_and_drivers_left_alone() {
    let api = FakeApi::new();
    api.with(|store| {
        store.create(foreign_slice("node-1", "node-1-gpu.nvidia.com-abcde"));
        let mut other = foreign_slice("node-2", "node-2-gpu.nvidia.com-abcde");
        other.spec.node_name = Some("node-2".to_owned());
        store.create(other);
        let mut other = foreign_slice("node-1", "other-driver");
        other.spec.driver = "other.example.com".to_owned();
        store.create(other);
    });
    let mut running = Running::start(&api);
    running.publish(&plain(1)).await;
    api.with(|store| {
        assert_eq!(store.slices.len(), 3);
        assert!(store.slices.contains_key("node-2-gpu.nvidia.com-abcde"));
        assert!(store.slices.contains_key("other-driver"));
    });
    running.stop().await;
}

#[tokio::test]
async fn a_driver_that_is_alive_under_our_name_is_reported_and_not_fought() {
    let api = FakeApi::new();
    let mut running = Running::start(&api);
    running.publish(&plain(1)).await;
    running.watching().await;
    for round in 0..4 {
        let name = format!("node-1-gpu.nvidia.com-{round}");
        api.with(|store| store.create(foreign_slice("node-1", &name)));
        if round < 3 {
            running.until_stored("it is deleted", |store| !store.slices.contains_key(&name)).await;
        }
    }
    let status = running.until("the rival is seen", |status| !status.rivals.is_empty()).await;
    assert_eq!(status.rivals, ["node-1"]);
    assert!(!status.is_ready());
    assert!(status.missing().unwrap().contains("another driver of this name"));
    api.with(|store| assert!(store.slices.contains_key("node-1-gpu.nvidia.com-3")));
    running.stop().await;
}

fn drop_counters(spec: &mut ResourceSliceSpec) {
    spec.shared_counters = None;
    spec.devices.iter_mut().flatten().for_each(|device| device.consumes_counters = None);
}

#[tokio::test]
async fn slices_whose_counters_were_dropped_are_withdrawn_at_once() {
    let api = FakeApi::new();
    api.with(|store| store.gates.push(Box::new(drop_counters)));
    let mut running = Running::start(&api);
    running.desired.send_replace(Some(partitioned()));
    let status = running.until("it withdraws", |status| status.phase == Phase::Withheld).await;
    assert_eq!(status.dropped, [Feature::PartitionableDevices].into());
    assert!(status.missing().unwrap().contains("DRAPartitionableDevices"));
    api.with(|store| {
        assert!(store.slices.is_empty());
        let writes: Vec<_> = store.requests.iter().filter(|it| !it.starts_with("GET")).collect();
        assert_eq!(writes, ["POST resourceslices", "DELETE resourceslices"]);
    });

    // An equal desired state changes nothing, a layout without counters does.
    running.desired.send_replace(Some(partitioned()));
    let status = running.publish(&plain(1)).await;
    assert!(status.is_ready());
    // Else nothing would tell why there is so little.
    assert_eq!(status.dropped, [Feature::PartitionableDevices].into());
    api.with(|store| assert_eq!(device_names(store), ["gpu-0"]));
    running.stop().await;
}

#[tokio::test]
async fn a_stripped_slice_whose_withdrawal_failed_is_withdrawn_later() {
    let api = FakeApi::new();
    api.with(|store| {
        store.gates.push(Box::new(drop_counters));
        store.failures.push_back((Method::DELETE, StatusCode::INTERNAL_SERVER_ERROR));
    });
    let mut running = Running::start(&api);
    running.desired.send_replace(Some(partitioned()));
    running.until("it withdraws", |status| status.phase == Phase::Withheld).await;
    api.with(|store| assert!(store.slices.is_empty()));
    running.stop().await;
}

#[tokio::test]
async fn a_taint_that_is_dropped_takes_its_pool_away() {
    let api = FakeApi::new();
    let mut running = Running::start(&api);
    running.publish(&plain(2)).await;
    api.with(|store| {
        store.gates.push(Box::new(|spec| {
            spec.devices.iter_mut().flatten().for_each(|device| device.taints = None);
        }));
    });
    let tainted = pool(vec![devices(vec![device("gpu-0")]), devices(vec![taint(device("gpu-1"))])]);
    running.desired.send_replace(Some(tainted));
    let status = running.until("it withdraws", |status| status.phase == Phase::Withheld).await;
    assert_eq!(status.dropped, [Feature::DeviceTaints].into());
    api.with(|store| assert!(store.slices.is_empty()));
    running.stop().await;
}

#[tokio::test]
async fn a_dropped_field_that_guards_nothing_leaves_the_rest_published() {
    let api = FakeApi::new();
    api.with(|store| store.gates.push(Box::new(|spec| spec.partition_type_attribute = None)));
    let mut running = Running::start(&api);
    let mut slice = devices(vec![device("gpu-0")]);
    slice.partition_type_attribute = Some("gpu.nvidia.com/profile".to_owned());
    let status = running.publish(&pool(vec![slice])).await;
    assert_eq!(status.dropped, [Feature::PartitionableDevicesType].into());
    assert!(status.is_ready());
    assert_eq!(status.writes, 1);
    running.stop().await;
}

#[tokio::test]
async fn only_the_instance_that_may_publish_writes() {
    let api = FakeApi::new();
    let mut running = Running::start_with(&api, Duration::from_hours(1), false);
    let pools = plain(1);
    running.desired.send_replace(Some(pools.clone()));
    running.until("it stands by", |status| status.phase == Phase::Standby).await;
    api.with(|store| assert_eq!(store.writes(), 0));
    running.may_publish.send_replace(true);
    running.stored(&pools).await;
    running.stop().await;
}

#[tokio::test]
async fn until_something_is_desired_stored_slices_stay_and_no_pools_withdraw_all() {
    let api = FakeApi::new();
    let mut first = Running::start(&api);
    first.publish(&plain(2)).await;
    first.stop().await;
    let mut second = Running::start(&api);
    second.watching().await;
    assert_eq!(second.status.borrow().phase, Phase::Undecided);
    api.with(|store| assert_eq!(store.slices.len(), 2));
    let none = Arc::new(DesiredPools::default());
    second.publish(&none).await;
    api.with(|store| assert!(store.slices.is_empty()));
    second.stop().await;
}

#[tokio::test]
async fn failures_are_reported_and_tried_again_until_the_server_answers() {
    let api = FakeApi::new();
    api.with(|store| {
        for _ in 0..3 {
            store.failures.push_back((Method::POST, StatusCode::FORBIDDEN));
        }
        for _ in 0..3 {
            store.failures.push_back((Method::GET, StatusCode::SERVICE_UNAVAILABLE));
        }
    });
    let mut running = Running::start(&api);
    let pools = plain(2);
    running.desired.send_replace(Some(pools.clone()));
    let failed = |status: &PublishStatus| status.last_error.is_some();
    let status = running.until("a failure is reported", failed).await;
    let error = status.last_error.clone().unwrap();
    assert_eq!(error, "cannot create a ResourceSlice: made up: Forbidden");
    assert!(!status.is_ready());
    let status = running.stored(&pools).await;
    assert_eq!(status.last_error, None);
    api.with(|store| assert!(consistent(store, 2)));
    running.stop().await;
}

#[tokio::test]
async fn a_write_that_lost_a_race_is_planned_anew() {
    let api = FakeApi::new();
    let mut running = Running::start(&api);
    running.publish(&plain(2)).await;
    api.with(|store| store.failures.push_back((Method::PUT, StatusCode::CONFLICT)));
    let tainted = pool(vec![devices(vec![device("gpu-0")]), devices(vec![taint(device("gpu-1"))])]);
    let status = running.publish(&tainted).await;
    assert_eq!(status.generation, 1);
    running.stop().await;
}
