//! What a process has between `nvmlInit` and `nvmlShutdown`, and the path of
//! every call: latency, faults, the work, faults again. No panic leaves it.

use std::collections::HashMap;
use std::ffi::{CStr, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use crate::code::Code;
use crate::events::EventSet;
use crate::faults::Faults;
use crate::machine::Machine;
use crate::state::{State, When};

static SESSION: Mutex<Open> = Mutex::new(Open { count: 0, session: None });

/// `nvmlInit` counts; the last `nvmlShutdown` closes.
struct Open {
    count: u32,
    session: Option<Arc<Session>>,
}

#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) machine: Machine,
    faults: Faults,
    pub(crate) event_sets: Mutex<HashMap<usize, Arc<EventSet>>>,
}

impl Session {
    pub(crate) fn state(&self) -> Result<Arc<State>, Code> {
        self.machine.state()
    }

    fn perform(&self, call: &'static str, work: impl FnOnce(&Self) -> Result<(), Code>) -> Result<(), Code> {
        let state = self.state()?;
        Faults::delay(&state, call);
        self.faults.meet(&self.machine, &state, call, When::Before)?;
        let outcome = work(self);
        self.faults.meet(&self.machine, &state, call, When::After)?;
        outcome
    }
}

/// Runs a call in the open session and answers its NVML number.
pub(crate) fn call(name: &'static str, work: impl FnOnce(&Session) -> Result<(), Code>) -> u32 {
    guard(|| {
        let open = SESSION.lock().unwrap_or_else(PoisonError::into_inner).session.clone();
        open.ok_or(Code::UNINITIALIZED)?.perform(name, work)
    })
}

/// `nvmlInit`.
pub(crate) fn open(name: &'static str) -> u32 {
    guard(|| {
        let mut open = SESSION.lock().unwrap_or_else(PoisonError::into_inner);
        let session = match &open.session {
            Some(session) => Arc::clone(session),
            None => Arc::new(Session {
                machine: Machine::find(own_path().as_deref())?,
                faults: Faults::of_this_process(),
                event_sets: Mutex::default(),
            }),
        };
        session.perform(name, |_| Ok(()))?;
        open.count += 1;
        open.session = Some(session);
        Ok(())
    })
}

/// `nvmlShutdown`.
pub(crate) fn close(name: &'static str) -> u32 {
    guard(|| {
        let mut open = SESSION.lock().unwrap_or_else(PoisonError::into_inner);
        let session = open.session.clone().ok_or(Code::UNINITIALIZED)?;
        session.perform(name, |_| Ok(()))?;
        open.count -= 1;
        if open.count == 0 {
            open.session = None;
        }
        Ok(())
    })
}

/// Nothing unwinds into C.
pub(crate) fn guard(work: impl FnOnce() -> Result<(), Code>) -> u32 {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(())) => 0,
        Ok(Err(code)) => code.number(),
        Err(_) => Code::UNKNOWN.number(),
    }
}

/// The file this library was loaded from.
fn own_path() -> Option<PathBuf> {
    let mut info = libc::Dl_info {
        dli_fname: ptr::null(),
        dli_fbase: ptr::null_mut(),
        dli_sname: ptr::null(),
        dli_saddr: ptr::null_mut(),
    };
    let here: *const Mutex<Open> = &raw const SESSION;
    // SAFETY: any address may be asked for, and `info` is a live local.
    if unsafe { libc::dladdr(here.cast(), &raw mut info) } == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: not null; the loader's own NUL-terminated text, which lives as
    // long as this library.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    Some(PathBuf::from(OsStr::from_bytes(name.to_bytes())))
}
