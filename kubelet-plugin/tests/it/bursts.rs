//! Many claims at once: who waits for whom.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use futures::future::join_all;
use kerf_dra_driver::hardware::{DeviceNode, DriverFiles, Hardware, HardwareError, HardwareEvent, Holder};
use kerf_dra_driver::inventory::{
    ComputeInstance, ComputeInstanceId, GpuInstance, GpuInstanceId, Inventory, MigMode, Placement, ProfileId,
};
use kerf_dra_driver::names::{DeviceName, PciAddress};
use kerf_kubelet_plugin::testing::{Fuse, ModelHardware, Node, claim, h100, partition};
use kerf_kubelet_plugin::{Operation, Plugin};

use super::{pci, prepare, unprepare};

const GPUS: u8 = 8;
/// Only a hang takes this long.
const LIMIT: Duration = Duration::from_mins(1);

/// What happens in the hardware, and whom it holds up.
#[derive(Debug, Default)]
struct Traffic {
    /// The GPUs in a call that changes them.
    inside: BTreeSet<PciAddress>,
    /// The GPUs whose calls that change them have to wait inside.
    shut: BTreeSet<PciAddress>,
    /// Whether calls wait inside until there is one for each GPU.
    together: bool,
    arrived: u8,
    rounds: usize,
    /// GPUs that were changed by two calls at the same time.
    trampled: BTreeSet<PciAddress>,
    /// Where GPU instances were made on each GPU, in order.
    made: BTreeMap<PciAddress, Vec<u32>>,
}

/// A machine in memory whose GPUs work at the same time.
#[derive(Debug, Clone)]
struct Busy {
    model: ModelHardware,
    traffic: Arc<(Mutex<Traffic>, Condvar)>,
}

impl Busy {
    fn start(node: &Node) -> (Self, Plugin) {
        let fuse = Fuse::none();
        let model = ModelHardware::new(Arc::clone(&node.machine), Arc::clone(&fuse));
        let busy = Self { model, traffic: Arc::default() };
        let plugin = node.plugin_with(busy.clone(), &fuse).unwrap();
        (busy, plugin)
    }

    fn change(&self, change: impl FnOnce(&mut Traffic)) {
        change(&mut self.traffic.0.lock().unwrap());
        self.traffic.1.notify_all();
    }

    /// Waits for something to happen in the hardware.
    async fn wait_for(&self, happened: impl Fn(&Traffic) -> bool) {
        let all = async {
            while !happened(&self.traffic.0.lock().unwrap()) {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(LIMIT, all).await.unwrap();
    }

    fn inside<T>(&self, gpu: PciAddress, call: impl FnOnce() -> T) -> T {
        let mut round = None;
        self.change(|traffic| {
            if !traffic.inside.insert(gpu) {
                traffic.trampled.insert(gpu);
            }
            if traffic.together {
                round = Some(traffic.rounds);
                traffic.arrived += 1;
                if traffic.arrived == GPUS {
                    traffic.arrived = 0;
                    traffic.rounds += 1;
                }
            }
        });
        let waits = |traffic: &mut Traffic| traffic.shut.contains(&gpu) || round == Some(traffic.rounds);
        drop(self.traffic.1.wait_timeout_while(self.traffic.0.lock().unwrap(), LIMIT, waits).unwrap());
        let result = call();
        self.change(|traffic| {
            traffic.inside.remove(&gpu);
        });
        result
    }
}

impl Hardware for Busy {
    fn inventory(&self) -> Result<Inventory, HardwareError> {
        self.model.inventory()
    }

    fn mig_mode(&self, gpu: PciAddress) -> Result<(MigMode, MigMode), HardwareError> {
        self.model.mig_mode(gpu)
    }

    fn set_mig_mode(&self, gpu: PciAddress, mode: MigMode) -> Result<(), HardwareError> {
        self.inside(gpu, || self.model.set_mig_mode(gpu, mode))
    }

    fn gpu_instances(&self, gpu: PciAddress) -> Result<Vec<GpuInstance>, HardwareError> {
        self.model.gpu_instances(gpu)
    }

    fn create_gpu_instance(
        &self,
        gpu: PciAddress,
        profile: ProfileId,
        placement: Placement,
    ) -> Result<GpuInstanceId, HardwareError> {
        self.change(|traffic| traffic.made.entry(gpu).or_default().push(placement.start));
        self.inside(gpu, || self.model.create_gpu_instance(gpu, profile, placement))
    }

    fn create_compute_instance(
        &self,
        gpu: PciAddress,
        instance: GpuInstanceId,
    ) -> Result<ComputeInstance, HardwareError> {
        self.inside(gpu, || self.model.create_compute_instance(gpu, instance))
    }

    fn destroy_compute_instance(
        &self,
        gpu: PciAddress,
        instance: GpuInstanceId,
        compute_instance: ComputeInstanceId,
    ) -> Result<(), HardwareError> {
        self.inside(gpu, || self.model.destroy_compute_instance(gpu, instance, compute_instance))
    }

    fn destroy_gpu_instance(&self, gpu: PciAddress, instance: GpuInstanceId) -> Result<(), HardwareError> {
        self.inside(gpu, || self.model.destroy_gpu_instance(gpu, instance))
    }

    fn holders(&self, gpu: PciAddress) -> Result<Vec<Holder>, HardwareError> {
        self.model.holders(gpu)
    }

    fn device_nodes(
        &self,
        gpu: PciAddress,
        partition: Option<(GpuInstanceId, ComputeInstanceId)>,
    ) -> Result<Vec<DeviceNode>, HardwareError> {
        self.model.device_nodes(gpu, partition)
    }

    fn driver_files(&self) -> Result<DriverFiles, HardwareError> {
        self.model.driver_files()
    }

    fn wait_for_event(&self, timeout: Duration) -> Result<Option<HardwareEvent>, HardwareError> {
        self.model.wait_for_event(timeout)
    }
}

fn node(root: &tempfile::TempDir, mode: MigMode) -> Node {
    let gpus = (0..GPUS).map(|bus| h100(pci(bus), u32::from(bus), mode)).collect();
    Node::new(root.path(), gpus).unwrap()
}

fn slice(bus: u8, start: u32) -> DeviceName {
    partition(pci(bus), "1g.10gb", start)
}

/// Seven claims on each GPU.
fn full(node: &Node) -> Vec<String> {
    let slots = (0..GPUS).flat_map(|bus| (0..7).map(move |start| (bus, start)));
    slots
        .map(|(bus, start)| {
            let name = format!("c{bus}-{start}");
            node.claims.put(claim(&name, &[("r", slice(bus, start))]));
            name
        })
        .collect()
}

#[tokio::test]
async fn no_gpu_is_changed_by_two_at_once_and_all_gpus_are_changed_at_once() {
    let root = tempfile::tempdir().unwrap();
    let node = node(&root, MigMode::Enabled);
    let (busy, plugin) = Busy::start(&node);
    let names = full(&node);
    busy.change(|traffic| traffic.together = true);
    let prepared = join_all(names.iter().map(|name| prepare(&plugin, name))).await;
    assert!(prepared.iter().all(Result::is_ok), "{prepared:?}");
    let unprepared = join_all(names.iter().map(|name| unprepare(&plugin, name))).await;
    assert!(unprepared.iter().all(Result::is_ok), "{unprepared:?}");
    let traffic = busy.traffic.0.lock().unwrap();
    // Two calls make a partition, two end it.
    assert_eq!((traffic.rounds, &traffic.trampled), (4 * 7, &BTreeSet::new()));
}

#[tokio::test]
async fn the_gpus_of_one_claim_are_changed_at_the_same_time() {
    let root = tempfile::tempdir().unwrap();
    let node = node(&root, MigMode::Disabled);
    let (busy, plugin) = Busy::start(&node);
    let devices: Vec<_> = (0..GPUS).map(|bus| ("r", slice(bus, 0))).collect();
    node.claims.put(claim("all", &devices));
    busy.change(|traffic| traffic.together = true);
    prepare(&plugin, "all").await.unwrap();
    unprepare(&plugin, "all").await.unwrap();
    // The mode, and the same as above.
    assert_eq!(busy.traffic.0.lock().unwrap().rounds, 1 + 4);
    assert!((0..GPUS).all(|bus| node.machine.lock().unwrap().instances(pci(bus)).is_empty()));
}

#[tokio::test]
async fn claims_are_served_in_the_order_in_which_they_came_also_those_of_several_gpus() {
    let root = tempfile::tempdir().unwrap();
    let node = node(&root, MigMode::Enabled);
    let (busy, plugin) = Busy::start(&node);
    let claims = [
        ("first", vec![("r", slice(1, 0))]),
        ("other", vec![("r", slice(2, 0))]),
        ("both", vec![("r", slice(1, 1)), ("r", slice(2, 1))]),
        ("second", vec![("r", slice(2, 2))]),
        ("third", vec![("r", slice(2, 3))]),
    ];
    busy.change(|traffic| traffic.shut.extend([pci(1), pci(2)]));
    let mut calls = Vec::new();
    for (number, (name, devices)) in claims.into_iter().enumerate() {
        node.claims.put(claim(name, &devices));
        let plugin = plugin.clone();
        calls.push(tokio::spawn(async move { prepare(&plugin, name).await }));
        // Once it has read its claim, it waits in line when it has to.
        busy.wait_for(|_| node.claims.questions.load(Ordering::SeqCst) > number).await;
    }
    busy.wait_for(|traffic| traffic.inside.len() == 2).await;
    // The second GPU of `both` is free before its first.
    for (gpu, first) in [(2, 1), (1, 0)] {
        busy.change(|traffic| traffic.shut.retain(|shut| *shut != pci(gpu)));
        calls.remove(first).await.unwrap().unwrap();
    }
    for call in calls {
        call.await.unwrap().unwrap();
    }
    let made = &busy.traffic.0.lock().unwrap().made;
    assert_eq!(*made, BTreeMap::from([(pci(1), vec![0, 1]), (pci(2), vec![0, 1, 2, 3])]));
}

#[tokio::test]
async fn behind_a_gpu_that_hangs_every_call_is_answered_in_time_and_the_next_one_succeeds() {
    let root = tempfile::tempdir().unwrap();
    let node = node(&root, MigMode::Enabled);
    let (busy, plugin) = Busy::start(&node);
    let names = full(&node);
    busy.change(|traffic| traffic.shut.extend([pci(0)]));
    let calls = tokio::spawn({
        let (plugin, names) = (plugin.clone(), names.clone());
        async move { join_all(names.iter().map(|name| prepare(&plugin, name))).await }
    });
    // Answered, not only ready: time leaps for whoever still writes a spec, too.
    let answered = || plugin.metrics().counted(Operation::Prepare).succeeded;
    busy.wait_for(|_| answered() == 7 * u64::from(GPUS - 1)).await;
    tokio::time::pause();
    let paused = tokio::time::Instant::now();
    tokio::time::advance(Duration::from_secs(40)).await;
    let answers = calls.await.unwrap();
    // Of a clock that nothing but this test moves.
    assert!(paused.elapsed() < Duration::from_secs(45));
    assert!(answers.iter().take(7).all(|answer| answer.as_ref().is_err_and(|error| error.contains("40 s"))));
    assert!(answers.iter().skip(7).all(Result::is_ok));
    tokio::time::resume();
    busy.change(|traffic| traffic.shut.clear());
    let again = join_all(names.iter().map(|name| prepare(&plugin, name))).await;
    assert!(again.iter().all(Result::is_ok), "{again:?}");
    assert_eq!(node.machine.lock().unwrap().changes.len(), 2 * names.len());
    assert_eq!(busy.traffic.0.lock().unwrap().trampled, BTreeSet::new());
}

#[tokio::test]
async fn who_has_a_gpu_reads_its_claim_while_those_without_wait_for_the_api() {
    let root = tempfile::tempdir().unwrap();
    let node = node(&root, MigMode::Enabled);
    let (busy, plugin) = Busy::start(&node);
    let asked = || node.claims.questions.load(Ordering::SeqCst);
    let start = |name: String| {
        let plugin = plugin.clone();
        tokio::spawn(async move { prepare(&plugin, &name).await })
    };
    for (name, start) in [("first", 0), ("second", 1)] {
        node.claims.put(claim(name, &[("gpu", partition(pci(0), "1g.10gb", start))]));
    }
    busy.change(|traffic| traffic.shut.extend([pci(0)]));
    let first = start("first".to_owned());
    busy.wait_for(|traffic| traffic.inside.contains(&pci(0))).await;
    let second = start("second".to_owned());
    busy.wait_for(|_| asked() == 2).await;
    let strangers: Vec<String> = (0..40).map(|number| format!("stranger-{number}")).collect();
    node.claims.silent.lock().unwrap().extend(strangers.iter().cloned());
    for stranger in strangers {
        start(stranger);
    }
    busy.wait_for(|_| asked() >= 2 + 8).await;
    busy.change(|traffic| traffic.shut.clear());
    first.await.unwrap().unwrap();
    second.await.unwrap().unwrap();
    // It had waited, so it was read once more; of the strangers, eight at once are.
    assert_eq!(asked(), 2 + 8 + 1);
}
