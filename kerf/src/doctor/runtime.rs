//! The container runtime's side: CDI specs, whether containerd reads them, and
//! whether it can start what they name.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use rustix::fs::{StatVfsMountFlags, statvfs};
use serde_json::Value;

use super::finding::Kind;
use super::kubelet::names;
use super::{Report, unwritable};
use crate::arguments::DoctorArguments;

pub(super) fn examine(report: &mut Report, arguments: &DoctorArguments) {
    let cdi = &arguments.roots.cdi_root;
    // It is made where only its parent is there.
    let folder = if cdi.symlink_metadata().is_ok() { Some(cdi.as_path()) } else { cdi.parent() };
    if let Some(reason) = folder.and_then(unwritable) {
        report.found(Kind::CdiFolderUnusable, reason);
    }
    hook(report, &arguments.hook.copies(&arguments.kubelet.driver_name));
    let ours = format!("{}/", arguments.kubelet.driver_name.as_str());
    for folder in [cdi, &arguments.etc_root.join("cdi")] {
        for name in names(folder) {
            let path = folder.join(name);
            let kind = fs::read_to_string(&path).ok().and_then(|text| kind_of_all(&text));
            if let Some(kind) = kind.filter(|kind| !kind.starts_with(&ours)) {
                report.found(Kind::CdiSpecAllGpus, format!("{} offers {kind}=all", path.display()));
            }
        }
    }
    containerd(report, &arguments.etc_root.join("containerd/config.toml"));
}

/// The folder of the hook's program, as far as it is there.
fn hook(report: &mut Report, copies: &Path) {
    let Some(folder) = copies.ancestors().find(|folder| folder.symlink_metadata().is_ok()) else { return };
    if let Some(reason) = unwritable(folder) {
        return report.found(Kind::HookFolderUnusable, reason);
    }
    if statvfs(folder).is_ok_and(|found| found.f_flag.contains(StatVfsMountFlags::NOEXEC)) {
        report.found(Kind::HookFolderUnusable, format!("{}: it is mounted noexec", folder.display()));
    }
    let is_closed =
        |folder: &&Path| folder.metadata().is_ok_and(|metadata| metadata.permissions().mode() & 0o001 == 0);
    // The last of them is made open by `kerf node`.
    for folder in copies.ancestors().skip(1).filter(is_closed) {
        report.found(Kind::HookFolderClosed, folder.display().to_string());
    }
}

/// The kind of a CDI spec that has a device `all` and is of NVIDIA GPUs. Specs
/// are JSON or YAML; of YAML, the lines that nvidia-ctk writes are understood.
fn kind_of_all(text: &str) -> Option<String> {
    let (kind, all) = if let Ok(spec) = serde_json::from_str::<Value>(text) {
        let named_all = |device: &Value| device["name"] == "all";
        (spec["kind"].as_str()?.to_owned(), spec["devices"].as_array()?.iter().any(named_all))
    } else {
        let value = |key: &str| {
            let lines = text.lines().map(|line| line.trim().trim_start_matches("- "));
            let values = lines.filter_map(move |line| line.strip_prefix(key)?.strip_prefix(':'));
            values.map(|value| value.trim().trim_matches(['"', '\'']).to_owned()).collect::<Vec<_>>()
        };
        (value("kind").into_iter().next()?, value("name").iter().any(|name| name == "all"))
    };
    (all && kind.contains("nvidia.com/")).then_some(kind)
}

fn containerd(report: &mut Report, path: &Path) {
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) => {
            return report
                .skipped(format!("whether containerd reads CDI specs: {}: {error}", path.display()));
        }
    };
    let detail = path.display().to_string();
    match cdi_in(&text) {
        Cdi::Off => report.found(Kind::ContainerdCdiOff, detail),
        Cdi::Unset => report.found(Kind::ContainerdCdiUnset, detail),
        Cdi::On => {}
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Cdi {
    On,
    Off,
    Unset,
}

/// What containerd's configuration says of CDI. A scan of lines: a key counts
/// wherever it stands, which is one section in practice, and imported files are
/// not followed. A configuration of version 3 is of containerd 2.x.
fn cdi_in(text: &str) -> Cdi {
    let value = |key: &str| {
        text.lines()
            .filter_map(|line| line.split('#').next()?.split_once('='))
            .filter(|(name, _)| name.trim() == key)
            .map(|(_, value)| value.trim())
            .next_back()
    };
    match value("enable_cdi") {
        Some("false") => Cdi::Off,
        Some(_) => Cdi::On,
        None if value("version").and_then(|version| version.parse::<u32>().ok()) >= Some(3) => Cdi::On,
        None => Cdi::Unset,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn containerds_configuration_says_whether_cdi_is_on() {
        assert_eq!(cdi_in("version = 3\n"), Cdi::On);
        assert_eq!(cdi_in("version = 3\n[plugins]\n  enable_cdi = false # no\n"), Cdi::Off);
        assert_eq!(cdi_in("version = 2\n"), Cdi::Unset);
        assert_eq!(cdi_in("version = 2\n# enable_cdi = true\n"), Cdi::Unset);
        assert_eq!(cdi_in("version = 2\nenable_cdi=true\n"), Cdi::On);
    }

    #[test]
    fn a_spec_of_all_gpus_is_seen_in_json_and_yaml() {
        let kind = Some("nvidia.com/gpu".to_owned());
        assert_eq!(kind_of_all(r#"{"kind": "nvidia.com/gpu", "devices": [{"name": "all"}]}"#), kind);
        assert_eq!(kind_of_all("kind: nvidia.com/gpu\ndevices:\n- name: \"0\"\n- name: all\n"), kind);
        assert_eq!(kind_of_all(r#"{"kind": "nvidia.com/gpu", "devices": [{"name": "0"}]}"#), None);
        assert_eq!(kind_of_all("kind: vendor.com/nic\ndevices:\n- name: all\n"), None);
    }
}
