//! Event sets.

use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use nvml_wrapper_sys::bindings::{nvmlDevice_t, nvmlEventData_t, nvmlEventSet_t};

use super::handle::{Device, gpu_at, with_gpu};
use super::{Out, api};
use crate::code::Code;
use crate::events::{COMMON, EventSet, MIG_CONFIG_CHANGE};
use crate::model::Model;
use crate::session::Session;

/// What an instance id is where the event is about none.
const NONE: u32 = u32::MAX;

static NEXT: AtomicUsize = AtomicUsize::new(1);

fn find(session: &Session, set: nvmlEventSet_t) -> Result<Arc<EventSet>, Code> {
    let sets = session.event_sets.lock().unwrap_or_else(PoisonError::into_inner);
    sets.get(&set.addr()).cloned().ok_or(Code::INVALID_ARGUMENT)
}

fn supported(model: &Model) -> u64 {
    if model.mig.is_some() { COMMON | MIG_CONFIG_CHANGE } else { COMMON }
}

fn wait(
    session: &Session,
    set: nvmlEventSet_t,
    data: &Out<nvmlEventData_t>,
    milliseconds: u32,
) -> Result<(), Code> {
    data.check()?;
    let event = find(session, set)?.wait(&session.machine, Duration::from_millis(milliseconds.into()))?;
    let state = session.state()?;
    let position = state.gpus.iter().position(|gpu| gpu.uuid == event.gpu).ok_or(Code::UNKNOWN)?;
    let (instance, compute) = event.instance.unwrap_or((NONE, NONE));
    data.set(nvmlEventData_t {
        device: Device::Gpu(position).to_handle(),
        eventType: event.kind.bit(),
        eventData: event.data,
        gpuInstanceId: instance,
        computeInstanceId: compute,
    })
}

api! {
    fn nvmlEventSetCreate(set: Out<nvmlEventSet_t>) |session| {
        set.check()?;
        let made = EventSet::new(&session.machine)?;
        let number = NEXT.fetch_add(1, Ordering::Relaxed) << 4;
        session.event_sets.lock().unwrap_or_else(PoisonError::into_inner).insert(number, Arc::new(made));
        set.set(ptr::without_provenance_mut(number))
    }
    fn nvmlEventSetFree(set: nvmlEventSet_t) |session| {
        let mut sets = session.event_sets.lock().unwrap_or_else(PoisonError::into_inner);
        sets.remove(&set.addr()).map(|_| ()).ok_or(Code::INVALID_ARGUMENT)
    }
    fn nvmlDeviceGetSupportedEventTypes(device: nvmlDevice_t, types: Out<u64>) |session| {
        with_gpu(session, device, |_, model| types.set(supported(model)))
    }
    fn nvmlDeviceRegisterEvents(device: nvmlDevice_t, types: u64, set: nvmlEventSet_t) |session| {
        let set = find(session, set)?;
        let index = Device::from_handle(device)?.gpu();
        let state = session.state()?;
        let (gpu, model) = gpu_at(&session.machine, &state, index)?;
        if types & !supported(model) != 0 {
            return Err(Code::NOT_SUPPORTED);
        }
        set.watch(&session.machine, &state, &gpu.uuid, types)
    }
    fn nvmlEventSetWait(set: nvmlEventSet_t, data: Out<nvmlEventData_t>, timeout: u32) |session| {
        wait(session, set, &data, timeout)
    }
    fn nvmlEventSetWait_v2(set: nvmlEventSet_t, data: Out<nvmlEventData_t>, timeout: u32) |session| {
        wait(session, set, &data, timeout)
    }
}
