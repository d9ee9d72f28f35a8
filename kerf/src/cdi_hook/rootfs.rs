//! A container's root folder, seen from outside: every path is resolved by the
//! kernel as the container would (`RESOLVE_IN_ROOT`), on the root's own mount.

use std::fs::File;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Component, Path};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, RenameFlags, ResolveFlags};
use rustix::io::Errno;

/// Larger files are not what they should be: a loader's cache has some 24 bytes
/// and two names for a library, less than 200 KiB in all.
const MAX_FILE: u64 = 4 << 20;

/// A container's root folder.
#[derive(Debug)]
pub(super) struct Rootfs(OwnedFd);

impl Rootfs {
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let rootfs = Self(rustix::fs::open(path, flags, Mode::empty())?);
        match rootfs.open_at(Path::new("."), OFlags::PATH) {
            Err(Errno::NOSYS) => Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "the kernel has no openat2: Linux 5.6 or newer is needed",
            )),
            opened => opened.map(|_| rootfs).map_err(Into::into),
        }
    }

    /// Whether something is under a path.
    pub(super) fn has(&self, path: &Path) -> bool {
        self.open_at(path, OFlags::PATH).is_ok()
    }

    /// A file's content; none where there is none.
    ///
    /// Only a file is opened: to open a device may do something, and a FIFO
    /// tells whoever waits at its other end.
    pub(super) fn read(&self, path: &Path) -> io::Result<Option<Vec<u8>>> {
        let invalid = |why: &str| io::Error::new(io::ErrorKind::InvalidData, why);
        let found = match self.open_at(path, OFlags::PATH) {
            Err(Errno::NOENT) => return Ok(None),
            found => found?,
        };
        let is = rustix::fs::fstat(&found)?;
        if FileType::from_raw_mode(is.st_mode) != FileType::RegularFile {
            return Err(invalid("what is in its place is no file"));
        }
        // A second way by the path could end at another thing.
        let same = format!("/proc/self/fd/{}", found.as_raw_fd());
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = File::from(rustix::fs::open(same, flags, Mode::empty())?);
        let opened = rustix::fs::fstat(&file)?;
        if (opened.st_dev, opened.st_ino, opened.st_mode) != (is.st_dev, is.st_ino, is.st_mode) {
            return Err(invalid("it changed while it was opened"));
        }
        let mut content = Vec::new();
        if file.take(MAX_FILE + 1).read_to_end(&mut content)? as u64 > MAX_FILE {
            return Err(invalid("the file is larger than 4 MiB"));
        }
        Ok(Some(content))
    }

    /// Replaces a file, and makes the folders above it.
    pub(super) fn write(&self, path: &Path, content: &[u8]) -> io::Result<()> {
        self.replace(path, |folder, draft| {
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
            let mut file = File::from(rustix::fs::openat(folder, draft, flags, Mode::from_raw_mode(0o644))?);
            // The umask is the runtime's.
            file.set_permissions(std::os::unix::fs::PermissionsExt::from_mode(0o644))?;
            file.write_all(content)
        })
    }

    /// Makes a link, and the folders above it. A file or another link in its
    /// place is replaced; a folder is not.
    pub(super) fn link(&self, path: &Path, target: &str) -> io::Result<()> {
        if let (Ok(folder), Some(name)) = (self.folder(path.parent().unwrap_or(path)), path.file_name())
            && rustix::fs::readlinkat(&folder, name, Vec::new())
                .is_ok_and(|is| is.as_bytes() == target.as_bytes())
        {
            return Ok(());
        }
        self.replace(path, |folder, draft| Ok(rustix::fs::symlinkat(target, folder, draft)?))
    }

    /// Makes something under another name and renames it, so that nobody who
    /// shares the folder sees it half made.
    fn replace(&self, path: &Path, make: impl Fn(&OwnedFd, &str) -> io::Result<()>) -> io::Result<()> {
        self.replace_by(path, std::iter::repeat_with(draft_name).take(16), make)
    }

    /// The same by the first of some names that nothing has.
    fn replace_by(
        &self,
        path: &Path,
        drafts: impl Iterator<Item = String>,
        make: impl Fn(&OwnedFd, &str) -> io::Result<()>,
    ) -> io::Result<()> {
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let folder = self.folder(parent)?;
        for draft in drafts {
            let drafted = make(&folder, &draft);
            // Not ours: it stays.
            if drafted.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::AlreadyExists) {
                continue;
            }
            let flags = RenameFlags::empty();
            return drafted
                .and_then(|()| Ok(rustix::fs::renameat_with(&folder, draft.as_str(), &folder, name, flags)?))
                .inspect_err(|_| {
                    let _ = rustix::fs::unlinkat(&folder, draft.as_str(), AtFlags::empty());
                });
        }
        Err(io::ErrorKind::AlreadyExists.into())
    }

    /// A folder, made where it is not there.
    fn folder(&self, path: &Path) -> io::Result<OwnedFd> {
        let open = |path: &Path| self.open_at(path, OFlags::PATH | OFlags::DIRECTORY);
        let mut last = open(Path::new("."))?;
        let mut so_far = std::path::PathBuf::new();
        for component in path.components() {
            let Component::Normal(name) = component else { continue };
            so_far.push(name);
            last = match open(&so_far) {
                Err(Errno::NOENT) => {
                    rustix::fs::mkdirat(&last, name, Mode::from_raw_mode(0o755))?;
                    open(&so_far)?
                }
                folder => folder?,
            };
        }
        Ok(last)
    }

    fn open_at(&self, path: &Path, flags: OFlags) -> Result<OwnedFd, Errno> {
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS | ResolveFlags::NO_XDEV;
        // EAGAIN: something was renamed meanwhile, and the kernel is not sure.
        for _ in 0..32 {
            match rustix::fs::openat2(&self.0, path, flags | OFlags::CLOEXEC, Mode::empty(), resolve) {
                Err(Errno::AGAIN) => {}
                answer => return answer,
            }
        }
        Err(Errno::AGAIN)
    }
}

/// A name that nobody who made an image could guess. A process id would not do:
/// in a container's namespace every hook has the same few.
fn draft_name() -> String {
    format!(".kerf-{:016x}", RandomState::new().build_hasher().finish())
}

#[cfg(test)]
mod tests;
