//! The binary, as a container runtime or an operator calls it, and what it
//! joins: back-end, plugin and layout on emulated machines.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod bundle;
mod cdi_hook;
mod cdi_hook_runc;
mod doctor;
mod emulated;
mod every_model;
mod in_use;
mod random_claims;
mod real_server;
mod upgrade;
