//! Which of a node's instances publishes: the youngest.
//!
//! In a rolling update the new instance starts while the former still serves.
//! Both answer the kubelet; only one may describe the node and write what it
//! published, or they would undo each other's slices.
//!
//! Each instance has a numbered file in `state/instances/`, locked as long as
//! it lives; whoever sees a locked one of a higher number hands over. The lock
//! on `publisher` is what is handed over: it is free when the former has
//! stopped writing, and when it was killed.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use tracing::info;

use crate::plugin::blocking;
use crate::server::ServeError;
use crate::socket::{SocketFolders, inode};

/// Locked while a number is drawn.
const DRAWING: &str = ".drawing";
/// Locked by who publishes.
const PUBLISHER: &str = ".publisher";

/// This process among the instances of its node.
#[derive(Debug)]
pub struct Instances {
    folder: PathBuf,
    own: Numbered,
    events: SocketFolders,
}

/// The right to publish, until it is dropped.
#[derive(Debug)]
pub struct Lead {
    _lock: File,
}

/// Whether a process has others beside it.
#[derive(Debug, Clone)]
pub struct Others {
    folder: PathBuf,
}

impl Others {
    /// Whether another instance lives; also where that cannot be told.
    pub(crate) fn are_there(&self) -> bool {
        // One of them is this one.
        living_above(&self.folder, 0).map_or(true, |living| living.len() > 1)
    }
}

/// An instance's file. Others take it for alive while this value lives.
#[derive(Debug)]
struct Numbered {
    number: u64,
    file: File,
}

impl Instances {
    /// Joins the instances of a plugin's folder, as the youngest.
    ///
    /// # Errors
    /// The folder cannot be written or watched.
    pub fn join(plugin_dir: &Path) -> Result<Self, ServeError> {
        let folder = plugin_dir.join("state/instances");
        let own = Numbered::draw(&folder).map_err(|source| unusable(&folder, source))?;
        let events = SocketFolders::new(vec![folder.clone()]);
        Ok(Self { folder, own, events })
    }

    /// Waits until this is the youngest instance and nobody else publishes.
    ///
    /// # Errors
    /// The folder cannot be used.
    pub async fn lead(&mut self) -> Result<Lead, ServeError> {
        let folder = self.folder.clone();
        let failed = |source| unusable(&folder, source);
        loop {
            self.rejoin().map_err(failed)?;
            if let Some(younger) = self.younger().map_err(failed)?.pop() {
                // Ends when that instance does.
                wait_for(younger, FlockOperation::LockShared).await.map_err(failed)?;
                continue;
            }
            let lock = open(&self.folder.join(PUBLISHER)).map_err(failed)?;
            let lock = wait_for(lock, FlockOperation::LockExclusive).await.map_err(failed)?;
            if self.is_youngest().map_err(failed)? {
                return Ok(Lead { _lock: lock });
            }
        }
    }

    /// Returns when a younger instance wants to publish.
    ///
    /// # Errors
    /// The folder cannot be used.
    pub async fn overtaken(&mut self) -> Result<(), ServeError> {
        loop {
            self.events.watch()?;
            if !self.is_youngest().map_err(|source| unusable(&self.folder, source))? {
                info!("a younger instance takes over publishing");
                return Ok(());
            }
            self.events.changed().await?;
        }
    }

    /// The other instances.
    pub fn others(&self) -> Others {
        Others { folder: self.folder.clone() }
    }

    /// Whether nobody younger is there, and others see this one.
    fn is_youngest(&self) -> io::Result<bool> {
        Ok(self.own.is_in_place(&self.folder) && self.younger()?.is_empty())
    }

    /// Draws another number where somebody removed the file.
    fn rejoin(&mut self) -> io::Result<()> {
        if !self.own.is_in_place(&self.folder) {
            self.own = Numbered::draw(&self.folder)?;
        }
        Ok(())
    }

    /// The files of the younger instances that live.
    fn younger(&self) -> io::Result<Vec<File>> {
        living_above(&self.folder, self.own.number)
    }
}

impl Numbered {
    fn draw(folder: &Path) -> io::Result<Self> {
        fs::create_dir_all(folder)?;
        let drawing = open(&folder.join(DRAWING))?;
        flock(&drawing, FlockOperation::LockExclusive)?;
        let mut highest = 0;
        for number in numbers(folder)? {
            highest = highest.max(number);
            let path = folder.join(number.to_string());
            if living(&path)?.is_none() {
                // What stays is not alive the next time either.
                let _ = fs::remove_file(path);
            }
        }
        let number = highest.saturating_add(1);
        // It has its name only when it is locked: whoever sees it sees it alive.
        let draft = folder.join(".draft");
        let file = open(&draft)?;
        flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        fs::rename(draft, folder.join(number.to_string()))?;
        Ok(Self { number, file })
    }

    fn is_in_place(&self, folder: &Path) -> bool {
        let there = fs::symlink_metadata(folder.join(self.number.to_string()));
        let own = self.file.metadata();
        there.is_ok_and(|there| own.is_ok_and(|own| inode(&there) == inode(&own)))
    }
}

fn numbers(folder: &Path) -> io::Result<Vec<u64>> {
    let mut numbers = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        let number = name.to_str().and_then(|name| name.parse::<u64>().ok());
        // Names that are written otherwise are nobody's, and so are folders.
        let is_written_so = |number: &u64| name == *number.to_string();
        let is_file = entry.file_type().is_ok_and(|kind| kind.is_file());
        numbers.extend(number.filter(is_written_so).filter(|_| is_file));
    }
    Ok(numbers)
}

/// The files of the instances that live, of those with a higher number.
fn living_above(folder: &Path, number: u64) -> io::Result<Vec<File>> {
    let above = numbers(folder)?.into_iter().filter(|found| *found > number);
    above.filter_map(|number| living(&folder.join(number.to_string())).transpose()).collect()
}

/// An instance's file, if that instance lives.
fn living(path: &Path) -> io::Result<Option<File>> {
    let file = match OpenOptions::new().write(true).open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    match flock(&file, FlockOperation::NonBlockingLockShared) {
        Ok(()) => Ok(None),
        Err(Errno::WOULDBLOCK) => Ok(Some(file)),
        Err(error) => Err(error.into()),
    }
}

async fn wait_for(file: File, lock: FlockOperation) -> io::Result<File> {
    let waited = blocking(move || flock(&file, lock).map(|()| file));
    Ok(waited.await.ok_or_else(|| io::Error::other("the thread that waited panicked"))??)
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path)
}

fn unusable(folder: &Path, source: io::Error) -> ServeError {
    ServeError::Instances { path: folder.to_owned(), source }
}
