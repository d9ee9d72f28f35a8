//! Files that are whole or not there: a killed `xtask` leaves no half of one.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};
use rustix::fs::{FlockOperation, flock};

/// Writes `path` through a neighbour and a rename, unless it says that already.
pub(crate) fn replace(path: &Path, content: &[u8]) -> Result<()> {
    if fs::read(path).is_ok_and(|old| old == content) {
        return Ok(());
    }
    let mut neighbour = path.as_os_str().to_owned();
    neighbour.push(".new");
    fs::write(&neighbour, content)
        .and_then(|()| fs::rename(&neighbour, path))
        .with_context(|| format!("cannot write {}", path.display()))
}

/// Removes a file or folder with all it holds; one that is not there is removed.
pub(crate) fn remove(path: &Path) -> Result<()> {
    let removed = match fs::symlink_metadata(path) {
        Ok(meta) if meta.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(error) => Err(error),
    };
    match removed {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

/// Held while the value lives; the kernel drops it with the process.
#[derive(Debug)]
pub(crate) struct Lock {
    _file: fs::File,
}

impl Lock {
    /// Waits until no other process holds `path`, a file that is made if need
    /// be, or a folder that is there.
    pub(crate) fn take(path: &Path) -> Result<Self> {
        let file = if path.is_dir() {
            fs::File::open(path)
        } else {
            if let Some(folder) = path.parent() {
                fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
            }
            fs::File::options().create(true).truncate(false).write(true).open(path)
        };
        let file = file.with_context(|| format!("cannot open {}", path.display()))?;
        if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
            eprintln!("waiting for another process that holds {}", path.display());
            flock(&file, FlockOperation::LockExclusive)
                .with_context(|| format!("cannot lock {}", path.display()))?;
        }
        Ok(Self { _file: file })
    }
}
