//! What strikes a process at chosen ones of its calls that reach disk or
//! hardware.
//!
//! Death is modelled by effect: from the fatal call on, nothing that the
//! "process" does reaches disk or hardware any more. What a killed process
//! would have done next is therefore simply not done.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use super::lock;

/// What a call is to: calls to the same thing fail together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reach {
    /// The space of a disk: writes and new folders.
    Space,
    /// The names on a disk: renames and removals.
    Names,
    /// The medium: what is synced.
    Sync,
    /// A GPU.
    Hardware,
}

/// What strikes a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Strike {
    /// The process is killed before the call has its effect.
    KilledBefore,
    /// It is killed after that, before it has the answer.
    KilledAfter,
    /// The call fails and has no effect.
    Fails,
    /// So do all later ones to the same thing, until [`Fuse::heal`].
    FailsOn,
    /// Hardware takes its time: the call has its effect, but its answer does
    /// not come in time.
    Late,
}

/// What a caller is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Struck {
    /// Nothing: it is dead.
    Killed,
    /// An error.
    Failed,
    /// That no answer came in time.
    Late,
}

/// Counts and names the calls of a process, and strikes some of them.
#[derive(Debug, Default)]
pub struct Fuse {
    strikes: Vec<(usize, Strike)>,
    calls: Mutex<Vec<String>>,
    struck: Mutex<BTreeSet<usize>>,
    failing: Mutex<Option<Reach>>,
    dead: AtomicBool,
    healed: AtomicBool,
}

impl Fuse {
    /// Never strikes.
    pub fn none() -> Arc<Self> {
        Arc::default()
    }

    /// Kills at call `call` (from 0), before or after it has its effect.
    pub fn at(call: usize, after: bool) -> Arc<Self> {
        Self::with(vec![(call, if after { Strike::KilledAfter } else { Strike::KilledBefore })])
    }

    /// Strikes these calls.
    pub fn with(strikes: Vec<(usize, Strike)>) -> Arc<Self> {
        Arc::new(Self { strikes, ..Self::default() })
    }

    /// Whether it has killed.
    pub fn is_dead(&self) -> bool {
        self.dead.load(Ordering::SeqCst)
    }

    /// Whether it has struck a call.
    pub fn has_struck(&self, call: usize) -> bool {
        lock(&self.struck).contains(&call)
    }

    /// The calls so far, by name.
    pub fn calls(&self) -> Vec<String> {
        lock(&self.calls).clone()
    }

    /// Ends what keeps failing; from here on nothing strikes.
    pub fn heal(&self) {
        self.healed.store(true, Ordering::SeqCst);
        *lock(&self.failing) = None;
    }

    /// Makes a call as the process.
    pub fn run<T, E>(
        &self,
        reach: Reach,
        name: impl FnOnce() -> String,
        error: impl Fn(Struck) -> E,
        call: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        if self.is_dead() {
            return Err(error(Struck::Killed));
        }
        let number = {
            let mut calls = lock(&self.calls);
            calls.push(name());
            calls.len() - 1
        };
        let strike = self.strikes.iter().find(|(at, _)| *at == number).map(|(_, strike)| *strike);
        // Disks are not waited for with a time limit.
        let strike = strike.filter(|strike| *strike != Strike::Late || reach == Reach::Hardware);
        let strike = strike.filter(|_| !self.healed.load(Ordering::SeqCst));
        if strike.is_some() {
            lock(&self.struck).insert(number);
        }
        match strike {
            Some(Strike::KilledBefore) => {
                self.dead.store(true, Ordering::SeqCst);
                Err(error(Struck::Killed))
            }
            Some(Strike::KilledAfter) => {
                self.dead.store(true, Ordering::SeqCst);
                let _ = call();
                Err(error(Struck::Killed))
            }
            Some(Strike::Late) => call().and_then(|_| Err(error(Struck::Late))),
            Some(Strike::Fails) => Err(error(Struck::Failed)),
            Some(Strike::FailsOn) => {
                *lock(&self.failing) = Some(reach);
                Err(error(Struck::Failed))
            }
            None if *lock(&self.failing) == Some(reach) => Err(error(Struck::Failed)),
            None => call(),
        }
    }
}
