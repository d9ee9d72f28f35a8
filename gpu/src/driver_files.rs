//! The driver's files that containers get: where the driver root has them, and
//! where a container sees them.
//!
//! A file is mounted under the path it has below the driver root. Each real
//! file is mounted once: mounts are what a container's start waits for, and a
//! link costs next to nothing. Libraries are those of one version; when what
//! is there does not fit together, no container gets half of it. It never
//! opens a file.

mod fingerprint;
#[cfg(test)]
mod golden;
mod libraries;
mod places;

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use kerf_dra_driver::hardware::{DriverFile, DriverFiles, DriverLink};

pub(crate) use self::fingerprint::Fingerprint;
use crate::roots::{Roots, resolve_in};

/// Why containers cannot get the driver's files now.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FilesError {
    /// A new driver was unpacked, and the old one still runs.
    #[error(
        "driver {version} is loaded, but of its libraries only `{found}` is installed: end the driver's upgrade \
         by a reboot or by loading its kernel modules anew, or install {version} again"
    )]
    OtherVersion { version: String, found: String },
    /// The library that was loaded is gone.
    #[error(
        "driver {version} is loaded, but no libnvidia-ml.so of it is installed any more: install it again"
    )]
    NoLibrary { version: String },
    /// A folder cannot be listed.
    #[error("`{}` cannot be listed: {source}", path.display())]
    Unreadable { path: PathBuf, source: io::Error },
}

/// The management library under the driver root, links resolved, relative to
/// the root.
pub(crate) fn management_library(driver: &Path) -> Option<PathBuf> {
    libraries::management(driver).map(|(file, _)| file)
}

/// The files of a driver version under the driver root, in a stable order.
pub(crate) fn driver_files(roots: &Roots, version: &str) -> Result<DriverFiles, FilesError> {
    let driver = &roots.driver;
    let mut files = DriverFiles { version: version.to_owned(), ..DriverFiles::default() };
    let mut seen = BTreeSet::new();
    let mut mount = |files: &mut DriverFiles, file: &Path, container: &Path| {
        if seen.insert(container.to_owned()) {
            files.mounts.push(DriverFile {
                host_path: roots.host_driver.join(file).display().to_string(),
                container_path: in_container(container),
            });
        }
    };
    let libraries = libraries::find(driver, version)?;
    for library in &libraries {
        mount(&mut files, &library.file, &library.folder.join(&library.name));
    }
    for program in places::PROGRAMS {
        let folders = places::PROGRAM_FOLDERS.iter();
        let found = folders.map(|folder| Path::new(folder).join(program)).find_map(|path| {
            resolve_in(driver, &path).filter(|file| is_file(driver, file)).map(|file| (file, path))
        });
        if let Some((file, path)) = found {
            mount(&mut files, &file, &path);
        }
    }
    for path in places::CONFIGURATION.iter().map(PathBuf::from).chain(firmware(driver, version)?) {
        if let Some(file) = resolve_in(driver, &path).filter(|file| is_file(driver, file)) {
            mount(&mut files, &file, &path);
        }
    }
    for path in places::SOCKETS.iter().map(Path::new) {
        if let Some(socket) = resolve_in(driver, path).filter(|socket| is_socket(driver, socket)) {
            mount(&mut files, &socket, path);
        }
    }
    files.links = libraries.iter().flat_map(links).collect();
    files.links.extend(gbm_backend(driver, &libraries));
    files.libraries = libraries
        .iter()
        .filter(|library| library.by_name)
        .map(|library| in_container(&library.folder.join(library.soname())))
        .collect();
    Ok(files)
}

/// A library's links: `libcuda.so` → `libcuda.so.1` → `libcuda.so.580.95.05`.
fn links(library: &libraries::Library) -> impl Iterator<Item = DriverLink> {
    library.links.iter().map(|name| DriverLink {
        path: in_container(&library.folder.join(name)),
        target: if libraries::is_development(name) { library.soname() } else { &library.name }.to_owned(),
    })
}

/// The name by which GBM opens the allocator, where the installation has it.
fn gbm_backend(driver: &Path, libraries: &[libraries::Library]) -> Option<DriverLink> {
    let allocator = libraries.iter().find(|library| library.name.starts_with("libnvidia-allocator.so"))?;
    let path = allocator.folder.join("gbm/nvidia-drm_gbm.so");
    let beside = allocator.file.parent()?.join("gbm/nvidia-drm_gbm.so");
    let leads_there = |path: &Path| resolve_in(driver, path).is_some_and(|file| file == allocator.file);
    (leads_there(&path) || leads_there(&beside))
        .then(|| DriverLink { path: in_container(&path), target: format!("../{}", allocator.soname()) })
}

/// The firmware of a version, in the first folder that has any.
fn firmware(driver: &Path, version: &str) -> Result<Vec<PathBuf>, FilesError> {
    for folder in places::firmware_folders(version) {
        let Some(resolved) = resolve_in(driver, &folder) else { continue };
        let path = driver.join(resolved);
        let unreadable = |source| FilesError::Unreadable { path: path.clone(), source };
        let mut found = Vec::new();
        for entry in fs::read_dir(&path).map_err(unreadable)? {
            let name = entry.map_err(unreadable)?.file_name();
            if name.to_str().is_some_and(|name| name.starts_with("gsp_")) {
                found.push(folder.join(name));
            }
        }
        if !found.is_empty() {
            found.sort_unstable();
            return Ok(found);
        }
    }
    Ok(Vec::new())
}

fn in_container(path: &Path) -> String {
    Path::new("/").join(path).display().to_string()
}

fn is_file(driver: &Path, path: &Path) -> bool {
    driver.join(path).symlink_metadata().is_ok_and(|metadata| metadata.is_file())
}

fn is_socket(driver: &Path, path: &Path) -> bool {
    driver.join(path).symlink_metadata().is_ok_and(|metadata| metadata.file_type().is_socket())
}
