//! Chaos: every write, sync, rename, removal and hardware call of prepare,
//! unprepare and reconcile is a point at which kerf is killed, its calls fail,
//! or the power is cut. Then the kubelet goes on as the real one does, a
//! scheduler gives out whatever looks free, and one check says whether the node
//! is right: [`Table`] tells it point by point.
//!
//! Death is modelled by effect, in one process (see
//! `kubelet-plugin/src/testing/fuse.rs`), so that thousands of nodes can live
//! and die in minutes. The disk is a folder in memory with a ledger of what a
//! power cut may take.

#![forbid(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "where a node cannot be set up, its run fails by panicking")]

mod disk;
mod invariant;
mod run;
mod scenario;
mod scheduler;
mod table;
mod work;
mod world;

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use run::Job;
pub use scenario::{Scenario, scenarios};
pub use table::{Cell, Column, Row, Table};
pub use work::Work;
pub use world::Sabotage;

/// Which runs.
#[derive(Debug, Clone, Copy)]
pub struct Selection {
    /// What is drawn at random begins here.
    pub seed: u64,
    /// The share of all runs that is drawn; all of them from 1 on.
    pub share: f64,
}

/// Strikes works in scenarios, those that are wanted, on as many threads as
/// there are processors.
///
/// # Panics
/// Not even the node as it is before can be set up.
pub fn table(sabotage: Sabotage, selection: Selection, wanted: impl Fn(&Scenario, Work) -> bool) -> Table {
    let scenarios = scenarios();
    let all = scenarios.iter().flat_map(|scenario| Work::ALL.map(|work| (scenario, work)));
    let all: Vec<(&Scenario, Work)> = all.filter(|(scenario, work)| wanted(scenario, *work)).collect();
    let before = run::life(world::World::with_bystander(selection.seed)).unwrap();
    let (next, rows) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::SeqCst);
                    let Some((scenario, work)) = all.get(number) else { return };
                    let seed = u64::try_from(number).unwrap_or_default();
                    let job = Job::new(&before, scenario, *work, sabotage, seed);
                    let started = Instant::now();
                    let found = job.map(|job| job.rows(selection)).unwrap_or_default();
                    let part = Table { rows: found };
                    let (runs, lost) = part.total();
                    let (name, work, took) = (scenario.name, work.name(), started.elapsed().as_secs_f64());
                    eprintln!("{name}: {work}: {runs} runs, {lost} not survived, {took:.1} s");
                    rows.lock().unwrap().push((number, part.rows));
                }
            });
        }
    });
    let mut rows = rows.into_inner().unwrap();
    rows.sort_by_key(|(number, _)| *number);
    Table { rows: rows.into_iter().flat_map(|(_, rows)| rows).collect() }
}
