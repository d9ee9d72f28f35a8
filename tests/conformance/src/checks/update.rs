//! Two instances beside each other, as in a rolling update without a gap.

use anyhow::{Context as _, Result, ensure};

use super::slices::same_devices;
use crate::check::checks;
use crate::context::{Context, FIRST, SECOND, written};
use crate::kubelet::Plugin;

checks! {
    "UPDATE-001" [Registry Start Instances] "A second instance registers on sockets of its own, while the first still serves.",
        "kubelet 1.33 and later: several instances of a driver" => beside;
    "UPDATE-002" [Registry Claims Start Instances] "A claim that the first prepared is answered alike by the second, which unprepares it.",
        "kubelet calls the instance that registered last" => handed_over;
    "UPDATE-003" [Registry Start Instances] "Two instances do not fight over slices, and change no device.",
        "both run controllers of slices for a while" => no_fight;
    "UPDATE-004" [Registry Start Instances] "When the first ends, its sockets go and the second's stay.",
        "kubelet pluginwatcher: a socket's removal is the plugin's deregistration" => first_ends;
    "UPDATE-005" [Registry Claims Start Instances] "When the second ends, the first serves on: the update is taken back.",
        "kubelet falls back to the instance that registered before" => second_ends;
}

async fn both(context: &mut Context) -> Result<(Plugin, Plugin)> {
    let first = context.plugin().await?;
    context.start(SECOND).await?;
    let second = context
        .plugin_except(std::slice::from_ref(&first.registration))
        .await
        .context("the second instance")?;
    Ok((first, second))
}

async fn beside(context: &mut Context) -> Result<()> {
    let (first, second) = both(context).await?;
    ensure!(first.info.endpoint != second.info.endpoint, "both have the endpoint {}", first.info.endpoint);
    for plugin in [first, second] {
        plugin.prepare_all(&[]).await?;
    }
    Ok(())
}

async fn handed_over(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let claim = context.claim(0).await?;
    let before = plugin.prepare(&claim).await?;
    let (first, second) = both(context).await?;
    let after = second.prepare(&claim).await?;
    ensure!(before == after, "the first answered {before:?}, the second {after:?}");
    second.unprepare(&claim).await?;
    first.unprepare(&claim).await.context("the first, after the second")
}

async fn no_fight(context: &mut Context) -> Result<()> {
    context.plugin().await?;
    let before = context.quiet().await?;
    both(context).await?;
    let with_both = context.quiet().await?;
    same_devices(&before, &with_both)?;
    tokio::time::sleep(crate::profile::seconds(context.profile.limits.quiet)).await;
    match written(&with_both, &context.cluster.published().await?) {
        None => Ok(()),
        Some(slice) => anyhow::bail!("{slice} was written again"),
    }
}

async fn first_ends(context: &mut Context) -> Result<()> {
    let (first, second) = both(context).await?;
    context.terminate(FIRST).await?;
    for path in [first.registration.as_path(), first.endpoint()] {
        ensure!(!path.exists(), "{} is still there", path.display());
    }
    for path in [second.registration.as_path(), second.endpoint()] {
        ensure!(path.exists(), "{} is gone", path.display());
    }
    second.prepare_all(&[]).await.map(drop)
}

async fn second_ends(context: &mut Context) -> Result<()> {
    let (first, _) = both(context).await?;
    context.terminate(SECOND).await?;
    let claim = context.claim(0).await?;
    first.prepare(&claim).await?;
    first.unprepare(&claim).await
}
