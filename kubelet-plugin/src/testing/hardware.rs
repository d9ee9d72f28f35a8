//! A machine with GPUs in memory, and a process's way to it.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kerf_dra_driver::hardware::{
    DeviceNode, DriverFile, DriverFiles, DriverLink, Hardware, HardwareError, HardwareErrorKind,
    HardwareEvent, Holder,
};
use kerf_dra_driver::inventory::{
    Architecture, BoardFacts, Bytes, ComputeInstance, ComputeInstanceId, Gpu, GpuInstance, GpuInstanceId,
    Inventory, Mig, MigMode, Placement, Profile, ProfileId, Told,
};
use kerf_dra_driver::names::{DeviceName, PciAddress, ProfileName};

use super::{Fuse, Reach, Struck, lock};

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
        self.read(|machine| {
            let failure = machine.failure("gpu_instances");
            failure.map_or_else(|| machine.mig(gpu).map(|mig| mig.instances.clone()), Err)
        })
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
