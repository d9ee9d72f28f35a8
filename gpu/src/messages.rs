//! What users read of this crate, for `docs/troubleshooting.md`.

use std::io;
use std::path::PathBuf;

use kerf_dra_driver::hardware::{HardwareError, HardwareErrorKind};
use kerf_dra_driver::message::Message;
use kerf_dra_driver::messages;

use crate::device_nodes::NodeError;
use crate::driver_files::FilesError;
use crate::nvml::Failure;

/// Every failure of the hardware that this crate tells in its own words.
pub fn messages() -> Vec<Message> {
    [nodes(), files(), failures()].concat()
}

fn nodes() -> Vec<Message> {
    let path = || "/dev/nvidia-uvm".to_owned();
    let said = |error: &NodeError| {
        HardwareError::new("find the device nodes of 0000:65:00.0", HardwareErrorKind::System)
            .with_detail(error.to_string())
            .to_string()
    };
    messages!(said, NodeError, [],
        NodeError::Unknown { .. } => NodeError::Unknown {
            path: path(),
            proc: "/proc/devices".to_owned(),
            module: "nvidia-uvm",
        },
            "A container needs the device node; kerf makes what is missing, but the number of this one is not known.",
            "Load the kernel module that is named; the kubelet's next attempt goes on.";
        NodeError::NoCapability { .. } => NodeError::NoCapability {
            path: "/proc/driver/nvidia/capabilities/gpu0/mig/gi3/access".to_owned(),
        },
            "The partition was taken away meanwhile, or the driver does not tell who may use it.",
            "Nothing if the next attempt succeeds; else compare `nvidia-smi mig -lgi` with `kerf status`.";
        NodeError::NotADevice { .. } => NodeError::NotADevice { path: path() },
            "Often a folder that a container runtime made for a hostPath mount.",
            "Remove it; the node is then made anew.";
        NodeError::Io { .. } => NodeError::Io { path: path(), source: io::Error::from_raw_os_error(13) },
            "The device folder is read-only for kerf, or kerf is not privileged.",
            "Run kerf as root in a privileged container with the host's /dev, as the chart does.";
    )
}

fn files() -> Vec<Message> {
    let version = || "580.95.05".to_owned();
    let said = |error: &FilesError| {
        HardwareError::new("find the driver's files", HardwareErrorKind::NoDriver)
            .with_detail(error.to_string())
            .to_string()
    };
    messages!(said, FilesError, [],
        FilesError::OtherVersion { .. } => FilesError::OtherVersion {
            version: version(),
            found: "libcuda.so.590.44.01".to_owned(),
        },
            "The driver was upgraded and the old kernel module still runs, or only its kernel part is installed: a container never gets files of two versions.",
            "Drain the node and reboot it, or install the driver's CUDA libraries of the loaded version.";
        FilesError::NoLibrary { .. } => FilesError::NoLibrary { version: version() },
            "The driver was removed while its kernel module is still loaded.",
            "Install the driver again, and name its folder with --driver-root (chart value driverRoot).";
        FilesError::Unreadable { .. } => FilesError::Unreadable {
            path: PathBuf::from("/usr/lib64"),
            source: io::Error::from_raw_os_error(13),
        },
            "The driver's folder is mounted so that kerf cannot read it.",
            "Mount the folder that driverRoot names into the pod, as the chart does.";
    )
}

fn failures() -> Vec<Message> {
    let call = "nvmlDeviceGetMigMode";
    let said = |failure: &Failure| failure.during("read the MIG mode of 0000:65:00.0").to_string();
    messages!(said, Failure, [],
        Failure::Code { .. } => Failure::Code { call, code: 999 },
            "In brackets stands the call of NVML and its answer, by the name that nvml.h has for it.",
            "Look up the answer in NVIDIA's documentation of NVML, and into the kernel log for NVRM and Xid lines.";
        Failure::Missing { .. } => Failure::Missing { call },
            "The driver is older than this function.",
            "Upgrade the driver.";
        Failure::Absurd { .. } => Failure::Absurd { call, answer: "7 modes".to_owned() },
            "The driver answered what kerf does not believe, and nothing is done on it.",
            "Report it with the driver's version; reset the GPU if it goes on.";
        Failure::Leftover { .. } => Failure::Leftover { call, reason: "IN_USE".to_owned() },
            "Something was made on the GPU, was not as it should be, and could not be taken away again.",
            "Nothing: kerf looks for it and takes it away before it tries again.";
        Failure::NoLibrary(_) => Failure::NoLibrary("`/` has no libnvidia-ml.so.1".to_owned()),
            "No NVIDIA driver is installed in the folder that is named, or its library cannot be loaded.",
            "Install the driver, or name its folder with --driver-root (chart value driverRoot).";
    )
}
