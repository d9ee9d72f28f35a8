//! `nvidia-emulator fault` and `latency`.

use clap::{Args, Subcommand, ValueEnum};
use kerf_emulator::calls;
use kerf_emulator::code::Code;
use kerf_emulator::faults::unversioned;
use kerf_emulator::machine::Machine;
use kerf_emulator::state::{self, Action, When};

use crate::{Failure, refused, say};

#[derive(Debug, Subcommand)]
pub(crate) enum Fault {
    /// Make a fault and print its number.
    Add(Add),
    /// Print the faults that are still to happen, as JSON.
    List,
    /// Remove one fault, or all.
    Clear {
        /// Its number.
        id: Option<u32>,
    },
}

#[derive(Debug, Args)]
pub(crate) struct Add {
    /// The NVML function, with or without version.
    call: String,
    /// Before or after the call does its work.
    #[arg(long, value_enum, default_value_t = Moment::Before)]
    when: Moment,
    /// What happens: `return=<code>`, `hang=<milliseconds>` or `die`.
    #[arg(long = "do", value_parser = action)]
    action: Action,
    /// How often.
    #[arg(long, default_value_t = 1)]
    times: u32,
    /// Until it is cleared.
    #[arg(long, conflicts_with = "times")]
    forever: bool,
    /// Only in processes of this program name.
    #[arg(long)]
    process: Option<String>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Moment {
    Before,
    After,
}

fn action(text: &str) -> Result<Action, String> {
    let wrong = || "expected `return=<code>`, `hang=<milliseconds>` or `die`".to_owned();
    match text.split_once('=') {
        None if text == "die" => Ok(Action::Die),
        Some(("return", code)) => Code::parse(code)
            .map(|code| Action::Return(code.number()))
            .ok_or_else(|| format!("no NVML code `{code}`")),
        Some(("hang", milliseconds)) => milliseconds.parse().map(Action::Hang).map_err(|_| wrong()),
        _ => Err(wrong()),
    }
}

/// The unversioned name of a function that exists.
fn known(call: &str) -> Result<String, Failure> {
    let plain = unversioned(call);
    if calls().any(|known| unversioned(known) == plain) {
        Ok(plain.to_owned())
    } else {
        Err(format!("the library has no function `{call}`"))
    }
}

impl Fault {
    pub(crate) fn run(self, machine: &Machine) -> Result<(), Failure> {
        match self {
            Self::Add(add) => {
                let call = known(&add.call)?;
                let added = machine.change(|state| {
                    state.next_fault += 1;
                    state.faults.push(state::Fault {
                        id: state.next_fault,
                        call,
                        when: match add.when {
                            Moment::Before => When::Before,
                            Moment::After => When::After,
                        },
                        action: add.action,
                        times: (!add.forever).then_some(add.times),
                        process: add.process,
                    });
                    Ok(state.next_fault)
                });
                say(&added.map_err(refused("fault"))?.to_string());
            }
            Self::List => {
                let state = machine.state().map_err(refused("list"))?;
                let text = serde_json::to_string_pretty(&state.faults).map_err(|error| error.to_string())?;
                say(&text);
            }
            Self::Clear { id } => {
                let clear = |state: &mut state::State| {
                    state.faults.retain(|fault| id.is_some_and(|id| fault.id != id));
                    Ok(())
                };
                machine.change(clear).map_err(refused("clear"))?;
            }
        }
        Ok(())
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum Latency {
    /// Make a call take some milliseconds; 0 makes it fast again.
    Set {
        /// The NVML function, or `all`.
        call: String,
        /// Milliseconds.
        milliseconds: u64,
    },
}

impl Latency {
    pub(crate) fn run(self, machine: &Machine) -> Result<(), Failure> {
        let Self::Set { call, milliseconds } = self;
        let call = if call == "all" { call } else { known(&call)? };
        let set = |state: &mut state::State| {
            if milliseconds == 0 {
                state.latency_ms.remove(&call);
            } else {
                state.latency_ms.insert(call, milliseconds);
            }
            Ok(())
        };
        machine.change(set).map_err(refused("latency"))
    }
}
