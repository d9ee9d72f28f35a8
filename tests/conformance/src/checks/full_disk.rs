//! Disks without any room.

use std::path::PathBuf;

use anyhow::{Context as _, Result, bail, ensure};

use super::cdi::{resolve, resolve_any};
use crate::check::{NotApplicable, checks};
use crate::context::Context;

checks! {
    "DISK-001" [Registry Claims Start State] "With no room for state a prepare fails or is whole, and the retry is served once there is room.",
        "kubelet: a prepare is tried until it works; disks of nodes do fill" => state_prepare;
    "DISK-002" [Registry Claims Start State] "With no room for state an unprepare fails or is whole, and the retry is served once there is room.",
        "kubelet: an unprepare is tried until it works" => state_unprepare;
    "DISK-003" [Registry Claims Cdi Start] "With no room for CDI specs a prepare fails, or its specs are whole; the retry is served once there is room.",
        "a spec that ends half way keeps a runtime from all devices of its folder" => specs;
}

fn state(context: &Context) -> Result<PathBuf> {
    context.profile.state.clone().context("the profile has no `state`")
}

async fn state_prepare(context: &mut Context) -> Result<()> {
    let plugin = context.shrink(&state(context)?).await?;
    let claim = context.claim(0).await?;
    context.fill(true)?;
    let full = plugin.prepare_all(&[&claim]).await;
    context.fill(false)?;
    let devices = plugin.prepare(&claim).await.context("once there was room")?;
    if let Ok(Some(Ok(before))) = full.map(|mut results| results.pop()) {
        ensure!(before == devices, "without room it was {before:?}, and is {devices:?}");
    }
    resolve_any(context, &devices)?;
    plugin.unprepare(&claim).await?;
    context.require_free(&claim).await
}

async fn state_unprepare(context: &mut Context) -> Result<()> {
    let plugin = context.shrink(&state(context)?).await?;
    let claim = context.claim(0).await?;
    plugin.prepare(&claim).await?;
    context.fill(true)?;
    let _ = plugin.unprepare(&claim).await;
    context.fill(false)?;
    plugin.unprepare(&claim).await.context("once there was room")?;
    context.cluster.delete(&claim).await?;
    context.require_free(&claim).await
}

async fn specs(context: &mut Context) -> Result<()> {
    let [folder] = context.profile.cdi.as_slice() else {
        bail!(NotApplicable("the profile has several folders of CDI specs".to_owned()))
    };
    let plugin = context.shrink(&folder.clone()).await?;
    let claim = context.claim(0).await?;
    context.fill(true)?;
    let full = plugin.prepare_all(&[&claim]).await;
    if let Ok(Some(Ok(devices))) = full.map(|mut results| results.pop()) {
        resolve(context, &devices).context("without room it was answered as if all were well")?;
    }
    crate::cdi::read(&context.profile.cdi).context("without room")?;
    context.fill(false)?;
    let devices = plugin.prepare(&claim).await.context("once there was room")?;
    resolve(context, &devices).map(drop)
}
