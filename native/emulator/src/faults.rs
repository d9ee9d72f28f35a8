//! Scripted faults and latencies: which apply to a call, and taking one so
//! that of all processes only `times` many meet it.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::code::Code;
use crate::machine::Machine;
use crate::state::{Action, Fault, State, When};

/// What this process knows for faults.
#[derive(Debug)]
pub(crate) struct Faults {
    process: String,
    /// A container cannot write the state: there each process counts for
    /// itself.
    met: Mutex<HashMap<u32, u32>>,
}

/// A function's name without its version: `nvmlInit_v2` is `nvmlInit`.
pub fn unversioned(call: &str) -> &str {
    match call.rsplit_once("_v") {
        Some((name, version)) if version.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => call,
    }
}

impl Faults {
    pub(crate) fn of_this_process() -> Self {
        let program = std::env::current_exe().ok();
        let name = program.as_deref().and_then(|path| path.file_name()?.to_str()).unwrap_or_default();
        Self { process: name.to_owned(), met: Mutex::default() }
    }

    /// Waits as long as the call is told to take.
    pub(crate) fn delay(state: &State, call: &str) {
        if state.latency_ms.is_empty() {
            return;
        }
        let latency = state.latency_ms.get(unversioned(call)).or_else(|| state.latency_ms.get("all"));
        if let Some(latency) = latency {
            std::thread::sleep(Duration::from_millis(*latency));
        }
    }

    /// Meets the fault that is due, if one is.
    pub(crate) fn meet(&self, machine: &Machine, state: &State, call: &str, when: When) -> Result<(), Code> {
        let call = unversioned(call);
        let due = |fault: &Fault| {
            fault.when == when
                && fault.call == call
                && fault.process.as_ref().is_none_or(|process| *process == self.process)
        };
        if !state.faults.iter().any(due) {
            return Ok(());
        }
        let taken = if machine.writable() {
            machine.change(|state| Ok(take(state, due)))?
        } else {
            let mut met = self.met.lock().unwrap_or_else(PoisonError::into_inner);
            let fault = state.faults.iter().find(|fault| {
                due(fault) && fault.times.is_none_or(|times| met.get(&fault.id).copied().unwrap_or(0) < times)
            });
            fault.map(|fault| {
                *met.entry(fault.id).or_default() += 1;
                fault.action
            })
        };
        match taken {
            None => Ok(()),
            Some(Action::Return(code)) => Err(Code::parse(&code.to_string()).unwrap_or(Code::UNKNOWN)),
            Some(Action::Hang(milliseconds)) => {
                std::thread::sleep(Duration::from_millis(milliseconds));
                Ok(())
            }
            Some(Action::Die) => {
                let _ =
                    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
                // SIGKILL cannot be survived; should it be refused, end anyway.
                std::process::abort()
            }
        }
    }
}

fn take(state: &mut State, due: impl Fn(&Fault) -> bool) -> Option<Action> {
    let at = state.faults.iter().position(due)?;
    let fault = state.faults.get_mut(at)?;
    let action = fault.action;
    if let Some(times) = &mut fault.times {
        *times = times.saturating_sub(1);
        if *times == 0 {
            state.faults.remove(at);
        }
    }
    Some(action)
}
