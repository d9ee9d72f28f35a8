//! Runs cases one after another on the one cluster. A case that fails is
//! described and the next one runs all the same.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use xtask::cluster::{Cluster, Options};
use xtask::{driver, image, suite};

use crate::scene::Scene;

/// A test: the sentence that it proves, and how.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// The sentence.
    pub name: &'static str,
    /// What must be there before.
    pub needs: Needs,
    /// Proves the sentence or says why not.
    pub run: fn(&Scene<'_>) -> Result<()>,
}

/// What a case stands on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Needs {
    /// The stock cluster alone.
    Cluster,
    /// kerf, installed with the values that every case has.
    Driver,
}

/// Names another cluster than that of `cargo xtask test`, for who works on cases.
const CLUSTER_VARIABLE: &str = "KERF_E2E_CLUSTER";

/// Runs the cases whose name contains any of the command line's words, or all.
/// `--list` prints their names; `--as-installed` takes kerf as an earlier run
/// left it. The cluster stays up for the next run.
pub fn main(cases: &[Case]) -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if words.iter().any(|word| word == "--list") {
        for case in cases {
            eprintln!("{}", case.name);
        }
        return ExitCode::SUCCESS;
    }
    let as_installed = words.iter().any(|word| word == "--as-installed");
    let words: Vec<&String> = words.iter().filter(|word| !word.starts_with("--")).collect();
    let chosen: Vec<&Case> = cases
        .iter()
        .filter(|case| words.is_empty() || words.iter().any(|word| case.name.contains(word.as_str())))
        .collect();
    match run(&chosen, as_installed) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("the end-to-end tests cannot run: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(cases: &[&Case], as_installed: bool) -> Result<bool> {
    let gpus = driver::GPUS.map(str::to_owned).to_vec();
    let name = std::env::var(CLUSTER_VARIABLE).unwrap_or_else(|_| suite::CLUSTER.to_owned());
    let options = Options { name, gpus };
    let cluster = Cluster::up(&options)?;
    cluster.import(&image::cuda_stub()?)?;
    drop(cluster);
    let mut installed = as_installed;
    let mut results: Vec<(&str, Duration, bool)> = Vec::new();
    for (number, case) in cases.iter().enumerate() {
        eprintln!("\ncase: {}", case.name);
        let started = Instant::now();
        let outcome = prepare(&options, case, &mut installed)
            .and_then(|cluster| play(&cluster, case, &format!("e2e-{number}")));
        if let Err(error) = &outcome {
            eprintln!("  {error:#}");
        }
        let took = started.elapsed();
        eprintln!("  {} in {:.1} s", verdict(outcome.is_ok()), took.as_secs_f64());
        results.push((case.name, took, outcome.is_ok()));
    }
    eprintln!();
    for (name, took, passed) in &results {
        eprintln!("{:>8.1} s  {:<6}  {name}", took.as_secs_f64(), verdict(*passed));
    }
    Ok(results.iter().all(|(_, _, passed)| *passed))
}

/// Mends what the case before broke, and makes what this one needs.
fn prepare(options: &Options, case: &Case, installed: &mut bool) -> Result<Cluster> {
    let cluster = Cluster::up(options)?;
    if case.needs == Needs::Driver && !*installed {
        driver::import(&cluster)?;
        let started = Instant::now();
        let outcome = driver::install(&cluster, driver::Values::new());
        outcome.with_context(|| format!("logs of kerf:\n{}", driver::logs(&cluster)))?;
        eprintln!("  kerf is installed: {:.2} s", started.elapsed().as_secs_f64());
        *installed = true;
    }
    Ok(cluster)
}

fn play(cluster: &Cluster, case: &Case, namespace: &str) -> Result<()> {
    let scene = Scene::open(cluster, namespace.to_owned())?;
    let outcome = (case.run)(&scene);
    if outcome.is_err() {
        eprintln!("{}", scene.describe());
    }
    let closed = scene.close();
    outcome.and(closed)
}

fn verdict(passed: bool) -> &'static str {
    if passed { "passed" } else { "FAILED" }
}
