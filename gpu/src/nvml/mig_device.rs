//! The UUIDs of MIG devices, which are what NVML shows of compute instances.
//!
//! A compute instance's info carries a device handle. Its header calls it the
//! parent's, drivers give the MIG device's own; both are taken. Only the
//! parent's makes a walk over all MIG devices necessary, which is slow.

use std::cell::OnceCell;
use std::ffi::c_uint;
use std::ptr;

use nvml_wrapper_sys::bindings as sys;

use super::failure::Failure;
use super::gpu::{Gpu, uuid_of};
use super::session::{check, symbol};

/// More MIG devices than a GPU holds.
const MAX_DEVICES: u32 = 64;

const PREFIX: &str = "MIG-";

/// The MIG devices of a GPU, walked at most once.
pub(super) struct MigDevices<'g, 's> {
    gpu: &'g Gpu<'s>,
    walked: OnceCell<Vec<MigDevice>>,
}

struct MigDevice {
    instance: u32,
    compute_instance: u32,
    uuid: String,
}

impl<'g, 's> MigDevices<'g, 's> {
    pub(super) fn of(gpu: &'g Gpu<'s>) -> Self {
        Self { gpu, walked: OnceCell::new() }
    }

    /// The UUID of a compute instance, whose info carries `device`.
    pub(super) fn uuid(
        &self,
        device: sys::nvmlDevice_t,
        instance: u32,
        compute_instance: u32,
    ) -> Result<String, Failure> {
        if !device.is_null() {
            let uuid = uuid_of(self.gpu.session, device)?;
            if uuid.starts_with(PREFIX) {
                return Ok(uuid);
            }
        }
        let devices = if let Some(devices) = self.walked.get() {
            devices
        } else {
            let devices = walk(self.gpu)?;
            self.walked.get_or_init(|| devices)
        };
        devices
            .iter()
            .find(|device| (device.instance, device.compute_instance) == (instance, compute_instance))
            .map(|device| device.uuid.clone())
            .ok_or(Failure::Code {
                call: "nvmlDeviceGetMigDeviceHandleByIndex",
                code: sys::nvmlReturn_enum_NVML_ERROR_NOT_FOUND,
            })
    }
}

fn walk(gpu: &Gpu<'_>) -> Result<Vec<MigDevice>, Failure> {
    const BY_INDEX: &str = "nvmlDeviceGetMigDeviceHandleByIndex";
    let lib = gpu.session.lib();
    let by_index = symbol(&lib.nvmlDeviceGetMigDeviceHandleByIndex, BY_INDEX)?;
    let count = gpu.device().mig_device_count().map_err(Failure::of("nvmlDeviceGetMaxMigDeviceCount"))?;
    let mut devices = Vec::new();
    for index in 0..count.min(MAX_DEVICES) {
        let mut device = ptr::null_mut();
        // SAFETY: `device` is writable; the handle is of this library.
        match check(BY_INDEX, unsafe { by_index(gpu.handle(), index, &raw mut device) }) {
            Ok(()) if !device.is_null() => {}
            // The count is the most there can be; indices may have gaps.
            Ok(()) => continue,
            Err(failure) if failure.is(&[sys::nvmlReturn_enum_NVML_ERROR_NOT_FOUND]) => continue,
            Err(failure) => return Err(failure),
        }
        devices.push(MigDevice {
            instance: id_of("nvmlDeviceGetGpuInstanceId", &lib.nvmlDeviceGetGpuInstanceId, device)?,
            compute_instance: id_of(
                "nvmlDeviceGetComputeInstanceId",
                &lib.nvmlDeviceGetComputeInstanceId,
                device,
            )?,
            uuid: uuid_of(gpu.session, device)?,
        });
    }
    Ok(devices)
}

type IdCall = unsafe extern "C" fn(sys::nvmlDevice_t, *mut c_uint) -> sys::nvmlReturn_t;

fn id_of(
    name: &'static str,
    found: &Result<IdCall, libloading::Error>,
    device: sys::nvmlDevice_t,
) -> Result<u32, Failure> {
    let call = symbol(found, name)?;
    let mut id = 0;
    // SAFETY: `id` is writable; the handle is one this library gave.
    check(name, unsafe { call(device, &raw mut id) })?;
    Ok(id)
}
