//! The one event set over all GPUs, shared between the thread that waits on it
//! and calls that must have it closed for a while: a GPU's MIG mode cannot be
//! changed while a client, this process included, listens to it.

use std::collections::BTreeSet;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kerf_dra_driver::hardware::{HardwareError, HardwareErrorKind, HardwareEvent, HardwareEventKind};
use kerf_dra_driver::names::PciAddress;

use crate::nvml::{Event, EventSet, Failure, Session};

/// How long a wait in NVML may last. NVML has no way to end one early, so this
/// is also how long a mode change may have to wait for the set.
const WAIT: Duration = Duration::from_millis(200);

/// Who has the event set, and which GPUs it must leave out.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    paused: BTreeSet<PciAddress>,
    /// Events may have happened while a set was closed for a pause, and nobody
    /// has been told to look.
    missed: bool,
    set: Set,
}

#[derive(Debug, Default)]
enum Set {
    #[default]
    Closed,
    Idle(Open),
    /// The waiting thread has it, and it leaves these GPUs out.
    Taken {
        without: BTreeSet<PciAddress>,
    },
}

#[derive(Debug)]
struct Open {
    events: EventSet,
    /// Indices of the GPUs that could not be listened to when they should.
    deaf: Vec<u32>,
    without: BTreeSet<PciAddress>,
}

/// While it lives, no event set of this process listens to a GPU.
#[derive(Debug)]
pub(crate) struct Pause<'a> {
    watch: &'a Watch,
    gpu: PciAddress,
}

impl Drop for Pause<'_> {
    fn drop(&mut self) {
        let mut state = self.watch.lock();
        state.paused.remove(&self.gpu);
        state.missed = true;
        drop(state);
        self.watch.changed.notify_all();
    }
}

impl Watch {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stops listening to a GPU, and answers once that is so.
    pub(crate) fn pause(&self, gpu: PciAddress) -> Pause<'_> {
        let mut state = self.lock();
        state.paused.insert(gpu);
        loop {
            match &state.set {
                Set::Taken { without } if !without.contains(&gpu) => {
                    state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
                Set::Idle(open) if !open.without.contains(&gpu) => {
                    state.set = Set::Closed;
                    break;
                }
                Set::Closed | Set::Idle(_) | Set::Taken { .. } => break,
            }
        }
        drop(state);
        Pause { watch: self, gpu }
    }

    /// Waits for an event of any GPU that is not paused. For one thread.
    ///
    /// After a pause the first answer is a change of no GPU in particular: the
    /// set was closed meanwhile, and what happened then was not heard.
    ///
    /// `NotSupported` where no GPU here reports events: then there is nothing
    /// to wait for, the call returns at once, and it is the caller who sleeps.
    pub(crate) fn wait(
        &self,
        session: &Arc<Session>,
        timeout: Duration,
    ) -> Result<Option<HardwareEvent>, WatchError> {
        let deadline = Instant::now().checked_add(timeout);
        let left = || match deadline {
            Some(deadline) => deadline.saturating_duration_since(Instant::now()),
            None => timeout,
        };
        let mut first = true;
        loop {
            let mut open = match self.take(session)? {
                Taken::Set(mut open) => {
                    if std::mem::take(&mut first) {
                        open.deaf.retain(|index| open.events.register(*index).is_err());
                    }
                    open
                }
                Taken::AllPaused => {
                    let state = self.lock();
                    if !state.paused.is_empty() {
                        drop(self.changed.wait_timeout(state, left()));
                    }
                    if left().is_zero() {
                        return Ok(None);
                    }
                    continue;
                }
            };
            if std::mem::take(&mut self.lock().missed) {
                self.put_back(open);
                return Ok(Some(HardwareEvent {
                    gpu: None,
                    kind: HardwareEventKind::MigConfigurationChanged,
                }));
            }
            let waited = open.events.wait(left().min(WAIT));
            match waited {
                Ok(event) => {
                    self.put_back(open);
                    if let Some(event) = event.and_then(|event| reported(&event)) {
                        return Ok(Some(event));
                    }
                }
                Err(failure) => {
                    self.close(open);
                    return Err(WatchError::Nvml(failure));
                }
            }
            if left().is_zero() {
                return Ok(None);
            }
        }
    }

    /// Takes the set for a wait; makes it anew where it listens to other GPUs
    /// than it should, or belongs to a library that is no longer in use.
    fn take(&self, session: &Arc<Session>) -> Result<Taken, WatchError> {
        let mut state = self.lock();
        if let Set::Taken { .. } = state.set {
            return Err(WatchError::SecondThread);
        }
        if let Set::Idle(open) = std::mem::take(&mut state.set) {
            let without = open.without.clone();
            let current = without == state.paused && Arc::ptr_eq(open.events.session(), session);
            // What the state says must cover what a set still listens to.
            state.set = Set::Taken { without };
            if current {
                return Ok(Taken::Set(open));
            }
            drop(state);
            drop(open);
            state = self.lock();
        }
        let without = state.paused.clone();
        state.set = Set::Taken { without: without.clone() };
        drop(state);
        self.changed.notify_all();
        match build(session, &without) {
            Ok(Some((events, deaf))) => Ok(Taken::Set(Open { events, deaf, without })),
            Ok(None) if !without.is_empty() => {
                self.set_closed();
                Ok(Taken::AllPaused)
            }
            Ok(None) => {
                self.set_closed();
                Err(WatchError::NoEvents)
            }
            Err(failure) => {
                self.set_closed();
                Err(WatchError::Nvml(failure))
            }
        }
    }

    fn put_back(&self, open: Open) {
        self.lock().set = Set::Idle(open);
        self.changed.notify_all();
    }

    fn close(&self, open: Open) {
        drop(open);
        self.set_closed();
    }

    fn set_closed(&self) {
        self.lock().set = Set::Closed;
        self.changed.notify_all();
    }
}

enum Taken {
    Set(Open),
    /// No GPU is left to listen to until a pause ends.
    AllPaused,
}

/// Why there was no wait.
#[derive(Debug)]
pub(crate) enum WatchError {
    NoEvents,
    SecondThread,
    Nvml(Failure),
}

impl WatchError {
    /// The error as the caller gets it.
    pub(crate) fn during(&self, operation: &str) -> HardwareError {
        let error = |kind| HardwareError::new(operation, kind);
        match self {
            Self::NoEvents => {
                error(HardwareErrorKind::NotSupported).with_detail("no GPU here reports events")
            }
            Self::SecondThread => {
                error(HardwareErrorKind::InUse).with_detail("another thread waits for events already")
            }
            Self::Nvml(failure) => failure.during(operation),
        }
    }
}

/// A set over all GPUs but some, and the indices of those that could not be
/// listened to; none where no GPU reports events.
fn build(
    session: &Arc<Session>,
    without: &BTreeSet<PciAddress>,
) -> Result<Option<(EventSet, Vec<u32>)>, Failure> {
    let mut events = EventSet::new(session)?;
    let mut deaf = Vec::new();
    let mut listening = false;
    for index in 0..session.gpu_count()? {
        let pci = session.gpu_by_index(index).and_then(|gpu| gpu.pci());
        let registered = match pci {
            Ok(pci) if without.contains(&pci) => continue,
            Ok(_) => events.register(index),
            Err(failure) => Err(failure),
        };
        match registered {
            Ok(any) => listening |= any,
            Err(failure) if failure.driver_is_gone() => return Err(failure),
            Err(failure) => {
                tracing::debug!(index, %failure, "no events of this GPU for now");
                deaf.push(index);
            }
        }
    }
    Ok(listening.then_some((events, deaf)))
}

fn reported(event: &Event) -> Option<HardwareEvent> {
    let kind = if event.is_xid() {
        // Fields that are absent are left out of the line.
        let gpu = event.gpu.map(tracing::field::display);
        let (gpu_instance, compute_instance) = event.instance.unzip();
        tracing::warn!(gpu, xid = event.data, gpu_instance, compute_instance, "XID");
        HardwareEventKind::Xid(event.data)
    } else if event.is_mig_change() {
        HardwareEventKind::MigConfigurationChanged
    } else {
        return None;
    };
    Some(HardwareEvent { gpu: event.gpu, kind })
}
