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
use xtask::cluster::{Cluster, Options, Release};
use xtask::{driver, image, suite};

use crate::case::{Case, Cases, Needs, Ready};

/// Names one cluster to use instead of those of `cargo xtask test`, for who
/// works on cases.
const CLUSTER_VARIABLE: &str = "KERF_E2E_CLUSTER";

/// Runs one case, by its whole name, in this process.
const EXACT: &str = "--exact";

/// Takes kerf as an earlier run left it.
const AS_INSTALLED: &str = "--as-installed";

/// Runs the cases whose name contains any of the command line's words, or all.
/// `--list` prints their names. The clusters stay up for the next run.
pub fn main(cases: &Cases, ready: Ready) -> ExitCode {
    let (flags, words): (Vec<String>, Vec<String>) =
        std::env::args().skip(1).partition(|argument| argument.starts_with("--"));
    let has = |flag: &str| flags.iter().any(|given| given == flag);
    if has("--list") {
        for case in cases.all() {
            eprintln!("{}", case.name);
        }
        return ExitCode::SUCCESS;
    }
    let outcome = if has(EXACT) {
        run_one(cases, &words, has(AS_INSTALLED), ready)
    } else {
        groups(cases, &words).and_then(|groups| share_out(&groups, has(AS_INSTALLED)))
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

fn run_one(cases: &Cases, words: &[String], as_installed: bool, ready: Ready) -> Result<bool> {
    let found = cases.all().enumerate().find(|(_, case)| words == [case.name]);
    let (number, case) = found.with_context(|| format!("no case is called {words:?}"))?;
    let cluster = std::env::var(CLUSTER_VARIABLE).unwrap_or_else(|_| suite::CLUSTERS[0].to_owned());
    let options = options(cluster, release()?);
    eprintln!("case: {} (cluster {})", case.name, options.name);
    let started = Instant::now();
    let outcome = case.play(&options, format!("e2e-{number}"), as_installed, ready);
    if let Err(error) = &outcome {
        eprintln!("  {error:#}");
    }
    eprintln!("  {} in {:.1} s", verdict(outcome.is_ok()), started.elapsed().as_secs_f64());
    Ok(outcome.is_ok())
}

fn share_out(groups: &[Group<'_>], as_installed: bool) -> Result<bool> {
    let left = || groups.iter().flat_map(|group| group.left().clone());
    ensure!(left().next().is_some(), "no case has a name like that; `--list` prints the names");
    let started = Instant::now();
    // Once, for all clusters.
    let mut images = vec![image::cuda_stub()?];
    if !as_installed && left().any(|case| case.needs == Needs::Driver) {
        images.push(image::kerf()?);
    }
    let workers: Vec<(&Group<'_>, &String)> =
        groups.iter().flat_map(|group| group.clusters.iter().map(move |cluster| (group, cluster))).collect();
    let run = Run { images, as_installed, alone: workers.len() == 1 };
    let played: Vec<Result<Vec<Played>>> = thread::scope(|scope| {
        let threads: Vec<_> = workers
            .iter()
            .map(|(group, cluster)| {
                let run = &run;
                scope.spawn(move || run.work(group, cluster))
            })
            .collect();
        let ended = |thread: thread::ScopedJoinHandle<'_, _>| {
            thread.join().unwrap_or_else(|_| Err(anyhow!("a worker panicked")))
        };
        threads.into_iter().map(ended).collect()
    });

    eprintln!();
    let mut all_passed = true;
    for ((_, cluster), played) in workers.iter().zip(played) {
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
    for case in left() {
        all_passed = false;
        eprintln!("           not run  {}", case.name);
    }
    eprintln!("{:>8.1} s  on {} clusters", started.elapsed().as_secs_f64(), workers.len());
    Ok(all_passed)
}

/// Clusters of one release, and the cases that they share.
struct Group<'a> {
    clusters: Vec<String>,
    /// None: the default, or what a cluster has that is there already.
    release: Option<Release>,
    /// Cases that no cluster has taken yet, the next one last.
    left: Mutex<Vec<&'a Case>>,
}

impl<'a> Group<'a> {
    fn new(mut clusters: Vec<String>, release: Option<Release>, mut cases: Vec<&'a Case>) -> Self {
        clusters.truncate(cases.len());
        // Taken from the end: the longest first, lest it be left alone at the end.
        cases.sort_by_key(|case| case.seconds);
        Self { clusters, release, left: Mutex::new(cases) }
    }

    fn left(&self) -> MutexGuard<'_, Vec<&'a Case>> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// All cases on the clusters of `cargo xtask test` and, on one more, those for
/// every release on the oldest; or all on what the environment names.
fn groups<'a>(cases: &'a Cases, words: &[String]) -> Result<Vec<Group<'a>>> {
    let meant = |case: &&Case| words.is_empty() || words.iter().any(|word| case.name.contains(word.as_str()));
    let all = cases.all().filter(meant).collect();
    let release = release()?;
    if let Ok(name) = std::env::var(CLUSTER_VARIABLE) {
        return Ok(vec![Group::new(vec![name], release, all)]);
    }
    let mut groups = vec![Group::new(suite::CLUSTERS.map(str::to_owned).to_vec(), release, all)];
    if release.is_none() {
        let clusters = vec![suite::OLDEST_CLUSTER.to_owned()];
        let everywhere = cases.everywhere.iter().filter(meant).collect();
        groups.push(Group::new(clusters, Some(Release::Oldest), everywhere));
    }
    Ok(groups)
}

/// The release that the environment names.
fn release() -> Result<Option<Release>> {
    std::env::var(suite::RELEASE_VARIABLE).ok().map(|release| release.parse()).transpose()
}

/// What the clusters share.
struct Run {
    images: Vec<PathBuf>,
    as_installed: bool,
    /// There is one cluster, so what it prints is mixed with nothing.
    alone: bool,
}

/// A case that was run.
struct Played {
    name: &'static str,
    took: Duration,
    passed: bool,
}

impl Run {
    /// Brings a cluster up and runs cases on it until none is left.
    fn work(&self, group: &Group<'_>, cluster: &str) -> Result<Vec<Played>> {
        let up = Cluster::up(&options(cluster.to_owned(), group.release))?;
        for image in &self.images {
            up.import(image)?;
        }
        let mut as_installed = self.as_installed;
        let mut played = Vec::new();
        loop {
            let Some(case) = group.left().pop() else { return Ok(played) };
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

fn options(name: String, kubernetes: Option<Release>) -> Options {
    Options { name, gpus: driver::GPUS.map(str::to_owned).to_vec(), kubernetes, ..Options::default() }
}

fn verdict(passed: bool) -> &'static str {
    if passed { "passed" } else { "FAILED" }
}
