//! Who uses a device. Each holding client keeps an exclusive `flock` on a file
//! of its own in `clients/`: `<device UUID>.<n>`, for event sets
//! `<GPU UUID>.event.<n>`. The files are made by whoever makes the device.
//!
//! So a client needs neither a writable folder (a container's is read-only;
//! `flock` does not care) nor a PID that means the same on both sides, and the
//! kernel lets go when it dies. Who asks takes a shared lock for a moment:
//! askers do not disturb each other, and a holder that meets one takes the
//! next file.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::code::Code;

/// How many clients a device can have at once.
const SLOTS: usize = 8;

/// How a client uses a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// A process computes on it.
    Compute,
    /// An event set watches it, which keeps a GPU's mode from changing.
    Events,
}

impl Use {
    fn file(self, uuid: &str, slot: usize) -> String {
        match self {
            Self::Compute => format!("{uuid}.{slot}"),
            Self::Events => format!("{uuid}.event.{slot}"),
        }
    }
}

/// A device held until this is dropped or the process ends.
#[derive(Debug)]
pub struct Holding {
    _file: File,
}

/// A device that nobody holds and nobody can take, until this is dropped.
#[derive(Debug)]
pub struct Idle {
    _files: Vec<File>,
}

/// The `clients` folder of a state folder.
#[derive(Debug, Clone)]
pub struct Clients {
    folder: PathBuf,
}

impl Clients {
    /// The clients of a machine.
    pub fn new(state_folder: &Path) -> Self {
        Self { folder: state_folder.join("clients") }
    }

    /// Makes a device's files.
    pub fn prepare(&self, uuid: &str, uses: &[Use]) -> io::Result<()> {
        fs::create_dir_all(&self.folder)?;
        for file in uses.iter().flat_map(|kind| (0..SLOTS).map(|slot| kind.file(uuid, slot))) {
            File::options().create(true).append(true).open(self.folder.join(file))?;
        }
        Ok(())
    }

    /// Removes the files of devices that are gone.
    pub fn retain(&self, keep: impl Fn(&str) -> bool) -> io::Result<()> {
        for entry in fs::read_dir(&self.folder)? {
            let entry = entry?;
            let name = entry.file_name();
            let uuid = name.to_str().and_then(|name| name.split('.').next()).unwrap_or_default();
            if !keep(uuid) {
                fs::remove_file(entry.path())?;
            }
        }
        Ok(())
    }

    /// Removes the files of a MIG device that is gone.
    pub fn remove(&self, uuid: &str) -> io::Result<()> {
        for slot in 0..SLOTS {
            match fs::remove_file(self.folder.join(Use::Compute.file(uuid, slot))) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    /// Forgets all clients: what they hold is no longer a client file.
    pub fn drop_all(&self) -> io::Result<()> {
        self.retain(|_| false)
    }

    /// Holds a device.
    ///
    /// # Errors
    /// `NOT_FOUND` where it is gone, `INSUFFICIENT_RESOURCES` where it has as
    /// many clients as fit.
    pub fn hold(&self, uuid: &str, kind: Use) -> Result<Holding, Code> {
        for slot in 0..SLOTS {
            let Some(file) = open(&self.folder.join(kind.file(uuid, slot)))? else {
                return Err(Code::NOT_FOUND);
            };
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                // Its name may have been removed while it was being locked.
                Ok(()) if file.metadata()?.nlink() == 0 => return Err(Code::NOT_FOUND),
                Ok(()) => return Ok(Holding { _file: file }),
                Err(Errno::WOULDBLOCK) => {}
                Err(errno) => return Err(io::Error::from(errno).into()),
            }
        }
        Err(Code::INSUFFICIENT_RESOURCES)
    }

    /// Takes a device out of use.
    ///
    /// # Errors
    /// `IN_USE` while somebody holds it.
    pub fn idle(&self, uuid: &str, kind: Use) -> Result<Idle, Code> {
        let mut files = Vec::new();
        for slot in 0..SLOTS {
            let Some(file) = open(&self.folder.join(kind.file(uuid, slot)))? else { continue };
            match flock(&file, FlockOperation::NonBlockingLockShared) {
                Ok(()) => files.push(file),
                Err(Errno::WOULDBLOCK) => return Err(Code::IN_USE),
                Err(errno) => return Err(io::Error::from(errno).into()),
            }
        }
        Ok(Idle { _files: files })
    }

    /// The processes that hold a device, by their id in the caller's PID
    /// namespace. Those that have none there are not listed, as with NVML.
    pub fn pids(&self, uuid: &str, kind: Use) -> io::Result<Vec<u32>> {
        let mut inodes = Vec::new();
        for slot in 0..SLOTS {
            if let Some(file) = open(&self.folder.join(kind.file(uuid, slot)))?
                && flock(&file, FlockOperation::NonBlockingLockShared) == Err(Errno::WOULDBLOCK)
            {
                inodes.push(file.metadata()?.ino());
            }
        }
        if inodes.is_empty() {
            return Ok(Vec::new());
        }
        let locks = fs::read_to_string("/proc/locks")?;
        Ok(locks
            .lines()
            .filter_map(flock_holder)
            .filter(|(_, inode)| inodes.contains(inode))
            .map(|(pid, _)| pid)
            .collect())
    }
}

/// PID and inode of a `FLOCK` line of `/proc/locks`.
fn flock_holder(line: &str) -> Option<(u32, u64)> {
    let mut words = line.split_whitespace().skip(1);
    (words.next()? == "FLOCK").then_some(())?;
    let pid = words.nth(2)?.parse().ok().filter(|pid| *pid > 0)?;
    let inode = words.next()?.rsplit(':').next()?.parse().ok()?;
    Some((pid, inode))
}

fn open(path: &Path) -> io::Result<Option<File>> {
    match File::open(path) {
        Ok(file) => Ok(Some(file)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}
