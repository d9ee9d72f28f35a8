//! What was counted, as plain numbers: who exports them decides on the format.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// What is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// A claim to prepare.
    Prepare,
    /// A claim to unprepare.
    Unprepare,
    /// A round of reconcile.
    Reconcile,
}

impl Operation {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Prepare, Self::Unprepare, Self::Reconcile];

    /// Its name in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Prepare => "prepare",
            Self::Unprepare => "unprepare",
            Self::Reconcile => "reconcile",
        }
    }
}

/// The upper bounds of the duration buckets, in seconds; one more bucket has
/// none.
pub const BUCKETS: [f64; 12] = [0.001, 0.002, 0.003, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 5.0, 40.0];

/// One operation's numbers.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Counted {
    /// How many succeeded.
    pub succeeded: u64,
    /// How many failed.
    pub failed: u64,
    /// The durations of all of them together, in seconds.
    pub seconds: f64,
    /// How many ended within each of [`BUCKETS`], not cumulative; the last is
    /// for those that took longer.
    pub buckets: [u64; BUCKETS.len() + 1],
}

/// The numbers of all operations.
#[derive(Debug, Default)]
pub struct Metrics {
    counted: Mutex<[Counted; 3]>,
}

impl Metrics {
    /// An operation's numbers.
    pub fn counted(&self, operation: Operation) -> Counted {
        self.counted.lock().unwrap_or_else(PoisonError::into_inner)[operation as usize]
    }

    pub(crate) fn record(&self, operation: Operation, elapsed: Duration, success: bool) {
        let mut all = self.counted.lock().unwrap_or_else(PoisonError::into_inner);
        let counted = &mut all[operation as usize];
        let seconds = elapsed.as_secs_f64();
        let bucket = BUCKETS.iter().position(|bound| seconds <= *bound).unwrap_or(BUCKETS.len());
        if success {
            counted.succeeded += 1;
        } else {
            counted.failed += 1;
        }
        counted.seconds += seconds;
        if let Some(count) = counted.buckets.get_mut(bucket) {
            *count += 1;
        }
    }
}
