//! The end-to-end tests, in the order in which they run.

mod plain;

use std::process::ExitCode;

use kerf_e2e::{Case, Needs};

const CASES: &[Case] = &[Case {
    name: "a pod without a device runs, prints, and can be entered",
    needs: Needs::Cluster,
    run: plain::a_pod_runs,
}];

fn main() -> ExitCode {
    kerf_e2e::main(CASES)
}
