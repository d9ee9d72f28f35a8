//! The state document on disk. One writer at a time, by `flock`; a new
//! document replaces the old one by rename, so that a reader needs no lock and
//! a writer killed at any point leaves the old or the new one.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::{FlockOperation, flock};

use crate::state::State;

const DOCUMENT: &str = "state.json";

/// Inode and modification time. The time grows with every write, so that a
/// reused inode number is no trap.
type Stamp = (u64, i64, i64);

/// The document in a folder, with the last one read.
#[derive(Debug)]
pub struct Store {
    folder: PathBuf,
    last: Mutex<Option<(Stamp, Arc<State>)>>,
}

/// The right to write, until it is dropped or the process ends.
#[derive(Debug)]
pub struct WriteLock {
    _file: File,
}

impl Store {
    /// The store in a folder, which need not exist yet.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into(), last: Mutex::new(None) }
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The present document; one `stat` where it has not changed.
    pub fn load(&self) -> io::Result<Arc<State>> {
        let path = self.folder.join(DOCUMENT);
        let stamp = stamp_of(&fs::metadata(&path)?);
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((known, state)) = last.as_ref()
            && *known == stamp
        {
            return Ok(Arc::clone(state));
        }
        // The stamp must be of the bytes read, not of what came after them.
        let file = File::open(&path)?;
        let stamp = stamp_of(&file.metadata()?);
        let state: Arc<State> = Arc::new(serde_json::from_str(&io::read_to_string(file)?)?);
        *last = Some((stamp, Arc::clone(&state)));
        Ok(state)
    }

    /// Waits for the right to write.
    pub fn lock(&self) -> io::Result<WriteLock> {
        let file =
            OpenOptions::new().create(true).truncate(false).write(true).open(self.folder.join("lock"))?;
        loop {
            match flock(&file, FlockOperation::LockExclusive) {
                Err(rustix::io::Errno::INTR) => {}
                result => return result.map(|()| WriteLock { _file: file }).map_err(io::Error::from),
            }
        }
    }

    /// Replaces the document.
    pub fn write(&self, _lock: &WriteLock, state: &mut State) -> io::Result<()> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        state.written_ns = u64::try_from(now.as_nanos()).unwrap_or(0).max(state.written_ns + 1);
        let temporary = self.folder.join(".state.json.new");
        let mut file = File::create(&temporary)?;
        file.write_all(&serde_json::to_vec(state)?)?;
        file.set_modified(UNIX_EPOCH + Duration::from_nanos(state.written_ns))?;
        let stamp = stamp_of(&file.metadata()?);
        drop(file);
        fs::rename(&temporary, self.folder.join(DOCUMENT))?;
        // What was just written need not be read.
        let written = Some((stamp, Arc::new(state.clone())));
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = written;
        Ok(())
    }
}

fn stamp_of(metadata: &fs::Metadata) -> Stamp {
    (metadata.ino(), metadata.mtime(), metadata.mtime_nsec())
}
