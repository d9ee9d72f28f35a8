//! Who may work on a claim and on a GPU: one at a time, within the process
//! ([`crate::turns`]) and across the two instances of a rolling update (flock).
//!
//! The order is fixed, so nobody waits in a circle: a claim first, then all its
//! GPUs within the process, then their files by address. A lock belongs to
//! whoever holds the value; work that goes on after its caller stopped waiting
//! takes it along.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use kerf_dra_driver::names::{ClaimUid, PciAddress};
use rustix::fs::{FlockOperation, flock};
use tracing::warn;

use crate::turns::{Turn, Turns};

/// When a file that another instance has is looked at again. A thread that waits
/// in the kernel would be told at once, but cannot be called off: an instance
/// that hangs in the driver, long after its end, would take one for each call.
const FIRST_LOOK: Duration = Duration::from_millis(5);
const LAST_LOOK: Duration = Duration::from_millis(500);

/// The locks of a node.
#[derive(Debug)]
pub(crate) struct Locks {
    folder: PathBuf,
    turns: Turns<Key>,
    /// Shared by all instances as long as they live.
    _instance: File,
    alone: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Key {
    Claim(ClaimUid),
    Gpu(PciAddress),
}

impl Key {
    fn file_name(&self) -> String {
        match self {
            Self::Claim(uid) => format!("claim-{uid}.lock"),
            Self::Gpu(gpu) => format!("gpu-{}.lock", gpu.dashed()),
        }
    }
}

/// A claim, or GPUs, that nobody else works on while this value lives.
// Fields are dropped in this order: the files first, so that the next one in
// this process finds them free.
#[derive(Debug)]
pub(crate) struct Held {
    files: Vec<LockFile>,
    _turn: Turn<Key>,
    /// Whether somebody else had one of them when it was asked for: what was
    /// known before may not be true any more.
    pub(crate) waited: bool,
}

#[derive(Debug)]
struct LockFile {
    _file: File,
    /// Where the file is to disappear with the lock: claims come and go.
    remove: Option<PathBuf>,
}

impl Drop for LockFile {
    fn drop(&mut self) {
        if let Some(path) = &self.remove {
            // Still locked: whoever waits for it notices that it is gone.
            let _ = std::fs::remove_file(path);
        }
    }
}

impl Locks {
    /// Locks whose files are in a folder.
    pub(crate) fn open(folder: PathBuf) -> io::Result<Self> {
        std::fs::create_dir_all(&folder)?;
        let instance = open(&folder.join("instance.lock"))?;
        let alone = match flock(&instance, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => true,
            Err(rustix::io::Errno::WOULDBLOCK) => false,
            Err(error) => return Err(error.into()),
        };
        flock(&instance, FlockOperation::LockShared)?;
        if let Err(error) = remove_left(&folder) {
            warn!(%error, "lock files of killed processes cannot be removed; they take space and nothing else");
        }
        Ok(Self { folder, turns: Turns::default(), _instance: instance, alone })
    }

    /// Whether there was no other instance when this one began.
    pub(crate) fn is_alone(&self) -> bool {
        self.alone
    }

    /// Waits for a claim. Nothing may be held yet.
    pub(crate) async fn claim(&self, uid: &ClaimUid) -> io::Result<Held> {
        self.lock(BTreeSet::from([Key::Claim(uid.clone())])).await
    }

    /// Waits for GPUs. At most a claim may be held.
    pub(crate) async fn gpus(&self, gpus: &BTreeSet<PciAddress>) -> io::Result<Held> {
        self.lock(gpus.iter().copied().map(Key::Gpu).collect()).await
    }

    async fn lock(&self, keys: BTreeSet<Key>) -> io::Result<Held> {
        let (turn, waited) = self.turns.take(keys.clone()).await;
        let mut held = Held { files: Vec::new(), _turn: turn, waited };
        for key in &keys {
            let (file, waited) = self.lock_file(key).await?;
            held.files.push(file);
            held.waited |= waited;
        }
        Ok(held)
    }

    async fn lock_file(&self, key: &Key) -> io::Result<(LockFile, bool)> {
        let path = self.folder.join(key.file_name());
        let remove = matches!(key, Key::Claim(_)).then(|| path.clone());
        let mut waited = false;
        let mut pause = FIRST_LOOK;
        loop {
            let file = open(&path)?;
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(rustix::io::Errno::WOULDBLOCK) => {
                    waited = true;
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(LAST_LOOK);
                    continue;
                }
                Err(error) => return Err(error.into()),
            }
            // Removed by its former holder while it was waited for.
            if file.metadata()?.nlink() > 0 {
                return Ok((LockFile { _file: file, remove }, waited));
            }
        }
    }
}

/// Removes the claims' lock files that nobody holds: a killed process leaves
/// its own, and its claims may never come back. GPUs do, and are few.
fn remove_left(folder: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let (name, path) = entry.map(|entry| (entry.file_name(), entry.path()))?;
        let is_of_claim = name.to_str().is_some_and(|name| name.starts_with("claim-"));
        if !is_of_claim {
            continue;
        }
        let file = match OpenOptions::new().write(true).open(&path) {
            // Its holder was done with it.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            file => file?,
        };
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            // Only who holds a file removes it: with a link left, this is the
            // one that has the name. Who waits for it meanwhile notices.
            Ok(()) if file.metadata()?.nlink() > 0 => std::fs::remove_file(&path)?,
            Ok(()) | Err(rustix::io::Errno::WOULDBLOCK) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn open(path: &Path) -> io::Result<File> {
    let open = || OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path);
    match (open(), path.parent()) {
        // Somebody removed the folder.
        (Err(error), Some(folder)) if error.kind() == io::ErrorKind::NotFound => {
            std::fs::create_dir_all(folder)?;
            open()
        }
        (opened, _) => opened,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    fn uid(text: &str) -> ClaimUid {
        text.parse().unwrap()
    }

    /// As a killed process lets go: the kernel unlocks, nobody removes.
    fn kill(mut held: Held) {
        for file in &mut held.files {
            file.remove = None;
        }
    }

    fn files(folder: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(folder).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort_unstable();
        names
    }

    #[tokio::test]
    async fn a_start_removes_lock_files_of_claims_that_nobody_holds_and_no_others() {
        let folder = tempfile::tempdir().unwrap();
        let gpu = PciAddress { domain: 0, bus: 1, device: 0, function: 0 };
        let first = Locks::open(folder.path().to_owned()).unwrap();
        kill(first.claim(&uid("left")).await.unwrap());
        kill(first.gpus(&BTreeSet::from([gpu])).await.unwrap());
        let held = first.claim(&uid("held")).await.unwrap();
        let second = Locks::open(folder.path().to_owned()).unwrap();
        let kept = ["claim-held.lock", "gpu-0000-01-00-0.lock", "instance.lock"];
        assert_eq!(files(folder.path()), kept);
        // The name is still that of the lock that is held.
        let mut waiting = tokio::spawn(async move { second.claim(&uid("held")).await.unwrap().waited });
        let early = tokio::time::timeout(Duration::from_millis(200), &mut waiting).await;
        assert!(early.is_err(), "two have the claim");
        drop(held);
        assert!(waiting.await.unwrap());
    }

    /// A process that is gone but hangs in the driver keeps its files.
    #[test]
    fn who_stops_waiting_for_another_process_leaves_no_thread_behind() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .max_blocking_threads(1)
            .build()
            .unwrap();
        runtime.block_on(async {
            let folder = tempfile::tempdir().unwrap();
            let gpus = BTreeSet::from([PciAddress { domain: 0, bus: 1, device: 0, function: 0 }]);
            let other = Locks::open(folder.path().to_owned()).unwrap();
            let held = other.gpus(&gpus).await.unwrap();
            let own = Locks::open(folder.path().to_owned()).unwrap();
            for _ in 0..3 {
                let late = tokio::time::timeout(Duration::from_millis(20), own.gpus(&gpus)).await;
                assert!(late.is_err(), "two have the GPU");
            }
            let free =
                tokio::time::timeout(Duration::from_secs(30), tokio::task::spawn_blocking(|| ())).await;
            assert!(free.is_ok(), "the thread waits on");
            drop(held);
            own.gpus(&gpus).await.unwrap();
        });
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn starts_never_let_two_have_a_claim() {
        let folder = tempfile::tempdir().unwrap();
        let (busy, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let mut workers = tokio::task::JoinSet::new();
        for worker in 0..3 {
            let (path, busy) = (folder.path().to_owned(), Arc::clone(&busy));
            workers.spawn(async move {
                for turn in 0..300 {
                    let locks = Locks::open(path.clone()).unwrap();
                    let held = locks.claim(&uid("c")).await.unwrap();
                    assert!(!busy.swap(true, Ordering::SeqCst), "two have the claim");
                    tokio::task::yield_now().await;
                    busy.store(false, Ordering::SeqCst);
                    if (turn + worker) % 2 == 0 {
                        kill(held);
                    }
                }
            });
        }
        let starts = tokio::task::spawn_blocking({
            let (path, done) = (folder.path().to_owned(), Arc::clone(&done));
            move || {
                while !done.load(Ordering::SeqCst) {
                    Locks::open(path.clone()).unwrap();
                }
            }
        });
        while let Some(ended) = workers.join_next().await {
            ended.unwrap();
        }
        done.store(true, Ordering::SeqCst);
        starts.await.unwrap();
    }
}
