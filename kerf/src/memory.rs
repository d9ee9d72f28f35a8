//! Memory that is not used goes back to the system.
//!
//! A look at the GPUs and a comparison of all slices take megabytes for
//! milliseconds, and what outlives them lies scattered among what does not. So
//! the C library's allocator keeps more than twice what is in use, for as long
//! as the process idles, which is nearly always. So does the program's code:
//! most of it is needed to start and to read GPUs, little to wait.
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

/// Gives pages that hold nothing back, and those that a file holds too. It takes
/// the heap's lock for about a millisecond.
fn give_back() {
    #[cfg(target_env = "gnu")]
    // SAFETY: only pages that hold no allocation are touched, and the callback
    // is called before this returns.
    unsafe {
        libc::malloc_trim(0);
        libc::dl_iterate_phdr(Some(unmap_code), std::ptr::null_mut());
    }
}

/// The objects whose code is unmapped, by how their files' names begin, beside
/// the program itself. What the driver's libraries do with their pages is their
/// own business.
#[cfg(target_env = "gnu")]
const OURS: [&str; 4] = ["libc.so.", "libm.so.", "libgcc_s.so.", "ld-linux"];

/// Unmaps the pages of a loaded object that nobody can have written. Whoever
/// needs one again gets it from the system's cache of the file, in less than a
/// microsecond.
#[cfg(target_env = "gnu")]
unsafe extern "C" fn unmap_code(
    object: *mut libc::dl_phdr_info,
    _: libc::size_t,
    _: *mut libc::c_void,
) -> libc::c_int {
    const GO_ON: libc::c_int = 0;
    // SAFETY: the C library describes an object that is loaded: a name that
    // ends, and as many program headers as it says.
    let (name, base, headers) = unsafe {
        let object = &*object;
        let headers = std::slice::from_raw_parts(object.dlpi_phdr, object.dlpi_phnum.into());
        (std::ffi::CStr::from_ptr(object.dlpi_name), object.dlpi_addr, headers)
    };
    let path = name.to_string_lossy();
    let file = path.rsplit('/').next().unwrap_or_default();
    // The program's name is empty.
    if !file.is_empty() && !OURS.iter().any(|ours| file.starts_with(ours)) {
        return GO_ON;
    }
    let page = rustix::param::page_size() as u64;
    for header in headers.iter().filter(|header| header.p_type == libc::PT_LOAD) {
        if header.p_flags & libc::PF_W != 0 {
            continue;
        }
        let start = (base + header.p_vaddr).next_multiple_of(page);
        let end = (base + header.p_vaddr + header.p_memsz) / page * page;
        let Some(length) = end.checked_sub(start).and_then(|length| usize::try_from(length).ok()) else {
            continue;
        };
        // SAFETY: a private mapping of a file whose pages cannot be written: they
        // are the same when they are read again. An error changes nothing.
        unsafe {
            libc::madvise(start as *mut libc::c_void, length, libc::MADV_DONTNEED);
        }
    }
    GO_ON
}

/// How long nothing must have happened before memory is given back.
const QUIET: Duration = Duration::from_secs(1);
/// How often it is given back where nothing happens: looking whether all is
/// still as it was takes some too, and tells nobody.
const ROUTINE: Duration = Duration::from_mins(1);

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
            () = tokio::time::sleep(if is_due { QUIET } else { ROUTINE }) => {
                is_due = false;
                tokio::task::spawn_blocking(give_back).await?;
                continue;
            }
        }
        is_due = true;
    }
}
