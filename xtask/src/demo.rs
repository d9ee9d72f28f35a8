//! `cargo xtask demo`: a cluster with emulated GPUs, kerf installed by its
//! chart, and the stories of `demo/` told one after another: the node's
//! picture before, during and after each, and what its containers see.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use crate::cluster::{self, Cluster, Options};
use crate::{driver, emulator, exec, image, paths};

/// The cluster of the demo.
const CLUSTER: &str = "demo";

/// Only a hang takes this long.
const LIMIT: Duration = Duration::from_mins(2);

/// The stories: folders of `demo/`, whose pods have the label `story` with the
/// folder's name.
const STORIES: [&str; 8] = [
    "whole-gpu",
    "mig-on-demand",
    "several-slices",
    "deployment",
    "alternatives",
    "by-memory",
    "vllm",
    "kserve",
];

/// Tells all stories. The cluster is taken down after them, unless `keep`.
pub fn run(keep: bool) -> Result<()> {
    emulator::build()?;
    let (kerf, stub) = (image::kerf()?, image::cuda_stub()?);
    let gpus = driver::GPUS.map(str::to_owned).to_vec();
    let cluster = Cluster::up(&Options { name: CLUSTER.to_owned(), gpus, ..Options::default() })?;
    let told = tell(&cluster, &[kerf, stub]);
    if keep {
        eprintln!();
        eprintln!("the cluster stays: export KUBECONFIG={}", cluster.kubeconfig().display());
        eprintln!("picture:           {}", picture_command(&cluster));
        eprintln!("take it down:      cargo xtask cluster down --name {CLUSTER}");
        return told;
    }
    let down = cluster::down(CLUSTER);
    eprintln!("the cluster is taken down; `cargo xtask demo --keep` leaves it up, with kerf on it");
    told.and(down)
}

fn tell(cluster: &Cluster, images: &[PathBuf]) -> Result<()> {
    for archive in images {
        cluster.import(archive)?;
    }
    driver::install(cluster, driver::Values::new())?;
    say("kerf is installed; nothing runs yet");
    show_picture(cluster)?;
    for story in STORIES {
        let folder = paths::root().join("demo").join(story);
        say(&format!("{story}: kubectl apply -f demo/{story}"));
        exec::output(cluster.kubectl().arg("apply").arg("-f").arg(&folder))?;
        let selector = format!("story={story}");
        let containers = await_some(|| ready_containers(cluster, &selector))
            .with_context(|| format!("the pods of {story} do not run"))?;
        eprintln!("$ kubectl logs --selector {selector} --all-containers --prefix");
        eprint!("{}", await_some(|| logs(cluster, &selector, containers.lines().count()))?);
        show_picture(cluster)?;
        say(&format!("{story}: kubectl delete -f demo/{story}"));
        exec::output(cluster.kubectl().args(["delete", "--wait", "-f"]).arg(&folder))?;
        let gone = Instant::now();
        await_released(cluster)?;
        eprintln!("everything it had is gone {:.1} s after its pod", gone.elapsed().as_secs_f64());
    }
    show_picture(cluster)
}

/// The containers of a story's pods, a line each, once all pods are ready.
fn ready_containers(cluster: &Cluster, selector: &str) -> Result<String> {
    let pods =
        exec::output(cluster.kubectl().args(["get", "pods", "--output=json", "--selector", selector]))?;
    let pods: serde_json::Value = serde_json::from_str(&pods)?;
    let items = |value: &serde_json::Value| value.as_array().cloned().unwrap_or_default();
    let mut containers = String::new();
    for pod in items(&pods["items"]) {
        let is_ready =
            |condition: &serde_json::Value| condition["type"] == "Ready" && condition["status"] == "True";
        if !items(&pod["status"]["conditions"]).iter().any(is_ready) {
            return Ok(String::new());
        }
        for container in items(&pod["spec"]["containers"]) {
            writeln!(containers, "{}", container["name"])?;
        }
    }
    Ok(containers)
}

/// What a story's containers have said, once so many of them have.
fn logs(cluster: &Cluster, selector: &str, containers: usize) -> Result<String> {
    let logs = ["logs", "--selector", selector, "--all-containers", "--prefix"];
    let logs = exec::output(cluster.kubectl().args(logs))?;
    let prefixes: BTreeSet<_> = logs.lines().filter_map(|line| line.split_whitespace().next()).collect();
    Ok(if prefixes.len() < containers { String::new() } else { logs })
}

fn say(text: &str) {
    eprintln!();
    eprintln!("━━ {text}");
}

/// `kerf status` on the node, which is this machine.
fn status(cluster: &Cluster) -> Command {
    let mut command = Command::new(paths::release().join("kerf"));
    command.arg("status").arg("--kubelet-root").arg(cluster.kubelet_root());
    command
}

fn picture_command(cluster: &Cluster) -> String {
    let command = status(cluster);
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
}

fn show_picture(cluster: &Cluster) -> Result<()> {
    eprint!("{}", exec::output(&mut status(cluster))?);
    Ok(())
}

/// Waits until no claim holds anything of the node.
fn await_released(cluster: &Cluster) -> Result<()> {
    await_some(|| {
        let text = exec::output(status(cluster).arg("--json"))?;
        let status: serde_json::Value = serde_json::from_str(&text)?;
        let gpus = status["gpus"].as_array().context("a status has GPUs")?;
        let held = |gpu: &serde_json::Value| {
            let is_empty = |key: &str| gpu[key].as_array().is_none_or(Vec::is_empty);
            !is_empty("heldBy") || !is_empty("partitions")
        };
        Ok(if gpus.iter().any(held) { String::new() } else { text })
    })
    .map(drop)
}

/// Asks until the answer says something.
fn await_some(ask: impl Fn() -> Result<String>) -> Result<String> {
    let started = Instant::now();
    loop {
        let answer = ask()?;
        if !answer.trim().is_empty() {
            return Ok(answer);
        }
        if started.elapsed() > LIMIT {
            bail!("nothing came of it in {} s", LIMIT.as_secs());
        }
        sleep(Duration::from_millis(200));
    }
}
