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
    /// What is on a disk: files and lists of folders that are read.
    Content,
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
    /// The file system that it is to can only be read from here on, until
    /// [`Fuse::heal`].
    ReadOnly,
    /// The process can open no file any more, until [`Fuse::heal`].
    NoFiles,
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
    /// That nothing can be written there.
    ReadOnly,
    /// That too many files are open.
    NoFiles,
}

/// What goes on failing.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Failing {
    /// Calls to the same thing.
    Like(Reach),
    /// Changes of a file system.
    Changes(String),
    /// Whatever opens a file.
    Opens,
}

impl Failing {
    fn meets(&self, volume: &str, reach: Reach) -> Option<Struck> {
        let (meets, struck) = match self {
            Self::Like(other) => (*other == reach, Struck::Failed),
            Self::Changes(other) => {
                (other == volume && matches!(reach, Reach::Space | Reach::Names), Struck::ReadOnly)
            }
            Self::Opens => (matches!(reach, Reach::Content | Reach::Space | Reach::Sync), Struck::NoFiles),
        };
        meets.then_some(struck)
    }
}

/// Counts and names the calls of a process, and strikes some of them.
#[derive(Debug, Default)]
pub struct Fuse {
    strikes: Vec<(usize, Strike)>,
    calls: Mutex<Vec<String>>,
    struck: Mutex<BTreeSet<usize>>,
    failing: Mutex<Option<Failing>>,
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
        self.run_on("", reach, name, error, call)
    }

    /// Makes a call to a file system as the process.
    pub fn run_on<T, E>(
        &self,
        volume: &str,
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
            Some(Strike::FailsOn) => self.fail_on(Failing::Like(reach), Struck::Failed, error),
            Some(Strike::ReadOnly) => {
                self.fail_on(Failing::Changes(volume.to_owned()), Struck::ReadOnly, error)
            }
            Some(Strike::NoFiles) => self.fail_on(Failing::Opens, Struck::NoFiles, error),
            None => {
                let failing = lock(&self.failing).clone();
                match failing.and_then(|failing| failing.meets(volume, reach)) {
                    Some(struck) => Err(error(struck)),
                    None => call(),
                }
            }
        }
    }
    fn fail_on<T, E>(&self, what: Failing, struck: Struck, error: impl Fn(Struck) -> E) -> Result<T, E> {
        *lock(&self.failing) = Some(what);
        Err(error(struck))
    }
}
