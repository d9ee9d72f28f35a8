//! Claims of more than one device.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};

use super::cdi::resolve_any;
use crate::api::{Claim, Place, REQUEST, SECOND_REQUEST, Second, Unusual};
use crate::check::checks;
use crate::context::Context;
use crate::profile::ClaimProfile;

checks! {
    "PREP-020" [Registry Claims] "A claim with two devices for two requests is answered with both, each under its request.",
        "KEP-4381: a claim may have many requests; containers name one" => two_devices;
    "PREP-021" [Registry Claims] "A claim of whose two devices one cannot be had is refused, and the other is free.",
        "kubernetes/kubernetes 139772: a prepare that fails half way is rolled back" => half;
}

/// The first kind's device, and the second kind's or another of the first.
async fn devices(context: &Context) -> Result<(Place, ClaimProfile, Place)> {
    context.settled().await?;
    let kinds = &context.profile.claims;
    let first = kinds.first().context("the profile has no `claims`")?;
    let second = kinds.last().unwrap_or(first).clone();
    let device = context.cluster.pick(first, &[]).await?;
    let other = context.cluster.pick(&second, std::slice::from_ref(&device)).await?;
    Ok((device, second, other))
}

async fn claim(context: &mut Context, device: Place, profile: ClaimProfile, other: Place) -> Result<Claim> {
    let second = Some(Second { profile, device: other, share: None });
    context.unusual(0, Unusual { device: Some(device), second, ..Unusual::default() }).await
}

async fn two_devices(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let (device, profile, other) = devices(context).await?;
    let claim = claim(context, device.clone(), profile, other.clone()).await?;
    let answer = plugin.prepare(&claim).await?;
    let place = |(pool, device): Place, request: &str| (pool, device, request.to_owned());
    let expected = BTreeSet::from([place(device, REQUEST), place(other, SECOND_REQUEST)]);
    let told: BTreeSet<_> = answer
        .iter()
        .flat_map(|device| {
            let of =
                |request: &String| (device.pool_name.clone(), device.device_name.clone(), request.clone());
            device.request_names.iter().map(of)
        })
        .collect();
    ensure!(told == expected, "these are allocated: {expected:?}, the answer has {answer:?}");
    resolve_any(context, &answer)
}

async fn half(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let (device, profile, (pool, _)) = devices(context).await?;
    let claim = claim(context, device, profile, (pool, "never-published".to_owned())).await?;
    plugin.refusal(&claim).await?;
    context.cluster.delete(&claim).await?;
    context.require_free(&claim).await
}
