//! Claims that end without a word to the driver: the kubelet has lost its own
//! record, or was not there for long.

use anyhow::{Context as _, Result, ensure};

use super::cdi::resolve_any;
use crate::api::Unusual;
use crate::check::checks;
use crate::context::{Context, until};
use crate::profile::seconds;

checks! {
    "COLLECT-001" [Registry Claims Collect] "What a prepared claim has that is gone, and that nobody unprepares, becomes free; what one has that is there stays.",
        "NVIDIA/k8s-dra-driver-gpu 1278: claims that are prepared for ever" => collected;
}

async fn collected(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let (gone, kept) = (context.claim(0).await?, context.claim(1).await?);
    plugin.prepare(&gone).await?;
    let devices = plugin.prepare(&kept).await?;
    context.cluster.delete(&gone).await?;
    let device = Some(gone.device.clone());
    let next = context.unusual(0, Unusual { device, ..Unusual::default() }).await?;
    let limit = seconds(context.profile.limits.collect.unwrap_or_default());
    until(limit, async || plugin.prepare(&next).await.map(drop)).await.context("the device is not free")?;
    // The other is not collected a little later.
    tokio::time::sleep(seconds(context.profile.limits.quiet)).await;
    resolve_any(context, &devices).context("of the claim that is still there")?;
    let again = plugin.prepare(&kept).await?;
    ensure!(again == devices, "the claim that is still there had {devices:?} and has {again:?}");
    Ok(())
}
