//! An API server that does not answer for a while.

use anyhow::{Context as _, Result};

use super::slices::same_devices;
use crate::check::checks;
use crate::context::Context;
use crate::profile::seconds;

checks! {
    "OUTAGE-001" [Registry Claims Start Outage] "While the API server does not answer, a prepared claim is unprepared.",
        "NVIDIA/k8s-dra-driver-gpu 340, 342: pods hang in Terminating where an unprepare asks for the claim" => unprepared;
    "OUTAGE-002" [Registry Claims Start Outage] "While the API server does not answer, a new claim is not prepared, and it is once the API server answers.",
        "kubelet: a call has a deadline of 45 s and is made again" => prepared_later;
    "OUTAGE-003" [Registry Start Outage] "Slices that are deleted while the API server does not answer the driver come back once it does.",
        "a watch that is cut tells nothing of what has been" => slices_later;
}

async fn unprepared(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let claim = context.claim(0).await?;
    plugin.prepare(&claim).await?;
    context.cut(true)?;
    plugin.unprepare(&claim).await?;
    context.cut(false)?;
    context.require_free(&claim).await
}

async fn prepared_later(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let claim = context.claim(0).await?;
    context.cut(true)?;
    // An error of the driver's own, or the end of the call's time.
    plugin.refusal(&claim).await.context("nobody can have read the claim")?;
    context.cut(false)?;
    plugin.prepare(&claim).await.context("after the API server was there again").map(drop)
}

async fn slices_later(context: &mut Context) -> Result<()> {
    let before = context.quiet().await?;
    context.cut(true)?;
    context.cluster.delete_slices(&before).await?;
    // Long enough for a driver to notice.
    tokio::time::sleep(seconds(context.profile.limits.quiet)).await;
    context.cut(false)?;
    context.settled_when(async |after| same_devices(&before, after)).await.map(drop)
}
