//! How a client finds devices.

use std::ffi::c_char;

use nvml_wrapper_sys::bindings::nvmlDevice_t;

use super::handle::{Device, Instance, gpu_at};
use super::{In, Out, api};
use crate::code::Code;
use crate::session::Session;
use crate::state::Gpu;

/// Positions of the GPUs this process sees.
pub(super) fn visible(session: &Session) -> Result<Vec<usize>, Code> {
    let state = session.state()?;
    let seen = state.gpus.iter().enumerate().filter(|(_, gpu)| session.machine.sees(gpu));
    Ok(seen.map(|(position, _)| position).collect())
}

fn count(session: &Session, count: &Out<u32>) -> Result<(), Code> {
    count.set(u32::try_from(visible(session)?.len()).map_err(|_| Code::UNKNOWN)?)
}

fn by_index(session: &Session, index: u32, device: &Out<nvmlDevice_t>) -> Result<(), Code> {
    let index = usize::try_from(index).map_err(|_| Code::INVALID_ARGUMENT)?;
    let position = visible(session)?.get(index).copied().ok_or(Code::INVALID_ARGUMENT)?;
    answer(session, position, device)
}

fn answer(session: &Session, position: usize, device: &Out<nvmlDevice_t>) -> Result<(), Code> {
    gpu_at(&session.machine, session.state()?.as_ref(), position)?;
    device.set(Device::Gpu(position).to_handle())
}

fn by_property(session: &Session, device: &Out<nvmlDevice_t>, is: impl Fn(&Gpu) -> bool) -> Result<(), Code> {
    let state = session.state()?;
    let seen = |gpu: &Gpu| is(gpu) && session.machine.sees(gpu);
    let position = state.gpus.iter().position(seen).ok_or(Code::NOT_FOUND)?;
    answer(session, position, device)
}

fn by_uuid(session: &Session, uuid: &str, device: &Out<nvmlDevice_t>) -> Result<(), Code> {
    if !uuid.starts_with("MIG-") {
        return by_property(session, device, |gpu| gpu.uuid == uuid);
    }
    let state = session.state()?;
    for (position, gpu) in state.gpus.iter().enumerate().filter(|(_, gpu)| session.machine.sees(gpu)) {
        for (instance, compute) in gpu.mig_devices().filter(|(_, compute)| compute.uuid == uuid) {
            if session.machine.sees_mig_device(gpu, instance, compute) {
                gpu_at(&session.machine, &state, position)?;
                let of = Instance {
                    gpu: position,
                    instance: instance.id,
                    compute: compute.id,
                    serial: compute.serial,
                };
                return device.set(Device::Mig(of).to_handle());
            }
        }
    }
    Err(Code::NOT_FOUND)
}

/// The kernel's form of an address in any of the forms clients use.
pub(super) fn kernel_address(text: &str) -> String {
    let lower = text.to_ascii_lowercase();
    match lower.split_once(':') {
        Some((domain, rest)) if domain.len() > 4 && rest.contains(':') => {
            format!("{:0>4}:{rest}", domain.trim_start_matches('0'))
        }
        Some((_, rest)) if !rest.contains(':') => format!("0000:{lower}"),
        _ => lower,
    }
}

fn by_address(session: &Session, address: &In<c_char>, device: &Out<nvmlDevice_t>) -> Result<(), Code> {
    let address = kernel_address(&address.text()?);
    by_property(session, device, |gpu| gpu.pci == address)
}

api! {
    fn nvmlDeviceGetCount(number: Out<u32>) |session| { count(session, &number) }
    fn nvmlDeviceGetCount_v2(number: Out<u32>) |session| { count(session, &number) }
    fn nvmlDeviceGetHandleByIndex(index: u32, device: Out<nvmlDevice_t>) |session| {
        by_index(session, index, &device)
    }
    fn nvmlDeviceGetHandleByIndex_v2(index: u32, device: Out<nvmlDevice_t>) |session| {
        by_index(session, index, &device)
    }
    fn nvmlDeviceGetHandleByUUID(uuid: In<c_char>, device: Out<nvmlDevice_t>) |session| {
        by_uuid(session, &uuid.text()?, &device)
    }
    fn nvmlDeviceGetHandleBySerial(serial: In<c_char>, device: Out<nvmlDevice_t>) |session| {
        let serial = serial.text()?;
        by_property(session, &device, |gpu| gpu.serial == serial)
    }
    fn nvmlDeviceGetHandleByPciBusId(address: In<c_char>, device: Out<nvmlDevice_t>) |session| {
        by_address(session, &address, &device)
    }
    fn nvmlDeviceGetHandleByPciBusId_v2(address: In<c_char>, device: Out<nvmlDevice_t>) |session| {
        by_address(session, &address, &device)
    }
}
