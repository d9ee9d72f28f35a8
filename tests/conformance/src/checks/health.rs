//! The health stream, as a kubelet reads it.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use tonic::{Code, Streaming};

use crate::check::{NotApplicable, checks};
use crate::context::Context;
use crate::kubelet::{HEALTH, Plugin, said};
use crate::proto::health_v1::{DeviceHealth, HealthStatus, NodeWatchResourcesResponse};
use crate::rules;

checks! {
    "HEALTH-001" [Registry] "The health stream begins with all published devices.", "KEP-4680: each message is the complete list" => complete;
    "HEALTH-002" [Registry] "The list is sent again before the health of a device runs out.",
        "KEP-4680: after health_check_timeout_seconds (30 s) it is Unknown" => resent;
    "HEALTH-003" [Registry] "A stream that is opened anew begins with the complete list.", "kubelet opens the stream again after its end" => reopened;
    "HEALTH-004" [Registry] "Devices have a known status, a time that is not to come, and a message of at most 1024 bytes.",
        "dra-health API" => fields;
    "HEALTH-005" [Registry] "A driver without the health service answers Unimplemented there.", "kubernetes/kubernetes 141855" => not_served;
}

/// The kubelet's own, where a driver gives none.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Within which the first message comes; a kubelet waits for ever.
const FIRST_MESSAGE: Duration = Duration::from_secs(10);

async fn served(context: &mut Context) -> Result<(Plugin, &'static str)> {
    let plugin = context.plugin().await?;
    let Some(method) = plugin.health_method() else {
        bail!(NotApplicable("the driver lists no version of DRAResourceHealth".to_owned()));
    };
    if is_unimplemented(&plugin, method).await {
        bail!(NotApplicable("the driver answers DRAResourceHealth with Unimplemented".to_owned()));
    }
    Ok((plugin, method))
}

/// Where a driver has no health to tell of, the Go helper says so in the place
/// of the first message.
async fn is_unimplemented(plugin: &Plugin, method: &'static str) -> bool {
    let first = async {
        match plugin.watch_health(method).await {
            Ok(mut stream) => stream.message().await.map(drop),
            Err(status) => Err(status),
        }
    };
    let first = tokio::time::timeout(FIRST_MESSAGE, first).await;
    matches!(first, Ok(Err(status)) if status.code() == Code::Unimplemented)
}

async fn open(plugin: &Plugin, method: &'static str) -> Result<Streaming<NodeWatchResourcesResponse>> {
    plugin.watch_health(method).await.map_err(|status| anyhow!("NodeWatchResources: {}", said(&status)))
}

async fn next(
    stream: &mut Streaming<NodeWatchResourcesResponse>,
    limit: Duration,
) -> Result<Vec<DeviceHealth>> {
    let message = tokio::time::timeout(limit, stream.message()).await;
    let message = message.with_context(|| format!("no message in {} s", limit.as_secs_f32()))?;
    let message = message.map_err(|status| anyhow!("the stream failed: {}", said(&status)))?;
    Ok(message.context("the driver ended the stream")?.devices)
}

fn names(devices: &[DeviceHealth]) -> BTreeSet<(String, String)> {
    let known = devices.iter().filter_map(|device| device.device.as_ref());
    known.map(|device| (device.pool_name.clone(), device.device_name.clone())).collect()
}

async fn require_all(context: &Context, devices: &[DeviceHealth]) -> Result<()> {
    let slices = context.settled().await?;
    let published = slices.iter().flat_map(|slice| {
        rules::devices(slice).map(|device| (slice.spec.pool.name.clone(), device.name.clone()))
    });
    let told = names(devices);
    let missing: Vec<_> = published.filter(|device| !told.contains(device)).collect();
    ensure!(missing.is_empty(), "{} devices are told of, and these are not: {missing:?}", told.len());
    Ok(())
}

async fn complete(context: &mut Context) -> Result<()> {
    let (plugin, method) = served(context).await?;
    let devices = next(&mut open(&plugin, method).await?, FIRST_MESSAGE).await?;
    require_all(context, &devices).await
}

async fn resent(context: &mut Context) -> Result<()> {
    let (plugin, method) = served(context).await?;
    let mut stream = open(&plugin, method).await?;
    let first = next(&mut stream, FIRST_MESSAGE).await?;
    let own = first.iter().filter_map(|device| u64::try_from(device.health_check_timeout_seconds).ok());
    let shortest = own.filter(|seconds| *seconds > 0).min().map_or(TIMEOUT, Duration::from_secs);
    let again = next(&mut stream, shortest).await.context("after the first message")?;
    require_all(context, &again).await
}

async fn reopened(context: &mut Context) -> Result<()> {
    let (plugin, method) = served(context).await?;
    for _ in 0..3 {
        let devices = next(&mut open(&plugin, method).await?, FIRST_MESSAGE).await?;
        require_all(context, &devices).await?;
    }
    Ok(())
}

async fn fields(context: &mut Context) -> Result<()> {
    const MESSAGE: usize = 1024;
    let (plugin, method) = served(context).await?;
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?.as_secs();
    for health in next(&mut open(&plugin, method).await?, FIRST_MESSAGE).await? {
        let device = health.device.context("an entry names no device")?;
        let name = format!("{}/{}", device.pool_name, device.device_name);
        ensure!(HealthStatus::try_from(health.health).is_ok(), "`{name}` has the status {}", health.health);
        ensure!(
            health.message.len() <= MESSAGE,
            "the message of `{name}` has {} bytes",
            health.message.len()
        );
        // Clocks of one machine, and a second for rounding.
        let time = u64::try_from(health.last_updated_time).unwrap_or(u64::MAX);
        ensure!(time <= now + 1, "`{name}` was updated at {}, now is {now}", health.last_updated_time);
    }
    Ok(())
}

async fn not_served(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    for (version, method) in HEALTH {
        if is_unimplemented(&plugin, method).await {
            continue;
        }
        ensure!(plugin.lists(version), "{version} is not listed, and not answered with Unimplemented");
        bail!(NotApplicable("the driver serves DRAResourceHealth".to_owned()));
    }
    Ok(())
}
