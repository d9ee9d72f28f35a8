//! Shares the cases out among clusters. Most of a case is waiting, so several
//! clusters wait at the same time; each takes the next case when it is done
//! with its last. A case runs in a process of its own, and what it prints comes
//! whole when it has ended. One that fails is described, and the next one runs
//! all the same.

use std::io::{self, Read as _, Write as _};
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, ensure};
use xtask::cluster::{Cluster, Options};
use xtask::{driver, image, suite};

use crate::case::{Case, Needs, Ready};

/// Names one cluster to use instead of those of `cargo xtask test`, for who
/// works on cases.
const CLUSTER_VARIABLE: &str = "KERF_E2E_CLUSTER";

/// Runs one case, by its whole name, in this process.
const EXACT: &str = "--exact";

/// Takes kerf as an earlier run left it.
const AS_INSTALLED: &str = "--as-installed";

/// Runs the cases whose name contains any of the command line's words, or all.
/// `--list` prints their names. The clusters stay up for the next run.
pub fn main(cases: &[Case], ready: Ready) -> ExitCode {
    let (flags, words): (Vec<String>, Vec<String>) =
        std::env::args().skip(1).partition(|argument| argument.starts_with("--"));
    let has = |flag: &str| flags.iter().any(|given| given == flag);
    if has("--list") {
        for case in cases {
            eprintln!("{}", case.name);
        }
        return ExitCode::SUCCESS;
    }
    let outcome = if has(EXACT) {
        run_one(cases, &words, has(AS_INSTALLED), ready)
    } else {
        let meant =
            |case: &&Case| words.is_empty() || words.iter().any(|word| case.name.contains(word.as_str()));
        share_out(cases.iter().filter(meant).collect(), has(AS_INSTALLED))
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("the end-to-end tests cannot run: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run_one(cases: &[Case], words: &[String], as_installed: bool, ready: Ready) -> Result<bool> {
    let number = cases.iter().position(|case| words == [case.name]);
    let number = number.with_context(|| format!("no case is called {words:?}"))?;
    let case = &cases[number];
    let options = options(clusters().swap_remove(0));
    eprintln!("case: {} (cluster {})", case.name, options.name);
    let started = Instant::now();
    let outcome = case.play(&options, format!("e2e-{number}"), as_installed, ready);
    if let Err(error) = &outcome {
        eprintln!("  {error:#}");
    }
    eprintln!("  {} in {:.1} s", verdict(outcome.is_ok()), started.elapsed().as_secs_f64());
    Ok(outcome.is_ok())
}

fn share_out(mut cases: Vec<&Case>, as_installed: bool) -> Result<bool> {
    ensure!(!cases.is_empty(), "no case has a name like that; `--list` prints the names");
    let started = Instant::now();
    let mut clusters = clusters();
    clusters.truncate(cases.len());
    // Once, for all clusters.
    let mut images = vec![image::cuda_stub()?];
    if !as_installed && cases.iter().any(|case| case.needs == Needs::Driver) {
        images.push(image::kerf()?);
    }
    // Taken from the end: the longest first, lest it be left alone at the end.
    cases.sort_by_key(|case| case.seconds);
    let run = Run { images, as_installed, alone: clusters.len() == 1, left: Mutex::new(cases) };
    let workers: Vec<Result<Vec<Played>>> = thread::scope(|scope| {
        let workers: Vec<_> = clusters.iter().map(|cluster| scope.spawn(|| run.work(cluster))).collect();
        let ended = |worker: thread::ScopedJoinHandle<'_, _>| {
            worker.join().unwrap_or_else(|_| Err(anyhow!("a worker panicked")))
        };
        workers.into_iter().map(ended).collect()
    });

    eprintln!();
    let mut all_passed = true;
    for (cluster, played) in clusters.iter().zip(workers) {
        match played {
            Ok(played) => {
                for Played { name, took, passed } in played {
                    all_passed &= passed;
                    let (took, verdict) = (took.as_secs_f64(), verdict(passed));
                    eprintln!("{took:>8.1} s  {verdict:<6}  {cluster}  {name}");
                }
            }
            Err(error) => {
                all_passed = false;
                eprintln!("the cluster {cluster} was of no use: {error:#}");
            }
        }
    }
    for case in run.left().iter() {
        all_passed = false;
        eprintln!("           not run  {}", case.name);
    }
    eprintln!("{:>8.1} s  on {} clusters", started.elapsed().as_secs_f64(), clusters.len());
    Ok(all_passed)
}

/// What the clusters share.
struct Run<'a> {
    images: Vec<PathBuf>,
    as_installed: bool,
    /// There is one cluster, so what it prints is mixed with nothing.
    alone: bool,
    /// Cases that no cluster has taken yet, the next one last.
    left: Mutex<Vec<&'a Case>>,
}

/// A case that was run.
struct Played {
    name: &'static str,
    took: Duration,
    passed: bool,
}

impl<'a> Run<'a> {
    fn left(&self) -> MutexGuard<'_, Vec<&'a Case>> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Brings a cluster up and runs cases on it until none is left.
    fn work(&self, cluster: &str) -> Result<Vec<Played>> {
        let up = Cluster::up(&options(cluster.to_owned()))?;
        for image in &self.images {
            up.import(image)?;
        }
        let mut as_installed = self.as_installed;
        let mut played = Vec::new();
        loop {
            let Some(case) = self.left().pop() else { return Ok(played) };
            let started = Instant::now();
            let passed = self.play(cluster, case, as_installed)?;
            // After a failure its values may be those of the case.
            as_installed = self.as_installed || passed && (as_installed || case.needs == Needs::Driver);
            played.push(Played { name: case.name, took: started.elapsed(), passed });
        }
    }

    /// Runs a case in a process of its own.
    fn play(&self, cluster: &str, case: &Case, as_installed: bool) -> Result<bool> {
        // Not by its path, which names another program once it is built anew.
        let mut command = Command::new("/proc/self/exe");
        command.args([EXACT, case.name]).env(CLUSTER_VARIABLE, cluster).stdin(Stdio::null());
        if as_installed {
            command.arg(AS_INSTALLED);
        }
        if self.alone {
            eprintln!();
            return Ok(command.status().context("cannot start a case")?.success());
        }
        eprintln!("{cluster} begins: {}", case.name);
        let (mut reader, writer) = io::pipe()?;
        command.stdout(writer.try_clone()?).stderr(writer);
        let mut child = command.spawn().context("cannot start a case")?;
        // Its ends of the pipe: without them reading ends with the child.
        drop(command);
        let mut output = b"\n".to_vec();
        reader.read_to_end(&mut output)?;
        let status = child.wait()?;
        if status.code().is_none_or(|code| code > 1) {
            writeln!(output, "  the process of this case died ({status})")?;
        }
        io::stderr().lock().write_all(&output)?;
        Ok(status.success())
    }
}

/// The clusters to use; at least one.
fn clusters() -> Vec<String> {
    std::env::var(CLUSTER_VARIABLE)
        .map_or_else(|_| suite::CLUSTERS.map(str::to_owned).to_vec(), |name| vec![name])
}

fn options(name: String) -> Options {
    Options { name, gpus: driver::GPUS.map(str::to_owned).to_vec() }
}

fn verdict(passed: bool) -> &'static str {
    if passed { "passed" } else { "FAILED" }
}
