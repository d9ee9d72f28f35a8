//! The health of devices, as a kubelet reads it from the socket.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kerf_dra_driver::hardware::{HardwareErrorKind, HardwareEvent, HardwareEventKind};
use kerf_dra_driver::inventory::{MigMode, UnreadableGpu};
use kerf_kubelet_plugin::proto::health_v1::dra_resource_health_client::DraResourceHealthClient as V1;
use kerf_kubelet_plugin::proto::health_v1alpha1::dra_resource_health_client::DraResourceHealthClient as V1Alpha1;
use kerf_kubelet_plugin::proto::{health_v1, health_v1alpha1};
use kerf_kubelet_plugin::testing::{Node, claim, h100, partition};
use tonic::Streaming;

use super::rivals::Running;
use super::sockets::{Served, connect, serve, until};
use super::{node, pci, prepare, unprepare, whole};

/// Generous: it is reached only by a failure.
const LIMIT: Duration = Duration::from_mins(1);

type V1Stream = Streaming<health_v1::NodeWatchResourcesResponse>;

async fn open(served: &Served) -> V1Stream {
    let channel = until("DRA socket", async || connect(&served.dra).await).await;
    let opened = V1::new(channel).node_watch_resources(health_v1::NodeWatchResourcesRequest {}).await;
    opened.unwrap().into_inner()
}

async fn next(stream: &mut V1Stream) -> Vec<health_v1::DeviceHealth> {
    tokio::time::timeout(LIMIT, stream.message()).await.unwrap().unwrap().unwrap().devices
}

/// The devices that are not healthy, with status and message.
fn faults(devices: &[health_v1::DeviceHealth]) -> BTreeMap<String, (health_v1::HealthStatus, String)> {
    let faults = devices.iter().filter(|device| device.health() != health_v1::HealthStatus::Healthy);
    faults
        .map(|device| {
            let name = device.device.as_ref().unwrap().device_name.clone();
            (name, (device.health(), device.message.clone()))
        })
        .collect()
}

fn names(devices: &[health_v1::DeviceHealth]) -> BTreeSet<String> {
    devices.iter().map(|device| device.device.as_ref().unwrap().device_name.clone()).collect()
}

/// A hand at the hardware, which the driver reports.
fn by_hand(node: &Node, change: impl FnOnce(&mut kerf_kubelet_plugin::testing::Machine)) {
    let mut machine = node.machine.lock().unwrap();
    change(&mut machine);
    machine.events.push_back(HardwareEvent { gpu: None, kind: HardwareEventKind::Xid(79) });
}

#[tokio::test]
async fn the_kubelet_is_told_of_all_devices_and_of_every_change_in_either_version() {
    let root = tempfile::tempdir().unwrap();
    let held = partition(pci(1), "1g.10gb", 4);
    let owner = Running::on(node(&root)).await;
    owner.node.claims.put(claim("mig", &[("r", held.clone())]));
    owner.node.claims.put(claim("gpu", &[("r", whole(3))]));
    for name in ["mig", "gpu"] {
        prepare(&owner.plugin, name).await.unwrap();
    }
    owner.plugin.listen(owner.cancel.clone()).unwrap();
    let served = serve(&root, owner.plugin.clone());
    let mut stream = open(&served).await;
    let first = next(&mut stream).await;
    assert_eq!(names(&first).len(), 44, "four GPUs with ten places for partitions each");
    assert!(names(&first).contains(held.as_str()) && names(&first).contains(whole(3).as_str()));
    assert_eq!(faults(&first), BTreeMap::new());
    let now = i64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()).unwrap();
    for device in &first {
        assert_eq!(device.device.as_ref().unwrap().pool_name, "node/gpu");
        assert!((now - 60..=now).contains(&device.last_updated_time), "{device:?}");
        assert_eq!((device.health_check_timeout_seconds, device.message.as_str()), (180, ""));
    }

    by_hand(&owner.node, |machine| machine.inventory.gpus.retain(|gpu| gpu.pci != pci(3)));
    let lost = faults(&next(&mut stream).await);
    assert_eq!(lost.len(), 11, "all of the GPU and nothing else: {lost:?}");
    let (status, message) = &lost[whole(3).as_str()];
    assert_eq!(*status, health_v1::HealthStatus::Unhealthy);
    assert!(message.starts_with("GPU 0000:03:00.0 is lost"), "{message}");

    let channel = connect(&served.dra).await.unwrap();
    let request = health_v1alpha1::NodeWatchResourcesRequest {};
    let opened = V1Alpha1::new(channel).node_watch_resources(request).await;
    let mut older = opened.unwrap().into_inner();
    let older = older.message().await.unwrap().unwrap().devices;
    let told = older.iter().filter(|device| device.health() == health_v1alpha1::HealthStatus::Unhealthy);
    assert_eq!((older.len(), told.count()), (44, 11));
    assert!(older.iter().any(|device| device.message == *message));

    by_hand(&owner.node, |machine| machine.inventory.gpus.push(h100(pci(3), 2, MigMode::Disabled)));
    assert_eq!(faults(&next(&mut stream).await), BTreeMap::new());

    by_hand(&owner.node, |machine| {
        machine
            .inventory
            .gpus
            .iter_mut()
            .filter_map(|gpu| gpu.mig.as_mut())
            .for_each(|mig| mig.instances.clear());
    });
    let destroyed = faults(&next(&mut stream).await);
    let [(name, (status, message))] = &destroyed.into_iter().collect::<Vec<_>>()[..] else { panic!("one") };
    assert_eq!((name.as_str(), *status), (held.as_str(), health_v1::HealthStatus::Unhealthy));
    assert!(message.contains("that claim ns/mig holds"), "{message}");
    unprepare(&owner.plugin, "mig").await.unwrap();
    assert_eq!(faults(&next(&mut stream).await), BTreeMap::new(), "nobody has what vanished");

    served.cancel.cancel();
    let rest = tokio::time::timeout(LIMIT, async {
        while let Some(message) = stream.message().await? {
            assert_eq!(faults(&message.devices), BTreeMap::new());
        }
        Ok::<_, tonic::Status>(())
    });
    rest.await.unwrap().expect("the stream ends as it should");
    served.task.await.unwrap();
    owner.cancel.cancel();
    owner.task.await.unwrap();
}

#[tokio::test]
async fn a_partition_that_is_gone_is_unhealthy_also_when_its_gpu_cannot_be_looked_at_again() {
    let root = tempfile::tempdir().unwrap();
    let held = partition(pci(1), "1g.10gb", 4);
    let owner = Running::on(node(&root)).await;
    owner.node.claims.put(claim("mig", &[("r", held.clone())]));
    prepare(&owner.plugin, "mig").await.unwrap();
    owner.plugin.listen(owner.cancel.clone()).unwrap();
    let served = serve(&root, owner.plugin.clone());
    let mut stream = open(&served).await;
    assert_eq!(faults(&next(&mut stream).await), BTreeMap::new());
    by_hand(&owner.node, |machine| {
        machine.inventory.gpus[0].mig.as_mut().unwrap().instances.clear();
    });
    assert!(faults(&next(&mut stream).await).contains_key(held.as_str()));
    // The other is lost so that something is said.
    by_hand(&owner.node, |machine| {
        machine.failures.push_back(("gpu_instances", HardwareErrorKind::System));
        machine.inventory.gpus.retain(|gpu| gpu.pci != pci(3));
    });
    let both = faults(&next(&mut stream).await);
    assert!(both.contains_key(held.as_str()) && both.contains_key(whole(3).as_str()), "{both:?}");
    served.cancel.cancel();
    owner.cancel.cancel();
    served.task.await.unwrap();
    owner.task.await.unwrap();
}

#[tokio::test]
async fn nothing_is_known_while_the_driver_does_not_answer_nor_of_a_gpu_that_does_not() {
    let root = tempfile::tempdir().unwrap();
    let owner = Running::on(node(&root)).await;
    owner.plugin.listen(owner.cancel.clone()).unwrap();
    let served = serve(&root, owner.plugin.clone());
    let mut stream = open(&served).await;
    assert_eq!(faults(&next(&mut stream).await), BTreeMap::new());

    by_hand(&owner.node, |machine| {
        machine.failures.push_back(("inventory", HardwareErrorKind::NoDriver));
    });
    let unanswered = faults(&next(&mut stream).await);
    assert_eq!(unanswered.len(), 44);
    for (status, message) in unanswered.values() {
        assert_eq!(*status, health_v1::HealthStatus::Unknown);
        assert!(message.contains("the NVIDIA driver library cannot be used"), "{message}");
    }
    assert_eq!(faults(&next(&mut stream).await), BTreeMap::new(), "the next attempt succeeds");

    by_hand(&owner.node, |machine| {
        machine.inventory.gpus.retain(|gpu| gpu.pci != pci(2));
        let error = "GPU 1 has not answered for 10 s".to_owned();
        machine.inventory.unreadable = vec![UnreadableGpu { index: 1, pci: None, error, lost: false }];
    });
    let unread = faults(&next(&mut stream).await);
    assert_eq!(unread.len(), 11, "{unread:?}");
    let (status, message) = &unread[whole(2).as_str()];
    assert_eq!(*status, health_v1::HealthStatus::Unknown);
    assert!(message.contains("GPU 1 has not answered for 10 s"), "{message}");

    served.cancel.cancel();
    owner.cancel.cancel();
    served.task.await.unwrap();
    owner.task.await.unwrap();
}

#[tokio::test]
async fn a_stream_that_is_opened_anew_begins_with_all_and_is_silent_where_another_instance_tells() {
    let root = tempfile::tempdir().unwrap();
    let owner = Running::on(node(&root)).await;
    let served = serve(&root, owner.plugin.clone());
    let first = next(&mut open(&served).await).await;
    assert_eq!(names(&next(&mut open(&served).await).await), names(&first));
    owner.cancel.cancel();
    owner.task.await.unwrap();
    assert_eq!(*owner.plugin.health().borrow(), None);
    let mut silent = open(&served).await;
    served.cancel.cancel();
    assert_eq!(tokio::time::timeout(LIMIT, silent.message()).await.unwrap().unwrap(), None);
    served.task.await.unwrap();
}

#[tokio::test]
async fn the_list_of_64_gpus_fits_into_a_message_when_all_of_them_are_lost() {
    let root = tempfile::tempdir().unwrap();
    let gpus = (1..=64).map(|bus| h100(pci(bus), bus.into(), MigMode::Disabled)).collect();
    let owner = Running::on(Node::new(root.path(), gpus).unwrap()).await;
    owner.plugin.listen(owner.cancel.clone()).unwrap();
    let served = serve(&root, owner.plugin.clone());
    let mut stream = open(&served).await;
    assert_eq!(names(&next(&mut stream).await).len(), 704);
    by_hand(&owner.node, |machine| machine.inventory.gpus.clear());
    assert_eq!(faults(&next(&mut stream).await).len(), 704);
    served.cancel.cancel();
    owner.cancel.cancel();
    served.task.await.unwrap();
    owner.task.await.unwrap();
}
