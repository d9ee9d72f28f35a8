//! What `kerf node` costs, measured on the release binary, an emulated driver
//! without latency, and the real API server of a test cluster; and how claims
//! in bursts fare on a driver that takes its time (alone: argument `bursts`).
//!
//! The bench is the kubelet: it makes allocated claims, calls the plugin's
//! socket, and takes the time from request to answer, every fsync included.
//! The time of a bare fsync on the same disk stands beside, for machines
//! differ. It prints figures and asserts none.

#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, reason = "a bench prints its figures")]

mod bursts;
mod claims;
mod figures;
mod memory;
mod node;

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use xtask::cluster::{Cluster, Options};

use crate::claims::Claims;
use crate::figures::Times;
use crate::node::Node;

/// GPUs of the bench.
const GPUS: usize = 8;
/// GPUs of the largest node.
const MANY_GPUS: usize = 64;
/// Prepares of one kind, one after another.
const SEQUENTIAL: usize = 200;
/// Rounds of one prepare on each GPU at once.
const ROUNDS: usize = 40;
/// How long the process is left alone before its memory is read.
const IDLE: Duration = Duration::from_secs(5);

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let cluster = Cluster::up(&Options {
        name: "bench".to_owned(),
        gpus: vec!["h100-80".to_owned(); GPUS],
        ..Options::default()
    })?;
    let result = measure(&cluster).await;
    drop(cluster);
    xtask::cluster::down("bench")?;
    result
}

async fn measure(cluster: &Cluster) -> Result<()> {
    let claims = Claims::connect(cluster, "kerf-bench").await?;
    let binary = xtask::paths::release().join("kerf");
    if std::env::args().nth(1).is_none_or(|only| only != "bursts") {
        measure_costs(cluster, &claims, &binary).await?;
        measure_many(cluster, &claims, &binary).await?;
    }
    claims.withdraw_all().await?;
    let driver = cluster.emulator_root().context("the cluster has no emulated GPUs")?;
    let node = Node::start(cluster, &binary, claims.node(), &driver)?;
    claims.await_published(node.started, GPUS).await?;
    bursts::measure(&claims, &node, &driver).await?;
    node.stop()
}

/// What each thing costs by itself.
async fn measure_costs(cluster: &Cluster, claims: &Claims, binary: &Path) -> Result<()> {
    let size = std::fs::metadata(binary).context("kerf is not built")?.len();
    println!("binary                     {:>8.1} MB", megabytes(size));
    let driver = cluster.emulator_root().context("the cluster has no emulated GPUs")?;

    let mut starts = Times::default();
    for _ in 0..5 {
        claims.withdraw_all().await?;
        let node = Node::start(cluster, binary, claims.node(), &driver)?;
        starts.add(claims.await_published(node.started, GPUS).await?);
        node.stop()?;
    }
    println!("start to slices stored     {starts}");

    let node = Node::start(cluster, binary, claims.node(), &driver)?;
    claims.await_published(node.started, GPUS).await?;
    tokio::time::sleep(IDLE).await;
    print_memory("memory idle, 8 GPUs", node.pid())?;

    println!("bare fsync, same disk      {}", node.bare_fsync(SEQUENTIAL)?);
    println!("bare GET of a claim        {}", claims.bare_get(SEQUENTIAL).await?);
    let mut plugin = node.plugin().await?;
    let gpus = claims.gpus().await?;
    for (name, suffix) in [("whole GPU", ""), ("MIG 1g.10gb", "-mig-1g-10gb-6")] {
        let (mut prepare, mut unprepare) = (Times::default(), Times::default());
        // The first one changes the MIG mode, once for all that follow.
        for (index, gpu) in gpus.iter().cycle().take(SEQUENTIAL + gpus.len()).enumerate() {
            let claim = claims.allocate(&[format!("{gpu}{suffix}")]).await?;
            let times = plugin.clone().round(&claim).await?;
            claims.delete(&claim).await?;
            if index >= gpus.len() {
                prepare.add(times.prepare);
                unprepare.add(times.unprepare);
            }
        }
        println!("prepare {name:<18} {prepare}");
        println!("unprepare {name:<16} {unprepare}");

        let mut parallel = Times::default();
        for _ in 0..ROUNDS {
            let devices = gpus.iter().map(|gpu| format!("{gpu}{suffix}"));
            let round = futures::future::try_join_all(
                devices.map(|device| async move { claims.allocate(&[device]).await }),
            )
            .await?;
            let calls = round.iter().map(|claim| {
                let mut plugin = plugin.clone();
                async move { plugin.prepare(claim).await }
            });
            for time in futures::future::try_join_all(calls).await? {
                parallel.add(time);
            }
            for claim in &round {
                plugin.unprepare(claim).await?;
                claims.delete(claim).await?;
            }
        }
        println!("8 at once {name:<16} {parallel}");
    }
    tokio::time::sleep(IDLE).await;
    print_memory("memory after the work", node.pid())?;
    node.stop()
}

/// What a node of many GPUs costs while nothing happens: its layout is the
/// largest there is.
async fn measure_many(cluster: &Cluster, claims: &Claims, binary: &Path) -> Result<()> {
    let root = tempfile::tempdir()?;
    let mut init = Command::new(xtask::paths::release().join("nvidia-emulator"));
    init.arg("init").arg("--root").arg(root.path());
    init.args(["--gpu", "h100-80"].repeat(MANY_GPUS)).stdout(Stdio::null());
    ensure!(init.status()?.success(), "{MANY_GPUS} GPUs cannot be emulated");
    claims.withdraw_all().await?;
    let node = Node::start(cluster, binary, claims.node(), root.path())?;
    claims.await_published(node.started, MANY_GPUS).await?;
    tokio::time::sleep(IDLE).await;
    print_memory("memory idle, 64 GPUs", node.pid())?;
    node.stop()
}

fn print_memory(what: &str, pid: u32) -> Result<()> {
    let memory = memory::of(pid)?;
    println!(
        "{what:<26} {:>8.1} MB resident: {:.1} MB private, {:.1} MB of files; {:.1} MB without the driver's library",
        megabytes(memory.resident),
        megabytes(memory.anonymous),
        megabytes(memory.resident.saturating_sub(memory.anonymous)),
        megabytes(memory.resident.saturating_sub(memory.library)),
    );
    Ok(())
}

#[expect(clippy::cast_precision_loss, reason = "a figure for readers")]
fn megabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e6
}
