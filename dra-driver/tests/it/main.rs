//! Every model of GPU that the emulator knows, as kerf publishes it.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

mod models;
