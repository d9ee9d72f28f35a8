//! Durations, and what is said of them.

use std::fmt;
use std::time::Duration;

/// Durations of one kind.
#[derive(Debug, Default)]
pub(crate) struct Times(Vec<Duration>);

impl Times {
    pub(crate) fn add(&mut self, time: Duration) {
        self.0.push(time);
    }

    /// The duration that a share of all does not exceed.
    fn percentile(&self, percent: usize) -> Duration {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        let last = sorted.len().saturating_sub(1);
        sorted.get((sorted.len() * percent / 100).min(last)).copied().unwrap_or_default()
    }
}

impl fmt::Display for Times {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let millis = |percent| self.percentile(percent).as_secs_f64() * 1e3;
        write!(
            f,
            "p50 {:>7.2} ms   p99 {:>7.2} ms   max {:>7.2} ms   ({} times)",
            millis(50),
            millis(99),
            millis(100),
            self.0.len()
        )
    }
}
