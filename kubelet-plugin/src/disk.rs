//! The one way to state and CDI files: everything that must survive a crash is
//! written and removed through [`Disk`].
//!
//! A file is replaced by writing a temporary one beside it and `rename`: a
//! reader, or a start after a crash, sees the old content or the new, never
//! half of one. What is synced decides what a power cut may do to it
//! ([`Durability`]).
//!
//! [`Files`] is what of the operating system that needs; tests put a disk there
//! that dies or loses what was not synced.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::OFlags;
use rustix::io::Errno;

/// The calls of the operating system that [`Disk`] is made of.
pub trait Files: Send + Sync + fmt::Debug {
    /// A file's content.
    fn read(&self, path: &Path) -> io::Result<Vec<u8>>;

    /// The names in a folder; none where there is no such folder.
    fn list(&self, folder: &Path) -> io::Result<Vec<String>>;

    /// Makes a folder and those above it.
    fn create_folder(&self, folder: &Path) -> io::Result<()>;

    /// Writes a file.
    fn write(&self, path: &Path, content: &[u8], mode: u32) -> io::Result<()>;

    /// Writes a file, and returns when its content cannot be lost any more.
    fn write_synced(&self, path: &Path, content: &[u8], mode: u32) -> io::Result<()>;

    /// Gives a file another name in the same folder, or another folder of the
    /// same file system; what had that name is replaced: a file, or an empty
    /// folder.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Removes a file, or an empty folder in its place.
    fn remove(&self, path: &Path) -> io::Result<()>;

    /// Returns when the names in a folder cannot be lost any more.
    fn sync_folder(&self, folder: &Path) -> io::Result<()>;
}

/// No file of ours is near this.
const MAX_CONTENT: u64 = 16 << 20;

/// Whether an error of a reading tells that something else than a file of ours
/// is there.
pub(crate) fn is_no_file(error: &io::Error) -> bool {
    [Errno::ISDIR, Errno::NXIO, Errno::FBIG].iter().any(|fault| is(error, *fault))
}

/// Whether an error is this one.
pub(crate) fn is(error: &io::Error, fault: Errno) -> bool {
    error.raw_os_error() == Some(fault.raw_os_error())
}

/// The machine's own files.
#[derive(Debug, Clone, Copy, Default)]
pub struct HostFiles;

impl Files for HostFiles {
    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        // A pipe would be waited for until somebody writes to it.
        let flags = (OFlags::NONBLOCK | OFlags::CLOEXEC).bits().cast_signed();
        let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
        let kind = file.metadata()?.file_type();
        if !kind.is_file() && !kind.is_dir() {
            return Err(Errno::NXIO.into());
        }
        let mut content = Vec::new();
        file.take(MAX_CONTENT + 1).read_to_end(&mut content)?;
        if content.len() as u64 > MAX_CONTENT { Err(Errno::FBIG.into()) } else { Ok(content) }
    }

    fn list(&self, folder: &Path) -> io::Result<Vec<String>> {
        let entries = match fs::read_dir(folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        entries
            .filter_map(|entry| entry.map(|entry| entry.file_name().into_string().ok()).transpose())
            .collect()
    }

    fn create_folder(&self, folder: &Path) -> io::Result<()> {
        fs::create_dir_all(folder)
    }

    fn write(&self, path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
        written(path, content, mode).map(|_| ())
    }

    fn write_synced(&self, path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
        written(path, content, mode)?.sync_data()
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        match fs::rename(from, to) {
            Err(error) if error.kind() == io::ErrorKind::IsADirectory => {
                fs::remove_dir(to).and_then(|()| fs::rename(from, to))
            }
            renamed => renamed,
        }
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        match fs::remove_file(path) {
            Err(error) if error.kind() == io::ErrorKind::IsADirectory => fs::remove_dir(path),
            removed => removed,
        }
    }

    fn sync_folder(&self, folder: &Path) -> io::Result<()> {
        File::open(folder)?.sync_all()
    }
}

/// Writes a file that is not there. What a crash left in its place is removed,
/// and a link that somebody put there: neither is ever written to.
fn written(path: &Path, content: &[u8], mode: u32) -> io::Result<File> {
    let make = || OpenOptions::new().write(true).create_new(true).mode(mode).open(path);
    let mut file = match make() {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            HostFiles.remove(path)?;
            make()
        }
        file => file,
    }?;
    file.write_all(content)?;
    Ok(file)
}

/// What a power cut may do to a write that has returned. What a killed process
/// wrote is there in any case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Durability {
    /// Nothing: the new content is there. For what describes things that
    /// outlive the boot.
    Durable,
    /// The old content may be back, whole. For what describes one boot, which
    /// a power cut ends together with the hardware described.
    Ordered,
    /// The content may be lost. For what is made anew at every start.
    Derived,
}

/// Files that are replaced and removed whole.
#[derive(Debug, Clone)]
pub(crate) struct Disk {
    files: Arc<dyn Files>,
}

/// What marks a temporary file, before and after the name it will get.
const TEMPORARY: (&str, &str) = (".", ".tmp");

impl Disk {
    /// A disk over these calls.
    pub(crate) fn new(files: Arc<dyn Files>) -> Self {
        Self { files }
    }

    /// A file's content; absent where there is none.
    pub(crate) fn read(&self, path: &Path) -> io::Result<Option<Vec<u8>>> {
        match self.files.read(path) {
            Ok(content) => Ok(Some(content)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The names of the complete files in a folder, in order.
    pub(crate) fn list(&self, folder: &Path) -> io::Result<Vec<String>> {
        let mut names = self.files.list(folder)?;
        names.retain(|name| !name.starts_with('.'));
        names.sort_unstable();
        Ok(names)
    }

    /// Makes a folder.
    pub(crate) fn create_folder(&self, folder: &Path) -> io::Result<()> {
        self.files.create_folder(folder)
    }

    /// Replaces a file, or makes it. Whoever calls this is the only one that
    /// writes that file at the time.
    pub(crate) fn replace(
        &self,
        folder: &Path,
        name: &str,
        content: &[u8],
        mode: u32,
        durability: Durability,
    ) -> io::Result<()> {
        let temporary = folder.join(format!("{}{name}{}", TEMPORARY.0, TEMPORARY.1));
        let write = || {
            match durability {
                Durability::Durable | Durability::Ordered => {
                    self.files.write_synced(&temporary, content, mode)?;
                }
                Durability::Derived => self.files.write(&temporary, content, mode)?,
            }
            self.files.rename(&temporary, &folder.join(name))
        };
        let written = match write() {
            // Somebody removed the folder.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.files.create_folder(folder).and_then(|()| write())
            }
            written => written,
        };
        if written.is_err() {
            // What is left of it is swept at the next start at the latest.
            let _ = self.files.remove(&temporary);
            return written;
        }
        match durability {
            Durability::Durable => self.files.sync_folder(folder),
            Durability::Ordered | Durability::Derived => Ok(()),
        }
    }

    /// Removes a file; whether there was one. It may have been removed before
    /// without the folder being synced, so that is done in any case.
    pub(crate) fn remove(&self, folder: &Path, name: &str, durability: Durability) -> io::Result<bool> {
        let removed = self.unlink(folder, name)?;
        match durability {
            Durability::Durable => self.sync(folder)?,
            Durability::Ordered | Durability::Derived => {}
        }
        Ok(removed)
    }

    /// Removes a file as far as whoever looks can tell; whether there was one.
    pub(crate) fn unlink(&self, folder: &Path, name: &str) -> io::Result<bool> {
        match self.files.remove(&folder.join(name)) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Returns when what was removed from a folder cannot come back.
    pub(crate) fn sync(&self, folder: &Path) -> io::Result<()> {
        match self.files.sync_folder(folder) {
            // Nothing comes back into a folder that is not there.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            synced => synced,
        }
    }

    /// Moves a file into another folder, which is made if needed, as far as
    /// whoever looks can tell.
    pub(crate) fn move_to(&self, folder: &Path, name: &str, to: &Path) -> io::Result<()> {
        self.files.create_folder(to)?;
        self.files.rename(&folder.join(name), &to.join(name))
    }

    /// Removes the temporary files that a crash left whose final name begins
    /// with a prefix. Nobody may be writing such files at the time.
    pub(crate) fn sweep(&self, folder: &Path, prefix: &str) -> io::Result<()> {
        for name in self.files.list(folder)? {
            let target = name.strip_prefix(TEMPORARY.0).and_then(|name| name.strip_suffix(TEMPORARY.1));
            if target.is_some_and(|target| target.starts_with(prefix)) {
                match self.files.remove(&PathBuf::from(folder).join(name)) {
                    // A folder with something in it is somebody else's.
                    Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {}
                    removed => removed?,
                }
            }
        }
        Ok(())
    }
}
