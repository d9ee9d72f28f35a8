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

/// It takes the room.
const FILLER: &str = "dra-conformance-filler";

/// Makes the folder's disk so, from the state before it.
pub(crate) fn make(folder: &Path, disk: Disk) -> Result<()> {
    let filler = folder.join(FILLER);
    match disk {
        Disk::Normal => {
            // What the driver has open there may be in use still.
            unmount(folder, UnmountFlags::DETACH)
                .with_context(|| format!("cannot unmount {}", folder.display()))
        }
        Disk::Small if filler.exists() => {
            std::fs::remove_file(&filler).with_context(|| format!("cannot remove {}", filler.display()))
        }
        Disk::Small => mount("tmpfs", folder, "tmpfs", MountFlags::empty(), Some(c"size=1m"))
            .with_context(|| format!("cannot mount a tmpfs on {}", folder.display())),
        Disk::Full => fill(&filler).with_context(|| format!("cannot fill {}", folder.display())),
    }
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
