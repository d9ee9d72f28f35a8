//! What GPUs report by themselves: a partition that somebody else made, an
//! XID, a GPU that fell off the bus. Each report means that the hardware has
//! to be read again; nothing is concluded from the report itself.

use std::io;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use kerf_dra_driver::hardware::{HardwareErrorKind, HardwareEventKind};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info};

use crate::plugin::{Inner, Plugin};

/// How long one wait lasts.
const TURN: Duration = Duration::from_secs(1);
/// The pause where there is nothing to wait for: no driver, or GPUs that
/// report nothing.
const PAUSE: Duration = Duration::from_secs(5);

impl Plugin {
    /// Listens to the GPUs until cancelled, on a thread of its own: the wait
    /// cannot be ended, and nobody should have to wait for it.
    ///
    /// # Errors
    /// No thread can be made.
    pub fn listen(&self, cancel: CancellationToken) -> io::Result<()> {
        let inner = Arc::clone(&self.inner);
        thread::Builder::new().name("gpu-events".to_owned()).spawn(move || inner.listen(&cancel)).map(drop)
    }
}

impl Inner {
    fn listen(&self, cancel: &CancellationToken) {
        let mut deaf = None;
        while !cancel.is_cancelled() {
            match self.work.hardware.wait_for_event(TURN) {
                Ok(event) => {
                    // What happened while nobody listened was not heard.
                    let missed = deaf.take().is_some();
                    if let Some(event) = &event {
                        let what = match event.kind {
                            HardwareEventKind::MigConfigurationChanged => "a changed MIG configuration",
                            HardwareEventKind::Xid(_) => "an XID",
                        };
                        debug!(gpu = event.gpu.map(tracing::field::display), what, "a GPU reports");
                    }
                    if event.is_some() || missed {
                        self.work.announce();
                    }
                }
                Err(error) => {
                    if deaf.as_ref() != Some(&error) {
                        let reason = crate::chain(&error);
                        if error.kind == HardwareErrorKind::NotSupported {
                            info!(reason, "GPUs are read on a timer only");
                        } else {
                            info!(reason, "GPUs cannot be listened to, trying again");
                        }
                    }
                    deaf = Some(error);
                    thread::sleep(PAUSE);
                }
            }
        }
    }
}
