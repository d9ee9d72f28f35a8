//! The [`Hardware`] of a node with NVIDIA's driver.
//!
//! It owns the NVML session: opened at the first call, opened again at the
//! next call after the driver went away or its library was replaced. No lock
//! is held while NVML works, so calls for different GPUs run in parallel.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use kerf_dra_driver::hardware::{
    DeviceNode, DriverFiles, Hardware, HardwareError, HardwareErrorKind, HardwareEvent, Holder,
};
use kerf_dra_driver::inventory::{
    ComputeInstance, ComputeInstanceId, GpuInstance, GpuInstanceId, Inventory, MigMode, Placement, ProfileId,
};
use kerf_dra_driver::names::PciAddress;

use crate::describe::Reader;
use crate::driver_files::Fingerprint;
use crate::nvml::{Failure, Gpu, Session};
use crate::roots::Roots;
use crate::watch::{Watch, WatchError};
use crate::{describe, device_nodes, driver_files, procfs};

/// `NVML_ERROR_RESET_REQUIRED`.
const RESET_REQUIRED: u32 = 16;

/// NVML, sysfs, procfs and the driver's files under one set of roots.
#[derive(Debug)]
pub struct NvmlHardware {
    roots: Roots,
    session: RwLock<Option<Arc<Session>>>,
    /// Held while a session is opened, so that it is opened once.
    opening: Mutex<()>,
    watch: Watch,
    reader: Arc<Reader>,
    /// The driver's files, as long as their folders do not change.
    files: Mutex<Option<(Fingerprint, DriverFiles)>>,
}

impl NvmlHardware {
    /// Hardware under these roots. Nothing is opened yet: a driver that is not
    /// there is `NoDriver` at each call until it is.
    pub fn new(roots: Roots) -> Self {
        Self {
            roots,
            session: RwLock::new(None),
            opening: Mutex::new(()),
            watch: Watch::default(),
            reader: Arc::default(),
            files: Mutex::new(None),
        }
    }

    pub(crate) fn roots(&self) -> &Roots {
        &self.roots
    }

    fn current(&self) -> Option<Arc<Session>> {
        self.session.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn files(&self) -> MutexGuard<'_, Option<(Fingerprint, DriverFiles)>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn session(&self) -> Result<Arc<Session>, Failure> {
        if let Some(session) = self.current() {
            return Ok(session);
        }
        let _opening = self.opening.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(session) = self.current() {
            return Ok(session);
        }
        let library = driver_files::management_library(&self.roots.driver).ok_or_else(|| {
            let text = format!("no libnvidia-ml.so.1 under `{}`", self.roots.driver.display());
            Failure::NoLibrary(self.roots.explained(text))
        })?;
        let path = self.roots.driver.join(library);
        let session = Session::open(&path).map_err(|failure| match failure {
            Failure::NoLibrary(reason) => Failure::NoLibrary(self.roots.explained(reason)),
            other => other,
        })?;
        let session = Arc::new(session);
        tracing::info!(library = %path.display(), driver = session.driver_version().ok(), "NVML opened");
        *self.session.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&session));
        Ok(session)
    }

    /// Lets go of a session, unless another has taken its place already.
    fn forget(&self, session: &Arc<Session>) {
        let mut slot = self.session.write().unwrap_or_else(PoisonError::into_inner);
        if slot.as_ref().is_some_and(|current| Arc::ptr_eq(current, session)) {
            *slot = None;
            drop(slot);
            // Another driver has other files.
            *self.files() = None;
        }
    }

    /// Lets go of a session whose library an upgrade has replaced.
    fn notice_replaced_library(&self) {
        let Some(session) = self.current() else { return };
        let library = driver_files::management_library(&self.roots.driver);
        if library.is_none_or(|library| !session.is_of(&self.roots.driver.join(library))) {
            tracing::info!("the driver library was replaced and is opened anew");
            self.forget(&session);
        }
    }

    /// Runs an operation on the session, and forgets it where the driver is
    /// gone.
    pub(crate) fn with<T>(
        &self,
        run: impl FnOnce(&Arc<Session>) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let session = self.session()?;
        run(&session).inspect_err(|failure| {
            if failure.driver_is_gone() {
                self.forget(&session);
            }
        })
    }

    /// Runs an operation on one GPU.
    fn on<T>(
        &self,
        gpu: PciAddress,
        run: impl FnOnce(&Session, &Gpu<'_>) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        self.with(|session| run(session, &session.gpu(gpu)?))
    }
}

impl Hardware for NvmlHardware {
    fn inventory(&self) -> Result<Inventory, HardwareError> {
        self.notice_replaced_library();
        self.with(|session| self.reader.inventory(session, &self.roots))
            .map_err(|failure| failure.during("read the GPUs"))
    }

    fn mig_mode(&self, gpu: PciAddress) -> Result<(MigMode, MigMode), HardwareError> {
        self.on(gpu, |_, handle| handle.mig_mode())
            .map_err(|failure| failure.during(format!("read the MIG mode of {gpu}")))
    }

    fn set_mig_mode(&self, gpu: PciAddress, mode: MigMode) -> Result<(), HardwareError> {
        let verb = match mode {
            MigMode::Enabled => "enable",
            MigMode::Disabled => "disable",
        };
        let operation = format!("{verb} MIG mode of {gpu}");
        if self.mig_mode(gpu)? == (mode, mode) {
            return Ok(());
        }
        let _pause = self.watch.pause(gpu);
        let modes = self.on(gpu, |_, handle| {
            handle.set_mig_mode(mode)?;
            handle.mig_mode()
        });
        match modes {
            Ok((current, _)) if current == mode => Ok(()),
            Ok(_) => Err(HardwareError::new(operation, HardwareErrorKind::NeedsReset)),
            // Here the GPU is well, and only the new mode waits.
            Err(failure) if failure.is(&[RESET_REQUIRED]) => {
                Err(HardwareError::new(operation, HardwareErrorKind::NeedsReset)
                    .with_detail(failure.to_string()))
            }
            Err(failure) => Err(failure.during(operation)),
        }
    }

    fn gpu_instances(&self, gpu: PciAddress) -> Result<Vec<GpuInstance>, HardwareError> {
        self.on(gpu, |session, handle| {
            let (current, _) = match handle.mig_mode() {
                Err(failure) if failure.is_not_supported() => return Ok(Vec::new()),
                modes => modes?,
            };
            let profiles = session.profiles(gpu, handle)?;
            describe::instances(current, gpu, handle, &profiles)
        })
        .map_err(|failure| failure.during(format!("list the GPU instances of {gpu}")))
    }

    fn create_gpu_instance(
        &self,
        gpu: PciAddress,
        profile: ProfileId,
        placement: Placement,
    ) -> Result<GpuInstanceId, HardwareError> {
        self.on(gpu, |_, handle| handle.create_gpu_instance(profile, placement)).map_err(|failure| {
            let Placement { start, size } = placement;
            failure.during(format!(
                "create a GPU instance of profile {} on {size} memory slices from {start} of {gpu}",
                profile.0
            ))
        })
    }

    fn create_compute_instance(
        &self,
        gpu: PciAddress,
        instance: GpuInstanceId,
    ) -> Result<ComputeInstance, HardwareError> {
        self.on(gpu, |session, handle| {
            let profiles = session.profiles(gpu, handle)?;
            handle.create_compute_instance(gpu, instance, &profiles)
        })
        .map_err(|failure| {
            failure.during(format!("create the compute instance of GPU instance {} of {gpu}", instance.0))
        })
    }

    fn destroy_compute_instance(
        &self,
        gpu: PciAddress,
        instance: GpuInstanceId,
        compute_instance: ComputeInstanceId,
    ) -> Result<(), HardwareError> {
        self.on(gpu, |_, handle| handle.destroy_compute_instance(instance, compute_instance)).map_err(
            |failure| {
                failure.during(format!(
                    "destroy compute instance {} of GPU instance {} of {gpu}",
                    compute_instance.0, instance.0
                ))
            },
        )
    }

    fn destroy_gpu_instance(&self, gpu: PciAddress, instance: GpuInstanceId) -> Result<(), HardwareError> {
        self.on(gpu, |_, handle| handle.destroy_gpu_instance(instance))
            .map_err(|failure| failure.during(format!("destroy GPU instance {} of {gpu}", instance.0)))
    }

    fn holders(&self, gpu: PciAddress) -> Result<Vec<Holder>, HardwareError> {
        let pids = self
            .on(gpu, |_, handle| handle.processes())
            .map_err(|failure| failure.during(format!("list the processes on {gpu}")))?;
        Ok(pids
            .into_iter()
            .map(|pid| Holder { pid, name: procfs::process_name(&self.roots.proc, pid) })
            .collect())
    }

    fn device_nodes(
        &self,
        gpu: PciAddress,
        partition: Option<(GpuInstanceId, ComputeInstanceId)>,
    ) -> Result<Vec<DeviceNode>, HardwareError> {
        let operation = || format!("find the device nodes of {gpu}");
        let minor =
            self.on(gpu, |_, handle| handle.minor()).map_err(|failure| failure.during(operation()))?;
        device_nodes::device_nodes(&self.roots, minor, partition).map_err(|error| {
            HardwareError::new(operation(), HardwareErrorKind::System).with_detail(error.to_string())
        })
    }

    fn driver_files(&self) -> Result<DriverFiles, HardwareError> {
        if let Some((fingerprint, files)) = &*self.files()
            && fingerprint.is_current()
        {
            return Ok(files.clone());
        }
        self.notice_replaced_library();
        let operation = "find the driver's files";
        let failed = |failure: Failure| failure.during(operation);
        let session = self.session().map_err(failed)?;
        let version = self.with(|session| session.driver_version()).map_err(failed)?;
        let fingerprint = Fingerprint::of(&self.roots.driver, &version);
        let files = driver_files::driver_files(&self.roots, &version).map_err(|error| {
            let detail = self.roots.explained(error.to_string());
            HardwareError::new(operation, HardwareErrorKind::NoDriver).with_detail(detail)
        })?;
        let mut cached = self.files();
        if self.current().is_some_and(|current| Arc::ptr_eq(&current, &session)) {
            *cached = Some((fingerprint, files.clone()));
        }
        Ok(files)
    }

    /// `NotSupported` means that no GPU here reports events and that the call
    /// returned at once: the caller sleeps, and looks again itself.
    fn wait_for_event(&self, timeout: Duration) -> Result<Option<HardwareEvent>, HardwareError> {
        let operation = "wait for GPU events";
        let session = self.session().map_err(|failure| failure.during(operation))?;
        self.watch.wait(&session, timeout).map_err(|error| {
            if let WatchError::Nvml(failure) = &error
                && failure.driver_is_gone()
            {
                self.forget(&session);
            }
            error.during(operation)
        })
    }
}
