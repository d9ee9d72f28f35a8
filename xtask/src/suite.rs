//! `cargo xtask test`: all checks of this repository in the order in which a
//! failure is found cheapest. The clusters' programs build beside the first of
//! them, and the clusters are taken down however the tests end.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow};

use crate::cluster::{self, Cluster, programs};
use crate::{classes, codegen, emulator, exec, image};

/// The clusters of the end-to-end tests, which run at the same time.
pub const CLUSTERS: [&str; 3] = ["e2e1", "e2e2", "e2e3"];

/// Runs every check; the first failure ends the run.
pub fn run() -> Result<()> {
    programs::require_go()?;
    let mut report = Report::default();
    let outcome = stages(&mut report);
    report.print();
    outcome
}

fn stages(report: &mut Report) -> Result<()> {
    // Left by a run that was killed.
    report.stage("no cluster from before", clusters_down)?;
    let programs = thread::spawn(programs::ensure);
    report.stage("format", || cargo(&["fmt", "--all", "--check"]))?;
    report.stage("clippy", || {
        cargo(&["clippy", "--quiet", "--workspace", "--all-targets", "--", "--deny", "warnings"])?;
        // Not a target of `cargo test`, and so not of `--all-targets`.
        let e2e = ["clippy", "--quiet", "--package", "kerf-e2e", "--test", "e2e"];
        cargo(&[&e2e[..], &["--", "--deny", "warnings"]].concat())
    })?;
    report.stage("generated code", || codegen::run(true))?;
    report.stage("generated classes", || classes::run(true))?;
    report.stage("unit and component tests", || {
        cargo(&["test", "--quiet", "--workspace", "--exclude", "kerf-e2e"])
    })?;
    deny(report)?;
    report.stage("release build", || {
        emulator::build()?;
        cargo(&["build", "--release", "--package", "kerf"])
    })?;
    report.stage("images", image::all)?;
    report.stage("cluster programs, the rest", || {
        programs.join().map_err(|_| anyhow!("the build of the cluster's programs panicked"))?.map(drop)
    })?;
    let tests = report
        .stage("end-to-end tests", || cargo(&["test", "--quiet", "--package", "kerf-e2e", "--test", "e2e"]));
    let tests = tests.and_then(|()| report.stage("slices on the real API server", publisher));
    let down = report.stage("clusters down", clusters_down);
    tests.and(down)
}

/// Takes all down, also those after one that cannot be.
fn clusters_down() -> Result<()> {
    CLUSTERS.map(cluster::down).into_iter().collect()
}

/// The publisher's test that wants a real API server, on that of a cluster.
fn publisher() -> Result<()> {
    let cluster = Cluster::open(CLUSTERS[0])?.context("the cluster is gone")?;
    let test = ["test", "--quiet", "--package", "kerf-controller", "--test", "it"];
    let arguments = [&test[..], &["real_server", "--", "--nocapture"]].concat();
    exec::inherit(exec::cargo(&arguments).env("KERF_TEST_KUBECONFIG", cluster.kubeconfig()))
}

/// Licences and advisories, where the tool for them is installed.
fn deny(report: &mut Report) -> Result<()> {
    if exec::cargo(&["deny", "--version"]).output().is_ok_and(|output| output.status.success()) {
        return report.stage("dependency policy", || {
            cargo(&["deny", "--offline", "check", "bans", "licenses", "sources"])
        });
    }
    eprintln!("dependency policy: skipped, cargo-deny is not installed");
    Ok(())
}

fn cargo(arguments: &[&str]) -> Result<()> {
    exec::inherit(&mut exec::cargo(arguments))
}

/// What ran, and how long it took.
#[derive(Default)]
struct Report {
    stages: Vec<(&'static str, Duration, bool)>,
}

impl Report {
    fn stage<T>(&mut self, name: &'static str, run: impl FnOnce() -> Result<T>) -> Result<T> {
        eprintln!("== {name}");
        let started = Instant::now();
        let outcome = run();
        let took = started.elapsed();
        eprintln!("== {name}: {} in {:.1} s", verdict(outcome.is_ok()), took.as_secs_f64());
        self.stages.push((name, took, outcome.is_ok()));
        outcome.with_context(|| format!("{name} failed"))
    }

    fn print(&self) {
        eprintln!();
        for (name, took, passed) in &self.stages {
            eprintln!("{:>8.1} s  {:<6}  {name}", took.as_secs_f64(), verdict(*passed));
        }
        let total: Duration = self.stages.iter().map(|(_, took, _)| *took).sum();
        eprintln!("{:>8.1} s  total", total.as_secs_f64());
    }
}

fn verdict(passed: bool) -> &'static str {
    if passed { "passed" } else { "FAILED" }
}
