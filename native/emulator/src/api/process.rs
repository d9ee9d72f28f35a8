//! Processes that use a device.

use nvml_wrapper_sys::bindings::{nvmlDevice_t, nvmlProcessInfo_v1_t, nvmlProcessInfo_v2_t};

use super::handle::{Device, gpu_at};
use super::{Out, api};
use crate::clients::Use;
use crate::code::Code;
use crate::session::Session;

/// What a GPU instance id is where there is none.
const NONE: u32 = u32::MAX;
/// Memory an emulated process seems to use.
const USED: u64 = 512 << 20;

fn computing(session: &Session, device: nvmlDevice_t) -> Result<Vec<nvmlProcessInfo_v2_t>, Code> {
    let device = Device::from_handle(device)?;
    let state = session.state()?;
    let (gpu, _) = gpu_at(&session.machine, &state, device.gpu())?;
    let mut devices = Vec::new();
    match device {
        Device::Gpu(_) => {
            devices.push((gpu.uuid.as_str(), NONE, NONE));
            let parts =
                gpu.mig_devices().filter(|(of, compute)| session.machine.sees_mig_device(gpu, of, compute));
            devices.extend(parts.map(|(of, compute)| (compute.uuid.as_str(), of.id, compute.id)));
        }
        Device::Mig(of) => {
            let (instance, compute) = of.find_compute_instance(gpu)?;
            devices.push((compute.uuid.as_str(), instance.id, compute.id));
        }
    }
    let mut processes = Vec::new();
    for (uuid, instance, compute) in devices {
        let pids = session.machine.clients().pids(uuid, Use::Compute)?;
        processes.extend(pids.into_iter().map(|pid| nvmlProcessInfo_v2_t {
            pid,
            usedGpuMemory: USED,
            gpuInstanceId: instance,
            computeInstanceId: compute,
        }));
    }
    Ok(processes)
}

/// No process draws, none uses MPS.
fn none(session: &Session, device: nvmlDevice_t, count: &Out<u32>) -> Result<(), Code> {
    gpu_at(&session.machine, session.state()?.as_ref(), Device::from_handle(device)?.gpu())?;
    count.set(0)
}

api! {
    fn nvmlDeviceGetComputeRunningProcesses(
        device: nvmlDevice_t, count: Out<u32>, processes: Out<nvmlProcessInfo_v1_t>,
    ) |session| {
        let found = computing(session, device)?;
        let found: Vec<_> =
            found.iter().map(|one| nvmlProcessInfo_v1_t { pid: one.pid, usedGpuMemory: one.usedGpuMemory }).collect();
        processes.set_array(&count, &found)
    }
    fn nvmlDeviceGetComputeRunningProcesses_v2(
        device: nvmlDevice_t, count: Out<u32>, processes: Out<nvmlProcessInfo_v2_t>,
    ) |session| { processes.set_array(&count, &computing(session, device)?) }
    fn nvmlDeviceGetComputeRunningProcesses_v3(
        device: nvmlDevice_t, count: Out<u32>, processes: Out<nvmlProcessInfo_v2_t>,
    ) |session| { processes.set_array(&count, &computing(session, device)?) }
    fn nvmlDeviceGetGraphicsRunningProcesses(device: nvmlDevice_t, count: Out<u32>) |session| {
        none(session, device, &count)
    }
    fn nvmlDeviceGetGraphicsRunningProcesses_v2(device: nvmlDevice_t, count: Out<u32>) |session| {
        none(session, device, &count)
    }
    fn nvmlDeviceGetGraphicsRunningProcesses_v3(device: nvmlDevice_t, count: Out<u32>) |session| {
        none(session, device, &count)
    }
    fn nvmlDeviceGetMPSComputeRunningProcesses(device: nvmlDevice_t, count: Out<u32>) |session| {
        none(session, device, &count)
    }
    fn nvmlDeviceGetMPSComputeRunningProcesses_v2(device: nvmlDevice_t, count: Out<u32>) |session| {
        none(session, device, &count)
    }
    fn nvmlDeviceGetMPSComputeRunningProcesses_v3(device: nvmlDevice_t, count: Out<u32>) |session| {
        none(session, device, &count)
    }
}
