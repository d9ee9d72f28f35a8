//! The files of sockets and the folders they are in, which others delete and
//! replace: who serves a socket watches, looks, and then waits. What stands in a
//! socket's place and cannot be removed is waited for too.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures::StreamExt;
use inotify::{EventStream, Inotify, WatchMask};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use tokio::net::UnixListener;
use tracing::warn;

use crate::disk::{Files, HostFiles};
use crate::server::ServeError;

/// How often a folder is made that somebody removes at the same time.
const ATTEMPTS: usize = 10;

/// A bound socket's file. It is removed with this value, unless another one has
/// its place by then.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    /// Device and inode: what identifies the file that was bound, as long as
    /// its listener is open. Absent if it was gone at once.
    identity: Option<(u64, u64)>,
}

impl SocketFile {
    /// Binds a socket. What another process left or made there is replaced: a
    /// file, or an empty folder; not a socket on which it still answers.
    pub fn bind(path: &Path) -> Result<(UnixListener, Self), ServeError> {
        let folder = path.parent().unwrap_or(Path::new("/"));
        let bind = || {
            if knock(path)?.is_some() {
                return Err(io::Error::new(io::ErrorKind::AddrInUse, "another process serves it"));
            }
            // One that a killed process left would refuse the bind.
            match HostFiles.remove(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            UnixListener::bind(path)
        };
        let listener =
            in_folder(folder, bind).map_err(|source| ServeError::Bind { path: path.to_owned(), source })?;
        Ok((listener, Self { path: path.to_owned(), identity: identity(path) }))
    }

    /// Whether whoever connects to the path comes to this socket.
    pub fn is_in_place(&self) -> bool {
        self.identity.is_some() && identity(&self.path) == self.identity
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if self.is_in_place() {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Removes what killed instances left beside a socket: files of the same kind,
/// told by the name up to its `@`, on which nobody answers. A kubelet tries dead
/// registration sockets for ever.
pub(crate) fn sweep(path: &Path) {
    let kind = |path: &Path| {
        let name = path.file_name()?.to_str()?;
        name.split_once('@').map(|(kind, _)| kind.to_owned())
    };
    let Some(ours) = kind(path) else { return };
    let Some(Ok(entries)) = path.parent().map(fs::read_dir) else { return };
    for other in entries.flatten().map(|entry| entry.path()).filter(|other| other != path) {
        let is_of_kind = kind(&other).is_some_and(|kind| kind == ours);
        let is_socket = || fs::symlink_metadata(&other).is_ok_and(|found| found.file_type().is_socket());
        if is_of_kind && is_socket() && knock(&other).is_ok_and(|answer| answer.is_none()) {
            let _ = fs::remove_file(&other);
        }
    }
}

/// Connects to a socket without waiting: nothing where nobody listens, no
/// connection where whoever listens takes none now.
///
/// # Errors
/// It cannot be told whether somebody listens.
pub fn knock(path: &Path) -> io::Result<Option<Option<UnixStream>>> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    match SocketAddrUnix::new(path).and_then(|address| connect(&socket, &address)) {
        Ok(()) => Ok(Some(Some(UnixStream::from(socket)))),
        Err(Errno::AGAIN) => Ok(Some(None)),
        // The last two are no paths on which the kubelet could be served.
        Err(Errno::NOENT | Errno::CONNREFUSED | Errno::PROTOTYPE | Errno::NAMETOOLONG) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    fs::symlink_metadata(path).ok().map(|metadata| inode(&metadata))
}

/// Device and inode: which file it is, whatever its name.
pub(crate) fn inode(metadata: &fs::Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

/// How often folders are looked at that cannot be watched: a user may have only
/// so many inotify instances and watches.
const UNWATCHED: Duration = Duration::from_secs(2);

/// The folders of sockets, and what happens to the files in them.
#[derive(Debug)]
pub struct SocketFolders {
    folders: Vec<PathBuf>,
    events: Option<EventStream<[u8; 4096]>>,
}

impl SocketFolders {
    /// Some folders, not watched yet.
    pub fn new(folders: Vec<PathBuf>) -> Self {
        let events = Inotify::init().and_then(|inotify| inotify.into_event_stream([0; 4096]));
        let events = events.inspect_err(|error| {
            warn!(%error, "folders of sockets are looked at on a timer, as they cannot be watched");
        });
        Self { folders, events: events.ok() }
    }

    /// Waits until something happens in folders, at most for a while.
    pub async fn changed_within(most: Duration, folders: Vec<PathBuf>) {
        let changed = async {
            let mut folders = Self::new(folders);
            folders.watch()?;
            folders.changed().await
        };
        let wait = async {
            if changed.await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        let _ = tokio::time::timeout(most, wait).await;
    }

    /// Watches the folders that have these paths now; those that are gone are
    /// made anew. What happens from here on ends [`SocketFolders::changed`], so
    /// that who looks after this call misses nothing.
    pub fn watch(&mut self) -> Result<(), ServeError> {
        let mask = WatchMask::CREATE
            | WatchMask::DELETE
            | WatchMask::MOVED_FROM
            | WatchMask::MOVED_TO
            | WatchMask::DELETE_SELF
            | WatchMask::MOVE_SELF;
        let Some(events) = &mut self.events else { return Ok(()) };
        let mut watches = events.watches();
        for folder in &self.folders {
            // One that is watched already stays so.
            match in_folder(folder, || watches.add(folder, mask)) {
                Ok(_) => {}
                // All watches of the user are taken.
                Err(error) if error.kind() == io::ErrorKind::StorageFull => {
                    warn!(folder = %folder.display(), "the folder is looked at on a timer, as no watch is left");
                    self.events = None;
                    return Ok(());
                }
                Err(source) => return Err(unwatched(Some(folder), source)),
            }
        }
        Ok(())
    }

    /// Returns when something happened in the folders, or to them.
    pub async fn changed(&mut self) -> Result<(), ServeError> {
        let Some(events) = &mut self.events else {
            tokio::time::sleep(UNWATCHED).await;
            return Ok(());
        };
        let source = match events.next().await {
            Some(Ok(_)) => return Ok(()),
            Some(Err(source)) => source,
            None => io::ErrorKind::UnexpectedEof.into(),
        };
        Err(unwatched(self.folders.first(), source))
    }
}

fn unwatched(folder: Option<&PathBuf>, source: io::Error) -> ServeError {
    ServeError::Watch { path: folder.cloned().unwrap_or_default(), source }
}

/// Makes a folder and does what needs it.
fn in_folder<T>(folder: &Path, mut work: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let mut attempt = || fs::create_dir_all(folder).and_then(|()| work());
    for _ in 1..ATTEMPTS {
        match attempt() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            done => return done,
        }
    }
    attempt()
}
