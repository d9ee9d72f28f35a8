//! What the end-to-end tests stand on: real clusters with emulated GPUs for the
//! whole run, kerf installed in each by its chart, a namespace for each case,
//! and all that is worth reading when a case fails.
//!
//! It changes the cluster as a user would, through `kubectl`, and reads answers
//! into the API's own types.

#![forbid(unsafe_code)]

mod api;
mod case;
mod runner;
mod scene;
mod wait;

pub use api::Kind;
pub use case::{Case, Cases, Needs, Ready};
pub use runner::main;
pub use scene::Scene;
pub use wait::{LIMIT, wait_until, watch_until};
pub use xtask::driver::{GPUS, NAMESPACE, Values};
