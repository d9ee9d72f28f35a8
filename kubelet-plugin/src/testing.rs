//! Stand-ins for tests: a machine with GPUs in memory, claims in memory, a
//! disk and hardware that die at a chosen call.

mod fuse;
mod pod_resources;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use k8s_openapi::api::resource::v1::{
    AllocationResult, DeviceAllocationResult, DeviceRequestAllocationResult, ResourceClaim,
    ResourceClaimConsumerReference, ResourceClaimStatus,
};
use kerf_dra_driver::claim::ClaimObject;
use kerf_dra_driver::hardware::{
    DeviceNode, DriverFile, DriverFiles, DriverLink, Hardware, HardwareError, HardwareErrorKind,
    HardwareEvent, Holder,
};
use kerf_dra_driver::inventory::{
    Architecture, BoardFacts, Bytes, ComputeInstance, ComputeInstanceId, Gpu, GpuInstance, GpuInstanceId,
    Inventory, Mig, MigMode, Placement, Profile, ProfileId, Told,
};
use kerf_dra_driver::model::{ForeignPartitions, ProfileFilter, Settings};
use kerf_dra_driver::names::{DeviceName, DriverName, PciAddress, ProfileName, gpu_pool};
use tokio::sync::watch;

use crate::claims::{ClaimSource, ClaimSourceError};
use crate::disk::{Files, HostFiles};
use crate::hook_program::HookProgram;
use crate::plugin::{Plugin, PluginConfig, PluginError};
use crate::store::StoreError;

pub use fuse::{Fuse, Reach, Strike, Struck};
pub use pod_resources::pod_resources;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An error of the journal's files.
pub fn store_error(operation: &'static str, path: &str, source: io::Error) -> StoreError {
    StoreError { operation, path: path.into(), source }
}

/// A GPU with the MIG profiles of an H100 80GB that tests need.
pub fn h100(pci: PciAddress, minor: u32, mode: MigMode) -> Gpu {
    let profile = |id, name: &str, slices: u32, memory, size, starts: &[u32]| Profile {
        id: ProfileId(id),
        name: profile_name(name),
        memory: Bytes::from_mib(memory),
        compute_slices: slices,
        multiprocessors: slices * 16,
        copy_engines: 1,
        decoders: 1,
        encoders: 0,
        jpeg_engines: 1,
        ofa_engines: 0,
        max_instances: u32::try_from(starts.len()).unwrap_or(1),
        placements: starts.iter().map(|start| Placement { start: *start, size }).collect(),
    };
    Gpu {
        pci,
        minor,
        uuid: format!("GPU-{pci}"),
        product: "NVIDIA H100 80GB HBM3".to_owned(),
        brand: Told::Known("Nvidia".to_owned()),
        architecture: Architecture::Hopper,
        compute_capability: (9, 0),
        memory: Bytes::from_mib(81559),
        addressing_mode: Told::HasNone,
        numa_node: None,
        pcie_root: None,
        vgpu_guest: false,
        facts: BoardFacts::default(),
        mig: Some(Mig {
            current: mode,
            pending: mode,
            profiles: vec![
                profile(0, "7g.80gb", 7, 81_000, 8, &[0]),
                profile(9, "3g.40gb", 3, 40_000, 4, &[0, 4]),
                profile(19, "1g.10gb", 1, 10_000, 1, &[0, 1, 2, 3, 4, 5, 6]),
            ],
            instances: Vec::new(),
        }),
    }
}

fn profile_name(name: &str) -> ProfileName {
    match ProfileName::new(name) {
        Ok(name) => name,
        Err(error) => unreachable!("a test's own name: {error}"),
    }
}

/// The name of a partition's device.
pub fn partition(gpu: PciAddress, profile: &str, start: u32) -> DeviceName {
    DeviceName::partition(gpu, &profile_name(profile), start)
}

/// The hardware of a machine, which outlives processes.
#[derive(Debug)]
pub struct Machine {
    /// What is there.
    pub inventory: Inventory,
    /// Calls that fail, by name, in order.
    pub failures: VecDeque<(&'static str, HardwareErrorKind)>,
    /// What somebody else makes in the moment the next call fails: GPU, profile
    /// and start of a GPU instance.
    pub rival: Option<(PciAddress, u32, u32)>,
    /// Whether GPU instances that are destroyed are said to be gone and are not:
    /// a fault that tests of leaks must see.
    pub destroys_nothing: bool,
    /// Every call that changed something, in order.
    pub changes: Vec<String>,
    /// The processes that use each GPU, as NVML lists them.
    pub holders: Vec<Holder>,
    /// What GPUs report next.
    pub events: VecDeque<HardwareEvent>,
}

impl Machine {
    /// A machine with these GPUs.
    pub fn new(gpus: Vec<Gpu>) -> Arc<Mutex<Self>> {
        Arc::new(Mutex::new(Self {
            inventory: Inventory {
                driver_version: "580.95.05".to_owned(),
                cuda_version: (13, 0),
                gpus,
                unreadable: Vec::new(),
            },
            failures: VecDeque::new(),
            rival: None,
            destroys_nothing: false,
            changes: Vec::new(),
            holders: vec![Holder { pid: 4711, name: Some("trainer".to_owned()) }],
            events: VecDeque::new(),
        }))
    }

    /// Makes a GPU instance as somebody else would.
    pub fn make_foreign(&mut self, gpu: PciAddress, profile: u32, start: u32, full: bool) {
        if let Ok(id) = self.create(gpu, ProfileId(profile), start)
            && full
        {
            let _ = self.create_compute(gpu, id);
        }
    }

    /// What the next call of that name fails with, if it does.
    fn failure(&mut self, name: &str) -> Option<HardwareErrorKind> {
        let at = self.failures.iter().position(|(call, _)| *call == name)?;
        self.failures.remove(at).map(|(_, kind)| kind)
    }

    /// The GPU instances of a GPU.
    pub fn instances(&self, gpu: PciAddress) -> Vec<GpuInstance> {
        self.inventory
            .gpu(gpu)
            .and_then(|gpu| gpu.mig.as_ref())
            .map(|mig| mig.instances.clone())
            .unwrap_or_default()
    }

    fn mig(&mut self, gpu: PciAddress) -> Result<&mut Mig, HardwareErrorKind> {
        let gpu = self
            .inventory
            .gpus
            .iter_mut()
            .find(|found| found.pci == gpu)
            .ok_or(HardwareErrorKind::NotFound)?;
        gpu.mig.as_mut().ok_or(HardwareErrorKind::NotSupported)
    }

    fn create(
        &mut self,
        gpu: PciAddress,
        profile: ProfileId,
        start: u32,
    ) -> Result<GpuInstanceId, HardwareErrorKind> {
        let mig = self.mig(gpu)?;
        if mig.current != MigMode::Enabled {
            return Err(HardwareErrorKind::NotSupported);
        }
        let placement = mig
            .profile(profile)
            .and_then(|profile| profile.placements.iter().find(|placement| placement.start == start))
            .copied()
            .ok_or(HardwareErrorKind::NotSupported)?;
        if mig.instances.iter().any(|instance| instance.placement.overlaps(placement)) {
            return Err(HardwareErrorKind::InsufficientResources);
        }
        // The hardware gives the lowest free id again.
        let id = (1..=64).map(GpuInstanceId).find(|id| mig.instances.iter().all(|found| found.id != *id));
        let id = id.ok_or(HardwareErrorKind::InsufficientResources)?;
        mig.instances.push(GpuInstance { id, profile, placement, compute_instances: Vec::new() });
        mig.instances.sort_by_key(|instance| instance.id);
        Ok(id)
    }

    fn create_compute(
        &mut self,
        gpu: PciAddress,
        id: GpuInstanceId,
    ) -> Result<ComputeInstance, HardwareErrorKind> {
        let mig = self.mig(gpu)?;
        let instance =
            mig.instances.iter_mut().find(|found| found.id == id).ok_or(HardwareErrorKind::NotFound)?;
        if !instance.compute_instances.is_empty() {
            return Err(HardwareErrorKind::InsufficientResources);
        }
        // UUIDs are given again as well.
        let uuid = format!("MIG-{gpu}-{}-{}", id.0, instance.placement.start);
        let made = ComputeInstance { id: ComputeInstanceId(0), full: true, uuid };
        instance.compute_instances.push(made.clone());
        Ok(made)
    }
}

/// A process's way to a [`Machine`].
#[derive(Debug, Clone)]
pub struct ModelHardware {
    machine: Arc<Mutex<Machine>>,
    fuse: Arc<Fuse>,
    gate: Arc<Mutex<()>>,
}

impl ModelHardware {
    /// A process that may be killed.
    pub fn new(machine: Arc<Mutex<Machine>>, fuse: Arc<Fuse>) -> Self {
        Self { machine, fuse, gate: Arc::default() }
    }

    /// As long as the guard of this is held, calls that create hang.
    pub fn gate(&self) -> Arc<Mutex<()>> {
        Arc::clone(&self.gate)
    }

    fn change<T>(
        &self,
        name: &'static str,
        text: &str,
        change: impl FnOnce(&mut Machine) -> Result<T, HardwareErrorKind>,
    ) -> Result<T, HardwareError> {
        let error = |kind| HardwareError::new(text, kind);
        self.fuse.run(
            Reach::Hardware,
            || text.to_owned(),
            |struck| {
                error(match struck {
                    Struck::Killed => HardwareErrorKind::System,
                    Struck::Failed | Struck::ReadOnly | Struck::NoFiles => HardwareErrorKind::InUse,
                    Struck::Late => HardwareErrorKind::Timeout,
                })
            },
            || {
                let mut machine = lock(&self.machine);
                if let Some(kind) = machine.failure(name) {
                    if let Some((gpu, profile, start)) = machine.rival.take() {
                        machine.make_foreign(gpu, profile, start, false);
                    }
                    return Err(error(kind));
                }
                let result = change(&mut machine).map_err(error);
                if result.is_ok() {
                    machine.changes.push(text.to_owned());
                }
                result
            },
        )
    }

    fn read<T>(
        &self,
        read: impl FnOnce(&mut Machine) -> Result<T, HardwareErrorKind>,
    ) -> Result<T, HardwareError> {
        if self.fuse.is_dead() {
            return Err(HardwareError::new("read", HardwareErrorKind::System));
        }
        read(&mut lock(&self.machine)).map_err(|kind| HardwareError::new("read", kind))
    }
}

impl Hardware for ModelHardware {
    fn is_parallel(&self) -> bool {
        false
    }

    fn inventory(&self) -> Result<Inventory, HardwareError> {
        self.read(|machine| machine.failure("inventory").map_or_else(|| Ok(machine.inventory.clone()), Err))
    }

    fn mig_mode(&self, gpu: PciAddress) -> Result<(MigMode, MigMode), HardwareError> {
        self.read(|machine| machine.mig(gpu).map(|mig| (mig.current, mig.pending)))
    }

    fn set_mig_mode(&self, gpu: PciAddress, mode: MigMode) -> Result<(), HardwareError> {
        self.change("set_mig_mode", &format!("set MIG mode of {gpu}"), |machine| {
            let mig = machine.mig(gpu)?;
            if !mig.instances.is_empty() {
                return Err(HardwareErrorKind::InUse);
            }
            (mig.current, mig.pending) = (mode, mode);
            Ok(())
        })
    }

    fn gpu_instances(&self, gpu: PciAddress) -> Result<Vec<GpuInstance>, HardwareError> {
        self.read(|machine| machine.mig(gpu).map(|mig| mig.instances.clone()))
    }

    fn create_gpu_instance(
        &self,
        gpu: PciAddress,
        profile: ProfileId,
        placement: Placement,
    ) -> Result<GpuInstanceId, HardwareError> {
        drop(lock(&self.gate));
        self.change(
            "create_gpu_instance",
            &format!("create GPU instance at {} of {gpu}", placement.start),
            |machine| machine.create(gpu, profile, placement.start),
        )
    }

    fn create_compute_instance(
        &self,
        gpu: PciAddress,
        instance: GpuInstanceId,
    ) -> Result<ComputeInstance, HardwareError> {
        self.change(
            "create_compute_instance",
            &format!("create compute instance in {} of {gpu}", instance.0),
            |machine| machine.create_compute(gpu, instance),
        )
    }

    fn destroy_compute_instance(
        &self,
        gpu: PciAddress,
        instance: GpuInstanceId,
        compute_instance: ComputeInstanceId,
    ) -> Result<(), HardwareError> {
        self.change(
            "destroy_compute_instance",
            &format!("destroy compute instance in {} of {gpu}", instance.0),
            |machine| {
                let mig = machine.mig(gpu)?;
                let found = mig.instances.iter_mut().find(|found| found.id == instance);
                let found = found.ok_or(HardwareErrorKind::NotFound)?;
                found.compute_instances.retain(|compute| compute.id != compute_instance);
                Ok(())
            },
        )
    }

    fn destroy_gpu_instance(&self, gpu: PciAddress, instance: GpuInstanceId) -> Result<(), HardwareError> {
        self.change(
            "destroy_gpu_instance",
            &format!("destroy GPU instance {} of {gpu}", instance.0),
            |machine| {
                let lies = machine.destroys_nothing;
                let mig = machine.mig(gpu)?;
                let at = mig.instances.iter().position(|found| found.id == instance);
                let at = at.ok_or(HardwareErrorKind::NotFound)?;
                if mig.instances.get(at).is_some_and(|found| !found.compute_instances.is_empty()) {
                    return Err(HardwareErrorKind::InUse);
                }
                if !lies {
                    mig.instances.remove(at);
                }
                Ok(())
            },
        )
    }

    fn holders(&self, _: PciAddress) -> Result<Vec<Holder>, HardwareError> {
        self.read(|machine| Ok(machine.holders.clone()))
    }

    fn device_nodes(
        &self,
        gpu: PciAddress,
        partition: Option<(GpuInstanceId, ComputeInstanceId)>,
    ) -> Result<Vec<DeviceNode>, HardwareError> {
        self.read(|machine| {
            let gpu = machine.inventory.gpu(gpu).ok_or(HardwareErrorKind::NotFound)?;
            let node =
                |path: String, major, minor| DeviceNode { host_path: path.clone(), path, major, minor };
            let mut nodes = vec![
                node(format!("/dev/nvidia{}", gpu.minor), 195, gpu.minor),
                node("/dev/nvidiactl".to_owned(), 195, 255),
            ];
            if let Some((instance, _)) = partition {
                let minor = gpu.minor * 100 + instance.0;
                nodes.push(node(format!("/dev/nvidia-caps/nvidia-cap{minor}"), 511, minor));
            }
            Ok(nodes)
        })
    }

    fn driver_files(&self) -> Result<DriverFiles, HardwareError> {
        Ok(DriverFiles {
            version: "580.95.05".to_owned(),
            mounts: ["/usr/lib/libcuda.so.580.95.05", "/run/nvidia-persistenced/socket"]
                .map(|path| DriverFile { host_path: format!("/host{path}"), container_path: path.to_owned() })
                .to_vec(),
            links: [
                ("libcuda.so.580.95.05", "/usr/lib/libcuda.so.1"),
                ("libcuda.so.1", "/usr/lib/libcuda.so"),
            ]
            .map(|(target, path)| DriverLink { path: path.to_owned(), target: target.to_owned() })
            .to_vec(),
            libraries: vec!["/usr/lib/libcuda.so.1".to_owned()],
        })
    }

    fn wait_for_event(&self, timeout: Duration) -> Result<Option<HardwareEvent>, HardwareError> {
        let event = lock(&self.machine).events.pop_front();
        if event.is_none() {
            std::thread::sleep(timeout.min(Duration::from_millis(10)));
        }
        Ok(event)
    }
}

/// A file or folder as the names of calls tell it: below which folder.
pub fn place(path: &Path) -> String {
    let names: Vec<_> = path.iter().rev().take(2).map(|name| name.to_string_lossy()).collect();
    names.into_iter().rev().collect::<Vec<_>>().join("/")
}

/// The machine's files, reached by a process that may be struck.
#[derive(Debug)]
pub struct MortalFiles(pub Arc<Fuse>);

impl MortalFiles {
    fn run<T>(
        &self,
        reach: Reach,
        (what, path): (&str, &Path),
        call: impl FnOnce() -> io::Result<T>,
    ) -> io::Result<T> {
        self.0.run(reach, || format!("{what} {}", place(path)), |struck| disk_error(reach, struck), call)
    }
}

/// What a caller of a disk is told.
pub fn disk_error(reach: Reach, struck: Struck) -> io::Error {
    use rustix::io::Errno;
    let error = match (struck, reach) {
        (Struck::Killed | Struck::Late, _) => return io::Error::other("killed"),
        (Struck::Failed, Reach::Space) => Errno::NOSPC,
        (Struck::Failed, _) => Errno::IO,
        (Struck::ReadOnly, _) => Errno::ROFS,
        (Struck::NoFiles, _) => Errno::MFILE,
    };
    error.into()
}

impl Files for MortalFiles {
    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        if self.0.is_dead() { Err(io::Error::other("killed")) } else { HostFiles.read(path) }
    }

    fn list(&self, folder: &Path) -> io::Result<Vec<String>> {
        if self.0.is_dead() { Err(io::Error::other("killed")) } else { HostFiles.list(folder) }
    }

    fn create_folder(&self, folder: &Path) -> io::Result<()> {
        self.run(Reach::Space, ("make folder", folder), || HostFiles.create_folder(folder))
    }

    fn write(&self, path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
        self.run(Reach::Space, ("write", path), || HostFiles.write(path, content, mode))
    }

    fn write_synced(&self, path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
        self.run(Reach::Space, ("write and sync", path), || HostFiles.write_synced(path, content, mode))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.run(Reach::Names, ("rename to", to), || HostFiles.rename(from, to))
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.run(Reach::Names, ("remove", path), || HostFiles.remove(path))
    }

    fn sync_folder(&self, folder: &Path) -> io::Result<()> {
        self.run(Reach::Sync, ("sync folder", folder), || HostFiles.sync_folder(folder))
    }
}

/// Claims in memory.
#[derive(Debug, Default)]
pub struct MemoryClaims {
    claims: Mutex<BTreeMap<(String, String), ResourceClaim>>,
    /// Whether every call fails.
    pub fails: AtomicBool,
    /// The names of claims that cannot be read.
    pub unreadable: Mutex<BTreeSet<String>>,
    /// How often somebody asked.
    pub questions: AtomicUsize,
}

impl MemoryClaims {
    /// Puts a claim there, or another in its place.
    pub fn put(&self, claim: ResourceClaim) {
        let text = |value: &Option<String>| value.clone().unwrap_or_default();
        lock(&self.claims).insert((text(&claim.metadata.namespace), text(&claim.metadata.name)), claim);
    }

    /// Takes a claim away.
    pub fn delete(&self, namespace: &str, name: &str) {
        lock(&self.claims).remove(&(namespace.to_owned(), name.to_owned()));
    }

    fn answer<T>(&self, answer: T) -> Result<T, ClaimSourceError> {
        self.questions.fetch_add(1, Ordering::SeqCst);
        if self.fails.load(Ordering::SeqCst) {
            Err(ClaimSourceError::new("the API is down"))
        } else {
            Ok(answer)
        }
    }
}

impl ClaimSource for MemoryClaims {
    fn get<'a>(
        &'a self,
        namespace: &'a str,
        name: &'a str,
    ) -> BoxFuture<'a, Result<Option<ClaimObject>, ClaimSourceError>> {
        async move {
            if lock(&self.unreadable).contains(name) {
                return Err(ClaimSourceError::new("the API does not answer for this one"));
            }
            let claim = lock(&self.claims).get(&(namespace.to_owned(), name.to_owned())).cloned();
            let read = |claim| serde_json::from_str(&serde_json::to_string(&claim)?);
            let object = claim
                .map(read)
                .transpose()
                .map_err(|error| ClaimSourceError::new("the claim cannot be decoded").caused_by(error))?;
            self.answer(object)
        }
        .boxed()
    }

    fn allocated<'a>(
        &'a self,
        driver: &'a DriverName,
        pool: &'a str,
    ) -> BoxFuture<'a, Result<BTreeSet<DeviceName>, ClaimSourceError>> {
        async move {
            let claims: Vec<ResourceClaim> = lock(&self.claims).values().cloned().collect();
            let results =
                claims.into_iter().filter_map(|claim| claim.status?.allocation?.devices?.results).flatten();
            let ours = results.filter(|result| result.driver == driver.as_str() && result.pool == pool);
            self.answer(ours.filter_map(|result| DeviceName::parse(&result.device).ok()).collect())
        }
        .boxed()
    }
}

/// An allocated and reserved claim of namespace `ns`; its UID is `<name>-uid`.
pub fn claim(name: &str, devices: &[(&str, DeviceName)]) -> ResourceClaim {
    let results = devices
        .iter()
        .map(|(request, device)| DeviceRequestAllocationResult {
            request: (*request).to_owned(),
            driver: DriverName::DEFAULT.to_owned(),
            pool: gpu_pool("node"),
            device: device.to_string(),
            ..DeviceRequestAllocationResult::default()
        })
        .collect();
    let mut claim = ResourceClaim::default();
    claim.metadata.namespace = Some("ns".to_owned());
    claim.metadata.name = Some(name.to_owned());
    claim.metadata.uid = Some(format!("{name}-uid"));
    claim.status = Some(ResourceClaimStatus {
        allocation: Some(AllocationResult {
            devices: Some(DeviceAllocationResult { config: None, results: Some(results) }),
            ..AllocationResult::default()
        }),
        reserved_for: Some(vec![ResourceClaimConsumerReference {
            resource: "pods".to_owned(),
            name: "pod".to_owned(),
            uid: "pod-uid".to_owned(),
            ..ResourceClaimConsumerReference::default()
        }]),
        ..ResourceClaimStatus::default()
    });
    claim
}

/// A node's folders, machine and claims, on which plugins come and go.
#[derive(Debug)]
pub struct Node {
    /// Where everything is.
    pub root: PathBuf,
    /// Its hardware.
    pub machine: Arc<Mutex<Machine>>,
    /// The claims of its cluster.
    pub claims: Arc<MemoryClaims>,
}

impl Node {
    /// A node below a folder.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub fn new(root: &Path, gpus: Vec<Gpu>) -> io::Result<Self> {
        let node = Self { root: root.to_owned(), machine: Machine::new(gpus), claims: Arc::default() };
        node.boot("boot-1")?;
        Ok(node)
    }

    /// Gives the node another boot id.
    pub fn boot(&self, id: &str) -> io::Result<()> {
        let folder = self.root.join("proc/sys/kernel/random");
        std::fs::create_dir_all(&folder)?;
        std::fs::write(folder.join("boot_id"), format!("{id}\n"))
    }

    /// What a plugin of this node is made for.
    pub fn config(&self) -> PluginConfig {
        let driver: DriverName = match DriverName::DEFAULT.parse() {
            Ok(driver) => driver,
            Err(error) => unreachable!("the default name: {error}"),
        };
        PluginConfig {
            settings: Settings {
                driver,
                node: "node".to_owned(),
                mig_mode: None,
                mig_profiles: ProfileFilter::All,
                foreign_partitions: ForeignPartitions::Publish,
            },
            pool: gpu_pool("node"),
            instance: None,
            plugin_dir: self.root.join("plugin"),
            registry_dir: self.root.join("registry"),
            device_plugins_dir: self.root.join("device-plugins"),
            cdi_dir: self.root.join("cdi"),
            pod_resources_socket: self.root.join("pod-resources.sock"),
            extra_mounts: Vec::new(),
            hook: HookProgram::of_nothing(self.root.join("hook")),
            proc_root: self.root.join("proc"),
        }
    }

    /// Starts a process on the node.
    ///
    /// # Errors
    /// As [`Plugin::new`].
    pub fn plugin(&self, fuse: &Arc<Fuse>) -> Result<Plugin, PluginError> {
        self.plugin_with(ModelHardware::new(Arc::clone(&self.machine), Arc::clone(fuse)), fuse)
    }

    /// Starts a process on the node with another configuration.
    ///
    /// # Errors
    /// As [`Plugin::new`].
    pub fn plugin_of(&self, config: PluginConfig, fuse: &Arc<Fuse>) -> Result<Plugin, PluginError> {
        self.start(config, ModelHardware::new(Arc::clone(&self.machine), Arc::clone(fuse)), fuse)
    }

    /// Starts a process on the node that reaches its hardware in its own way.
    ///
    /// # Errors
    /// As [`Plugin::new`].
    pub fn plugin_with(
        &self,
        hardware: impl Hardware + 'static,
        fuse: &Arc<Fuse>,
    ) -> Result<Plugin, PluginError> {
        self.start(self.config(), hardware, fuse)
    }

    fn start(
        &self,
        config: PluginConfig,
        hardware: impl Hardware + 'static,
        fuse: &Arc<Fuse>,
    ) -> Result<Plugin, PluginError> {
        let inventory = lock(&self.machine).inventory.clone();
        Plugin::with_files(
            config,
            Arc::new(hardware),
            Arc::clone(&self.claims) as Arc<dyn ClaimSource>,
            watch::Sender::new(Some(Arc::new(inventory))).subscribe(),
            Arc::new(MortalFiles(Arc::clone(fuse))),
        )
    }

    /// The complete files in one of the node's folders.
    pub fn files(&self, folder: &str) -> Vec<String> {
        let mut names = HostFiles.list(&self.root.join(folder)).unwrap_or_default();
        names.sort();
        names
    }
}
