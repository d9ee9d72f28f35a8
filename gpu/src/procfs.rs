//! What procfs says about the driver: the numbers of its character devices,
//! the capability files of MIG instances, the names of processes.
//!
//! It only reads, and takes nothing on trust: a file that is not as expected
//! answers like one that is not there.

use std::fs;
use std::path::{Path, PathBuf};

use kerf_dra_driver::inventory::{ComputeInstanceId, GpuInstanceId};

/// The character devices of `/proc/devices`: major numbers by name.
#[derive(Debug, Default)]
pub(crate) struct CharacterDevices(Vec<(u32, String)>);

impl CharacterDevices {
    /// Reads them; none where the file cannot be read.
    pub(crate) fn read(proc: &Path) -> Self {
        let text = fs::read_to_string(proc.join("devices")).unwrap_or_default();
        let devices = text
            .lines()
            .skip_while(|line| line.trim() != "Character devices:")
            .skip(1)
            .take_while(|line| !line.trim().is_empty())
            .filter_map(|line| {
                let (major, name) = line.trim().split_once(char::is_whitespace)?;
                Some((major.parse().ok()?, name.trim().to_owned()))
            });
        Self(devices.collect())
    }

    /// The major number of the first of the names that is listed.
    pub(crate) fn major(&self, names: &[&str]) -> Option<u32> {
        names
            .iter()
            .find_map(|wanted| self.0.iter().find(|(_, name)| name == wanted))
            .map(|(major, _)| *major)
    }
}

/// A capability of the driver: the right to open the device node that stands
/// for a MIG instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Capability {
    /// The `N` of `nvidia-cap<N>`, which is also the node's minor number.
    pub minor: u32,
    /// The mode the driver wants for the node.
    pub mode: u32,
}

/// The capability file of a GPU instance, or of a compute instance in it.
pub(crate) fn capability_path(
    proc: &Path,
    gpu_minor: u32,
    instance: GpuInstanceId,
    compute_instance: Option<ComputeInstanceId>,
) -> PathBuf {
    let mut path = proc.join(format!("driver/nvidia/capabilities/gpu{gpu_minor}/mig/gi{}", instance.0));
    if let Some(compute_instance) = compute_instance {
        path.push(format!("ci{}", compute_instance.0));
    }
    path.join("access")
}

/// Reads a capability file: `DeviceFileMinor`, `DeviceFileMode` (decimal) and
/// `DeviceFileModify`, a line each.
pub(crate) fn capability(path: &Path) -> Option<Capability> {
    let text = fs::read_to_string(path).ok()?;
    let field = |name: &str| {
        text.lines()
            .filter_map(|line| line.split_once(':'))
            .find(|(key, _)| key.trim() == name)
            .and_then(|(_, value)| value.trim().parse::<u32>().ok())
    };
    let mode = field("DeviceFileMode").filter(|mode| *mode <= 0o777).unwrap_or(0o444);
    Some(Capability { minor: field("DeviceFileMinor")?, mode })
}

/// A process's name, as the kernel keeps it (at most 15 bytes).
pub(crate) fn process_name(proc: &Path, pid: u32) -> Option<String> {
    let bytes = fs::read(proc.join(pid.to_string()).join("comm")).ok()?;
    let name: String =
        String::from_utf8_lossy(&bytes).trim().chars().filter(|character| !character.is_control()).collect();
    (!name.is_empty()).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_character_devices_have_a_major_here() {
        let proc = tempfile::tempdir().expect("a folder");
        let text = "Character devices:\n  1 mem\n195 nvidia\n235 nvidia-caps\n\nBlock devices:\n  7 loop\n";
        fs::write(proc.path().join("devices"), text).expect("a file");
        let devices = CharacterDevices::read(proc.path());
        let major = |names: &[&str]| devices.major(names);
        assert_eq!(major(&["nvidia-frontend", "nvidia"]), Some(195));
        assert_eq!(major(&["nvidia-caps"]), Some(235));
        assert_eq!(major(&["loop"]), None);
        assert_eq!(CharacterDevices::read(Path::new("/nowhere")).major(&["mem"]), None);
    }

    #[test]
    fn a_capability_file_names_minor_and_mode() {
        let proc = tempfile::tempdir().expect("a folder");
        let path = capability_path(proc.path(), 2, GpuInstanceId(9), Some(ComputeInstanceId(0)));
        assert!(path.ends_with("driver/nvidia/capabilities/gpu2/mig/gi9/ci0/access"), "{}", path.display());
        fs::create_dir_all(path.parent().expect("a parent")).expect("a folder");
        let read = |text: &str| {
            fs::write(&path, text).expect("a file");
            capability(&path)
        };
        let whole = "DeviceFileMinor: 84\nDeviceFileMode: 292\nDeviceFileModify: 1\n";
        assert_eq!(read(whole), Some(Capability { minor: 84, mode: 0o444 }));
        assert_eq!(read("DeviceFileMinor: 84\nDeviceFileMode: 99999\n").map(|found| found.mode), Some(0o444));
        assert_eq!(read("DeviceFileMinor: -1\n"), None);
        assert_eq!(read(""), None);
    }

    #[test]
    fn a_process_name_has_no_line_end() {
        let proc = tempfile::tempdir().expect("a folder");
        fs::create_dir(proc.path().join("42")).expect("a folder");
        fs::write(proc.path().join("42/comm"), b"dcgm\xff\n").expect("a file");
        assert_eq!(process_name(proc.path(), 42).as_deref(), Some("dcgm\u{fffd}"));
        assert_eq!(process_name(proc.path(), 43), None);
    }
}
