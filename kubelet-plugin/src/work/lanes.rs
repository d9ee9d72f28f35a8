//! The steps of one claim on several GPUs: those of one GPU one after the other,
//! the GPUs at the same time. While a claim has its GPUs nobody else can use
//! them, so a GPU that waits for the next one of its claim holds all others up.

use std::collections::BTreeMap;
use std::panic::resume_unwind;
use std::thread;

use kerf_dra_driver::hardware::Hardware;
use kerf_dra_driver::names::PciAddress;

use crate::effects::StepError;

/// Steps by GPU.
pub(super) type Lanes<T> = BTreeMap<PciAddress, Vec<T>>;

pub(super) fn of<T>(steps: impl IntoIterator<Item = (PciAddress, T)>) -> Lanes<T> {
    let mut lanes = Lanes::new();
    for (gpu, step) in steps {
        lanes.entry(gpu).or_insert_with(Vec::new).push(step);
    }
    lanes
}

/// Does the work of all lanes, and returns when all of it has ended.
pub(super) fn run<T: Send, R: Send>(
    hardware: &dyn Hardware,
    lanes: Lanes<T>,
    work: impl Fn(Vec<T>) -> R + Sync,
) -> Vec<R> {
    if lanes.len() < 2 || !hardware.is_parallel() {
        return lanes.into_values().map(work).collect();
    }
    thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = lanes.into_values().map(|lane| scope.spawn(move || work(lane))).collect();
        let ended = threads.into_iter().map(thread::ScopedJoinHandle::join);
        ended.map(|result| result.unwrap_or_else(|panic| resume_unwind(panic))).collect()
    })
}

/// The error of all lanes by which to go on: of calls that may still take
/// effect, if there is one, for what they make must not be forgotten.
pub(super) fn first_grave(results: Vec<Result<(), StepError>>) -> Result<(), StepError> {
    let errors = results.into_iter().filter_map(Result::err);
    errors.reduce(|first, other| if other.is_timeout() { other } else { first }).map_or(Ok(()), Err)
}
