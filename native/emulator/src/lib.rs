//! An emulated NVIDIA machine: a `libnvidia-ml.so.1` with full MIG semantics
//! whose state is shared by all processes, and what its control command needs.
//!
//! The library is for testing NVML clients. It owns nothing outside one root
//! folder and knows nothing of kerf.

mod api;
pub mod clients;
pub mod code;
mod events;
pub mod faults;
pub mod install;
pub mod layout;
pub mod machine;
pub mod mig;
pub mod model;
mod session;
pub mod state;
pub mod store;

pub use api::calls;
