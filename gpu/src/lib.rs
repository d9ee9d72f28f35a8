//! The back-end of [`Hardware`] for real GPUs: what NVML, sysfs and procfs
//! say, and the files and device nodes that the driver brings.
//!
//! This crate decides nothing: it answers and it does. Every root path is a
//! parameter, so that it serves a driver container, an emulated tree or a
//! test as it serves a host. `unsafe` lives in the `nvml` module alone.
//!
//! [`Hardware`]: kerf_dra_driver::hardware::Hardware

#![deny(unsafe_code)]

mod answers;
mod describe;
mod device_nodes;
mod driver_files;
mod examine;
mod hardware;
#[cfg(feature = "messages")]
pub mod messages;
#[expect(
    unsafe_code,
    reason = "NVML is a C library; the rest of the driver speaks to it through this module"
)]
mod nvml;
mod procfs;
mod roots;
mod sysfs;
mod watch;

pub use answers::{Answers, BoardNumbers, ComputeProfile, ProfileAnswers};
pub use examine::{DriverTrouble, NodeTrouble};
pub use hardware::NvmlHardware;
pub use nvml::GpuProfile;
pub use roots::Roots;
