//! Waiting until something holds. Tests never assert a time; how long it took
//! is printed, and the limit only ends what would never come true.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow};

/// Long enough for anything on a slow machine under load.
pub const LIMIT: Duration = Duration::from_mins(3);

/// Pause between two questions. A question costs more than this.
const PAUSE: Duration = Duration::from_millis(50);

/// Asks until `attempt` gives a value and returns it. `None` and errors mean
/// *not yet*; the last error is told when `limit` has passed.
pub fn wait_until<T>(
    what: &str,
    limit: Duration,
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
        thread::sleep(PAUSE);
    }
}
