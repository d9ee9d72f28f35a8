//! The API-server side of kerf: what a node or the cluster has to offer is
//! kept true in `ResourceSlice`s here, and claims are read here.
//!
//! [`Publisher`] is a controller whose desired state comes from a channel and
//! whose actual state is the API server's. What to write is decided by pure
//! functions ([`diff`], [`dropped`]), when to write it by pure bookkeeping
//! ([`contention`]); only [`Publisher`] and [`list`] send requests.
//!
//! This crate never decides *what* is published: layouts and taints are the
//! business of `kerf-dra-driver`.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::expect_used, reason = "tests stop where something is wrong"))]

pub mod claims;
pub mod contention;
pub mod diff;
pub mod dropped;
#[cfg(feature = "messages")]
pub mod messages;
mod news;
mod pages;
mod pools;
mod publisher;
mod requests;
mod status;

pub use pages::{ListError, Listed, list};
pub use pools::{DesiredPool, DesiredPools, Identity};
pub use publisher::{Publisher, Timing};
pub use requests::sentence;
pub use status::{Phase, PublishStatus};
