//! A machine of a test's own, and raw NVML calls on it.

use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use kerf_emulator::machine::Machine;
use nvml_wrapper::Nvml;
use nvml_wrapper_sys::bindings::{
    NvmlLib, nvmlComputeInstance_t, nvmlDevice_t, nvmlGpuInstance_t, nvmlGpuInstancePlacement_t,
};
use tempfile::TempDir;

/// A test waits until something holds; a machine that is busy is no failure.
pub(crate) const GENEROUS: Duration = Duration::from_mins(1);

/// A machine that is gone with the test.
pub(crate) struct Lab {
    folder: TempDir,
}

impl Lab {
    /// A machine with these GPUs.
    pub(crate) fn new(gpus: &[&str]) -> Self {
        let lab = Self { folder: tempfile::tempdir().unwrap() };
        let mut arguments = vec!["init"];
        arguments.extend(gpus.iter().flat_map(|gpu| ["--gpu", gpu]));
        lab.control(&arguments);
        lab
    }

    pub(crate) fn path(&self, path: &str) -> PathBuf {
        self.folder.path().join(path)
    }

    pub(crate) fn machine(&self) -> Machine {
        Machine::host(self.folder.path()).unwrap()
    }

    pub(crate) fn library(&self) -> PathBuf {
        self.path(&format!("driver/usr/lib/{}-linux-gnu/libnvidia-ml.so.1", std::env::consts::ARCH))
    }

    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_nvidia-emulator"));
        command.args(arguments).env("NVIDIA_EMULATOR_ROOT", self.folder.path());
        command
    }

    /// Runs the control command; what it prints.
    pub(crate) fn control(&self, arguments: &[&str]) -> String {
        let output = self.command(arguments).output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap().trim_end().to_owned()
    }

    /// Runs the control command, which must refuse; its sentence.
    pub(crate) fn refused(&self, arguments: &[&str]) -> String {
        let output = self.command(arguments).output().unwrap();
        assert!(!output.status.success(), "{arguments:?} was not refused");
        String::from_utf8(output.stderr).unwrap()
    }

    /// The safe wrapper on this machine's library.
    pub(crate) fn nvml(&self) -> Nvml {
        Nvml::builder().lib_path(self.library().as_os_str()).init().unwrap()
    }

    /// The raw functions on this machine's library, initialised.
    pub(crate) fn raw(&self) -> Raw {
        // SAFETY: the library is the one under test.
        let raw = Raw(unsafe { NvmlLib::new(self.library()) }.unwrap());
        nvml!(raw, nvmlInit_v2()).unwrap();
        raw
    }

    /// A process that holds a device. It holds when this returns.
    pub(crate) fn hold(&self, uuid: &str) -> Running {
        use std::io::BufRead;
        let mut child = self.command(&["hold", "--uuid", uuid]).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        std::io::BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "holding\n");
        Running(child)
    }
}

/// A process that ends with the test.
pub(crate) struct Running(pub(crate) Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Calls a function; an error is NVML's number.
macro_rules! nvml {
    ($raw:expr, $function:ident($($argument:expr),* $(,)?)) => {
        // SAFETY: the arguments are values, handles that the library gave (or
        // stale ones, which it must stand), or pointers to live locals.
        match unsafe { $raw.0.$function($($argument),*) } {
            0 => Ok(()),
            code => Err(code),
        }
    };
}
pub(crate) use nvml;

/// Raw NVML. An error is NVML's number.
pub(crate) struct Raw(pub(crate) NvmlLib);

impl Raw {
    pub(crate) fn gpu(&self, index: u32) -> nvmlDevice_t {
        let mut device = std::ptr::null_mut();
        nvml!(self, nvmlDeviceGetHandleByIndex_v2(index, &raw mut device)).unwrap();
        device
    }

    pub(crate) fn create(
        &self,
        gpu: nvmlDevice_t,
        profile: u32,
        start: u32,
        size: u32,
    ) -> Result<nvmlGpuInstance_t, u32> {
        let mut created = std::ptr::null_mut();
        let placement = nvmlGpuInstancePlacement_t { start, size };
        nvml!(
            self,
            nvmlDeviceCreateGpuInstanceWithPlacement(gpu, profile, &raw const placement, &raw mut created)
        )?;
        Ok(created)
    }

    pub(crate) fn create_compute(
        &self,
        instance: nvmlGpuInstance_t,
        profile: u32,
    ) -> Result<nvmlComputeInstance_t, u32> {
        let mut created = std::ptr::null_mut();
        nvml!(self, nvmlGpuInstanceCreateComputeInstance(instance, profile, &raw mut created))?;
        Ok(created)
    }

    pub(crate) fn mig_uuid(&self, gpu: nvmlDevice_t, index: u32) -> Result<String, u32> {
        let mut device = std::ptr::null_mut();
        nvml!(self, nvmlDeviceGetMigDeviceHandleByIndex(gpu, index, &raw mut device))?;
        let mut buffer = [0_i8; 96];
        nvml!(self, nvmlDeviceGetUUID(device, buffer.as_mut_ptr().cast(), 96))?;
        Ok(buffer
            .iter()
            .take_while(|byte| **byte != 0)
            .map(|byte| char::from(byte.cast_unsigned()))
            .collect())
    }
}

pub(crate) fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}
