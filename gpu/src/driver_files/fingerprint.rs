//! What tells that the driver's folders hold the same files as before.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::places;
use crate::roots::resolve_in;

/// The identity and time of a folder; none where there is none.
type Stamp = Option<(u64, u64, i64, i64)>;

/// The folders of a driver, and what they were like: a file that comes, goes
/// or is replaced changes its folder's time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fingerprint {
    folders: Vec<(PathBuf, Stamp)>,
    /// Whether the last change is long enough ago that the next one shows.
    settled: bool,
}

/// File systems tell time by the kernel's tick, at most 10 ms; two changes
/// within one look like one.
const TICK: Duration = Duration::from_millis(50);

impl Fingerprint {
    /// Of the folders under a driver root. To be taken before the files are
    /// looked for: what changes meanwhile is then found next time.
    pub(crate) fn of(driver: &Path, version: &str) -> Self {
        let mut folders = BTreeSet::new();
        let mut absent = BTreeSet::new();
        folders.extend(places::folders_beside(version).filter_map(|folder| resolve_in(driver, &folder)));
        for folder in places::folders() {
            match resolve_in(driver, &folder) {
                Some(resolved) => folders.insert(resolved),
                None => absent.insert(folder),
            };
        }
        // A folder that comes changes the first one above it that there is.
        absent.retain(|folder| {
            let above = folder.ancestors().skip(1).find_map(|above| resolve_in(driver, above));
            above.is_none_or(|above| !folders.contains(&above))
        });
        let stamped = folders.into_iter().chain(absent).map(|folder| {
            let path = driver.join(folder);
            let stamp = stamp(&path);
            (path, stamp)
        });
        let folders: Vec<_> = stamped.collect();
        let now = SystemTime::now();
        // One of the future was set, or the clock was: it says nothing of now.
        let is_fresh = |path: &PathBuf| {
            let modified = path.metadata().and_then(|metadata| metadata.modified());
            modified.is_ok_and(|modified| now.duration_since(modified).is_ok_and(|age| age < TICK))
        };
        Self { settled: !folders.iter().any(|(path, _)| is_fresh(path)), folders }
    }

    /// Whether nothing has changed. It costs a call of the system for each
    /// folder, where finding the files costs many hundreds.
    pub(crate) fn is_current(&self) -> bool {
        self.settled && self.folders.iter().all(|(path, was)| stamp(path) == *was)
    }
}

fn stamp(path: &Path) -> Stamp {
    let metadata = path.metadata().ok()?;
    Some((metadata.dev(), metadata.ino(), metadata.mtime(), metadata.mtime_nsec()))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    const VERSION: &str = "580.95.05";

    /// A host as Ubuntu lays it out.
    fn tree() -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a folder");
        for folder in ["usr/lib/x86_64-linux-gnu", "usr/bin", "usr/sbin", "usr/local/lib", "usr/local/bin"] {
            fs::create_dir_all(root.path().join(folder)).expect("a folder");
        }
        for folder in ["etc/alternatives", "usr/share", "run/nvidia-persistenced"] {
            fs::create_dir_all(root.path().join(folder)).expect("a folder");
        }
        for (link, target) in [("lib", "usr/lib"), ("bin", "usr/bin"), ("sbin", "usr/sbin")] {
            symlink(target, root.path().join(link)).expect("a link");
        }
        root
    }

    /// Makes all folders old: the clock of file systems is coarse, and two
    /// changes within one tick of it look like one.
    fn fingerprint(root: &Path) -> Fingerprint {
        let fingerprint = Fingerprint::of(root, VERSION);
        for (path, stamp) in &fingerprint.folders {
            if stamp.is_some() {
                let folder = fs::File::open(path).expect("a folder");
                folder.set_modified(std::time::UNIX_EPOCH).expect("another time");
            }
        }
        Fingerprint::of(root, VERSION)
    }

    #[test]
    fn whatever_comes_goes_or_is_replaced_is_noticed() {
        let root = tree();
        let files = [
            "usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05",
            "usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.1",
            "usr/lib64/libcuda.so.1",
            "usr/bin/nvidia-smi",
            "etc/alternatives/nvidia",
            "run/nvidia-persistenced/socket",
            "run/nvidia-fabricmanager/socket",
        ];
        for file in files {
            let path = root.path().join(file);
            let before = fingerprint(root.path());
            assert!(before.is_current());
            fs::create_dir_all(path.parent().expect("a parent")).expect("a folder");
            fs::write(&path, "x").expect("a file");
            assert!(!before.is_current(), "{file} came");
            let before = fingerprint(root.path());
            fs::rename(&path, path.with_extension("old")).expect("another name");
            assert!(!before.is_current(), "{file} went");
        }
        let firmware = root.path().join("usr/lib/firmware/nvidia").join(VERSION);
        fs::create_dir_all(&firmware).expect("a folder");
        let before = fingerprint(root.path());
        fs::remove_dir(&firmware).expect("no folder");
        assert!(!before.is_current(), "the firmware went");
    }

    #[test]
    fn a_change_of_this_moment_may_hide_another_one() {
        let root = tree();
        let fresh = Fingerprint::of(root.path(), VERSION);
        assert!(!fresh.is_current());
        let mut settled = fingerprint(root.path());
        assert!(settled.is_current());
        // A clock that was wrong once must not cost every prepare a search.
        let path = root.path().join("usr/bin");
        let future = SystemTime::now() + Duration::from_hours(1);
        fs::File::open(path).expect("a folder").set_modified(future).expect("another time");
        assert!(!settled.is_current());
        settled = Fingerprint::of(root.path(), VERSION);
        assert!(settled.is_current());
    }

    #[test]
    fn it_asks_for_each_folder_once_and_not_for_those_below_a_missing_one() {
        let root = tree();
        let folders = Fingerprint::of(root.path(), VERSION).folders;
        let names: Vec<_> = folders
            .iter()
            .filter(|(_, stamp)| stamp.is_some())
            .map(|(path, _)| path.strip_prefix(root.path()).expect("below the root").display().to_string())
            .collect();
        let expected = [
            "etc/alternatives",
            "run/nvidia-persistenced",
            "usr/bin",
            "usr/lib",
            "usr/lib/x86_64-linux-gnu",
            "usr/local/bin",
            "usr/local/lib",
            "usr/sbin",
        ];
        assert_eq!(names, expected);
        let below = |folder: &str| folders.iter().any(|(path, _)| path.ends_with(folder));
        assert!(!below("aarch64-linux-gnu") && !below("nvidia/current"), "{folders:?}");
        assert_eq!(folders.len() - names.len(), 5, "{folders:?}");
    }
}
