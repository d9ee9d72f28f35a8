//! Memory that is not used goes back to the system.
//!
//! A look at the GPUs and a comparison of all slices take megabytes for
//! milliseconds, and what outlives them lies scattered among what does not. So
//! the C library's allocator keeps more than twice what is in use, for as long
//! as the process idles, which is nearly always.
//!
//! The one place in this program with `unsafe`: no crate here wraps the calls.

#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use kerf_controller::PublishStatus;
use kerf_dra_driver::inventory::Inventory;
use kerf_kubelet_plugin::JournalView;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// One heap for all threads: each further one keeps what its threads let go of.
/// Before there are threads.
pub(crate) fn use_one_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: a number to a number; an answer of failure changes nothing.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

/// Gives pages that hold nothing back. It takes the heap's lock for about a
/// millisecond.
fn give_back() {
    #[cfg(target_env = "gnu")]
    // SAFETY: only pages that hold no allocation are touched.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// How long nothing must have happened before memory is given back.
const QUIET: Duration = Duration::from_secs(1);

/// Gives memory back whenever what took it is over.
pub(crate) async fn keep_slim(
    mut inventory: watch::Receiver<Option<Arc<Inventory>>>,
    mut published: watch::Receiver<PublishStatus>,
    mut journal: watch::Receiver<Arc<JournalView>>,
    cancel: CancellationToken,
) -> Result<()> {
    let mut is_due = true;
    loop {
        tokio::select! {
            () = cancel.cancelled() => return Ok(()),
            changed = inventory.changed() => changed?,
            changed = published.changed() => changed?,
            changed = journal.changed() => changed?,
            () = tokio::time::sleep(QUIET), if is_due => {
                is_due = false;
                tokio::task::spawn_blocking(give_back).await?;
                continue;
            }
        }
        is_due = true;
    }
}
