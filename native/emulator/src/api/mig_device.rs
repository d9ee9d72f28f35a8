//! MIG devices: what a compute instance looks like to a client.

use nvml_wrapper_sys::bindings::{nvmlDevice_t, nvmlDeviceAttributes_t};

use super::handle::{Device, Instance, gpu_at, with_gpu};
use super::{Out, api};
use crate::code::Code;
use crate::mig;
use crate::session::Session;

/// The instance a MIG device handle stands for, which must still exist.
fn instance(session: &Session, device: nvmlDevice_t) -> Result<Instance, Code> {
    let Device::Mig(of) = Device::from_handle(device)? else { return Err(Code::INVALID_ARGUMENT) };
    let state = session.state()?;
    let (gpu, _) = gpu_at(&session.machine, &state, of.gpu)?;
    of.find_compute_instance(gpu)?;
    Ok(of)
}

fn attributes(
    session: &Session,
    device: nvmlDevice_t,
    out: &Out<nvmlDeviceAttributes_t>,
) -> Result<(), Code> {
    let Device::Mig(of) = Device::from_handle(device)? else { return Err(Code::NOT_SUPPORTED) };
    let state = session.state()?;
    let (gpu, model) = gpu_at(&session.machine, &state, of.gpu)?;
    let (instance, compute) = of.find_compute_instance(gpu)?;
    let mig = mig::of(model)?;
    let profile = mig.profile(instance.profile).ok_or(Code::UNKNOWN)?;
    let compute = mig.compute_profile(compute.profile).ok_or(Code::UNKNOWN)?;
    out.set(nvmlDeviceAttributes_t {
        multiprocessorCount: compute.multiprocessors(mig, profile),
        sharedCopyEngineCount: profile.copy_engines,
        sharedDecoderCount: profile.decoders,
        sharedEncoderCount: profile.encoders,
        sharedJpegCount: profile.jpeg_engines,
        sharedOfaCount: profile.ofa_engines,
        gpuInstanceSliceCount: profile.slices,
        computeInstanceSliceCount: compute.slices,
        memorySizeMB: profile.memory_mib,
    })
}

api! {
    fn nvmlDeviceIsMigDeviceHandle(device: nvmlDevice_t, answer: Out<u32>) |_session| {
        answer.set(u32::from(matches!(Device::from_handle(device)?, Device::Mig(_))))
    }
    fn nvmlDeviceGetGpuInstanceId(device: nvmlDevice_t, id: Out<u32>) |session| {
        id.set(instance(session, device)?.instance)
    }
    fn nvmlDeviceGetComputeInstanceId(device: nvmlDevice_t, id: Out<u32>) |session| {
        id.set(instance(session, device)?.compute)
    }
    fn nvmlDeviceGetMaxMigDeviceCount(device: nvmlDevice_t, count: Out<u32>) |session| {
        with_gpu(session, device, |gpu, model| {
            let most = model.mig.as_ref().filter(|_| gpu.mig_current).map_or(0, |mig| mig.max_devices);
            count.set(most)
        })
    }
    fn nvmlDeviceGetMigDeviceHandleByIndex(device: nvmlDevice_t, index: u32, found: Out<nvmlDevice_t>) |session| {
        let position = Device::from_handle(device)?.gpu();
        with_gpu(session, device, |gpu, model| {
            let mig = mig::of(model)?;
            if index >= mig.max_devices {
                return Err(Code::INVALID_ARGUMENT);
            }
            let index = usize::try_from(index).map_err(|_| Code::INVALID_ARGUMENT)?;
            let mut seen = gpu.mig_devices().filter(|(of, compute)| session.machine.sees_mig_device(gpu, of, compute));
            let (of, compute) = seen.nth(index).ok_or(Code::NOT_FOUND)?;
            let device = Instance { gpu: position, instance: of.id, compute: compute.id, serial: compute.serial };
            found.set(Device::Mig(device).to_handle())
        })
    }
    fn nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device: nvmlDevice_t, parent: Out<nvmlDevice_t>) |session| {
        parent.set(Device::Gpu(instance(session, device)?.gpu).to_handle())
    }
    fn nvmlDeviceGetAttributes(device: nvmlDevice_t, out: Out<nvmlDeviceAttributes_t>) |session| {
        attributes(session, device, &out)
    }
    fn nvmlDeviceGetAttributes_v2(device: nvmlDevice_t, out: Out<nvmlDeviceAttributes_t>) |session| {
        attributes(session, device, &out)
    }
}
