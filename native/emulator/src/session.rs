//! What a process has between `nvmlInit` and `nvmlShutdown`, and the path of
//! every call: latency, faults, the work, faults again. No panic leaves it.

use std::collections::HashMap;
use std::ffi::{CStr, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
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
    /// The version of this library, where its file's name tells it.
    version: Option<String>,
    faults: Faults,
    pub(crate) event_sets: Mutex<HashMap<usize, Arc<EventSet>>>,
}

impl Session {
    pub(crate) fn state(&self) -> Result<Arc<State>, Code> {
        self.machine.state()
    }

    fn begin() -> Result<Arc<Self>, Code> {
        let path = own_path();
        Ok(Arc::new(Self {
            machine: Machine::find(path.as_deref())?,
            version: path.as_deref().and_then(version_of),
            faults: Faults::of_this_process(),
            event_sets: Mutex::default(),
        }))
    }

    /// A library serves the driver of its own version only.
    fn matches_driver(&self) -> Result<(), Code> {
        let loaded = &self.state()?.driver_version;
        match &self.version {
            Some(version) if version != loaded => Err(Code::LIB_RM_VERSION_MISMATCH),
            _ => Ok(()),
        }
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
        let session = open.ok_or(Code::UNINITIALIZED)?;
        session.matches_driver()?;
        session.perform(name, work)
    })
}

/// `nvmlInit`.
pub(crate) fn open(name: &'static str) -> u32 {
    guard(|| {
        let mut open = SESSION.lock().unwrap_or_else(PoisonError::into_inner);
        let session = open.session.clone().map_or_else(Session::begin, Ok)?;
        session.matches_driver()?;
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

/// The version in a library's name, `libnvidia-ml.so.580.95.05`, links
/// resolved.
fn version_of(path: &Path) -> Option<String> {
    let file = path.canonicalize().ok()?;
    let version = file.file_name()?.to_str()?.strip_prefix("libnvidia-ml.so.")?;
    version.contains('.').then(|| version.to_owned())
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
