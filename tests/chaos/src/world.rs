//! A node with everything around it: its disk, its hardware, the claims of the
//! API, and a kubelet that asks as the real one does.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use k8s_openapi::api::resource::v1::ResourceClaim;
use kerf_dra_driver::inventory::{GpuInstance, Inventory, MigMode};
use kerf_dra_driver::names::{DriverName, PciAddress};
use kerf_kubelet_plugin::testing::{Fuse, ModelHardware, Node, pod_resources};
use kerf_kubelet_plugin::{ClaimRequest, ClaimSource, Plugin, PreparedDevice, chain};
use tokio::sync::watch;

use crate::disk::{Left, PowerDisk};
use crate::invariant::{self, ensure};
use crate::scenario::{self, BYSTANDER, pci};

/// What is broken in kerf or below it, so that the table must tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sabotage {
    /// Nothing.
    None,
    /// Names are not synced.
    NoSync,
    /// GPU instances are not destroyed.
    NoDestroy,
}

/// A process of kerf on the node.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) plugin: Plugin,
    pub(crate) inventory: watch::Sender<Option<Arc<Inventory>>>,
    pub(crate) fuse: Arc<Fuse>,
}

#[derive(Debug)]
pub(crate) struct World {
    pub(crate) node: Node,
    pub(crate) disk: PowerDisk,
    /// The claims of the API.
    pub(crate) objects: BTreeMap<String, ResourceClaim>,
    /// What the kubelet was last told of each claim.
    pub(crate) answers: BTreeMap<String, Vec<PreparedDevice>>,
    /// The GPU instances that others made.
    pub(crate) foreign: Vec<(PciAddress, GpuInstance)>,
    /// Whether the node has booted since claims were prepared, so that the
    /// kubelet asks for all of them again.
    pub(crate) booted: bool,
    /// Where what is drawn begins.
    pub(crate) seed: u64,
    root: tempfile::TempDir,
}

/// A folder whose syncs cost nothing, where the machine has such: thousands of
/// nodes are set up here, and what a sync is for is modelled.
fn in_memory() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.unwrap()
}

impl World {
    /// A node with this on its disk and nobody's instances on its GPUs.
    pub(crate) fn new(left: &Left, sabotage: Sabotage, seed: u64) -> Self {
        let root = in_memory();
        let node = scenario::node(root.path());
        node.machine.lock().unwrap().destroys_nothing = sabotage == Sabotage::NoDestroy;
        let disk = PowerDisk::new(&node.root, left);
        Self {
            disk: if sabotage == Sabotage::NoSync { disk.lying() } else { disk },
            node,
            objects: BTreeMap::new(),
            answers: BTreeMap::new(),
            foreign: Vec::new(),
            booted: false,
            seed,
            root,
        }
    }

    /// A node on which a pod runs, and somebody else has made instances. Nothing
    /// is wrong with it yet.
    pub(crate) async fn with_bystander(seed: u64) -> Result<Self, String> {
        let mut world = Self::new(&Left::new(), Sabotage::None, seed);
        world.make_foreign(&[(pci(1), 19, 0, true), (pci(1), 19, 1, false)]);
        let process = world.process(&Fuse::none()).ok_or("it does not start")?;
        world.put(BYSTANDER, kerf_kubelet_plugin::testing::claim(BYSTANDER, &scenario::bystanders()));
        world.prepare(&process, BYSTANDER).await?;
        crate::scheduler::published(&world, &process).await?;
        world.disk.settle();
        Ok(world)
    }

    /// Another node that is like one whose disk has settled.
    pub(crate) fn like(other: &Self, sabotage: Sabotage, seed: u64) -> Self {
        let mut world = Self::new(&other.disk.durable(), sabotage, seed);
        let inventory = other.node.machine.lock().unwrap().inventory.clone();
        world.node.machine.lock().unwrap().inventory = inventory;
        for (name, object) in &other.objects {
            world.put(name, object.clone());
        }
        world.answers.clone_from(&other.answers);
        world.foreign.clone_from(&other.foreign);
        world
    }

    /// Somebody else makes instances: GPU, profile, start, and whether a
    /// compute instance too.
    pub(crate) fn make_foreign(&mut self, instances: &[(PciAddress, u32, u32, bool)]) {
        let mut machine = self.node.machine.lock().unwrap();
        for (gpu, profile, start, full) in instances {
            machine.make_foreign(*gpu, *profile, *start, *full);
            let made = machine.instances(*gpu).into_iter().find(|one| one.placement.start == *start);
            self.foreign.extend(made.map(|made| (*gpu, made)));
        }
    }

    /// The instances of all GPUs.
    pub(crate) fn instances(&self) -> Vec<(PciAddress, GpuInstance)> {
        let machine = self.node.machine.lock().unwrap();
        (1..=4)
            .flat_map(|bus| machine.instances(pci(bus)).into_iter().map(move |one| (pci(bus), one)))
            .collect()
    }

    /// Whether each GPU is in MIG mode.
    pub(crate) fn modes(&self) -> Vec<bool> {
        let machine = self.node.machine.lock().unwrap();
        let modes = machine.inventory.gpus.iter().map(|gpu| gpu.mig.as_ref().map(|mig| mig.current));
        modes.map(|mode| mode == Some(MigMode::Enabled)).collect()
    }

    /// The node boots: instances are gone, and modes are these.
    pub(crate) fn boot(&mut self, id: &str, modes: &[bool]) {
        self.node.boot(id).unwrap();
        let mut machine = self.node.machine.lock().unwrap();
        for (gpu, enabled) in machine.inventory.gpus.iter_mut().zip(modes) {
            let mig = gpu.mig.as_mut().unwrap();
            mig.current = if *enabled { MigMode::Enabled } else { MigMode::Disabled };
            mig.pending = mig.current;
            mig.instances.clear();
        }
        self.foreign.clear();
        drop(machine);
        self.booted = true;
    }

    /// Starts a process; absent where it is struck so early that there is none.
    pub(crate) fn process(&self, fuse: &Arc<Fuse>) -> Option<Process> {
        let inventory = Arc::new(self.node.machine.lock().unwrap().inventory.clone());
        let inventory = watch::Sender::new(Some(inventory));
        let plugin = Plugin::with_files(
            self.node.config(),
            Arc::new(ModelHardware::new(Arc::clone(&self.node.machine), Arc::clone(fuse))),
            Arc::clone(&self.node.claims) as Arc<dyn ClaimSource>,
            inventory.subscribe(),
            Arc::new(self.disk.until(fuse)),
        );
        Some(Process { plugin: plugin.ok()?, inventory, fuse: Arc::clone(fuse) })
    }

    /// Puts a claim into the API.
    pub(crate) fn put(&mut self, name: &str, claim: ResourceClaim) {
        self.node.claims.put(claim.clone());
        self.objects.insert(name.to_owned(), claim);
    }

    /// Takes a claim out of the API.
    pub(crate) fn delete(&mut self, name: &str) {
        self.node.claims.delete("ns", name);
        self.objects.remove(name);
    }

    /// The devices of this driver that claims of the API have, with their
    /// claims.
    pub(crate) fn allocated(&self) -> BTreeMap<String, String> {
        let results = self.objects.iter().flat_map(|(name, claim)| {
            let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
            let results = allocation.and_then(|allocation| allocation.devices.as_ref()?.results.as_ref());
            results.into_iter().flatten().map(move |result| (name, result))
        });
        let ours = results.filter(|(_, result)| result.driver == DriverName::DEFAULT);
        ours.map(|(name, result)| (result.device.clone(), name.clone())).collect()
    }

    /// The kubelet asks for a claim of a pod that runs or starts.
    pub(crate) async fn prepare(&mut self, process: &Process, name: &str) -> Result<(), String> {
        let request =
            ClaimRequest { namespace: "ns".to_owned(), name: name.to_owned(), uid: format!("{name}-uid") };
        let answer = process.plugin.prepare(request).await.map_err(|error| chain(&error))?;
        self.answers.insert(name.to_owned(), answer);
        Ok(())
    }

    /// The kubelet gives a claim back. That never asks the API, and what was
    /// answered does not come back with a power cut.
    pub(crate) async fn unprepare(&mut self, process: &Process, name: &str) -> Result<(), String> {
        let asked = self.node.claims.questions.load(Ordering::SeqCst);
        let result = process.plugin.unprepare(format!("{name}-uid")).await.map_err(|error| chain(&error));
        let asked = self.node.claims.questions.load(Ordering::SeqCst) - asked;
        ensure(asked == 0, || format!("unprepare asked the API {asked} times"))?;
        result?;
        self.answers.remove(name);
        let is_of_claim = |path: &PathBuf| {
            path.file_name().is_some_and(|file| file.to_string_lossy().starts_with(&format!("{name}-uid")))
        };
        let left = self.disk.may_be_left().into_iter().find(is_of_claim);
        ensure(left.is_none(), || format!("what was given back may come back: {left:?}"))
    }

    /// A round of reconcile, while pods use these claims as the kubelet says,
    /// and another one ten minutes later.
    pub(crate) async fn reconcile_for_long(&self, process: &Process, used: &[&str]) {
        let socket = self.root.path().join("pod-resources.sock");
        let kubelet = pod_resources(&socket, used, || ()).unwrap();
        process.plugin.reconcile_now().await;
        tokio::time::pause();
        tokio::time::advance(Duration::from_mins(11)).await;
        tokio::time::resume();
        process.plugin.reconcile_now().await;
        kubelet.abort();
        std::fs::remove_file(socket).unwrap();
    }

    /// The invariants, with exactly these claims prepared.
    pub(crate) fn check(&self, process: &Process, live: &[&str]) -> Result<(), String> {
        invariant::check(self, process, &live.iter().copied().collect::<BTreeSet<_>>())
    }
}
