//! Checks any Kubernetes DRA driver from outside: as a kubelet through its two
//! sockets, as a scheduler and observer through the API server, and as a
//! container runtime through its CDI specs.
//!
//! Nothing here knows a driver. What a check needs of one is in its
//! [`Profile`]; how it is started and killed, behind a [`Launcher`].

#![forbid(unsafe_code)]

mod api;
mod cdi;
mod check;
mod checks;
mod context;
mod disk;
mod fault;
mod former;
mod gates;
mod kubelet;
mod launcher;
mod look;
mod process;
mod profile;
pub mod proto;
mod report;
mod rules;
mod run;
mod tunnel;
mod wire;

pub use check::Check;
pub use checks::all;
pub use context::Context;
pub use disk::Disk;
pub use fault::{Fault, Requests, Way};
pub use launcher::{Commands, Launcher, Running};
pub use profile::{ClaimProfile, Limits, Pair, Profile};
pub use report::{Finding, Verdict, json, junit, summary, table, text};
pub use run::run;
