//! The binary, as a container runtime calls it.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod bundle;
mod cdi_hook;
mod cdi_hook_runc;
mod doctor;
