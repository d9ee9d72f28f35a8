//! Mounts below the cluster's folders: volumes, root file systems, network
//! namespaces. They go before the folders do.

use std::fs;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_change, unmount};

/// Makes an empty folder in memory, with device nodes, from which containers may
/// follow what is mounted below it later. A machine's `/` allows that under
/// systemd, and only there.
pub(crate) fn in_memory(folder: &Path) -> Result<()> {
    detach(&[folder])?;
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    mount("tmpfs", folder, "tmpfs", MountFlags::empty(), c"mode=755")
        .and_then(|()| mount_change(folder, MountPropagationFlags::SHARED))
        .with_context(|| format!("cannot mount a file system in memory at {}", folder.display()))
}

/// Unmounts all at or below `folders`, the latest first.
///
/// Fails while one remains: deleting a folder would delete what is mounted in it.
pub(crate) fn detach(folders: &[&Path]) -> Result<()> {
    // A mount point may carry several mounts, each uncovered by the one above.
    for _ in 0..8 {
        let below = below(folders)?;
        if below.is_empty() {
            return Ok(());
        }
        for point in below.iter().rev() {
            // One that went with its parent is reported by the next listing.
            let _ = unmount(point, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW);
        }
    }
    let below = below(folders)?;
    let Some(first) = below.first() else { return Ok(()) };
    bail!("{} mounts remain, the first at {}", below.len(), first.display())
}

/// Mount points at or below `folders`, in the order of mounting.
pub(crate) fn below(folders: &[&Path]) -> Result<Vec<PathBuf>> {
    let text = fs::read_to_string("/proc/self/mountinfo").context("cannot list mounts")?;
    let points = text.lines().filter_map(|line| line.split(' ').nth(4)).map(unescape);
    Ok(points.filter(|point| folders.iter().any(|folder| point.starts_with(folder))).collect())
}

/// Undoes the `\ooo` by which the kernel spells blanks and backslashes.
fn unescape(field: &str) -> PathBuf {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field.as_bytes();
    while let Some((first, tail)) = rest.split_first() {
        let octal = tail.get(..3).and_then(|digits| std::str::from_utf8(digits).ok());
        match octal.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) if *first == b'\\' => {
                bytes.push(byte);
                rest = &tail[3..];
            }
            _ => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    std::ffi::OsString::from_vec(bytes).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_blank_in_a_mount_point_is_read_as_a_blank() {
        assert_eq!(unescape(r"/a\040b\134c"), Path::new(r"/a b\c"));
        assert_eq!(unescape("/123/45"), Path::new("/123/45"));
    }
}
