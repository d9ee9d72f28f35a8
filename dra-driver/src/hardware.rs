//! The seam between decisions and devices.
//!
//! [`Hardware`] is implemented by the NVML back-end in `gpu`, and by plain
//! models in tests. Plain data in and out: no handle or lifetime of a library
//! crosses it.

use std::fmt;

use crate::inventory::{
    ComputeInstance, ComputeInstanceId, GpuInstance, GpuInstanceId, Inventory, MigMode, Placement, ProfileId,
};
use crate::names::PciAddress;

/// What a node's GPUs answer and do. Every call may block, for seconds where
/// it changes hardware: async callers use a blocking thread and a budget.
///
/// Calls for different GPUs may run at the same time. The caller holds the
/// GPU's lock for every call that changes it.
pub trait Hardware: Send + Sync + fmt::Debug {
    /// Whether calls for different GPUs gain by running at the same time. A
    /// stand-in whose calls are to come in one order says no.
    fn is_parallel(&self) -> bool {
        true
    }

    /// Everything that is there. A GPU that cannot be read is listed as such.
    ///
    /// # Errors
    /// Only where nothing at all can be said: no driver library, or NVML
    /// refuses to start.
    fn inventory(&self) -> Result<Inventory, HardwareError>;

    /// The current and the pending MIG mode of a GPU.
    fn mig_mode(&self, gpu: PciAddress) -> Result<(MigMode, MigMode), HardwareError>;

    /// Changes the MIG mode now. The back-end closes its own event sets on the
    /// GPU before, and opens them again after.
    ///
    /// # Errors
    /// `InUse` where a process holds the GPU; `NeedsReset` where the new mode
    /// is only pending.
    fn set_mig_mode(&self, gpu: PciAddress, mode: MigMode) -> Result<(), HardwareError>;

    /// The GPU instances that exist, with their compute instances.
    fn gpu_instances(&self, gpu: PciAddress) -> Result<Vec<GpuInstance>, HardwareError>;

    /// Creates a GPU instance of a profile exactly at a placement.
    ///
    /// # Errors
    /// `InsufficientResources` where the placement is occupied: NVML does not
    /// tell that from a GPU that is full.
    fn create_gpu_instance(
        &self,
        gpu: PciAddress,
        profile: ProfileId,
        placement: Placement,
    ) -> Result<GpuInstanceId, HardwareError>;

    /// Creates the compute instance that spans a whole GPU instance.
    fn create_compute_instance(
        &self,
        gpu: PciAddress,
        instance: GpuInstanceId,
    ) -> Result<ComputeInstance, HardwareError>;

    /// Destroys a compute instance.
    ///
    /// # Errors
    /// `InUse` while a process runs in it; `NotFound` where it is gone.
    fn destroy_compute_instance(
        &self,
        gpu: PciAddress,
        instance: GpuInstanceId,
        compute_instance: ComputeInstanceId,
    ) -> Result<(), HardwareError>;

    /// Destroys a GPU instance that has no compute instance.
    ///
    /// # Errors
    /// `InUse` while it has one; `NotFound` where it is gone.
    fn destroy_gpu_instance(&self, gpu: PciAddress, instance: GpuInstanceId) -> Result<(), HardwareError>;

    /// The processes that use a GPU, for messages that name who holds it.
    fn holders(&self, gpu: PciAddress) -> Result<Vec<Holder>, HardwareError>;

    /// The device nodes a container needs for a whole GPU, and for a partition
    /// of it where one is named. They are created where the driver has not.
    fn device_nodes(
        &self,
        gpu: PciAddress,
        partition: Option<(GpuInstanceId, ComputeInstanceId)>,
    ) -> Result<Vec<DeviceNode>, HardwareError>;

    /// The driver's files a container needs beside device nodes: libraries,
    /// their links, programs, firmware, sockets. All of one version, or an
    /// error that says what does not fit.
    fn driver_files(&self) -> Result<DriverFiles, HardwareError>;

    /// Blocks until a GPU reports that something changed (XID, MIG
    /// configuration, a GPU lost or back) or the time is over.
    fn wait_for_event(&self, timeout: std::time::Duration) -> Result<Option<HardwareEvent>, HardwareError>;
}

/// A process that uses a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// Its id in this process's PID namespace.
    pub pid: u32,
    /// Its name, where `/proc` tells.
    pub name: Option<String>,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.name {
            Some(name) => write!(f, "{name} (pid {})", self.pid),
            None => write!(f, "pid {}", self.pid),
        }
    }
}

/// A character device of the driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceNode {
    /// Where it appears in the container: `/dev/nvidia0`.
    pub path: String,
    /// Where it is on the host.
    pub host_path: String,
    /// Device number, major.
    pub major: u32,
    /// Device number, minor.
    pub minor: u32,
}

/// The files of the driver that containers get.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DriverFiles {
    /// The driver's version, part of what a CDI spec was made from.
    pub version: String,
    /// Files to mount read-only, each real file once.
    pub mounts: Vec<DriverFile>,
    /// Links beside them, in an order in which a target comes before its links.
    pub links: Vec<DriverLink>,
    /// Libraries that a container's loader must find by name: the path of each
    /// under its SONAME, as the container sees it.
    pub libraries: Vec<String>,
}

/// One file of the driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverFile {
    /// Where it is on the host, links resolved.
    pub host_path: String,
    /// Where containers see it.
    pub container_path: String,
}

/// A link that a container needs: `libcuda.so.1`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct DriverLink {
    /// Where containers see it.
    pub path: String,
    /// What it says, relative to its folder.
    pub target: String,
}

/// Something a GPU reported by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HardwareEvent {
    /// The GPU, where the event names one.
    pub gpu: Option<PciAddress>,
    /// What happened.
    pub kind: HardwareEventKind,
}

/// The kinds of [`HardwareEvent`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HardwareEventKind {
    /// A GPU instance was created or destroyed, or a mode changed, by anybody.
    MigConfigurationChanged,
    /// An XID of the driver.
    Xid(u64),
}

/// A hardware operation that did not succeed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{operation} failed: {kind}{}", detail.as_deref().map(|detail| format!(" ({detail})")).unwrap_or_default())]
pub struct HardwareError {
    /// What was tried, such as `create GPU instance 1g.10gb at 4 of 0000:65:00.0`.
    pub operation: String,
    /// Why it did not succeed, for decisions.
    pub kind: HardwareErrorKind,
    /// More, for readers.
    pub detail: Option<String>,
}

impl HardwareError {
    /// An error of an operation.
    pub fn new(operation: impl Into<String>, kind: HardwareErrorKind) -> Self {
        Self { operation: operation.into(), kind, detail: None }
    }

    /// The same error with more to read.
    #[must_use]
    pub fn with_detail(mut self, detail: impl Into<String>) -> Self {
        self.detail = Some(detail.into());
        self
    }
}

/// Why a hardware operation did not succeed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HardwareErrorKind {
    /// The driver library is not there or too old. Tried again later.
    #[error("the NVIDIA driver library cannot be used; `kerf doctor` says why")]
    NoDriver,
    /// The GPU or instance is gone.
    #[error("not found: somebody else took it away, or the GPU is gone")]
    NotFound,
    /// A process or an instance still uses it.
    #[error("in use by another client")]
    InUse,
    /// The placement is occupied, or the GPU is full.
    #[error("insufficient resources: the placement is occupied or the GPU is full")]
    InsufficientResources,
    /// The GPU cannot do this.
    #[error("not supported")]
    NotSupported,
    /// The change is pending until the GPU is reset.
    #[error("a GPU reset is needed first: when nothing uses the GPU, reset it or reboot the node")]
    NeedsReset,
    /// The GPU has fallen off the bus or must be reset.
    #[error("the GPU is lost: reset it or reboot the node")]
    Lost,
    /// The process may not do this.
    #[error("no permission: kerf must run as root in a privileged container")]
    NoPermission,
    /// The call took longer than its budget. It may still take effect.
    #[error("no answer within the time budget")]
    Timeout,
    /// A file or folder of the system could not be read or written.
    #[error("system error")]
    System,
    /// Any other answer of NVML, with its number.
    #[error("NVML error {0}")]
    Other(u32),
}
