//! The binary, as a container runtime calls it.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod cdi_hook;
mod doctor;
