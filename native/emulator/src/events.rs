//! Event sets: a waiter sleeps in `poll` on the state folder and looks at the
//! new document when one has been put there.

use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify;
use rustix::io::Errno;

use crate::clients::{Holding, Use};
use crate::code::Code;
use crate::machine::Machine;
use crate::state::{Event, EventKind, State};

/// `nvmlEventTypeXidCriticalError`.
pub(crate) const XID: u64 = 8;
/// `nvmlEventMigConfigChange`.
pub(crate) const MIG_CONFIG_CHANGE: u64 = 256;
/// What every GPU can report: ECC errors, performance state, XID, clocks.
pub(crate) const COMMON: u64 = 1 | 2 | 4 | XID | 16;

impl EventKind {
    pub(crate) fn bit(self) -> u64 {
        match self {
            Self::Xid => XID,
            Self::MigConfigChange => MIG_CONFIG_CHANGE,
        }
    }
}

#[derive(Debug)]
pub(crate) struct EventSet {
    watch: OwnedFd,
    inside: Mutex<Inside>,
}

#[derive(Debug)]
struct Inside {
    /// Events up to this number have been delivered.
    seen: u64,
    watched: Vec<Watched>,
}

#[derive(Debug)]
struct Watched {
    gpu: String,
    types: u64,
    /// Events up to this number came before.
    since: u64,
    _holding: Holding,
}

impl EventSet {
    pub(crate) fn new(machine: &Machine) -> Result<Self, Code> {
        let flags = inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK;
        let watch = inotify::init(flags).map_err(system)?;
        inotify::add_watch(&watch, machine.state_folder(), inotify::WatchFlags::MOVED_TO).map_err(system)?;
        Ok(Self { watch, inside: Mutex::new(Inside { seen: 0, watched: Vec::new() }) })
    }

    /// Watches a GPU for more types of events. What came before is not
    /// delivered.
    pub(crate) fn watch(&self, machine: &Machine, state: &State, gpu: &str, types: u64) -> Result<(), Code> {
        let mut inside = self.inside.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(watched) = inside.watched.iter_mut().find(|watched| watched.gpu == gpu) {
            watched.types |= types;
            return Ok(());
        }
        let holding = machine.clients().hold(gpu, Use::Events)?;
        inside.watched.push(Watched {
            gpu: gpu.to_owned(),
            types,
            since: state.next_event,
            _holding: holding,
        });
        Ok(())
    }

    /// The next event.
    ///
    /// # Errors
    /// `TIMEOUT`.
    pub(crate) fn wait(&self, machine: &Machine, timeout: Duration) -> Result<Event, Code> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(event) = self.next(machine.state()?.as_ref()) {
                return Ok(event);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Code::TIMEOUT);
            }
            let left = Timespec::try_from(left).map_err(|_| Code::INVALID_ARGUMENT)?;
            match poll(&mut [PollFd::new(&self.watch, PollFlags::IN)], Some(&left)) {
                Ok(_) | Err(Errno::INTR) => self.drain()?,
                Err(errno) => return Err(system(errno)),
            }
        }
    }

    fn next(&self, state: &State) -> Option<Event> {
        let mut inside = self.inside.lock().unwrap_or_else(PoisonError::into_inner);
        let wants = |watched: &Watched, event: &Event| {
            watched.gpu == event.gpu && watched.types & event.kind.bit() != 0 && event.number > watched.since
        };
        let wanted = |event: &&Event| {
            event.number > inside.seen && inside.watched.iter().any(|watched| wants(watched, event))
        };
        let found = state.events.iter().find(wanted).cloned();
        if let Some(event) = &found {
            inside.seen = event.number;
        }
        found
    }

    fn drain(&self) -> Result<(), Code> {
        let mut buffer = [MaybeUninit::<u8>::uninit(); 4096];
        let mut reader = inotify::Reader::new(&self.watch, &mut buffer);
        loop {
            match reader.next() {
                Ok(_) | Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(()),
                Err(errno) => return Err(system(errno)),
            }
        }
    }
}

fn system(errno: Errno) -> Code {
    std::io::Error::from(errno).into()
}
