//! The kubelet's side: folders, sockets, the journal, and who else is there.

use std::fs;
use std::path::Path;

use kerf_dra_driver::journal::{Entry, FileName};
use kerf_dra_driver::status::NodeStatus;

use kerf_kubelet_plugin::{RivalFolders, RivalKind, knock};

use super::finding::Kind;
use super::{Report, unwritable};
use crate::arguments::{DoctorArguments, KubeletArguments};

const COMPUTE_DOMAIN: &str = "compute-domain.nvidia.com";

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
    others(report, kubelet);
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

/// Others who hand out the same GPUs. A dead one is only a file.
fn others(report: &mut Report, kubelet: &KubeletArguments) {
    let folders = RivalFolders {
        registry: kubelet.registry_dir(),
        device_plugins: kubelet.device_plugins_dir(),
        pod_resources: kubelet.pod_resources_socket(),
    };
    let rivals = match folders.answering(&kubelet.driver_name) {
        Ok(rivals) => rivals,
        Err(error) => return report.skipped(format!("who else hands out the GPUs: {error}")),
    };
    for rival in rivals {
        let kind = match rival.kind {
            RivalKind::SameName => Kind::DriverNameTaken,
            RivalKind::OtherDriver => Kind::OtherDriverBeside,
            RivalKind::DevicePlugin | RivalKind::PluginsPods => Kind::DevicePluginBeside,
        };
        report.found(kind, rival.socket.display().to_string());
    }
    // It hands out no GPU itself.
    for name in names(&folders.registry).iter().filter(|name| name.starts_with(COMPUTE_DOMAIN)) {
        let socket = folders.registry.join(name);
        if answers(&socket) {
            report.found(Kind::ComputeDomainBeside, socket.display().to_string());
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
    knock(socket).is_ok_and(|answer| answer.is_some())
}
