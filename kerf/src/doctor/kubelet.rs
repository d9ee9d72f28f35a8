//! The kubelet's side: folders, sockets, the journal, and who else is there.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::Path;

use kerf_dra_driver::journal::{Entry, FileName};
use kerf_dra_driver::names::DriverName;
use kerf_dra_driver::status::NodeStatus;

use super::finding::Kind;
use super::{Report, unwritable};
use crate::arguments::DoctorArguments;

pub(super) fn examine(report: &mut Report, arguments: &DoctorArguments, status: &anyhow::Result<NodeStatus>) {
    let DoctorArguments { kubelet, roots, .. } = arguments;
    let boot = boot_id(report, &roots.proc_root);
    if !kubelet.kubelet_root.is_dir() {
        report.found(Kind::KubeletRootMissing, kubelet.kubelet_root.display().to_string());
        report.skipped("sockets and journal: the kubelet's root folder is not there");
        return;
    }
    let registry = kubelet.registry_dir();
    if let Some(reason) = unwritable(&registry) {
        report.found(Kind::RegistryFolderUnusable, reason);
    }
    // It is made below the first of its parents that is there.
    let plugin = kubelet.plugin_dir();
    let existing = plugin.ancestors().find(|folder| folder.symlink_metadata().is_ok());
    if let Some(reason) = existing.and_then(unwritable) {
        report.found(Kind::PluginFolderUnusable, reason);
    }
    match status {
        Err(error) => report.found(Kind::NodeNotRunning, format!("{error:#}")),
        Ok(status) => {
            for missing in &status.missing {
                report.found(Kind::NodeNotReady, missing.clone());
            }
            let is_ours = |name: &String| kubelet.driver_name.is_registration_socket(name);
            if !names(&registry).iter().filter(|name| is_ours(name)).any(|name| answers(&registry.join(name)))
            {
                let socket = registry.join(kubelet.driver_name.registration_socket(None));
                report.found(Kind::RegistrationSocketMissing, socket.display().to_string());
            }
        }
    }
    others(report, &registry, &kubelet.driver_name);
    for name in names(&kubelet.kubelet_root.join("device-plugins")) {
        let socket = kubelet.kubelet_root.join("device-plugins").join(&name);
        if name.starts_with("nvidia") && answers(&socket) {
            report.found(Kind::DevicePluginBeside, socket.display().to_string());
        }
    }
    journal(report, &plugin.join("state"), boot.as_deref());
}

fn boot_id(report: &mut Report, proc: &Path) -> Option<String> {
    let path = proc.join("sys/kernel/random/boot_id");
    match fs::read_to_string(&path) {
        Ok(text) if !text.trim().is_empty() => return Some(text.trim().to_owned()),
        Ok(_) => report.found(Kind::BootIdUnreadable, format!("{} is empty", path.display())),
        Err(error) => report.found(Kind::BootIdUnreadable, format!("{}: {error}", path.display())),
    }
    None
}

/// Other drivers' registration sockets; those of ours have an `@` that theirs
/// do not. A dead one is only a file.
fn others(report: &mut Report, registry: &Path, ours: &DriverName) {
    for name in names(registry) {
        let of = |driver: &str| {
            name.strip_prefix(driver).is_some_and(|rest| rest.starts_with(['-', '@']) || rest == ".sock")
        };
        let kind = if ours.is_registration_socket(&name) {
            continue;
        } else if of(ours.as_str()) {
            Kind::DriverNameTaken
        } else if of(DriverName::DEFAULT) {
            Kind::OtherDriverBeside
        } else if of("compute-domain.nvidia.com") {
            Kind::ComputeDomainBeside
        } else {
            continue;
        };
        let socket = registry.join(&name);
        if answers(&socket) {
            report.found(kind, socket.display().to_string());
        }
    }
}

fn journal(report: &mut Report, state: &Path, boot: Option<&str>) {
    for name in names(&state.join("quarantine")) {
        report.found(Kind::JournalQuarantine, state.join("quarantine").join(name).display().to_string());
    }
    let claims = state.join("claims");
    for name in names(&claims).into_iter().filter(|name| FileName::parse(name).is_some()) {
        let path = claims.join(name);
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            // It was unprepared meanwhile.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            Err(error) => {
                report.found(Kind::JournalEntryUnreadable, format!("{}: {error}", path.display()));
                continue;
            }
        };
        match Entry::decode(&bytes) {
            Err(error) => report.found(Kind::JournalEntryUnreadable, format!("{}: {error}", path.display())),
            Ok(entry) if boot.is_some_and(|boot| boot != entry.boot_id.0) => {
                report.found(Kind::JournalOtherBoot, format!("{}: claim {}", path.display(), entry.claim));
            }
            Ok(_) => {}
        }
    }
}

/// The names in a folder, sorted; none where it cannot be listed.
pub(super) fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort_unstable();
    names
}

fn answers(socket: &Path) -> bool {
    UnixStream::connect(socket).is_ok()
}
