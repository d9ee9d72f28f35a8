//! Devices that do not answer.

use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use futures::future::{Either, select};

use crate::check::{NotApplicable, checks};
use crate::context::{Context, FIRST};
use crate::kubelet::{self, said};

checks! {
    "HANG-001" [Registry Start Hang] "While the devices do not answer, GetInfo answers within one second.",
        "kubelet pluginmanager: GetInfo has a deadline of 1 s; kubernetes/kubernetes 127457, 133725" => get_info;
    "HANG-002" [Registry Start Hang] "Started while the devices do not answer, the driver registers once they do.",
        "kubelet pluginmanager: registration is tried with backoff" => started;
    "HANG-003" [Registry Claims Start Hang] "A prepare that is given up because the devices do not answer is served once they do.",
        "kubelet: a call has a deadline of 45 s and is made again" => prepared_later;
    "HANG-004" [Registry Claims Start Hang] "An unprepare that is given up because the devices do not answer is served once they do.",
        "kubelet: a call has a deadline of 45 s and is made again" => unprepared_later;
    "HANG-005" [Registry Claims Start Slow] "While one claim's device is slow, another claim is prepared and unprepared.",
        "NVIDIA/k8s-dra-driver-gpu 374: one slow prepare held up all others past 45 s" => one_slow;
}

/// When a call is given up; short of the kubelet's, for it makes no difference.
const GIVEN_UP: Duration = Duration::from_secs(2);

async fn get_info(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    context.hang(true).await?;
    for _ in 0..3 {
        let info = kubelet::get_info(&plugin.registration).await;
        info.map_err(|status| anyhow!("GetInfo: {}", said(&status)))?;
    }
    Ok(())
}

async fn started(context: &mut Context) -> Result<()> {
    context.plugin().await?;
    context.kill(FIRST).await?;
    context.hang(true).await?;
    context.start(FIRST).await?;
    tokio::time::sleep(GIVEN_UP).await;
    context.hang(false).await?;
    context.plugin().await.map(drop)
}

async fn prepared_later(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let claim = context.claim(0).await?;
    context.hang(true).await?;
    let served = tokio::time::timeout(GIVEN_UP, plugin.prepare(&claim)).await;
    context.hang(false).await?;
    if let Ok(Ok(_)) = served {
        bail!(NotApplicable("the claim was prepared while the devices did not answer".to_owned()));
    }
    context.retried(async || plugin.prepare(&claim).await.map(drop)).await.context("once they answered")
}

async fn unprepared_later(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let claim = context.claim(0).await?;
    plugin.prepare(&claim).await?;
    context.hang(true).await?;
    let served = tokio::time::timeout(GIVEN_UP, plugin.unprepare(&claim)).await;
    context.hang(false).await?;
    if let Ok(Ok(())) = served {
        bail!(NotApplicable("the claim was unprepared while the devices did not answer".to_owned()));
    }
    context.retried(async || plugin.unprepare(&claim).await).await.context("once they answered")?;
    context.require_free(&claim).await
}

async fn one_slow(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let (slow, other) = (context.claim(0).await?, context.claim(1).await?);
    context.slow(true).await?;
    let prepared = async { Ok::<_, anyhow::Error>(plugin.prepare(&slow).await?.len()) };
    let others = async {
        // Once the slow one is under way.
        tokio::time::sleep(GIVEN_UP).await;
        plugin.prepare(&other).await?;
        plugin.unprepare(&other).await
    };
    match select(Box::pin(others), Box::pin(prepared)).await {
        Either::Left((served, _)) => served.context("the other claim")?,
        Either::Right((Err(error), _)) => return Err(error.context("the slow claim")),
        Either::Right((Ok(_), _)) => bail!("the slow claim was prepared before the other"),
    }
    context.slow(false).await?;
    context.retried(async || plugin.prepare(&slow).await.map(drop)).await.context("once it was fast again")
}
