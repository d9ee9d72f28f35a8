//! The emulated machine as one process sees it: as the host, which may change
//! it, or from a container, which sees what its device nodes show.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::clients::{Clients, Idle, Use};
use crate::code::Code;
use crate::layout::{Layout, compute_instance_capability, gpu_instance_capability};
use crate::mig::{self, ModeChange};
use crate::model::{Model, Models};
use crate::state::{ComputeInstance, EventKind, Gpu, GpuInstance, State};
use crate::store::{Store, WriteLock};

/// Present while the files beside the state may lag behind it.
const LAGGING: &str = "lagging";

/// One process's view of a machine.
#[derive(Debug)]
pub struct Machine {
    store: Store,
    models: Models,
    clients: Clients,
    view: View,
}

#[derive(Debug)]
enum View {
    Host(Layout),
    Container { dev: PathBuf },
}

impl Machine {
    /// The machine this process is on: the host's under
    /// `NVIDIA_EMULATOR_ROOT`, or under the root that `program` (the library,
    /// or a program of the driver) lies in; else a container's, at
    /// `/run/nvidia-emulator` and `/dev` (or `NVIDIA_EMULATOR_STATE` and
    /// `NVIDIA_EMULATOR_DEV`).
    ///
    /// # Errors
    /// `DRIVER_NOT_LOADED` where there is none.
    pub fn find(program: Option<&Path>) -> Result<Self, Code> {
        let variable =
            |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let around =
            || program?.ancestors().find(|folder| folder.ends_with("driver"))?.parent().map(Path::to_owned);
        let installed = || around().filter(|root| crate::install::is_installed(root));
        match variable("NVIDIA_EMULATOR_ROOT").or_else(installed) {
            Some(root) => Self::host(&root),
            None => Self::container(
                &variable("NVIDIA_EMULATOR_STATE").unwrap_or_else(|| PathBuf::from("/run/nvidia-emulator")),
                &variable("NVIDIA_EMULATOR_DEV").unwrap_or_else(|| PathBuf::from("/dev")),
            ),
        }
    }

    /// The host's view of the machine under a root.
    ///
    /// # Errors
    /// `DRIVER_NOT_LOADED` where there is none.
    pub fn host(root: &Path) -> Result<Self, Code> {
        let layout = Layout::new(root);
        Self::open(&layout.state(), View::Host(layout))
    }

    /// A container's view.
    ///
    /// # Errors
    /// `DRIVER_NOT_LOADED` without a state or without `nvidiactl`.
    pub fn container(state: &Path, dev: &Path) -> Result<Self, Code> {
        if !dev.join("nvidiactl").exists() {
            return Err(Code::DRIVER_NOT_LOADED);
        }
        Self::open(state, View::Container { dev: dev.to_owned() })
    }

    fn open(state: &Path, view: View) -> Result<Self, Code> {
        let models = fs::read(state.join("models.json")).map_err(|_| Code::DRIVER_NOT_LOADED)?;
        let models = serde_json::from_slice(&models).map_err(|_| Code::DRIVER_NOT_LOADED)?;
        let machine = Self { store: Store::new(state), models, clients: Clients::new(state), view };
        machine.store.load().map_err(|_| Code::DRIVER_NOT_LOADED)?;
        if machine.store.folder().join(LAGGING).exists() && matches!(machine.view, View::Host(_)) {
            machine.mend(&machine.store.lock()?)?;
        }
        Ok(machine)
    }

    /// The present state.
    pub fn state(&self) -> Result<Arc<State>, Code> {
        self.store.load().map_err(Code::from)
    }

    /// The state folder.
    pub fn state_folder(&self) -> &Path {
        self.store.folder()
    }

    /// Who uses its devices.
    pub fn clients(&self) -> &Clients {
        &self.clients
    }

    /// Whether this process can change it.
    pub fn writable(&self) -> bool {
        matches!(self.view, View::Host(_))
    }

    /// The model of a GPU.
    pub fn model(&self, gpu: &Gpu) -> Result<&Model, Code> {
        self.models.get(&gpu.model).ok_or(Code::UNKNOWN)
    }

    /// Whether this process sees a GPU.
    pub fn sees(&self, gpu: &Gpu) -> bool {
        match &self.view {
            View::Host(_) => true,
            View::Container { dev } => dev.join(format!("nvidia{}", gpu.minor)).exists(),
        }
    }

    /// Whether this process sees a GPU instance.
    pub fn sees_instance(&self, gpu: &Gpu, instance: &GpuInstance) -> bool {
        self.sees_capability(gpu_instance_capability(gpu.minor, instance.id))
    }

    /// Whether this process sees a MIG device.
    pub fn sees_mig_device(&self, gpu: &Gpu, instance: &GpuInstance, compute: &ComputeInstance) -> bool {
        self.sees_instance(gpu, instance)
            && self.sees_capability(compute_instance_capability(gpu.minor, instance.id, compute.id))
    }

    fn sees_capability(&self, number: u32) -> bool {
        match &self.view {
            View::Host(_) => true,
            View::Container { dev } => dev.join(format!("nvidia-caps/nvidia-cap{number}")).exists(),
        }
    }

    /// Changes the machine: under the write lock, on a fresh state, with the
    /// files beside it following before this returns. Nothing is written when
    /// the change is refused.
    ///
    /// # Errors
    /// What `change` refuses with; `NO_PERMISSION` in a container.
    pub fn change<T>(&self, change: impl FnOnce(&mut State) -> Result<T, Code>) -> Result<T, Code> {
        let View::Host(layout) = &self.view else { return Err(Code::NO_PERMISSION) };
        let lock = self.store.lock()?;
        self.mend(&lock)?;
        let before = self.state()?;
        let mut state = State::clone(&before);
        let outcome = change(&mut state)?;
        if state == *before {
            return Ok(outcome);
        }
        let rebooted = state.boot_id != before.boot_id;
        let follows = rebooted || moved(&before, &state).next().is_some();
        let lagging = self.store.folder().join(LAGGING);
        if follows {
            fs::write(&lagging, "")?;
        }
        self.store.write(&lock, &mut state)?;
        if rebooted {
            self.clients.drop_all()?;
            layout.bring_up_to_date(&state)?;
            layout.boot_id(&state)?;
        }
        for (then, now) in moved(&before, &state).filter(|_| !rebooted) {
            layout.follow(then, now)?;
        }
        if follows {
            fs::remove_file(&lagging)?;
        }
        Ok(outcome)
    }

    /// Brings the files beside the state up to date after a writer was killed.
    fn mend(&self, _lock: &WriteLock) -> Result<(), Code> {
        let lagging = self.store.folder().join(LAGGING);
        if let View::Host(layout) = &self.view
            && lagging.exists()
        {
            let state = self.state()?;
            layout.bring_up_to_date(&state)?;
            layout.boot_id(&state)?;
            fs::remove_file(&lagging)?;
        }
        Ok(())
    }

    /// Asks for a MIG mode.
    ///
    /// # Errors
    /// Those of [`mig::set_mode`].
    pub fn set_mig_mode(&self, gpu: usize, on: bool) -> Result<ModeChange, Code> {
        self.change(|state| {
            let found = state.gpus.get_mut(gpu).ok_or(Code::INVALID_ARGUMENT)?;
            let model = self.model(found)?;
            let devices = std::iter::once((found.uuid.clone(), Use::Events))
                .chain(std::iter::once((found.uuid.clone(), Use::Compute)));
            let idle: Result<Vec<Idle>, Code> =
                devices.map(|(uuid, kind)| self.clients.idle(&uuid, kind)).collect();
            let was = found.mig_current;
            let outcome = mig::set_mode(model, found, on, idle.is_err())?;
            if found.mig_current != was {
                let uuid = found.uuid.clone();
                state.note(&uuid, EventKind::MigConfigChange, 0, None);
            }
            Ok(outcome)
        })
    }

    /// Creates a GPU instance and answers its id and serial number.
    ///
    /// # Errors
    /// Those of [`mig::create_gpu_instance`].
    pub fn create_gpu_instance(
        &self,
        gpu: usize,
        profile: u32,
        placement: Option<(u32, u32)>,
    ) -> Result<(u32, u32), Code> {
        self.change(|state| {
            let serial = state.take_serial();
            let found = state.gpus.get_mut(gpu).ok_or(Code::INVALID_ARGUMENT)?;
            let id = mig::create_gpu_instance(self.model(found)?, found, profile, placement, serial)?;
            let uuid = found.uuid.clone();
            state.note(&uuid, EventKind::MigConfigChange, 0, None);
            Ok((id, serial))
        })
    }

    /// Creates a compute instance and answers its id and serial number.
    ///
    /// # Errors
    /// Those of [`mig::create_compute_instance`].
    pub fn create_compute_instance(
        &self,
        gpu: usize,
        instance: u32,
        profile: u32,
        placement: Option<(u32, u32)>,
    ) -> Result<(u32, u32), Code> {
        self.change(|state| {
            let serial = state.take_serial();
            let found = state.gpus.get_mut(gpu).ok_or(Code::INVALID_ARGUMENT)?;
            let id = mig::create_compute_instance(
                self.model(found)?,
                found,
                instance,
                profile,
                placement,
                serial,
            )?;
            let uuid = found.uuid.clone();
            state.note(&uuid, EventKind::MigConfigChange, 0, None);
            Ok((id, serial))
        })
    }

    /// Destroys a GPU instance, if it is still the one with this serial number.
    ///
    /// # Errors
    /// Those of [`mig::destroy_gpu_instance`].
    pub fn destroy_gpu_instance(&self, gpu: usize, instance: u32, serial: u32) -> Result<(), Code> {
        self.change(|state| {
            let found = state.gpus.get_mut(gpu).ok_or(Code::INVALID_ARGUMENT)?;
            if !found.instances.iter().any(|other| other.id == instance && other.serial == serial) {
                return Err(Code::NOT_FOUND);
            }
            mig::destroy_gpu_instance(found, instance)?;
            let uuid = found.uuid.clone();
            state.note(&uuid, EventKind::MigConfigChange, 0, None);
            Ok(())
        })
    }

    /// Destroys a compute instance, if it is still the one with this serial
    /// number.
    ///
    /// # Errors
    /// `IN_USE` while a process runs in it; `NOT_FOUND`.
    pub fn destroy_compute_instance(
        &self,
        gpu: usize,
        instance: u32,
        compute: u32,
        serial: u32,
    ) -> Result<(), Code> {
        // Held until its client files are gone: nobody can slip in between.
        let mut guard = None;
        self.change(|state| {
            let found = state.gpus.get_mut(gpu).ok_or(Code::INVALID_ARGUMENT)?;
            let uuid = found
                .mig_devices()
                .find(|(of, other)| of.id == instance && other.id == compute && other.serial == serial)
                .map(|(_, other)| other.uuid.clone())
                .ok_or(Code::NOT_FOUND)?;
            guard = Some(self.clients.idle(&uuid, Use::Compute)?);
            mig::destroy_compute_instance(found, instance, compute)?;
            let uuid = found.uuid.clone();
            state.note(&uuid, EventKind::MigConfigChange, 0, None);
            Ok(())
        })
    }

    /// Reboots: a new boot id, all instances gone, pending modes applied, a
    /// mode that does not survive turned off. Clients are dropped: the files
    /// they hold are replaced by new ones.
    pub fn reboot(&self) -> Result<(), Code> {
        self.change(|state| {
            state.boot_id = uuid::Uuid::new_v4().to_string();
            state.events.clear();
            for gpu in &mut state.gpus {
                mig::reboot(self.models.get(&gpu.model).ok_or(Code::UNKNOWN)?, gpu);
            }
            Ok(())
        })
    }
}

/// The GPUs whose instances differ, before and after.
fn moved<'state>(
    before: &'state State,
    after: &'state State,
) -> impl Iterator<Item = (&'state Gpu, &'state Gpu)> {
    before.gpus.iter().zip(&after.gpus).filter(|(then, now)| then.instances != now.instances)
}
