//! SIGINT and SIGTERM: the first asks for an end in order, the second is one.

use std::thread;

use anyhow::{Context as _, Result};
use tokio::runtime::Builder;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;

/// A signal that asks for the end.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asked {
    pub(crate) name: &'static str,
    /// What a shell says of a process that one has ended.
    pub(crate) code: u8,
}

const INTERRUPT: Asked = Asked { name: "SIGINT", code: 130 };
const TERMINATE: Asked = Asked { name: "SIGTERM", code: 143 };

/// Tells of the first. The second ends the process, whatever it does: hence a
/// thread, for a command of the profile may hold the other one up.
pub(crate) fn listen() -> Result<oneshot::Receiver<Asked>> {
    let (tell, told) = oneshot::channel();
    let runtime = Builder::new_current_thread().enable_all().build().context("signals cannot be awaited")?;
    let entered = runtime.enter();
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    drop(entered);
    thread::spawn(move || {
        runtime.block_on(async {
            let mut next = async || {
                tokio::select! { _ = interrupt.recv() => INTERRUPT, _ = terminate.recv() => TERMINATE }
            };
            let first = next().await;
            eprintln!(
                "{}: the driver is ended, and what was made is taken away; the next signal leaves it all",
                first.name
            );
            let _ = tell.send(first);
            std::process::exit(next().await.code.into());
        });
    });
    Ok(told)
}
