//! The NVML library, loaded at run time: the only `unsafe` of the driver.
//!
//! Plain reads go through `nvml-wrapper` where it is right. What it lacks or
//! gets wrong is called raw: everything of MIG ([`mig`], [`mig_device`], [`profile`]), events with their
//! instance ids ([`events`]), and reads into buffers that the library may not
//! have ended with a NUL or whose size it chooses ([`gpu`]).
//!
//! Nothing that NVML answers is trusted: counts are bounded, strings are cut at
//! their buffer, null handles are refused, and an unknown number stays a
//! number. No handle is kept between calls; a GPU is opened by its PCI address
//! each time.

mod board_facts;
mod board_numbers;
mod events;
mod failure;
mod gpu;
mod mig;
mod mig_device;
mod profile;
mod session;

pub use board_numbers::BoardNumbers;
pub(crate) use events::{Event, EventSet};
pub(crate) use failure::Failure;
pub(crate) use gpu::Gpu;
pub use mig::ComputeProfile;
pub use profile::GpuProfile;
pub(crate) use profile::GpuProfiles;
pub(crate) use session::Session;
