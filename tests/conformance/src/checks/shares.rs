//! Shares of devices (`allowMultipleAllocations`).

use anyhow::{Context as _, Result, ensure};

use super::cdi::resolve_any;
use crate::api::{Claim, Second, Unusual};
use crate::check::checks;
use crate::context::Context;
use crate::proto::dra_v1::Device;

checks! {
    "SHARE-001" [Registry Shares] "Claims with shares of one device are prepared beside each other, and answered with their share ids.",
        "KEP-5075; kubelet: share_id of the v1 service, since 1.35" => beside;
    "SHARE-002" [Registry Shares] "Two shares of one device in one claim are answered as two.",
        "KEP-5075: pool, device and share id say which" => in_one_claim;
    "SHARE-003" [Registry Shares] "When one share is unprepared, another of the device stays as it is.",
        "KEP-5075: shares are given back one by one" => one_ends;
}

/// A share's id, which the scheduler would make up.
fn id(number: u8) -> String {
    format!("33333333-3333-4333-8333-3333333333{number:02}")
}

async fn share(context: &mut Context, number: u8, second: Option<u8>) -> Result<Claim> {
    let profile = context.profile.shares.clone().context("the profile has no `shares`")?;
    context.settled().await?;
    let device = context.cluster.pick_shared(&profile).await?;
    let second = second.map(|number| Second {
        profile: profile.clone(),
        device: device.clone(),
        share: Some(id(number)),
    });
    let unusual = Unusual { device: Some(device), share: Some(id(number)), second, ..Unusual::default() };
    context.made(&profile, unusual).await
}

fn require_shares(devices: &[Device], claim: &Claim, numbers: &[u8]) -> Result<()> {
    let told: Vec<_> = devices
        .iter()
        .map(|device| {
            (&device.pool_name, &device.device_name, device.share_id.as_deref().unwrap_or_default())
        })
        .collect();
    for number in numbers {
        let id = id(*number);
        let is_told = told.contains(&(&claim.device.0, &claim.device.1, &id));
        ensure!(is_told, "the share {id} of {:?} is allocated, the answer has {told:?}", claim.device);
    }
    ensure!(told.len() == numbers.len(), "{} shares are allocated, the answer has {told:?}", numbers.len());
    Ok(())
}

async fn beside(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    for number in [1, 2] {
        let claim = share(context, number, None).await?;
        let devices = plugin.prepare(&claim).await.with_context(|| format!("share {number}"))?;
        require_shares(&devices, &claim, &[number])?;
        resolve_any(context, &devices)?;
    }
    Ok(())
}

async fn in_one_claim(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let claim = share(context, 1, Some(2)).await?;
    let devices = plugin.prepare(&claim).await?;
    require_shares(&devices, &claim, &[1, 2])?;
    resolve_any(context, &devices)
}

async fn one_ends(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let (first, second) = (share(context, 1, None).await?, share(context, 2, None).await?);
    plugin.prepare(&first).await?;
    let devices = plugin.prepare(&second).await?;
    plugin.unprepare(&first).await?;
    resolve_any(context, &devices).context("after the other was unprepared")?;
    let again = plugin.prepare(&second).await?;
    ensure!(again == devices, "it was {devices:?} and is {again:?}");
    Ok(())
}
