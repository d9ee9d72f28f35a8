//! The end-to-end tests, in the order in which they run.

mod crash;
mod foreign;
mod ground;
mod holding;
mod plain;
mod publishing;
mod restart;
mod slices;
mod workload;

use std::process::ExitCode;

use kerf_e2e::{Case, Needs};

const CASES: &[Case] = &[
    Case {
        name: "a pod without a device runs, prints, and can be entered",
        needs: Needs::Cluster,
        run: plain::a_pod_runs,
    },
    Case {
        name: "every GPU of the node is published with its counters",
        needs: Needs::Driver,
        run: publishing::every_gpu_is_published,
    },
];

fn main() -> ExitCode {
    let cases = [CASES, slices::CASES, holding::CASES, foreign::CASES, crash::CASES, restart::CASES].concat();
    kerf_e2e::main(&cases)
}
