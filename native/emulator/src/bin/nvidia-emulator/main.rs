//! The control command of the emulated machine: makes it, changes it as an
//! administrator, a driver or bad luck would, and shows it.

#![forbid(unsafe_code)]

mod control;
mod faults;
mod init;
mod models;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use kerf_emulator::code::Code;
use kerf_emulator::machine::Machine;

/// Emulates a machine with NVIDIA GPUs under one root folder.
#[derive(Debug, Parser)]
#[command(name = "nvidia-emulator", version)]
struct Arguments {
    /// The machine's root folder.
    #[arg(long, global = true, env = "NVIDIA_EMULATOR_ROOT")]
    root: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Make a machine.
    Init(init::Init),
    /// New boot id, instances and clients gone, pending modes applied.
    Reboot,
    /// Make, list or clear scripted faults.
    #[command(subcommand)]
    Fault(faults::Fault),
    /// Make calls slow.
    #[command(subcommand)]
    Latency(faults::Latency),
    /// Use a GPU or MIG device until killed.
    Hold(control::Hold),
    /// Change MIG as a foreign administrator.
    #[command(subcommand)]
    Mig(control::Mig),
    /// Let a GPU fall off the bus.
    Lose(control::Which),
    /// Bring a lost GPU back.
    Return(control::Which),
    /// Let a GPU report an XID.
    Xid(control::Xid),
    /// Print the whole state as JSON.
    Show,
    /// List the built-in models, or print one as JSON.
    Models {
        /// Its key.
        model: Option<String>,
    },
}

/// A sentence for the operator.
type Failure = String;

fn refused(what: &str) -> impl Fn(Code) -> Failure + '_ {
    move |code| format!("{what} refused: {code}")
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match run(arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("nvidia-emulator: {failure}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: Arguments) -> Result<(), Failure> {
    let root = arguments.root;
    let needed = || root.clone().ok_or_else(|| "no --root and no NVIDIA_EMULATOR_ROOT".to_owned());
    let machine = || {
        let root = needed()?;
        Machine::host(&root).map_err(|_| format!("no machine under {}; make one with `init`", root.display()))
    };
    match arguments.command {
        Command::Init(init) => init.run(&needed()?),
        Command::Hold(hold) => {
            // Also in a container, where there is no root.
            let view =
                if root.is_some() { machine()? } else { Machine::find(None).map_err(refused("hold"))? };
            hold.run(&view)
        }
        Command::Reboot => control::reboot(&machine()?),
        Command::Fault(fault) => fault.run(&machine()?),
        Command::Latency(latency) => latency.run(&machine()?),
        Command::Mig(mig) => mig.run(&machine()?),
        Command::Lose(which) => which.set_lost(&machine()?, true),
        Command::Return(which) => which.set_lost(&machine()?, false),
        Command::Xid(xid) => xid.run(&machine()?),
        Command::Show => control::show(&machine()?),
        Command::Models { model } => models::run(model.as_deref()),
    }
}

/// One line for the caller.
#[expect(clippy::print_stdout, reason = "it is what the caller asked for")]
fn say(text: &str) {
    println!("{text}");
}
