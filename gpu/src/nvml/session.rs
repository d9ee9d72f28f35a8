//! One initialised NVML library, and what was learned through it that does not
//! change while it is loaded.

use std::collections::BTreeMap;
use std::mem::ManuallyDrop;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::{fmt, fs};

use kerf_dra_driver::inventory::ProfileId;
use kerf_dra_driver::names::PciAddress;
use nvml_wrapper::Nvml;
use nvml_wrapper_sys::bindings as sys;

use super::failure::Failure;
use super::gpu::{Gpu, fixed_text};
use super::mig::ComputeProfile;
use super::profile::GpuProfiles;

/// More GPUs than any node has. A larger count is not believed.
const MAX_GPUS: u32 = 256;

/// NVML between init and shutdown. It is shut down when the last user lets go.
pub(crate) struct Session {
    nvml: ManuallyDrop<Nvml>,
    path: PathBuf,
    identity: Option<FileIdentity>,
    profiles: Mutex<BTreeMap<PciAddress, Arc<GpuProfiles>>>,
    compute_profiles: Mutex<BTreeMap<(PciAddress, ProfileId), ComputeProfiles>>,
}

type ComputeProfiles = Arc<[ComputeProfile]>;

/// What tells a library file from the one an upgrade put in its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FileIdentity {
    device: u64,
    inode: u64,
    modified: (i64, i64),
}

impl FileIdentity {
    fn of(path: &Path) -> Option<Self> {
        let metadata = fs::metadata(path).ok()?;
        Some(Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
        })
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Session {
    /// Loads a library by its full path and initialises it.
    pub(crate) fn open(path: &Path) -> Result<Self, Failure> {
        let identity = FileIdentity::of(path);
        let nvml = Nvml::builder().lib_path(path.as_os_str()).init().map_err(Failure::of("nvmlInit_v2"))?;
        Ok(Self {
            nvml: ManuallyDrop::new(nvml),
            path: path.to_owned(),
            identity,
            profiles: Mutex::default(),
            compute_profiles: Mutex::default(),
        })
    }

    /// Whether the file this session was opened from is still in its place.
    pub(crate) fn is_of(&self, path: &Path) -> bool {
        self.path == path && self.identity == FileIdentity::of(path)
    }

    pub(super) fn lib(&self) -> &sys::NvmlLib {
        self.nvml.lib()
    }

    pub(super) fn nvml(&self) -> &Nvml {
        &self.nvml
    }

    /// The driver's version.
    pub(crate) fn driver_version(&self) -> Result<String, Failure> {
        let call = symbol(&self.lib().nvmlSystemGetDriverVersion, "nvmlSystemGetDriverVersion")?;
        fixed_text::<{ sys::NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE as usize }>(
            "nvmlSystemGetDriverVersion",
            |buffer, length| {
                // SAFETY: `buffer` has `length` writable bytes, and the library
                // is loaded as long as `self` lives.
                unsafe { call(buffer, length) }
            },
        )
    }

    /// The highest CUDA version the driver serves, as major and minor.
    pub(crate) fn cuda_version(&self) -> Result<(u32, u32), Failure> {
        let version = self
            .nvml()
            .sys_cuda_driver_version()
            .map_err(Failure::of("nvmlSystemGetCudaDriverVersion_v2"))?;
        // 13000 is 13.0, 12040 is 12.4.
        let version = u32::try_from(version).unwrap_or(0);
        Ok((version / 1000, version % 1000 / 10))
    }

    /// How many GPUs NVML counts; at most as many as can be.
    pub(crate) fn gpu_count(&self) -> Result<u32, Failure> {
        let count = self.nvml().device_count().map_err(Failure::of("nvmlDeviceGetCount_v2"))?;
        if count > MAX_GPUS {
            return Err(Failure::Absurd { call: "nvmlDeviceGetCount_v2", answer: format!("{count} GPUs") });
        }
        Ok(count)
    }

    /// Opens a GPU by NVML's index.
    pub(crate) fn gpu_by_index(&self, index: u32) -> Result<Gpu<'_>, Failure> {
        let device =
            self.nvml().device_by_index(index).map_err(Failure::of("nvmlDeviceGetHandleByIndex_v2"))?;
        Ok(Gpu::new(self, device))
    }

    /// Opens a GPU by its address.
    pub(crate) fn gpu(&self, pci: PciAddress) -> Result<Gpu<'_>, Failure> {
        let device = self
            .nvml()
            .device_by_pci_bus_id(pci.to_string())
            .map_err(Failure::of("nvmlDeviceGetHandleByPciBusId_v2"))?;
        Ok(Gpu::new(self, device))
    }

    /// The MIG profiles of a GPU, read once and then remembered.
    pub(crate) fn profiles(&self, pci: PciAddress, gpu: &Gpu<'_>) -> Result<Arc<GpuProfiles>, Failure> {
        let known = self.profiles.lock().unwrap_or_else(PoisonError::into_inner).get(&pci).cloned();
        match known {
            Some(profiles) => Ok(profiles),
            None => self.read_profiles(pci, gpu),
        }
    }

    /// The MIG profiles of a GPU as NVML gives them now.
    pub(crate) fn read_profiles(&self, pci: PciAddress, gpu: &Gpu<'_>) -> Result<Arc<GpuProfiles>, Failure> {
        let profiles = Arc::new(gpu.mig_profiles()?);
        self.profiles.lock().unwrap_or_else(PoisonError::into_inner).insert(pci, Arc::clone(&profiles));
        Ok(profiles)
    }

    /// The compute instance profiles of a kind of GPU instance, read once from
    /// the first instance that `read` has at hand.
    pub(super) fn compute_profiles(
        &self,
        pci: PciAddress,
        profile: ProfileId,
        read: impl FnOnce() -> Result<Vec<ComputeProfile>, Failure>,
    ) -> Result<ComputeProfiles, Failure> {
        let key = (pci, profile);
        let known = self.compute_profiles.lock().unwrap_or_else(PoisonError::into_inner).get(&key).cloned();
        if let Some(profiles) = known {
            return Ok(profiles);
        }
        let profiles: ComputeProfiles = read()?.into();
        // An instance that vanished meanwhile has none; that is not to be kept.
        if !profiles.is_empty() {
            let mut all = self.compute_profiles.lock().unwrap_or_else(PoisonError::into_inner);
            all.insert(key, Arc::clone(&profiles));
        }
        Ok(profiles)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // The wrapper's own drop panics in a library without this function;
        // such a library stays loaded.
        if self.lib().nvmlShutdown.is_ok() {
            // SAFETY: `nvml` is dropped here only, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.nvml) }
        }
    }
}

/// A function of the library, where it has it.
pub(super) fn symbol<F: Copy>(
    found: &Result<F, libloading::Error>,
    call: &'static str,
) -> Result<F, Failure> {
    found.as_ref().copied().map_err(|_| Failure::Missing { call })
}

/// An answer of a raw call.
pub(super) fn check(call: &'static str, code: sys::nvmlReturn_t) -> Result<(), Failure> {
    if code == sys::nvmlReturn_enum_NVML_SUCCESS { Ok(()) } else { Err(Failure::Code { call, code }) }
}
