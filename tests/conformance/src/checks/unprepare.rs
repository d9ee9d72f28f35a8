//! `NodeUnprepareResources`: it must work without the API server's claim, for
//! claims that nobody knows, and leave nothing.

use anyhow::{Context as _, Result, ensure};
use futures::future::{join, join_all, try_join_all};

use super::cdi::resolve_any;
use crate::api::{Claim, Unusual};
use crate::check::checks;
use crate::context::Context;

checks! {
    "UNPREP-001" [Registry Claims] "A prepared claim is unprepared.", "KEP-4381, NodeUnprepareResources" => unprepared;
    "UNPREP-002" [Registry Claims] "A claim that is unprepared again is answered with success.", "KEP-4381: calls are idempotent" => again;
    "UNPREP-003" [Registry] "A claim that nobody knows is unprepared with success.", "kubernetes/kubernetes 131957" => unknown;
    "UNPREP-004" [Registry Claims] "A claim that is gone from the API server is unprepared.",
        "kubernetes/kubernetes 119307: claims may be deleted before" => deleted;
    "UNPREP-005" [Registry Claims] "A claim is unprepared after another of its name has taken its place, and the other can be prepared.",
        "kubelet: old ResourceClaim with same name" => replaced;
    "UNPREP-006" [Registry Claims] "Ten calls for one claim at once all succeed.", "kubelet: its pod workers and its reconcile loop" => parallel;
    "UNPREP-007" [Registry Claims] "In one call with claims that nobody knows, every claim has an entry.",
        "kubelet: an entry that is missing is an error" => mixed;
    "UNPREP-008" [Registry Claims] "The device of an unprepared claim can be prepared for another claim.", "KEP-4381" => reused;
    "UNPREP-009" [Registry Claims] "A claim can be prepared again after it was unprepared.",
        "KEP-4381: a claim outlives the pods that use it" => prepared_again;
    "UNPREP-010" [Registry Claims] "A claim whose prepare was refused is unprepared with success.",
        "kubernetes/kubernetes 139772: a pod whose prepare failed must be able to end" => refused;
    "UNPREP-011" [Registry Claims] "A late prepare of a claim that was unprepared and is gone is refused, and its device is free.",
        "NVIDIA/k8s-dra-driver-gpu 1162" => late_prepare;
    "UNPREP-012" [Registry Claims] "Prepares and unprepares of one claim at once leave it whole: prepared by the last prepare, and its device free after the last unprepare.",
        "kubernetes/kubernetes 140212, 140527: a pod of a claim ends while another starts" => crossed;
}

fn nobody(number: u8) -> Claim {
    Claim {
        namespace: "default".to_owned(),
        name: format!("dra-conformance-nobody-{number}"),
        uid: format!("22222222-2222-4222-8222-2222222222{number:02}"),
        device: (String::new(), String::new()),
    }
}

async fn unprepared(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let claim = context.claim(0).await?;
    plugin.prepare(&claim).await?;
    plugin.unprepare(&claim).await
}

async fn again(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let claim = context.claim(0).await?;
    plugin.prepare(&claim).await?;
    plugin.unprepare(&claim).await?;
    plugin.unprepare(&claim).await.context("the second time")
}

async fn unknown(context: &mut Context) -> Result<()> {
    context.plugin().await?.unprepare(&nobody(1)).await
}

async fn deleted(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let claim = context.claim(0).await?;
    plugin.prepare(&claim).await?;
    context.cluster.delete(&claim).await?;
    plugin.unprepare(&claim).await?;
    context.require_free(&claim).await
}

async fn replaced(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let former = context.claim(0).await?;
    plugin.prepare(&former).await?;
    context.cluster.delete(&former).await?;
    let unusual = Unusual {
        device: Some(former.device.clone()),
        name: Some(former.name.clone()),
        ..Unusual::default()
    };
    let next = context.unusual(0, unusual).await?;
    plugin.unprepare(&former).await?;
    let devices = plugin.prepare(&next).await.context("the claim that took the place")?;
    // The kubelet may say it again.
    plugin.unprepare(&former).await?;
    resolve_any(context, &devices).context("after the former claim was unprepared once more")?;
    let now = plugin.prepare(&next).await?;
    ensure!(devices == now, "the former claim's unprepare has changed the other: {devices:?}, then {now:?}");
    Ok(())
}

async fn parallel(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let claim = context.claim(0).await?;
    plugin.prepare(&claim).await?;
    try_join_all((0..10).map(|_| plugin.unprepare(&claim))).await?;
    Ok(())
}

async fn mixed(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let claim = context.claim(0).await?;
    plugin.prepare(&claim).await?;
    plugin.unprepare_all(&[&nobody(1), &claim, &nobody(2)]).await
}

async fn reused(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let claim = context.claim(0).await?;
    plugin.prepare(&claim).await?;
    plugin.unprepare(&claim).await?;
    context.require_free(&claim).await
}

async fn prepared_again(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let claim = context.claim(0).await?;
    for _ in 0..3 {
        plugin.prepare(&claim).await?;
        plugin.unprepare(&claim).await?;
    }
    Ok(())
}

async fn refused(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let claim = context.unusual(0, Unusual { unallocated: true, ..Unusual::default() }).await?;
    plugin.refusal(&claim).await?;
    plugin.unprepare(&claim).await
}

async fn late_prepare(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let claim = context.claim(0).await?;
    plugin.prepare(&claim).await?;
    plugin.unprepare(&claim).await?;
    context.cluster.delete(&claim).await?;
    plugin.refusal(&claim).await?;
    context.require_free(&claim).await
}

async fn crossed(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let claim = context.claim(0).await?;
    for _ in 0..3 {
        let prepares = join_all((0..4).map(|_| plugin.prepare(&claim)));
        let unprepares = join_all((0..4).map(|_| plugin.unprepare(&claim)));
        // Some may fail for another that is under way.
        let _ = join(prepares, unprepares).await;
        let devices = plugin.prepare(&claim).await.context("after prepares and unprepares at once")?;
        resolve_any(context, &devices).context("after prepares and unprepares at once")?;
    }
    plugin.unprepare(&claim).await?;
    context.cluster.delete(&claim).await?;
    context.require_free(&claim).await
}
