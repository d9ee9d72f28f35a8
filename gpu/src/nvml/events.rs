//! Event sets. The wrapper's event drops the instance ids of an XID and knows
//! the older event bits only, so sets are made and waited on here.

use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use kerf_dra_driver::names::PciAddress;
use nvml_wrapper_sys::bindings as sys;

use super::failure::Failure;
use super::gpu::pci_of;
use super::session::{Session, check, symbol};

/// The events that are of interest, as far as a GPU supports them.
const WANTED: u64 = sys::nvmlEventTypeXidCriticalError as u64 | sys::nvmlEventMigConfigChange as u64;

/// What one wait gave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Event {
    /// The GPU, where it could be told.
    pub gpu: Option<PciAddress>,
    /// `nvmlEventType…` bits.
    pub kind: u64,
    /// The XID, for an XID event.
    pub data: u64,
    /// GPU and compute instance, where the event is of one.
    pub instance: Option<(u32, u32)>,
}

impl Event {
    /// Whether the event is a change of instances or mode.
    pub(crate) fn is_mig_change(&self) -> bool {
        self.kind & u64::from(sys::nvmlEventMigConfigChange) != 0
    }

    /// Whether the event is an XID.
    pub(crate) fn is_xid(&self) -> bool {
        self.kind & u64::from(sys::nvmlEventTypeXidCriticalError) != 0
    }
}

/// A set of events, with the library that it belongs to.
#[derive(Debug)]
pub(crate) struct EventSet {
    session: Arc<Session>,
    set: sys::nvmlEventSet_t,
}

// SAFETY: an NVML event set is bound to no thread. It must not be used by two
// at once, which `&mut self` of `wait` and of drop ensures.
unsafe impl Send for EventSet {}

impl EventSet {
    /// An empty set.
    pub(crate) fn new(session: &Arc<Session>) -> Result<Self, Failure> {
        const CALL: &str = "nvmlEventSetCreate";
        let call = symbol(&session.lib().nvmlEventSetCreate, CALL)?;
        let mut set = ptr::null_mut();
        // SAFETY: `set` is writable.
        check(CALL, unsafe { call(&raw mut set) })?;
        if set.is_null() {
            return Err(Failure::Absurd { call: CALL, answer: "a null handle".to_owned() });
        }
        Ok(Self { session: Arc::clone(session), set })
    }

    /// The session the set belongs to.
    pub(crate) fn session(&self) -> &Arc<Session> {
        &self.session
    }

    /// Adds a GPU's events, as far as it supports them. Answers whether there
    /// were any.
    pub(crate) fn register(&mut self, index: u32) -> Result<bool, Failure> {
        const SUPPORTED: &str = "nvmlDeviceGetSupportedEventTypes";
        const REGISTER: &str = "nvmlDeviceRegisterEvents";
        let lib = self.session.lib();
        let supported = symbol(&lib.nvmlDeviceGetSupportedEventTypes, SUPPORTED)?;
        let register = symbol(&lib.nvmlDeviceRegisterEvents, REGISTER)?;
        let gpu = self.session.gpu_by_index(index)?;
        let mut kinds = 0;
        // SAFETY: `kinds` is writable; the handle is of this library.
        check(SUPPORTED, unsafe { supported(gpu.handle(), &raw mut kinds) })?;
        let kinds = kinds & WANTED;
        if kinds == 0 {
            return Ok(false);
        }
        // SAFETY: handle and set are of this library.
        check(REGISTER, unsafe { register(gpu.handle(), kinds, self.set) })?;
        Ok(true)
    }

    /// Waits for one event. None where the time is over.
    pub(crate) fn wait(&mut self, timeout: Duration) -> Result<Option<Event>, Failure> {
        const CALL: &str = "nvmlEventSetWait_v2";
        let call = symbol(&self.session.lib().nvmlEventSetWait_v2, CALL)?;
        let mut data = sys::nvmlEventData_t {
            device: ptr::null_mut(),
            eventType: 0,
            eventData: 0,
            gpuInstanceId: u32::MAX,
            computeInstanceId: u32::MAX,
        };
        let milliseconds = u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX);
        // SAFETY: `data` is writable; the set is of this library and, as `self`
        // is borrowed mutably, in use by this thread only.
        let code = unsafe { call(self.set, &raw mut data, milliseconds) };
        if code == sys::nvmlReturn_enum_NVML_ERROR_TIMEOUT {
            return Ok(None);
        }
        check(CALL, code)?;
        let gpu = if data.device.is_null() { None } else { pci_of(&self.session, data.device).ok() };
        // All ones means: the event is of the whole GPU.
        let instance =
            (data.gpuInstanceId != u32::MAX).then_some((data.gpuInstanceId, data.computeInstanceId));
        Ok(Some(Event { gpu, kind: data.eventType, data: data.eventData, instance }))
    }
}

impl Drop for EventSet {
    fn drop(&mut self) {
        if let Ok(free) = symbol(&self.session.lib().nvmlEventSetFree, "nvmlEventSetFree") {
            // SAFETY: the set is of this library and is not used again.
            let _ = unsafe { free(self.set) };
        }
    }
}
