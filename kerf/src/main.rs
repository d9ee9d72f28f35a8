//! The one binary. Wiring only: each subcommand builds the parts of the
//! library crates and joins them.

#![deny(unsafe_code)]

mod arguments;
mod cdi_hook;
mod doctor;
mod memory;
mod node;
mod picture;
mod status;
#[cfg(test)]
mod troubleshooting;

use std::process::ExitCode;

use clap::Parser;

use crate::arguments::{Arguments, Command};

fn main() -> ExitCode {
    memory::use_one_heap();
    // Built together with others, rustls may have two; nobody else chooses before.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let result = match Arguments::parse().command {
        Command::Node(arguments) => node::run(*arguments),
        Command::Status(arguments) => status::run(&arguments),
        Command::Doctor(arguments) => return doctor::run(&arguments),
        Command::CdiHook(arguments) => cdi_hook::run(&arguments),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("kerf: {error:#}");
            ExitCode::FAILURE
        }
    }
}
