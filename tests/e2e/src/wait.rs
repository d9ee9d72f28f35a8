//! Waiting until something holds. Tests never assert a time; how long it took
//! is printed, and the limit only ends what would never come true.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow};

/// Long enough for anything on a slow machine under load.
pub const LIMIT: Duration = Duration::from_mins(3);

/// The least pause between two questions.
const PAUSE: Duration = Duration::from_millis(50);

/// The longest. A question may be a process of a tenth of a second on the CPUs
/// that all clusters share.
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// Asks until `attempt` gives a value and returns it. `None` and errors mean
/// *not yet*; the last error is told when `limit` has passed. Who waits long is
/// asked less often, which makes the wait no more than a tenth longer.
pub fn wait_until<T>(what: &str, limit: Duration, attempt: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    ask(what, limit, |waited| (waited / 10).clamp(PAUSE, LONGEST_PAUSE), attempt)
}

/// [`wait_until`] for an `attempt` that also looks at what must not lapse
/// meanwhile, and so goes on as often as it can.
pub fn watch_until<T>(what: &str, limit: Duration, attempt: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    ask(what, limit, |_| PAUSE, attempt)
}

fn ask<T>(
    what: &str,
    limit: Duration,
    pause: impl Fn(Duration) -> Duration,
    mut attempt: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    let started = Instant::now();
    loop {
        let reason = match attempt() {
            Ok(Some(value)) => {
                eprintln!("  {what}: {:.2} s", started.elapsed().as_secs_f64());
                return Ok(value);
            }
            Ok(None) => anyhow!("it did not hold"),
            Err(error) => error,
        };
        if started.elapsed() > limit {
            return Err(reason).with_context(|| format!("{what}: not within {} s", limit.as_secs()));
        }
        thread::sleep(pause(started.elapsed()));
    }
}
