//! What an operator asks when a node does not work: whether the driver can be
//! opened, and whether the device nodes can be had. It only looks: no node is
//! made and nothing is changed, unlike what a prepare does.

use crate::hardware::NvmlHardware;
use crate::nvml::Failure;
use crate::{device_nodes, driver_files};

/// Why the driver does not answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DriverTrouble {
    /// There is no library under the driver root.
    NoLibrary(String),
    /// The library is there and cannot be loaded or initialised.
    Unusable(String),
    /// The kernel module is not loaded.
    NotLoaded(String),
    /// The kernel module is of another version than the library.
    OtherVersion(String),
    /// This process may not use the driver.
    NoPermission(String),
}

/// What is wrong with a device node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodeTrouble {
    /// It is not there, and the number it would have is not known.
    Unknown {
        /// Where it would be.
        path: String,
        /// The kernel module that would tell the number.
        module: &'static str,
    },
    /// Something that is not a device stands in its place, or it cannot be
    /// looked at.
    Unusable(String),
    /// It has the number of a former load of the driver.
    Outdated {
        /// Where it is.
        path: String,
        /// The number it has.
        found: (u32, u32),
        /// The number it should have.
        expected: (u32, u32),
    },
}

impl NvmlHardware {
    /// Why the driver does not answer; none where it does.
    pub fn driver_trouble(&self) -> Option<DriverTrouble> {
        let failure = self.with(|session| session.driver_version()).err()?;
        let text = failure.to_string();
        Some(match failure {
            Failure::NoLibrary(_) if driver_files::management_library(&self.roots().driver).is_none() => {
                DriverTrouble::NoLibrary(text)
            }
            failure if failure.is(&[DRIVER_NOT_LOADED]) => DriverTrouble::NotLoaded(text),
            failure if failure.is(&[VERSION_MISMATCH]) => DriverTrouble::OtherVersion(text),
            failure if failure.is(&[NO_PERMISSION]) => DriverTrouble::NoPermission(text),
            _ => DriverTrouble::Unusable(text),
        })
    }

    /// What is wrong with the device nodes of GPUs with these minor numbers,
    /// and with the capability nodes where partitions are to be served.
    pub fn node_troubles(&self, gpu_minors: &[u32], partitions: bool) -> Vec<NodeTrouble> {
        device_nodes::troubles(self.roots(), gpu_minors, partitions)
    }
}

/// `NVML_ERROR_NO_PERMISSION`.
const NO_PERMISSION: u32 = 4;
/// `NVML_ERROR_DRIVER_NOT_LOADED`.
const DRIVER_NOT_LOADED: u32 = 9;
/// `NVML_ERROR_LIB_RM_VERSION_MISMATCH`.
const VERSION_MISMATCH: u32 = 18;
