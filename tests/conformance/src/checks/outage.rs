//! An API server that does not answer for a while.

use anyhow::{Context as _, Result, bail, ensure};
use futures::future::{Either, select};

use super::slices::same_devices;
use crate::check::{NotApplicable, checks};
use crate::context::{Context, FIRST};
use crate::fault::{Fault, Requests};
use crate::profile::seconds;

checks! {
    "OUTAGE-001" [Registry Claims Start Outage] "While the API server does not answer, a prepared claim is unprepared.",
        "NVIDIA/k8s-dra-driver-gpu 340, 342: pods hang in Terminating where an unprepare asks for the claim" => unprepared;
    "OUTAGE-002" [Registry Claims Start Outage] "While the API server does not answer, a new claim is not prepared, and it is once the API server answers.",
        "kubelet: a call has a deadline of 45 s and is made again" => prepared_later;
    "OUTAGE-003" [Registry Start Outage] "Slices that are deleted while the API server does not answer the driver come back once it does.",
        "a watch that is cut tells nothing of what has been" => slices_later;
    "OUTAGE-004" [Registry Claims Start Outage] "Started while the API server does not answer, the driver unprepares a claim of before, and publishes once it answers.",
        "kubelet: pods end without the API server; what waits for it at its start holds them up" => started;
    "OUTAGE-005" [Registry Claims Start Outage] "While one claim cannot be read, another is prepared and unprepared.",
        "NVIDIA/k8s-dra-driver-gpu 374: one lock for all claims" => one_claim;
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

async fn started(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let claim = context.claim(0).await?;
    plugin.prepare(&claim).await?;
    let before = context.quiet().await?;
    context.kill(FIRST).await?;
    context.cut(true)?;
    context.start(FIRST).await?;
    let plugin = context.plugin().await?;
    context.retried(async || plugin.unprepare(&claim).await).await?;
    context.cluster.delete_slices(&before).await?;
    context.cut(false)?;
    context.settled_when(async |after| same_devices(&before, after)).await?;
    context.require_free(&claim).await
}

async fn one_claim(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let (held, other) = (context.claim(0).await?, context.claim(1).await?);
    context.trouble(Fault::Hold(Requests::Claim(held.name.clone())))?;
    let others = async {
        context
            .retried(async || {
                ensure!(context.met() > 0, "the claim was not read");
                Ok(())
            })
            .await?;
        plugin.prepare(&other).await?;
        plugin.unprepare(&other).await
    };
    match select(Box::pin(others), Box::pin(plugin.prepare(&held))).await {
        Either::Left((served, _)) => served.context("the other claim")?,
        Either::Right((Ok(_), _)) => {
            bail!(NotApplicable("the claim was not read: the driver had it from before".to_owned()))
        }
        Either::Right((Err(error), _)) => {
            return Err(
                error.context("the claim that cannot be read was given up before the other was served")
            );
        }
    }
    context.cut(false)?;
    context.retried(async || plugin.prepare(&held).await.map(drop)).await.context("once it could be read")
}
