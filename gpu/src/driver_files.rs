//! The driver's libraries and programs: where the driver root has them, and
//! where a container sees them.
//!
//! A library is mounted under the path it has below the driver root, where the
//! dynamic loader of a container of the same layout finds it, once under its
//! versioned name and once under its SONAME. Files of another driver version
//! (left over from an upgrade) are not taken. It never opens a file.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use kerf_dra_driver::hardware::{DriverFile, DriverFiles};

use crate::roots::{Roots, resolve_in};

/// Folders of libraries, in the order in which they are searched: Debian's,
/// then RHEL's, then what a driver container or a bare tree may have.
const LIBRARY_FOLDERS: &[&str] = &[
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "usr/lib",
    "lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
    "lib64",
    "lib",
    "usr/lib/x86_64-linux-gnu/nvidia/current",
    "usr/lib/aarch64-linux-gnu/nvidia/current",
];

const PROGRAM_FOLDERS: &[&str] = &["usr/bin", "usr/sbin", "bin", "sbin"];

/// Where links of the folders above may lead on, and be turned.
const LINK_FOLDERS: &[&str] = &["etc/alternatives"];

/// Libraries that compute needs, with the number at the end of their SONAME;
/// none where the SONAME is the versioned name itself.
const LIBRARIES: &[(&str, Option<u32>)] = &[
    ("libnvidia-ml", Some(1)),
    ("libcuda", Some(1)),
    ("libcudadebugger", Some(1)),
    ("libnvcuvid", Some(1)),
    ("libnvidia-allocator", Some(1)),
    ("libnvidia-cfg", Some(1)),
    ("libnvidia-encode", Some(1)),
    ("libnvidia-gpucomp", None),
    ("libnvidia-nvvm", Some(4)),
    ("libnvidia-nvvm70", Some(4)),
    ("libnvidia-opencl", Some(1)),
    ("libnvidia-opticalflow", Some(1)),
    ("libnvidia-pkcs11", None),
    ("libnvidia-pkcs11-openssl3", None),
    ("libnvidia-ptxjitcompiler", Some(1)),
    ("libnvidia-sandboxutils", Some(1)),
];

const PROGRAMS: &[&str] = &[
    "nvidia-smi",
    "nvidia-debugdump",
    "nvidia-persistenced",
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
];

/// The management library under the driver root, links resolved, relative to
/// the root.
pub(crate) fn management_library(driver: &Path) -> Option<PathBuf> {
    LIBRARY_FOLDERS.iter().find_map(|folder| resolve_in(driver, &Path::new(folder).join("libnvidia-ml.so.1")))
}

/// What tells that the folders hold the same files as before: a file that
/// comes, goes or is replaced changes its folder's time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fingerprint(Vec<Option<(u64, u64, i64, i64)>>);

impl Fingerprint {
    /// Of the folders under a driver root. It costs a dozen system calls,
    /// where finding the files costs many hundreds.
    pub(crate) fn of(driver: &Path) -> Self {
        let stamp = |folder: &&str| {
            let metadata = driver.join(folder).metadata().ok()?;
            Some((metadata.dev(), metadata.ino(), metadata.mtime(), metadata.mtime_nsec()))
        };
        Self(LIBRARY_FOLDERS.iter().chain(PROGRAM_FOLDERS).chain(LINK_FOLDERS).map(stamp).collect())
    }
}

/// The files of a driver version under the driver root, in a stable order.
pub(crate) fn driver_files(roots: &Roots, version: &str) -> DriverFiles {
    let mut mounts = Vec::new();
    let mut seen = BTreeSet::new();
    let mut mount = |resolved: &Path, container: PathBuf| {
        let container_path = Path::new("/").join(container).display().to_string();
        if seen.insert(container_path.clone()) {
            let host_path = roots.host_driver.join(resolved).display().to_string();
            mounts.push(DriverFile { host_path, container_path });
        }
    };
    for (stem, soname) in LIBRARIES {
        let Some(library) =
            LIBRARY_FOLDERS.iter().find_map(|folder| find(roots, folder, stem, *soname, version))
        else {
            continue;
        };
        for name in library.names {
            mount(&library.file, library.folder.join(name));
        }
    }
    for program in PROGRAMS {
        let found = PROGRAM_FOLDERS.iter().find_map(|folder| {
            let path = Path::new(folder).join(program);
            resolve_in(&roots.driver, &path).map(|file| (file, path))
        });
        if let Some((file, path)) = found {
            mount(&file, path);
        }
    }
    DriverFiles { version: version.to_owned(), mounts }
}

struct Library {
    /// The file, links resolved, relative to the driver root.
    file: PathBuf,
    /// Where it was found, relative to the driver root.
    folder: PathBuf,
    /// The names it gets in the container.
    names: Vec<String>,
}

/// A library of one version in one folder. It is known by its versioned name,
/// or, in trees without one, by a SONAME that names no other version.
fn find(roots: &Roots, folder: &str, stem: &str, soname: Option<u32>, version: &str) -> Option<Library> {
    let folder = PathBuf::from(folder);
    let versioned = format!("{stem}.so.{version}");
    let soname = soname.map(|number| format!("{stem}.so.{number}"));
    if let Some(file) = resolve_in(&roots.driver, &folder.join(&versioned)) {
        let names = std::iter::once(versioned).chain(soname).collect();
        return Some(Library { file, folder, names });
    }
    let soname = soname?;
    let file = resolve_in(&roots.driver, &folder.join(&soname))?;
    let other_version = file
        .file_name()
        .and_then(|name| name.to_str())
        .and_then(|name| name.strip_prefix(stem)?.strip_prefix(".so."))
        .is_some_and(|rest| rest.contains('.') && rest != version);
    (!other_version).then(|| Library { file, folder, names: vec![soname] })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    fn tree(files: &[&str], links: &[(&str, &str)]) -> (tempfile::TempDir, Roots) {
        let root = tempfile::tempdir().expect("a folder");
        for file in files {
            let path = root.path().join(file);
            fs::create_dir_all(path.parent().expect("a parent")).expect("a folder");
            fs::write(path, "x").expect("a file");
        }
        for (link, target) in links {
            let path = root.path().join(link);
            fs::create_dir_all(path.parent().expect("a parent")).expect("a folder");
            symlink(target, path).expect("a link");
        }
        let roots = Roots { host_driver: "/run/nvidia/driver".into(), ..Roots::under(root.path()) };
        (root, roots)
    }

    fn mounts(roots: &Roots) -> Vec<(String, String)> {
        let files = driver_files(roots, "580.95.05");
        assert_eq!(files.version, "580.95.05");
        files.mounts.into_iter().map(|file| (file.container_path, file.host_path)).collect()
    }

    #[test]
    fn a_library_is_mounted_under_its_versioned_name_and_its_soname() {
        let (_root, roots) = tree(
            &["usr/lib64/libcuda.so.580.95.05", "usr/bin/nvidia-smi"],
            &[("usr/lib64/libcuda.so.1", "/usr/lib64/libcuda.so.580.95.05"), ("lib64", "usr/lib64")],
        );
        let host = "/run/nvidia/driver/usr/lib64/libcuda.so.580.95.05";
        let expected = [
            ("/usr/lib64/libcuda.so.580.95.05", host),
            ("/usr/lib64/libcuda.so.1", host),
            ("/usr/bin/nvidia-smi", "/run/nvidia/driver/usr/bin/nvidia-smi"),
        ];
        assert_eq!(mounts(&roots), expected.map(|(container, host)| (container.to_owned(), host.to_owned())));
    }

    #[test]
    fn a_library_of_another_version_is_left_out() {
        let (_root, roots) =
            tree(&["usr/lib64/libcuda.so.570.10.01"], &[("usr/lib64/libcuda.so.1", "libcuda.so.570.10.01")]);
        assert_eq!(mounts(&roots), []);
    }

    #[test]
    fn a_tree_that_has_only_the_soname_serves_it() {
        let (_root, roots) = tree(&["usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"], &[]);
        let path = "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1";
        assert_eq!(mounts(&roots), [(format!("/{path}"), format!("/run/nvidia/driver/{path}"))]);
        assert_eq!(management_library(&roots.driver), Some(PathBuf::from(path)));
    }

    #[test]
    fn the_management_library_is_found_through_links_that_are_absolute_in_the_root() {
        let (_root, roots) = tree(
            &["opt/nvidia/libnvidia-ml.so.580.95.05"],
            &[("usr/lib64/libnvidia-ml.so.1", "/opt/nvidia/libnvidia-ml.so.580.95.05")],
        );
        let found = management_library(&roots.driver);
        assert_eq!(found, Some(PathBuf::from("opt/nvidia/libnvidia-ml.so.580.95.05")));
    }
}
