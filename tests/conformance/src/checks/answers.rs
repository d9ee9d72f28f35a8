//! An API server that answers with an error, or keeps less than was written.

use anyhow::{Context as _, Result, bail, ensure};
use k8s_openapi::api::resource::v1::ResourceSlice;

use super::slices::same_devices;
use crate::check::{NotApplicable, checks};
use crate::context::{Context, FIRST};
use crate::fault::{Fault, Requests};
use crate::rules;

checks! {
    "API-001" [Registry Start Outage] "Writes of slices that meet a conflict (409) are made again.",
        "API conventions: who gets 409 reads again and retries" => conflict;
    "API-002" [Registry Start Outage] "Started while it may not read or write slices (403), the driver publishes once it may.",
        "RBAC and admission policies are made and mended after the driver" => forbidden;
    "API-003" [Registry Start Outage] "Writes of slices that are put off (429) or fail (500) are made again.",
        "API conventions: 429 and 500 are for now only" => later;
    "API-004" [Registry Start Outage] "Slices that are deleted while a watch of them ends with 410 come back.",
        "API concepts: after 410 Gone a client lists anew" => gone;
    "API-005" [Registry Claims Start Outage] "While claims may not be read (403), a prepared one is unprepared and a new one refused, which is prepared once they may.",
        "kubernetes/kubernetes 119307: the node authorizer refuses claims whose pods are gone" => unreadable;
    "API-006" [Registry Claims Start Outage] "A claim is prepared though its status may not be written (403).",
        "kubernetes/kubernetes 138149: since 1.36 the status of claims has rules of its own" => status;
    "API-007" [Registry Start Outage] "An API server that drops fields of slices is not written to all the time.",
        "feature gates: fields of one that is off are dropped without an error" => stripped;
    "API-008" [Registry Start Outage] "Where counters are dropped, only devices stay published that fit beside each other.",
        "KEP-4815; the allocator counts what is stored: all of a GPU's partitions at once" => counters;
}

/// Deletes all slices, and waits until they are back. What the first writes or
/// watches meet is set before.
async fn restored(context: &mut Context, fault: Fault) -> Result<()> {
    let Fault::Answer(_, code, ..) = fault else { bail!("no answer is set") };
    context.rest().await?;
    let before = context.quiet().await?;
    context.trouble(fault)?;
    context.cluster.delete_slices(&before).await?;
    let restored = context.settled_when(async |after| same_devices(&before, after)).await;
    let met = context.met();
    restored.map(drop).with_context(|| format!("{met} requests were answered with {code}"))
}

async fn conflict(context: &mut Context) -> Result<()> {
    restored(context, Fault::Answer(Requests::SliceWrites, 409, "Conflict", 3)).await
}

async fn later(context: &mut Context) -> Result<()> {
    restored(context, Fault::Answer(Requests::SliceWrites, 429, "TooManyRequests", 1)).await?;
    restored(context, Fault::Answer(Requests::SliceWrites, 500, "InternalError", 1)).await
}

async fn gone(context: &mut Context) -> Result<()> {
    restored(context, Fault::Answer(Requests::SliceWatches, 410, "Expired", 2)).await?;
    // It goes on watching.
    context.trouble(Fault::None)?;
    let before = context.quiet().await?;
    context.cluster.delete_slices(&before).await?;
    context.settled_when(async |after| same_devices(&before, after)).await.map(drop)
}

async fn forbidden(context: &mut Context) -> Result<()> {
    let before = context.quiet().await?;
    anew(context, Fault::Answer(Requests::Slices, 403, "Forbidden", u32::MAX)).await?;
    context
        .retried(async || {
            ensure!(context.met() > 0, "the driver has asked for no slice");
            Ok(())
        })
        .await?;
    context.plugin().await?;
    context.trouble(Fault::None)?;
    context.settled_when(async |after| same_devices(&before, after)).await.map(drop)
}

async fn unreadable(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let (old, new) = (context.claim(0).await?, context.claim(1).await?);
    plugin.prepare(&old).await?;
    context.trouble(Fault::Answer(Requests::ClaimReads, 403, "Forbidden", u32::MAX))?;
    plugin.unprepare(&old).await?;
    let refused = plugin.refusal(&new).await;
    let met = context.met();
    context.trouble(Fault::None)?;
    if met == 0 {
        bail!(NotApplicable("no claim was read: the driver had them from before".to_owned()));
    }
    refused.context("it cannot have been read")?;
    context.retried(async || plugin.prepare(&new).await.map(drop)).await.context("once claims could be read")
}

async fn status(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let claim = context.claim(0).await?;
    context.trouble(Fault::Answer(Requests::StatusWrites, 403, "Forbidden", u32::MAX))?;
    plugin.prepare(&claim).await?;
    plugin.unprepare(&claim).await?;
    if context.met() == 0 {
        bail!(NotApplicable("the driver wrote no status of the claim".to_owned()));
    }
    Ok(())
}

/// Publishes anew, on an API server whose gates are off, until `holds`.
async fn without_gates(
    context: &mut Context,
    holds: impl AsyncFnOnce(&Context, &[ResourceSlice]) -> Result<()>,
) -> Result<()> {
    let before = context.quiet().await?;
    anew(context, Fault::Strip).await?;
    context.plugin().await?;
    context.settled().await?;
    let held = holds(context, &before).await;
    let met = context.met();
    // A driver may take a feature for missing until its next start.
    anew(context, Fault::None).await?;
    context.settled_when(async |after| same_devices(&before, after)).await?;
    if met == 0 {
        bail!(NotApplicable(
            "no slice was written, in JSON or YAML, with a field of a feature gate".to_owned()
        ));
    }
    held
}

/// Starts the driver again without any slice.
async fn anew(context: &mut Context, fault: Fault) -> Result<()> {
    context.kill(FIRST).await?;
    let left = context.cluster.published().await?;
    context.cluster.delete_slices(&left).await?;
    context.trouble(fault)?;
    context.start(FIRST).await
}

async fn stripped(context: &mut Context) -> Result<()> {
    without_gates(context, async |context, _| context.quiet().await.map(drop)).await
}

async fn counters(context: &mut Context) -> Result<()> {
    let slices = context.settled().await?;
    if slices.iter().flat_map(rules::devices).all(|device| device.consumes_counters.is_none()) {
        bail!(NotApplicable("no device consumes counters".to_owned()));
    }
    without_gates(context, async |context, before| {
        context.settled_when(async |after| rules::fit_without_counters(before, after)).await.map(drop)
    })
    .await
}
