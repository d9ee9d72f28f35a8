//! Who may work on a claim and on a GPU: one at a time, within the process
//! (async mutexes) and across the two instances of a rolling update (flock).
//!
//! The order is fixed, so nobody waits in a circle: a claim first, then GPUs
//! by address. A lock belongs to whoever holds the value; work that goes on
//! after its caller stopped waiting takes it along.

use std::collections::{BTreeSet, HashMap};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use kerf_dra_driver::names::{ClaimUid, PciAddress};
use rustix::fs::{FlockOperation, flock};
use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard};

/// The locks of a node.
#[derive(Debug)]
pub(crate) struct Locks {
    folder: PathBuf,
    mutexes: Mutex<HashMap<Key, Arc<AsyncMutex<()>>>>,
    /// Shared by all instances as long as they live.
    _instance: File,
    alone: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
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
#[derive(Debug)]
pub(crate) struct Held {
    locks: Vec<Lock>,
    /// Whether somebody else had one of them when it was asked for: what was
    /// known before may not be true any more.
    pub(crate) waited: bool,
}

// Fields are dropped in this order: the file first, so that the next one in
// this process finds it free.
#[derive(Debug)]
struct Lock {
    _file: LockFile,
    _mutex: OwnedMutexGuard<()>,
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
        Ok(Self { folder, mutexes: Mutex::default(), _instance: instance, alone })
    }

    /// Whether there was no other instance when this one began.
    pub(crate) fn is_alone(&self) -> bool {
        self.alone
    }

    /// Waits for a claim. Nothing may be held yet.
    pub(crate) async fn claim(&self, uid: &ClaimUid) -> io::Result<Held> {
        let (lock, waited) = self.lock(Key::Claim(uid.clone())).await?;
        Ok(Held { locks: vec![lock], waited })
    }

    /// Waits for GPUs. At most a claim may be held.
    pub(crate) async fn gpus(&self, gpus: &BTreeSet<PciAddress>) -> io::Result<Held> {
        let mut held = Held { locks: Vec::new(), waited: false };
        for gpu in gpus {
            let (lock, waited) = self.lock(Key::Gpu(*gpu)).await?;
            held.locks.push(lock);
            held.waited |= waited;
        }
        Ok(held)
    }

    async fn lock(&self, key: Key) -> io::Result<(Lock, bool)> {
        let path = self.folder.join(key.file_name());
        let remove = matches!(key, Key::Claim(_)).then(|| path.clone());
        let mutex = self.mutex(key);
        let (guard, mut waited) = match Arc::clone(&mutex).try_lock_owned() {
            Ok(guard) => (guard, false),
            Err(_) => (mutex.lock_owned().await, true),
        };
        loop {
            let file = open(&path)?;
            let file = match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => file,
                Err(rustix::io::Errno::WOULDBLOCK) => {
                    waited = true;
                    tokio::task::spawn_blocking(move || {
                        flock(&file, FlockOperation::LockExclusive).map(|()| file)
                    })
                    .await
                    .map_err(io::Error::other)??
                }
                Err(error) => return Err(error.into()),
            };
            // Removed by its former holder while it was waited for.
            if file.metadata()?.nlink() > 0 {
                return Ok((Lock { _file: LockFile { _file: file, remove }, _mutex: guard }, waited));
            }
        }
    }

    fn mutex(&self, key: Key) -> Arc<AsyncMutex<()>> {
        let mut mutexes = self.mutexes.lock().unwrap_or_else(PoisonError::into_inner);
        if mutexes.len() > 1024 {
            mutexes.retain(|_, mutex| Arc::strong_count(mutex) > 1);
        }
        Arc::clone(mutexes.entry(key).or_default())
    }
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
