//! `cargo xtask`: everything repeatable of this repository.

#![forbid(unsafe_code)]

use clap::{Parser, Subcommand};

#[derive(Debug, Parser)]
#[command(name = "cargo xtask", about = "Everything repeatable of this repository")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Regenerate committed code, or check that it is current.
    Codegen {
        /// Change nothing; fail if anything would change.
        #[arg(long)]
        check: bool,
    },
}

fn main() -> anyhow::Result<()> {
    match Arguments::parse().command {
        Command::Codegen { check } => xtask::codegen::run(check),
    }
}
