//! The brain of kerf: what the node has, what is published of it, what a claim
//! needs done, and in which form that is remembered.
//!
//! Everything here is a function of values. This crate never opens a file,
//! reads a clock, talks to the API server or calls NVML; the crates around it
//! do, through the [`hardware::Hardware`] trait and the data types below.

#![forbid(unsafe_code)]

pub mod claim;
pub mod cluster;
pub mod error;
#[cfg(any(test, feature = "fixtures"))]
pub mod fixtures;
pub mod hardware;
pub mod health;
pub mod inventory;
pub mod journal;
pub mod layout;
mod links;
#[cfg(any(test, feature = "fixtures"))]
pub mod message;
pub mod model;
pub mod names;
pub mod plan;
pub mod publication;
pub mod published;
pub mod status;
pub mod step;
pub mod taint;
pub mod withdraw;
