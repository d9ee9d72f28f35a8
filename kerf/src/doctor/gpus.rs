//! The side of the GPUs: driver, modes, files and device nodes.

use kerf_dra_driver::hardware::Hardware;
use kerf_dra_driver::inventory::Gpu;
use kerf_dra_driver::status::{NodeStatus, Offered};
use kerf_gpu::{DriverTrouble, NodeTrouble, NvmlHardware};

use super::Report;
use super::finding::Kind;
use crate::arguments::RootArguments;

pub(super) fn examine(report: &mut Report, roots: &RootArguments, status: Option<&NodeStatus>) {
    let hardware = NvmlHardware::new(roots.hardware());
    if let Some(trouble) = hardware.driver_trouble() {
        let (kind, detail) = match trouble {
            DriverTrouble::NoLibrary(detail) => (Kind::DriverLibraryMissing, detail),
            DriverTrouble::Unusable(detail) => (Kind::DriverLibraryUnusable, detail),
            DriverTrouble::NotLoaded(detail) => (Kind::KernelModuleNotLoaded, detail),
            DriverTrouble::OtherVersion(detail) => (Kind::DriverVersionMismatch, detail),
            DriverTrouble::NoPermission(detail) => (Kind::DriverNoPermission, detail),
        };
        report.found(kind, detail);
        report.skipped("GPUs, driver files and device nodes: the driver does not answer");
        return;
    }
    let inventory = match hardware.inventory() {
        Ok(inventory) => inventory,
        Err(error) => return report.found(Kind::GpuUnreadable, error.to_string()),
    };
    for gpu in &inventory.unreadable {
        report.found(Kind::GpuUnreadable, gpu.error.clone());
    }
    if inventory.gpus.is_empty() && inventory.unreadable.is_empty() {
        report.found(Kind::NoGpus, format!("driver {} counts 0 GPUs", inventory.driver_version));
    }
    for gpu in &inventory.gpus {
        mode(report, &hardware, gpu, status);
    }
    // The running `kerf node` knows its settings.
    for profile in status.into_iter().flat_map(|status| &status.absent_profiles) {
        report.found(Kind::MigProfileAbsent, profile.to_string());
    }
    let gpus = status.into_iter().flat_map(|status| &status.gpus);
    for gpu in gpus.filter(|gpu| gpu.offered == Offered::Nothing) {
        report.found(Kind::NothingOffered, format!("{} ({})", gpu.pci, gpu.product));
    }
    files(report, &hardware);
    let minors: Vec<u32> = inventory.gpus.iter().map(|gpu| gpu.minor).collect();
    let partitions = inventory.gpus.iter().any(|gpu| gpu.mig.is_some());
    for trouble in hardware.node_troubles(&minors, partitions) {
        match trouble {
            NodeTrouble::Unknown { path, module } => {
                report.found(Kind::DeviceNodeUnknown, format!("{path}: {module} is not in /proc/devices"));
            }
            NodeTrouble::Unusable(error) => report.found(Kind::DeviceNodeUnusable, error),
            NodeTrouble::Outdated { path, found, expected } => report.found(
                Kind::DeviceNodeOutdated,
                format!("{path} is {}:{} instead of {}:{}", found.0, found.1, expected.0, expected.1),
            ),
        }
    }
}

/// A mode that waits, and who is in its way.
fn mode(report: &mut Report, hardware: &NvmlHardware, gpu: &Gpu, status: Option<&NodeStatus>) {
    let pending = gpu.mig.as_ref().is_some_and(|mig| mig.current != mig.pending);
    let stuck = status.into_iter().flat_map(|status| &status.gpus).any(|known| {
        known.pci == gpu.pci && known.conditions.iter().any(|condition| condition.contains("/mode-stuck"))
    });
    if let Some(mig) = gpu.mig.as_ref().filter(|_| pending) {
        let detail = format!(
            "{} ({}): MIG is {:?}, and {:?} after a reset",
            gpu.pci, gpu.product, mig.current, mig.pending
        );
        report.found(Kind::MigModePending, detail);
    }
    if !pending && !stuck {
        return;
    }
    match hardware.holders(gpu.pci) {
        Ok(holders) if holders.is_empty() => {}
        Ok(holders) => {
            let names: Vec<String> = holders
                .iter()
                .map(|holder| format!("{} ({})", holder.name.as_deref().unwrap_or("unknown"), holder.pid))
                .collect();
            report.found(Kind::ModeChangeBlocked, format!("{}: used by {}", gpu.pci, names.join(", ")));
        }
        Err(error) => report.skipped(format!("processes on {}: {error}", gpu.pci)),
    }
}

fn files(report: &mut Report, hardware: &NvmlHardware) {
    match hardware.driver_files() {
        Err(error) => {
            report.found(Kind::DriverFilesIncomplete, error.detail.unwrap_or_else(|| error.kind.to_string()));
        }
        Ok(files) => {
            let cuda = format!("libcuda.so.{}", files.version);
            if files.mounts.iter().all(|file| !file.container_path.ends_with(&cuda)) {
                report.found(Kind::DriverFilesIncomplete, format!("{cuda} is not under the driver root"));
            }
        }
    }
}
