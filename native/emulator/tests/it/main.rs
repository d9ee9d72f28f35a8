//! The emulator as its clients meet it: a library loaded from an emulated
//! driver root, and a control command.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    missing_docs,
    reason = "a failed step fails the test, and what it measured is printed"
)]

mod board;
mod container;
mod crash;
mod events;
mod faults;
mod mig;
mod models;
mod python;
mod rules;
mod smi;
mod support;
