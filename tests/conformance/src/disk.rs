//! A small disk under a folder of the driver's, which can be full.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Write as _};
use std::path::Path;

use anyhow::{Context as _, Result};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

/// What a folder is on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Disk {
    /// What it was on.
    Normal,
    /// An empty one of a megabyte.
    Small,
    /// That one, without any room.
    Full,
}

/// What the mount's source says, so that a later run knows it for its own.
const SOURCE: &str = "dra-conformance";

/// It takes the room.
const FILLER: &str = "dra-conformance-filler";

/// Makes the folder's disk so, from the state before it.
pub(crate) fn make(folder: &Path, disk: Disk) -> Result<()> {
    let filler = folder.join(FILLER);
    match disk {
        Disk::Normal => take_away(folder),
        Disk::Small if filler.exists() => {
            std::fs::remove_file(&filler).with_context(|| format!("cannot remove {}", filler.display()))
        }
        Disk::Small => mount(SOURCE, folder, "tmpfs", MountFlags::empty(), Some(c"size=1m"))
            .with_context(|| format!("cannot mount a tmpfs on {}", folder.display())),
        Disk::Full => fill(&filler).with_context(|| format!("cannot fill {}", folder.display())),
    }
}

fn take_away(folder: &Path) -> Result<()> {
    // What the driver has open there may be in use still.
    unmount(folder, UnmountFlags::DETACH).with_context(|| format!("cannot unmount {}", folder.display()))
}

/// Takes away small disks that a run has left which was killed.
pub(crate) fn reclaim(folder: &Path) -> Result<()> {
    // Where there is no folder there is no mount.
    let Ok(folder) = folder.canonicalize() else { return Ok(()) };
    while is_ours(&std::fs::read_to_string("/proc/self/mountinfo")?, &folder) {
        take_away(&folder).context("a run that was killed has left a small disk there")?;
    }
    Ok(())
}

/// Whether the uppermost mount on a folder is ours, see proc(5).
fn is_ours(mounts: &str, folder: &Path) -> bool {
    let mut path = folder.display().to_string();
    for (byte, escaped) in [('\\', "\\134"), (' ', "\\040"), ('\t', "\\011"), ('\n', "\\012")] {
        path = path.replace(byte, escaped);
    }
    let uppermost = mounts.lines().rfind(|line| line.split(' ').nth(4) == Some(&path));
    let source = uppermost.and_then(|line| line.split_once(" - ")?.1.split(' ').nth(1));
    source == Some(SOURCE)
}

fn fill(filler: &Path) -> Result<()> {
    let mut file = OpenOptions::new().append(true).create(true).open(filler)?;
    loop {
        match file.write_all(&[0; 4096]) {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::StorageFull => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}
