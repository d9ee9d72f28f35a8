//! What the end-to-end tests stand on: one real cluster with emulated GPUs for
//! the whole run, kerf installed in it by its chart, a namespace for each case,
//! and all that is worth reading when a case fails.
//!
//! It talks to the cluster as a user would, through `kubectl`, and reads
//! answers into the API's own types.

#![forbid(unsafe_code)]

mod runner;
mod scene;
mod wait;

pub use runner::{Case, Needs, main};
pub use scene::Scene;
pub use wait::{LIMIT, wait_until};
pub use xtask::driver::{GPUS, NAMESPACE, Values};
