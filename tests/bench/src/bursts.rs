//! Claims in bursts, on GPUs whose driver takes its time: how far waiting for
//! each other is from what the hardware alone would take.
//!
//! The bench allocates from what is published, as the scheduler would, and a
//! device is free again only after the answer of its unprepare. It calls for
//! each claim on its own and all at once, as the kubelet does for pods, gives
//! up after the kubelet's 45 s, and asks again.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use futures::future::try_join_all;
use futures::stream::{FuturesUnordered, StreamExt as _};
use k8s_openapi::api::resource::v1::ResourceSliceSpec;
use kerf_dra_driver::fixtures::allocator::offers;
use tokio::time::timeout;

use crate::claims::{Allocated, Claims};
use crate::figures::Times;
use crate::node::{Node, Plugin};

/// Partitions of each shape.
const PARTITIONS: usize = 200;
/// The kubelet's limit for a call.
const LIMIT: Duration = Duration::from_secs(45);
/// After a call that failed.
const PAUSE: Duration = Duration::from_secs(1);
/// More than any claim needs that is ever served.
const MOST_CALLS: usize = 30;
/// What a partition costs the driver.
const CREATE: (&str, Duration) = ("nvmlGpuInstanceCreateComputeInstance", Duration::from_millis(300));
const DESTROY: (&str, Duration) = ("nvmlGpuInstanceDestroy", Duration::from_secs(1));

/// How claims come and go.
struct Shape {
    name: &'static str,
    /// The partitions of one claim after the other, over and over.
    claims: &'static [&'static [&'static str]],
    /// Whether one burst is over before the next comes.
    apart: bool,
}

const SHAPES: [Shape; 4] = [
    Shape { name: "all prepared, then all unprepared", claims: &[&["1g-10gb"]], apart: true },
    Shape { name: "unprepares among prepares", claims: &[&["1g-10gb"]], apart: false },
    Shape {
        name: "mixed sizes",
        claims: &[&["1g-10gb"], &["3g-40gb"], &["2g-20gb"], &["1g-10gb"]],
        apart: false,
    },
    Shape { name: "claims of two GPUs", claims: &[&["1g-10gb", "1g-10gb"], &["1g-10gb"]], apart: false },
];

/// What was seen of one shape.
#[derive(Default)]
struct Tally {
    prepare: Times,
    unprepare: Times,
    late: usize,
    retries: usize,
    /// The driver's time by GPU.
    work: BTreeMap<String, Duration>,
}

/// One claim's calls.
#[derive(Default)]
struct Calls {
    times: Vec<Duration>,
    late: usize,
}

/// Which devices are given out.
struct Allocator {
    slices: Vec<ResourceSliceSpec>,
    given: BTreeSet<String>,
}

impl Allocator {
    /// A free device for each of some profiles, or none at all.
    fn take(&mut self, profiles: &[&str]) -> Option<Vec<String>> {
        let mut taken = Vec::new();
        for profile in profiles {
            let given: BTreeSet<&str> = self.given.iter().map(String::as_str).collect();
            let load = |gpu: &str| given.iter().filter(|device| gpu_of(device) == gpu).count();
            let device = offers(&self.slices, &given)
                .into_iter()
                .filter(|device| is_of(&device.name, profile))
                .min_by_key(|device| load(gpu_of(&device.name)))
                .map(|device| device.name.clone());
            let Some(device) = device else {
                self.give_back(&taken);
                return None;
            };
            self.given.insert(device.clone());
            taken.push(device);
        }
        Some(taken)
    }

    fn give_back(&mut self, devices: &[String]) {
        for device in devices {
            self.given.remove(device);
        }
    }
}

fn gpu_of(device: &str) -> &str {
    device.split_once("-mig-").map_or(device, |(gpu, _)| gpu)
}

fn is_of(device: &str, profile: &str) -> bool {
    let partition = device.split_once("-mig-").map(|(_, partition)| partition);
    partition.and_then(|partition| partition.rsplit_once('-')).is_some_and(|(name, _)| name == profile)
}

/// Measures all shapes on a machine of its own.
pub(crate) async fn measure(claims: &Claims, node: &Node, driver: &Path) -> Result<()> {
    let slices = claims.published().await?;
    let plugin = node.plugin().await?;
    let gpus: BTreeSet<&str> = slices
        .iter()
        .flat_map(|slice| slice.devices.iter().flatten())
        .map(|device| gpu_of(&device.name))
        .collect();
    // What follows is not to wait for changes of the MIG mode.
    for gpu in &gpus {
        let claim = claims.allocate(&[&format!("{gpu}-mig-1g-10gb-6")]).await?;
        plugin.clone().round(&claim).await?;
        claims.delete(&claim).await?;
    }
    for (call, time) in [CREATE, DESTROY] {
        set_latency(driver, call, time)?;
    }
    for shape in &SHAPES {
        let mut allocator = Allocator { slices: slices.clone(), given: BTreeSet::new() };
        let mut wanted: VecDeque<&[&str]> = VecDeque::new();
        let mut partitions = 0;
        for profiles in shape.claims.iter().cycle() {
            if partitions >= PARTITIONS {
                break;
            }
            partitions += profiles.len();
            wanted.push_back(profiles);
        }
        let mut tally = Tally::default();
        let started = Instant::now();
        if shape.apart {
            apart(claims, &plugin, &mut allocator, wanted, &mut tally).await?;
        } else {
            flowing(claims, &plugin, &mut allocator, wanted, &mut tally).await?;
        }
        print(shape, started.elapsed(), &tally, gpus.len());
    }
    for (call, _) in [CREATE, DESTROY] {
        set_latency(driver, call, Duration::ZERO)?;
    }
    Ok(())
}

/// One burst after the other: of each, all prepares, then all unprepares.
async fn apart(
    claims: &Claims,
    plugin: &Plugin,
    allocator: &mut Allocator,
    mut wanted: VecDeque<&[&str]>,
    tally: &mut Tally,
) -> Result<()> {
    while !wanted.is_empty() {
        let mut burst = Vec::new();
        while let Some(devices) = wanted.front().and_then(|profiles| allocator.take(profiles)) {
            wanted.pop_front();
            tally.count(&devices);
            burst.push((claims.allocate(&devices).await?, devices));
        }
        ensure!(!burst.is_empty(), "nothing is free");
        let calls = burst.iter().map(|(claim, _)| until_prepared(plugin, claim));
        try_join_all(calls).await?.into_iter().for_each(|calls| tally.add(calls, true));
        let calls = burst.iter().map(|(claim, _)| until_unprepared(plugin, claim));
        try_join_all(calls).await?.into_iter().for_each(|calls| tally.add(calls, false));
        try_join_all(burst.iter().map(|(claim, _)| claims.delete(claim))).await?;
        for (_, devices) in &burst {
            allocator.give_back(devices);
        }
    }
    Ok(())
}

/// All come at once; each gets devices as soon as they are free, and gives
/// them back as soon as it is prepared.
async fn flowing(
    claims: &Claims,
    plugin: &Plugin,
    allocator: &mut Allocator,
    mut wanted: VecDeque<&[&str]>,
    tally: &mut Tally,
) -> Result<()> {
    let mut lives = FuturesUnordered::new();
    loop {
        while let Some(devices) = wanted.front().and_then(|profiles| allocator.take(profiles)) {
            wanted.pop_front();
            tally.count(&devices);
            lives.push(async move {
                let claim = claims.allocate(&devices).await?;
                let prepared = until_prepared(plugin, &claim).await?;
                let unprepared = until_unprepared(plugin, &claim).await?;
                claims.delete(&claim).await?;
                anyhow::Ok((devices, prepared, unprepared))
            });
        }
        let Some(life) = lives.next().await else { break };
        let (devices, prepared, unprepared) = life?;
        tally.add(prepared, true);
        tally.add(unprepared, false);
        allocator.give_back(&devices);
    }
    ensure!(wanted.is_empty(), "nothing is free");
    Ok(())
}

async fn until_prepared(plugin: &Plugin, claim: &Allocated) -> Result<Calls> {
    until_done(|| {
        let mut plugin = plugin.clone();
        async move { plugin.prepare(claim).await }
    })
    .await
}

async fn until_unprepared(plugin: &Plugin, claim: &Allocated) -> Result<Calls> {
    until_done(|| {
        let mut plugin = plugin.clone();
        async move { plugin.unprepare(claim).await }
    })
    .await
}

/// Calls as the kubelet does: with its limit, and again after a failure.
async fn until_done<F: Future<Output = Result<Duration>>>(call: impl Fn() -> F) -> Result<Calls> {
    let mut calls = Calls::default();
    for _ in 0..MOST_CALLS {
        let started = Instant::now();
        let answer = timeout(LIMIT, call()).await;
        calls.times.push(started.elapsed());
        match answer {
            Ok(Ok(_)) => return Ok(calls),
            Ok(Err(error)) => eprintln!("{error:#}"),
            Err(_) => calls.late += 1,
        }
        tokio::time::sleep(PAUSE).await;
    }
    bail!("a claim was not served by {MOST_CALLS} calls")
}

impl Tally {
    fn count(&mut self, devices: &[String]) {
        for device in devices {
            *self.work.entry(gpu_of(device).to_owned()).or_default() += CREATE.1 + DESTROY.1;
        }
    }

    fn add(&mut self, calls: Calls, prepares: bool) {
        self.late += calls.late;
        self.retries += calls.times.len() - 1;
        let times = if prepares { &mut self.prepare } else { &mut self.unprepare };
        calls.times.into_iter().for_each(|time| times.add(time));
    }
}

fn print(shape: &Shape, wall: Duration, tally: &Tally, gpus: usize) {
    let longest = tally.work.values().max().copied().unwrap_or_default().as_secs_f64();
    let all: Duration = tally.work.values().sum();
    #[expect(clippy::cast_precision_loss, reason = "a count of GPUs")]
    let average = all.as_secs_f64() / gpus as f64;
    println!("bursts: {}", shape.name);
    println!("  prepare                  {}", tally.prepare);
    println!("  unprepare                {}", tally.unprepare);
    println!(
        "  {:.1} s in all; the driver alone: {longest:.1} s on the busiest GPU, {average:.1} s on average; {} late, {} again",
        wall.as_secs_f64(),
        tally.late,
        tally.retries
    );
}

fn set_latency(driver: &Path, call: &str, time: Duration) -> Result<()> {
    let mut command = Command::new(xtask::paths::release().join("nvidia-emulator"));
    command.arg("--root").arg(driver).args(["latency", "set", call, &time.as_millis().to_string()]);
    ensure!(command.status().context("the emulator cannot be run")?.success(), "{call} cannot be made slow");
    Ok(())
}
