//! A container's root folder, seen from outside: every path is resolved by the
//! kernel as the container would (`RESOLVE_IN_ROOT`), on the root's own mount.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::path::{Component, Path};

use rustix::fs::{AtFlags, Mode, OFlags, RenameFlags, ResolveFlags};
use rustix::io::Errno;

/// Larger files are not what they should be.
const MAX_FILE: u64 = 64 << 20;

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
    pub(super) fn read(&self, path: &Path) -> io::Result<Option<Vec<u8>>> {
        // A FIFO in its place must not keep the container from starting.
        let file = match self.open_at(path, OFlags::RDONLY | OFlags::NONBLOCK) {
            Err(Errno::NOENT) => return Ok(None),
            file => File::from(file?),
        };
        let mut content = Vec::new();
        if !file.metadata()?.is_file() || file.take(MAX_FILE + 1).read_to_end(&mut content)? as u64 > MAX_FILE
        {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "it is no file, or one of over 64 MiB"));
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
    fn replace(&self, path: &Path, make: impl FnOnce(&OwnedFd, &str) -> io::Result<()>) -> io::Result<()> {
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let folder = self.folder(parent)?;
        let draft = format!(".kerf-{}", std::process::id());
        let remove = || rustix::fs::unlinkat(&folder, draft.as_str(), AtFlags::empty());
        let _ = remove();
        make(&folder, &draft)
            .and_then(|()| {
                let flags = RenameFlags::empty();
                Ok(rustix::fs::renameat_with(&folder, draft.as_str(), &folder, name, flags)?)
            })
            .inspect_err(|_| {
                let _ = remove();
            })
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

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::path::PathBuf;

    use super::*;

    /// A root with a neighbour that nothing in it may reach.
    fn root() -> (tempfile::TempDir, PathBuf, Rootfs) {
        let folder = tempfile::tempdir().expect("a folder");
        let root = folder.path().join("root");
        fs::create_dir(&root).expect("a folder");
        fs::create_dir(folder.path().join("outside")).expect("a folder");
        let rootfs = Rootfs::open(&root).expect("a root");
        (folder, root, rootfs)
    }

    #[test]
    fn links_are_made_below_folders_that_were_not_there() {
        let (_folder, root, rootfs) = root();
        for _ in 0..2 {
            rootfs.link(Path::new("/usr/lib64/libcuda.so.1"), "libcuda.so.580.1").expect("a link");
        }
        let link = fs::read_link(root.join("usr/lib64/libcuda.so.1")).expect("a link");
        assert_eq!(link, Path::new("libcuda.so.580.1"));
        fs::write(root.join("usr/lib64/libcuda.so"), "a stub").expect("a file");
        rootfs.link(Path::new("/usr/lib64/libcuda.so"), "libcuda.so.1").expect("a link");
        assert_eq!(
            fs::read_link(root.join("usr/lib64/libcuda.so")).expect("a link"),
            Path::new("libcuda.so.1")
        );
        assert_eq!(fs::read_dir(root.join("usr/lib64")).expect("a folder").count(), 2, "a draft is left");
    }

    #[test]
    fn a_merged_usr_is_followed() {
        let (_folder, root, rootfs) = root();
        fs::create_dir_all(root.join("usr/lib64")).expect("a folder");
        symlink("/usr/lib64", root.join("lib64")).expect("a link");
        rootfs.link(Path::new("/lib64/libcuda.so.1"), "libcuda.so.580.1").expect("a link");
        assert!(root.join("usr/lib64/libcuda.so.1").is_symlink());
    }

    #[test]
    fn nothing_outside_the_root_is_ever_written_or_read() {
        let (folder, root, rootfs) = root();
        let outside = folder.path().join("outside");
        fs::write(outside.join("ld.so.cache"), "secret").expect("a file");
        let attacks = [outside.display().to_string(), "../outside".to_owned(), "/proc/self/cwd".to_owned()];
        for (number, target) in attacks.iter().enumerate() {
            let etc = format!("etc{number}");
            symlink(target, root.join(&etc)).expect("a link");
            symlink(outside.join("ld.so.cache"), root.join(format!("file{number}"))).expect("a link");
            let in_etc = Path::new(&etc).join("ld.so.cache");
            assert!(!rootfs.has(&in_etc));
            assert_eq!(rootfs.read(&in_etc).ok().flatten(), None);
            assert_eq!(rootfs.read(Path::new(&format!("file{number}"))).ok().flatten(), None);
            let _ = rootfs.write(&in_etc, b"mine");
            let _ = rootfs.link(&Path::new(&etc).join("libcuda.so.1"), "mine");
            // A link in the place of a file is replaced, not written through.
            rootfs.write(Path::new(&format!("file{number}")), b"mine").expect("a file");
            rootfs.link(Path::new("../../../outside/ld.so.cache"), "mine").expect("a link in the root");
        }
        assert_eq!(fs::read_to_string(outside.join("ld.so.cache")).expect("a file"), "secret");
        assert_eq!(fs::read_dir(&outside).expect("a folder").count(), 1, "something was made outside");
    }

    #[test]
    fn loops_folders_and_fifos_in_the_way_are_errors() {
        let (_folder, root, rootfs) = root();
        symlink("loop", root.join("loop")).expect("a link");
        assert!(rootfs.link(Path::new("/loop/libcuda.so.1"), "x").is_err());
        fs::create_dir_all(root.join("lib/libcuda.so.1/kept")).expect("a folder");
        assert!(rootfs.link(Path::new("/lib/libcuda.so.1"), "x").is_err());
        assert!(root.join("lib/libcuda.so.1/kept").is_dir());
        rustix::fs::mknodat(
            rustix::fs::CWD,
            root.join("fifo"),
            rustix::fs::FileType::Fifo,
            Mode::from_raw_mode(0o644),
            0,
        )
        .expect("a FIFO");
        assert_eq!(rootfs.read(Path::new("fifo")).expect_err("no file").kind(), io::ErrorKind::InvalidData);
    }
}
