//! `cargo xtask test`: all checks of this repository in the order in which a
//! failure is found cheapest. The clusters' programs build beside the first of
//! them, and the clusters are taken down however the tests end.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow};

use crate::cluster::{self, Cluster, Release, programs};
use crate::{classes, codegen, conformance, emulator, exec, image};

/// The clusters of the end-to-end tests, which run at the same time.
pub const CLUSTERS: [&str; 3] = ["e2e1", "e2e2", "e2e3"];

/// One more beside them, for the cases that every release must pass.
pub const OLDEST_CLUSTER: &str = "e2e136";

/// Names the release that all of [`CLUSTERS`] run, and there is no other.
pub const RELEASE_VARIABLE: &str = "KERF_E2E_KUBERNETES";

/// Runs every check; the first failure ends the run. With a release, every
/// end-to-end test runs on that one and no other.
pub fn run(release: Option<Release>) -> Result<()> {
    programs::require_go()?;
    let mut report = Report::default();
    let outcome = stages(&mut report, release);
    report.print();
    outcome
}

fn stages(report: &mut Report, release: Option<Release>) -> Result<()> {
    // Left by a run that was killed.
    report.stage("no cluster from before", clusters_down)?;
    let programs = thread::spawn(move || match release {
        Some(release) => programs::ensure(release).map(drop),
        None => Release::ALL.into_iter().try_for_each(|release| programs::ensure(release).map(drop)),
    });
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
        programs.join().map_err(|_| anyhow!("the build of the cluster's programs panicked"))?
    })?;
    // It waits nearly always, and needs an API server only.
    let conformance = thread::spawn(move || conformance::alone(release));
    let tests = report.stage("end-to-end tests", || {
        let mut tests = exec::cargo(&["test", "--quiet", "--package", "kerf-e2e", "--test", "e2e"]);
        if let Some(release) = release {
            tests.env(RELEASE_VARIABLE, release.version());
        }
        exec::inherit(&mut tests)
    });
    let tests = tests.and_then(|()| report.stage("slices on the real API server", real_server));
    let conformance = report.stage("conformance, the rest", || {
        conformance.join().map_err(|_| anyhow!("dra-conformance's run panicked"))?
    });
    let down = report.stage("clusters down", clusters_down);
    tests.and(conformance).and(down)
}

/// Takes all down, also those after one that cannot be.
fn clusters_down() -> Result<()> {
    let all = CLUSTERS.into_iter().chain([OLDEST_CLUSTER, conformance::CLUSTER]);
    all.map(cluster::down).fold(Ok(()), Result::and)
}

/// The tests that want a real API server, on that of a cluster: the publisher's,
/// and that of every model. As part of the whole workspace they are built already.
fn real_server() -> Result<()> {
    let cluster = Cluster::open(CLUSTERS[0])?.context("the cluster is gone")?;
    let test = ["test", "--quiet", "--workspace", "--exclude", "kerf-e2e", "--test", "it"];
    let arguments = [&test[..], &["real_server::", "--", "--nocapture"]].concat();
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

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use crate::paths;

    /// Every Rust file below a folder.
    fn sources(folder: &Path) -> Vec<PathBuf> {
        let entries =
            std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path());
        let below = |path: PathBuf| if path.is_dir() { sources(&path) } else { vec![path] };
        let mut files: Vec<PathBuf> = entries.flat_map(below).collect();
        files.retain(|path| path.extension().is_some_and(|extension| extension == "rs"));
        files
    }

    /// Whether a line captures a value in its debug form, as tracing's macros
    /// write it: `?name` or `key = ?name`. The operator `?` stands after a value.
    fn captures_debug(line: &str) -> bool {
        !line.trim_start().starts_with("//")
            && line.match_indices('?').any(|(at, _)| {
                let before = line[..at].trim_end().chars().next_back();
                before.is_none_or(|before| matches!(before, '=' | ',' | '('))
                    && line[at + 1..].starts_with(|next: char| next.is_ascii_alphabetic() || next == '_')
            })
    }

    /// Log lines are read by people who need not know Rust: no `Some("580")`.
    #[test]
    fn no_log_line_writes_a_value_as_rust_does() {
        for shown in ["debug!(?event);", "gpu = ?event.gpu,", "  ?name,", "info!(a, ?b)"] {
            assert!(captures_debug(shown), "{shown}");
        }
        for hidden in ["let a = f()?;", "    .ok_or(x)?;", "T: ?Sized", "// what = ?that", "g(f(a)?, b?)"] {
            assert!(!captures_debug(hidden), "{hidden}");
        }
        for package in ["dra-driver", "gpu", "controller", "kubelet-plugin", "kerf"] {
            for path in sources(&paths::root().join(package).join("src")) {
                let text = std::fs::read_to_string(&path).expect("a source");
                let found: Vec<&str> = text.lines().filter(|line| captures_debug(line)).collect();
                assert_eq!(found, [""; 0], "{}", path.display());
            }
        }
    }
}
