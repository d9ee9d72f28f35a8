//! NVML as this program needs it: finding the library, and plain values out of
//! its calls. The only unsafe code of the program.

use std::ffi::{CStr, c_char};
use std::fmt;
use std::path::PathBuf;

use nvml_wrapper_sys::bindings::{NvmlLib, nvmlDevice_t, nvmlMemory_t, nvmlPciInfo_t, nvmlProcessInfo_t};

/// Room for any text NVML answers.
const TEXT: usize = 128;

/// Why there is no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Failure {
    /// No `libnvidia-ml.so.1`.
    NoLibrary,
    /// An NVML return code.
    Nvml(u32),
}

impl Failure {
    /// The status the real program ends with: NVML's code.
    pub(crate) fn status(self) -> u8 {
        match self {
            Self::NoLibrary => 12,
            Self::Nvml(code) => u8::try_from(code).unwrap_or(u8::MAX),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoLibrary => {
                f.write_str("NVIDIA-SMI couldn't find libnvidia-ml.so.1: is the driver installed?")
            }
            Self::Nvml(9) => {
                f.write_str("NVIDIA-SMI couldn't communicate with the NVIDIA driver: is it loaded?")
            }
            Self::Nvml(code) => write!(f, "NVIDIA-SMI failed: NVML error {code}"),
        }
    }
}

/// One GPU.
#[derive(Debug)]
pub(crate) struct Gpu {
    pub(crate) name: String,
    pub(crate) uuid: String,
    pub(crate) bus: String,
    pub(crate) memory_mib: u64,
    pub(crate) used_mib: u64,
    pub(crate) celsius: Option<u32>,
    pub(crate) watts: Option<(u32, u32)>,
    /// None where the model has no MIG.
    pub(crate) mig: Option<bool>,
    pub(crate) mig_devices: Vec<MigDevice>,
    pub(crate) processes: Vec<nvmlProcessInfo_t>,
}

/// One MIG device.
#[derive(Debug)]
pub(crate) struct MigDevice {
    pub(crate) profile: String,
    pub(crate) uuid: String,
    pub(crate) instance: u32,
    pub(crate) compute: u32,
    pub(crate) memory_mib: u64,
}

/// The open library; closed by the end of the process.
pub(crate) struct Library(NvmlLib);

/// Calls a function of the library with the arguments given.
macro_rules! nvml {
    ($library:expr, $function:ident($($argument:expr),*)) => {
        match &$library.0.$function {
            Err(_) => Err(Failure::Nvml(13)),
            Ok(function) => {
                // SAFETY: the arguments are values, handles the library gave,
                // or pointers to live locals of the types NVML's header names.
                match unsafe { function($($argument),*) } {
                    0 => Ok(()),
                    code => Err(Failure::Nvml(code)),
                }
            }
        }
    };
}

impl Library {
    /// Opens the library where the loader finds it, then beside this program
    /// in the driver's tree, then in the folders drivers use.
    pub(crate) fn open() -> Result<Self, Failure> {
        const NAME: &str = "libnvidia-ml.so.1";
        let arch = format!("{}-linux-gnu", std::env::consts::ARCH);
        let mut places = vec![PathBuf::from(NAME)];
        if let Some(prefix) =
            std::env::current_exe().ok().and_then(|path| Some(path.parent()?.parent()?.to_owned()))
        {
            places.extend(["lib64", "lib"].map(|folder| prefix.join(folder).join(NAME)));
            places.push(prefix.join("lib").join(&arch).join(NAME));
        }
        for folder in ["/usr/lib64", "/usr/lib", "/usr/local/nvidia/lib64", "/usr/local/nvidia/lib"] {
            places.push(PathBuf::from(folder).join(NAME));
        }
        places.push(PathBuf::from("/usr/lib").join(&arch).join(NAME));
        // SAFETY: opening NVML runs its initialisers, which do not depend on
        // anything of this program.
        let found = places.iter().find_map(|place| unsafe { NvmlLib::new(place) }.ok());
        let library = Self(found.ok_or(Failure::NoLibrary)?);
        nvml!(library, nvmlInit_v2())?;
        Ok(library)
    }

    pub(crate) fn driver_version(&self) -> Result<String, Failure> {
        text(|buffer, length| nvml!(self, nvmlSystemGetDriverVersion(buffer, length)))
    }

    pub(crate) fn nvml_version(&self) -> Result<String, Failure> {
        text(|buffer, length| nvml!(self, nvmlSystemGetNVMLVersion(buffer, length)))
    }

    pub(crate) fn cuda_version(&self) -> Result<String, Failure> {
        let mut version = 0;
        nvml!(self, nvmlSystemGetCudaDriverVersion_v2(&raw mut version))?;
        Ok(format!("{}.{}", version / 1000, version % 1000 / 10))
    }

    /// All GPUs this process sees; one that does not answer is left out.
    pub(crate) fn gpus(&self) -> Result<Vec<Gpu>, Failure> {
        let mut count = 0;
        nvml!(self, nvmlDeviceGetCount_v2(&raw mut count))?;
        Ok((0..count).filter_map(|index| self.gpu(index).ok()).collect())
    }

    fn gpu(&self, index: u32) -> Result<Gpu, Failure> {
        let mut device: nvmlDevice_t = std::ptr::null_mut();
        nvml!(self, nvmlDeviceGetHandleByIndex_v2(index, &raw mut device))?;
        let memory = self.memory(device)?;
        // SAFETY: a plain C struct, for which zero bytes are a value.
        let mut pci: nvmlPciInfo_t = unsafe { std::mem::zeroed() };
        nvml!(self, nvmlDeviceGetPciInfo_v3(device, &raw mut pci))?;
        let (mut current, mut pending, mut celsius, mut power, mut limit) = (0, 0, 0, 0, 0);
        let mig = nvml!(self, nvmlDeviceGetMigMode(device, &raw mut current, &raw mut pending)).is_ok();
        let temperature = nvml!(self, nvmlDeviceGetTemperature(device, 0, &raw mut celsius)).is_ok();
        let powered = nvml!(self, nvmlDeviceGetPowerUsage(device, &raw mut power))
            .and_then(|()| nvml!(self, nvmlDeviceGetEnforcedPowerLimit(device, &raw mut limit)))
            .is_ok();
        Ok(Gpu {
            name: self.name(device)?,
            uuid: self.uuid(device)?,
            bus: array_text(&pci.busId),
            memory_mib: memory.total >> 20,
            used_mib: memory.used >> 20,
            celsius: temperature.then_some(celsius),
            watts: powered.then_some((power / 1000, limit / 1000)),
            mig: mig.then_some(current == 1),
            mig_devices: self.mig_devices(device),
            processes: self.processes(device),
        })
    }

    fn mig_devices(&self, gpu: nvmlDevice_t) -> Vec<MigDevice> {
        let mut most = 0;
        if nvml!(self, nvmlDeviceGetMaxMigDeviceCount(gpu, &raw mut most)).is_err() {
            return Vec::new();
        }
        (0..most).filter_map(|index| self.mig_device(gpu, index).ok()).collect()
    }

    fn mig_device(&self, gpu: nvmlDevice_t, index: u32) -> Result<MigDevice, Failure> {
        let mut device: nvmlDevice_t = std::ptr::null_mut();
        nvml!(self, nvmlDeviceGetMigDeviceHandleByIndex(gpu, index, &raw mut device))?;
        let (mut instance, mut compute) = (0, 0);
        nvml!(self, nvmlDeviceGetGpuInstanceId(device, &raw mut instance))?;
        nvml!(self, nvmlDeviceGetComputeInstanceId(device, &raw mut compute))?;
        let name = self.name(device)?;
        let profile = name.rsplit("MIG ").next().unwrap_or(&name).to_owned();
        let memory_mib = self.memory(device)?.total >> 20;
        Ok(MigDevice { profile, uuid: self.uuid(device)?, instance, compute, memory_mib })
    }

    fn processes(&self, gpu: nvmlDevice_t) -> Vec<nvmlProcessInfo_t> {
        let none = nvmlProcessInfo_t { pid: 0, usedGpuMemory: 0, gpuInstanceId: 0, computeInstanceId: 0 };
        let mut found = vec![none; 256];
        let mut count = 256;
        let answer =
            nvml!(self, nvmlDeviceGetComputeRunningProcesses_v3(gpu, &raw mut count, found.as_mut_ptr()));
        found.truncate(if answer.is_ok() { usize::try_from(count).unwrap_or(0) } else { 0 });
        found
    }

    fn memory(&self, device: nvmlDevice_t) -> Result<nvmlMemory_t, Failure> {
        let mut memory = nvmlMemory_t { total: 0, free: 0, used: 0 };
        nvml!(self, nvmlDeviceGetMemoryInfo(device, &raw mut memory))?;
        Ok(memory)
    }

    fn name(&self, device: nvmlDevice_t) -> Result<String, Failure> {
        text(|buffer, length| nvml!(self, nvmlDeviceGetName(device, buffer, length)))
    }

    fn uuid(&self, device: nvmlDevice_t) -> Result<String, Failure> {
        text(|buffer, length| nvml!(self, nvmlDeviceGetUUID(device, buffer, length)))
    }
}

/// A text that a call writes into a buffer.
fn text(call: impl FnOnce(*mut c_char, u32) -> Result<(), Failure>) -> Result<String, Failure> {
    let mut buffer: [c_char; TEXT] = [0; TEXT];
    // One byte is kept back: whatever the library does, a NUL is there.
    call(buffer.as_mut_ptr(), u32::try_from(TEXT - 1).unwrap_or(0))?;
    Ok(array_text(&buffer))
}

/// The text in an array, up to its NUL.
fn array_text(array: &[c_char]) -> String {
    let bytes: Vec<u8> = array.iter().map(|letter| letter.cast_unsigned()).collect();
    CStr::from_bytes_until_nul(&bytes).map(|text| text.to_string_lossy().into_owned()).unwrap_or_default()
}
