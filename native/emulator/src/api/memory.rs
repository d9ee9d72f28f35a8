//! Memory and utilisation. Nothing computes, so nothing is used.

use nvml_wrapper_sys::bindings::{nvmlDevice_t, nvmlMemory_t, nvmlMemory_v2_t, nvmlUtilization_t};

use super::handle::{Device, gpu_at, with_gpu};
use super::{Out, api, check_version};
use crate::code::Code;
use crate::mig;
use crate::session::Session;

/// Total bytes of a device.
fn total(session: &Session, device: nvmlDevice_t) -> Result<u64, Code> {
    let device = Device::from_handle(device)?;
    let state = session.state()?;
    let (gpu, model) = gpu_at(&session.machine, &state, device.gpu())?;
    let mebibytes = match device {
        Device::Gpu(_) => model.memory_mib,
        Device::Mig(of) => {
            let (instance, _) = of.find_compute_instance(gpu)?;
            mig::of(model)?.profile(instance.profile).ok_or(Code::UNKNOWN)?.memory_mib
        }
    };
    Ok(mebibytes << 20)
}

api! {
    fn nvmlDeviceGetMemoryInfo(device: nvmlDevice_t, memory: Out<nvmlMemory_t>) |session| {
        let total = total(session, device)?;
        memory.set(nvmlMemory_t { total, free: total, used: 0 })
    }
    fn nvmlDeviceGetMemoryInfo_v2(device: nvmlDevice_t, memory: Out<nvmlMemory_v2_t>) |session| {
        let version = memory.cast::<u32>().get()?;
        check_version::<nvmlMemory_v2_t>(version, 2)?;
        let total = total(session, device)?;
        memory.set(nvmlMemory_v2_t { version, total, reserved: 0, free: total, used: 0 })
    }
    fn nvmlDeviceGetUtilizationRates(device: nvmlDevice_t, utilization: Out<nvmlUtilization_t>) |session| {
        with_gpu(session, device, |gpu, _| {
            // The driver does not measure a GPU in MIG mode as a whole.
            if gpu.mig_current {
                return Err(Code::NOT_SUPPORTED);
            }
            utilization.set(nvmlUtilization_t { gpu: 0, memory: 0 })
        })
    }
}
