//! Ends, kills and boots between two calls of a kubelet.

use anyhow::{Context as _, Result, ensure};

use super::cdi::resolve;
use super::slices::same_devices;
use crate::check::checks;
use crate::context::{Context, FIRST, written};

checks! {
    "RESTART-001" [Registry Claims Start] "A claim that was prepared before a kill is answered alike after it.",
        "kubelet prepares anew; KEP-4381: calls are idempotent" => prepared;
    "RESTART-002" [Registry Claims Start] "A claim that was prepared before a kill is unprepared after it, though it is gone from the API server.",
        "KEP-4381; kubernetes/kubernetes 119307" => unprepared;
    "RESTART-003" [Registry Claims Start] "A device that a claim has is refused to others after a kill too.",
        "kubernetes/kubernetes 136269, 141471" => held;
    "RESTART-004" [Registry Claims Start] "Killed at any moment of a prepare, the driver serves the retry, and the unprepare.",
        "kubelet: a call that fails is made again" => killed_meanwhile;
    "RESTART-005" [Registry Claims Start] "Killed at any moment of an unprepare, the driver serves the retry, and the device is free.",
        "kubelet: a call that fails is made again" => killed_in_unprepare;
    "RESTART-006" [Registry Start] "Asked to end, the driver leaves its slices.",
        "Go helper; the kubelet deletes them after 30 s without the plugin" => slices_left;
    "RESTART-007" [Registry Start] "A restart changes no device, and writes no slice that is right.",
        "every write of a slice goes to all schedulers" => slices_kept;
    "RESTART-008" [Registry Claims Cdi Start Reboot] "After a boot, a claim of before is prepared anew, with specs that are there.",
        "kubernetes/kubernetes 141433: after a boot CDI specs are gone, the checkpoint is not" => rebooted;
    "RESTART-009" [Registry Claims Start Reboot] "After a boot, a claim of before is unprepared, and its device is free.",
        "kubelet: pods that do not come back are unprepared" => rebooted_unprepare;
}

async fn prepared(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let claim = context.claim(0).await?;
    let before = plugin.prepare(&claim).await?;
    let after = context.crash().await?.prepare(&claim).await?;
    ensure!(before == after, "it was {before:?} and is {after:?}");
    Ok(())
}

async fn unprepared(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let claim = context.claim(0).await?;
    plugin.prepare(&claim).await?;
    context.cluster.delete(&claim).await?;
    let plugin = context.crash().await?;
    plugin.unprepare(&claim).await?;
    context.require_free(&claim).await
}

async fn held(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let holder = context.claim(0).await?;
    plugin.prepare(&holder).await?;
    let device = Some(holder.device.clone());
    let rival = context.unusual(0, crate::api::Unusual { device, ..Default::default() }).await?;
    context.crash().await?.refusal(&rival).await.map(drop)
}

/// Moments after a call's beginning, in milliseconds.
const MOMENTS: [u64; 5] = [0, 2, 5, 15, 40];

async fn killed_meanwhile(context: &mut Context) -> Result<()> {
    for millis in MOMENTS {
        let plugin = context.plugin().await?;
        let claim = context.claim(0).await?;
        let moment = std::time::Duration::from_millis(millis);
        let _ = tokio::time::timeout(moment, plugin.prepare(&claim)).await;
        let plugin = context.crash().await?;
        let killed = format!("killed {millis} ms after the call");
        plugin.prepare(&claim).await.with_context(|| killed.clone())?;
        plugin.unprepare(&claim).await.context(killed)?;
        context.cluster.delete(&claim).await?;
    }
    Ok(())
}

async fn killed_in_unprepare(context: &mut Context) -> Result<()> {
    for millis in MOMENTS {
        let plugin = context.plugin().await?;
        let claim = context.claim(0).await?;
        plugin.prepare(&claim).await?;
        let moment = std::time::Duration::from_millis(millis);
        let _ = tokio::time::timeout(moment, plugin.unprepare(&claim)).await;
        let plugin = context.crash().await?;
        let killed = format!("killed {millis} ms after the call");
        plugin.unprepare(&claim).await.with_context(|| killed.clone())?;
        context.cluster.delete(&claim).await?;
        context.require_free(&claim).await.context(killed)?;
    }
    Ok(())
}

async fn slices_left(context: &mut Context) -> Result<()> {
    context.plugin().await?;
    let before = context.quiet().await?;
    context.terminate(FIRST).await?;
    let after = context.cluster.published().await?;
    match written(&before, &after) {
        None => Ok(()),
        Some(slice) => anyhow::bail!("{slice} was deleted or written"),
    }
}

async fn slices_kept(context: &mut Context) -> Result<()> {
    context.plugin().await?;
    let before = context.quiet().await?;
    context.crash().await?;
    let after = context.quiet().await?;
    same_devices(&before, &after)?;
    match written(&before, &after) {
        None => Ok(()),
        Some(slice) => anyhow::bail!("{slice} was written, with the same devices"),
    }
}

async fn rebooted(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let claim = context.claim(0).await?;
    plugin.prepare(&claim).await?;
    let devices = context.reboot().await?.prepare(&claim).await?;
    resolve(context, &devices).map(drop)
}

async fn rebooted_unprepare(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let claim = context.claim(0).await?;
    plugin.prepare(&claim).await?;
    context.reboot().await?.unprepare(&claim).await?;
    context.cluster.delete(&claim).await?;
    context.require_free(&claim).await
}
