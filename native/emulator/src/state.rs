//! What the emulated machine is at one moment: the document that all its
//! processes share. Plain data; the rules that change it are in `mig`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// Events kept for waiters; older ones are forgotten.
const EVENT_LIMIT: usize = 64;

/// The whole machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// When it was written, in nanoseconds: strictly larger with every write,
    /// and the file's modification time, by which readers know a change.
    pub written_ns: u64,
    /// The boot id, new with every emulated reboot.
    pub boot_id: String,
    /// The driver's version.
    pub driver_version: String,
    /// The CUDA version the driver supports, as NVML packs it (13000).
    pub cuda_version: i32,
    /// The serial number of the next instance: an instance is never mistaken
    /// for another of the same id.
    pub next_serial: u32,
    /// The number of the next event.
    pub next_event: u64,
    /// The GPUs, in PCI order.
    pub gpus: Vec<Gpu>,
    /// The latest events, oldest first.
    pub events: Vec<Event>,
    /// The number of the next fault.
    pub next_fault: u32,
    /// Scripted faults.
    pub faults: Vec<Fault>,
    /// Milliseconds each call takes, by call name; `all` stands for the rest.
    pub latency_ms: BTreeMap<String, u64>,
}

impl State {
    /// A fresh instance serial number.
    pub fn take_serial(&mut self) -> u32 {
        self.next_serial += 1;
        self.next_serial
    }

    /// Notes an event for waiters.
    pub fn note(&mut self, gpu: &str, kind: EventKind, data: u64, instance: Option<(u32, u32)>) {
        self.next_event += 1;
        self.events.push(Event { number: self.next_event, gpu: gpu.to_owned(), kind, data, instance });
        let surplus = self.events.len().saturating_sub(EVENT_LIMIT);
        self.events.drain(..surplus);
    }

    /// The position of a GPU named by PCI address, UUID or index.
    pub fn find_gpu(&self, name: &str) -> Option<usize> {
        let by_name = |gpu: &Gpu| gpu.uuid == name || gpu.pci.eq_ignore_ascii_case(name);
        self.gpus
            .iter()
            .position(by_name)
            .or_else(|| name.parse().ok().filter(|index| *index < self.gpus.len()))
    }
}

/// One GPU.
#[expect(clippy::struct_excessive_bools, reason = "each is a setting that NVML reports on its own")]
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    /// Key of its model.
    pub model: String,
    /// PCI address as the kernel prints it.
    pub pci: String,
    /// PCI root complex in `/sys/devices`, such as `pci0000:15`.
    pub pci_root: String,
    /// The minor number of `/dev/nvidia<minor>`.
    pub minor: u32,
    /// NUMA node; -1 for none.
    pub numa: i32,
    /// `GPU-…`.
    pub uuid: String,
    /// Board serial number.
    pub serial: String,
    /// Whether ECC is on; absent where the board has none.
    #[serde(default)]
    pub ecc: Option<bool>,
    /// How many of its NVLinks are up.
    #[serde(default)]
    pub nvlinks: u32,
    /// The NVLink fabric it is registered with.
    #[serde(default)]
    pub clique: Option<Clique>,
    /// Whether this machine is a virtual one and the GPU a vGPU.
    #[serde(default)]
    pub vgpu: bool,
    /// Whether MIG is on now.
    pub mig_current: bool,
    /// Whether MIG is on after the next reset.
    pub mig_pending: bool,
    /// Whether it fell off the bus.
    pub lost: bool,
    /// `NVML_COMPUTEMODE_*`.
    pub compute_mode: u32,
    /// Persistence mode.
    pub persistence: bool,
    /// Its GPU instances, by id.
    pub instances: Vec<GpuInstance>,
}

impl Gpu {
    /// The UUID of a MIG device: made of GPU, ids and placement, so it repeats
    /// when the same instance is made again, as on hardware.
    pub fn mig_uuid(&self, instance: &GpuInstance, compute: (u32, u32)) -> String {
        let gpu = Uuid::parse_str(self.uuid.trim_start_matches("GPU-")).unwrap_or(Uuid::NAMESPACE_OID);
        let name =
            format!("{}/{}/{}/{}/{}", instance.id, instance.start, instance.size, compute.0, compute.1);
        format!("MIG-{}", Uuid::new_v5(&gpu, name.as_bytes()))
    }

    /// All MIG devices in index order: one for each compute instance.
    pub fn mig_devices(&self) -> impl Iterator<Item = (&GpuInstance, &ComputeInstance)> {
        self.instances
            .iter()
            .flat_map(|instance| instance.compute.iter().map(move |compute| (instance, compute)))
    }
}

/// A part of an NVLink fabric, all of whose GPUs reach each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Clique {
    /// The fabric; all zero where it does not leave the machine.
    pub cluster: Uuid,
    /// The part of it.
    pub id: u32,
}

/// A GPU instance.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuInstance {
    /// Its id, reused after it is gone.
    pub id: u32,
    /// Its serial number, never reused.
    pub serial: u32,
    /// Id of its profile.
    pub profile: u32,
    /// First memory slice.
    pub start: u32,
    /// Memory slices.
    pub size: u32,
    /// Its compute instances, by id.
    pub compute: Vec<ComputeInstance>,
}

/// A compute instance, which makes a MIG device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ComputeInstance {
    /// Its id, reused after it is gone.
    pub id: u32,
    /// Its serial number, never reused.
    pub serial: u32,
    /// Id of its profile.
    pub profile: u32,
    /// First compute slice.
    pub start: u32,
    /// Compute slices.
    pub size: u32,
    /// `MIG-…`.
    pub uuid: String,
}

/// What an event reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EventKind {
    /// An instance came or went, or the mode changed.
    MigConfigChange,
    /// An XID of the driver.
    Xid,
}

/// Something a GPU reported.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Strictly increasing.
    pub number: u64,
    /// UUID of the GPU.
    pub gpu: String,
    /// What happened.
    pub kind: EventKind,
    /// The XID, or 0.
    pub data: u64,
    /// GPU instance and compute instance, where the event is about one.
    pub instance: Option<(u32, u32)>,
}

/// A scripted fault.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// Its number, for `fault list`.
    pub id: u32,
    /// The NVML function, without a version suffix.
    pub call: String,
    /// Before or after the call has done its work.
    pub when: When,
    /// What happens.
    #[serde(rename = "do")]
    pub action: Action,
    /// How often it still happens; none: until cleared.
    pub times: Option<u32>,
    /// Only in processes of this name.
    pub process: Option<String>,
}

impl Fault {
    /// Every call of a function answers a code, in whatever process, and does
    /// nothing else.
    pub fn answer(call: &str, code: u32) -> Self {
        Self {
            id: 1,
            call: call.to_owned(),
            when: When::Before,
            action: Action::Return(code),
            times: None,
            process: None,
        }
    }
}

/// When a fault happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum When {
    /// The call does nothing.
    Before,
    /// The call has done its work.
    After,
}

/// What a fault does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Action {
    /// Answers this code.
    Return(u32),
    /// Waits so many milliseconds, then goes on.
    Hang(u64),
    /// Ends the process as SIGKILL does.
    Die,
}
