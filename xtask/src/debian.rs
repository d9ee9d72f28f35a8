//! The few things that come from the distribution and not from a source build.
//! Installs what is missing when it may, and names it otherwise.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use crate::{exec, files, paths};

/// Where distributions keep programs that are not for every user.
const PROGRAM_FOLDERS: [&str; 6] =
    ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"];

/// Where distributions and upstream put CNI plugins.
const CNI_FOLDERS: [&str; 2] = ["/usr/lib/cni", "/opt/cni/bin"];

/// A program and the Debian package that brings it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Need {
    package: &'static str,
    found: fn() -> bool,
}

/// `ip`, with which the cluster's bridge is made.
pub(crate) const IPROUTE: Need = Need { package: "iproute2", found: || program("ip").is_some() };
/// The CNI plugins `bridge` and `host-local`.
pub(crate) const CNI: Need =
    Need { package: "containernetworking-plugins", found: || cni_folder().is_some() };
/// A statically linked shell and tools, for images.
pub(crate) const BUSYBOX: Need = Need { package: "busybox-static", found: || static_busybox().is_some() };
/// A C compiler, for the pause program and a part of runc.
pub(crate) const COMPILER: Need = Need { package: "gcc", found: || program("gcc").is_some() };
/// The kernel's filter of system calls, with which runc is built: containerd asks
/// for a filter for every container.
pub(crate) const SECCOMP: Need = Need {
    package: "libseccomp-dev",
    found: || {
        Command::new("pkg-config")
            .args(["--exists", "libseccomp"])
            .status()
            .is_ok_and(|status| status.success())
    },
};
/// What finds it.
pub(crate) const PKG_CONFIG: Need = Need { package: "pkg-config", found: || program("pkg-config").is_some() };
/// The static C library itself.
pub(crate) const LIBC: Need = Need {
    package: "libc6-dev",
    found: || {
        Command::new("gcc")
            .arg("-print-file-name=libc.a")
            .output()
            .is_ok_and(|output| Path::new(String::from_utf8_lossy(&output.stdout).trim()).is_absolute())
    },
};

/// Makes sure that all of `needs` are there.
pub(crate) fn require(needs: &[Need]) -> Result<()> {
    let missing =
        || -> Vec<&str> { needs.iter().filter(|need| !(need.found)()).map(|need| need.package).collect() };
    if missing().is_empty() {
        return Ok(());
    }
    // Two installations at a time do not go; the first may have been for both.
    let _lock = files::Lock::take(&paths::target().join("packages.lock"))?;
    let packages = missing();
    if packages.is_empty() {
        return Ok(());
    }
    let list = packages.join(" ");
    if !rustix::process::geteuid().is_root() || program("apt-get").is_none() {
        bail!("programs are missing here; install the Debian packages: {list}");
    }
    eprintln!("installing Debian packages: {list}");
    let install = || {
        let mut command = apt_get();
        command.args(["install", "--yes", "--no-install-recommends", "-o", "Dpkg::Use-Pty=0"]);
        exec::output(command.args(&packages))
    };
    if install().is_err() {
        exec::output(apt_get().arg("update"))?;
        install().with_context(|| format!("cannot install {list}"))?;
    }
    let still = missing();
    if !still.is_empty() {
        bail!("packages were installed, but what they bring was not found: {}", still.join(" "));
    }
    Ok(())
}

/// Fetches the `.deb` of each package into `folder` and returns their paths in
/// the order of `packages`. What is there already is not fetched again.
pub(crate) fn fetch(packages: &[&str], folder: &Path) -> Result<Vec<PathBuf>> {
    std::fs::create_dir_all(folder)?;
    let present = |package: &str| -> Result<Option<PathBuf>> {
        let prefix = format!("{package}_");
        for entry in std::fs::read_dir(folder)? {
            let entry = entry?;
            let name = entry.file_name();
            let name = name.to_string_lossy();
            if name.starts_with(&prefix) && Path::new(&*name).extension().is_some_and(|ext| ext == "deb") {
                return Ok(Some(entry.path()));
            }
        }
        Ok(None)
    };
    for package in packages {
        if present(package)?.is_none() {
            // As root apt drops to a user that may not write here, and says so.
            let download = || {
                let mut command = apt_get();
                command.args(["-o", "APT::Sandbox::User=root", "download", package]);
                exec::output(command.current_dir(folder))
            };
            if download().is_err() {
                exec::output(apt_get().arg("update"))?;
                download()?;
            }
        }
    }
    packages
        .iter()
        .map(|package| present(package)?.with_context(|| format!("apt-get fetched no {package}")))
        .collect()
}

/// Where a program lies, also for a user whose PATH lacks the sbin folders.
pub(crate) fn program(name: &str) -> Option<PathBuf> {
    PROGRAM_FOLDERS.iter().map(|folder| Path::new(folder).join(name)).find(|path| path.is_file())
}

/// The folder with the CNI plugins.
pub(crate) fn cni_folder() -> Option<&'static str> {
    CNI_FOLDERS.into_iter().find(|folder| Path::new(folder).join("bridge").is_file())
}

/// A busybox that needs no library, told by its lack of an ELF interpreter.
pub(crate) fn static_busybox() -> Option<PathBuf> {
    let path = program("busybox")?;
    let content = std::fs::read(&path).ok()?;
    let loader = b"/ld-linux";
    let head = content.get(..4096).unwrap_or(&content);
    (!head.windows(loader.len()).any(|window| window == loader)).then_some(path)
}

/// The search path for what the cluster starts.
pub(crate) fn search_path() -> String {
    PROGRAM_FOLDERS.join(":")
}

fn apt_get() -> Command {
    let mut command = Command::new("apt-get");
    command.env("DEBIAN_FRONTEND", "noninteractive").arg("--quiet");
    command
}
