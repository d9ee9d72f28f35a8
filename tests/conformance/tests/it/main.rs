//! The checks, tried on a driver that is right and on one that is wrong in one
//! way at a time.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests stop where something is wrong")]

mod api;
mod driver;
mod publisher;
mod selftest;
mod services;
