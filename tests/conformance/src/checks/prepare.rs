//! `NodePrepareResources`, as a kubelet calls it: again, at once, given up half
//! way, for claims that are not what they were.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use futures::future::{join_all, try_join_all};
use serde_json::json;

use crate::api::{Claim, REQUEST, Unusual};
use crate::cdi::is_id;
use crate::check::{NotApplicable, checks};
use crate::context::Context;
use crate::kubelet::{CALL, Plugin, Version, said};
use crate::proto::dra_v1::Device;

checks! {
    "PREP-001" [Registry Claims] "An allocated claim is prepared: the answer has the allocated device and no other, under the request's name.",
        "KEP-4381, NodePrepareResources" => prepared;
    "PREP-002" [Registry Claims] "CDI device ids are fully qualified names: vendor/class=name.",
        "CDI specification; CRI CDIDevices" => ids;
    "PREP-003" [Registry Claims] "A claim that is prepared again gets the same answer.",
        "kubelet prepares anew after a restart; KEP-4381: calls are idempotent" => again;
    "PREP-004" [Registry Claims] "Two claims in one call are both answered.",
        "kubelet: one call has all claims of a pod" => two;
    "PREP-005" [Registry Claims] "Ten calls for one claim at once all get the same answer.",
        "kubelet: pods that share a claim; a retry beside a call that still runs (119414)" => parallel;
    "PREP-006" [Registry Claims] "Calls for two claims at once are both served.",
        "kubelet: pods start at the same time" => parallel_claims;
    "PREP-007" [Registry Claims] "A call that the kubelet cancels does no harm: the retry is served.",
        "kubelet: a call is cancelled with its pod's worker" => cancelled;
    "PREP-008" [Registry Claims] "A call whose deadline passes does no harm: the retry is served.",
        "kubelet: a call has a deadline of 45 s and is made again" => deadline;
    "PREP-009" [Registry Claims] "Both versions of the service answer a claim alike.",
        "kubelet: an upgrade or downgrade changes the version" => versions;
    "PREP-010" [Registry Claims] "A claim that does not exist is refused.", "KEP-4381; Go helper: each claim is read first" => unknown;
    "PREP-011" [Registry Claims] "A claim of another UID than asked for is refused: it got replaced.",
        "kubelet: old ResourceClaim with same name" => replaced;
    "PREP-012" [Registry Claims] "A claim to which nothing is allocated is refused.", "KEP-4381" => unallocated;
    "PREP-013" [Registry Claims] "One claim's failure is no other's: in one call with a claim that is refused, either the good one is prepared or the call fails as a whole, and then the good one alone is prepared.",
        "KEP-4381: errors are per claim" => mixed;
    "PREP-014" [Registry Claims] "Another driver's devices and parameters in a claim are passed over.",
        "KEP-4381: a claim may have devices of several drivers" => foreign;
    "PREP-015" [Registry Claims] "For an alternative of a list of requests the answer names the request, without the alternative.",
        "KEP-4816; kubelet knows base names" => alternatives;
    "PREP-016" [Registry Claims] "Parameters that the driver does not know are refused.",
        "OpaqueDeviceConfiguration: the driver validates its parameters" => parameters;
    "PREP-017" [Registry Claims] "A device that was never published is refused.", "KEP-4381" => no_device;
    "PREP-018" [Registry Claims] "A device that another prepared claim has is refused, and that one is left as it is.",
        "kubernetes/kubernetes 136269, 141471: schedulers have allocated a device twice" => held;
    "PREP-019" [Registry Claims] "After a refusal for a device that is in use, the claim is prepared once the device is free.",
        "kubelet: a prepare is tried until it works" => freed;
}

fn device_names(devices: &[Device]) -> BTreeSet<(String, String)> {
    devices.iter().map(|device| (device.pool_name.clone(), device.device_name.clone())).collect()
}

fn require_device(devices: &[Device], claim: &Claim) -> Result<()> {
    let expected = BTreeSet::from([claim.device.clone()]);
    ensure!(device_names(devices) == expected, "{:?} is allocated, the answer has {devices:?}", claim.device);
    let of_request = |device: &Device| device.request_names.iter().all(|name| name == REQUEST);
    ensure!(devices.iter().all(of_request), "the request is `{REQUEST}`, the answer has {devices:?}");
    Ok(())
}

async fn prepared(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    for kind in [0, 1] {
        let claim = context.claim(kind).await?;
        require_device(&plugin.prepare(&claim).await?, &claim)?;
    }
    Ok(())
}

async fn ids(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let claim = context.claim(0).await?;
    let devices = plugin.prepare(&claim).await?;
    let ids: Vec<&String> = devices.iter().flat_map(|device| &device.cdi_device_ids).collect();
    if ids.is_empty() {
        bail!(NotApplicable("the driver's devices have no CDI ids".to_owned()));
    }
    let bad: Vec<_> = ids.into_iter().filter(|id| !is_id(id)).collect();
    ensure!(bad.is_empty(), "these are not: {bad:?}");
    Ok(())
}

fn same(first: &[Device], again: &[Device]) -> Result<()> {
    ensure!(first == again, "the first answer was {first:?}, then {again:?}");
    Ok(())
}

async fn again(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let claim = context.claim(0).await?;
    let first = plugin.prepare(&claim).await?;
    same(&first, &plugin.prepare(&claim).await?)
}

async fn two(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let claims = [context.claim(0).await?, context.claim(1).await?];
    let answers = plugin.prepare_all(&claims.each_ref()).await?;
    for (claim, answer) in claims.iter().zip(answers) {
        require_device(&answer.map_err(|error| anyhow!("{}: {error}", claim.name))?, claim)?;
    }
    Ok(())
}

async fn parallel(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let claim = context.claim(0).await?;
    let answers = try_join_all((0..10).map(|_| plugin.prepare(&claim))).await?;
    let first = answers.first().context("ten calls have answers")?;
    require_device(first, &claim)?;
    answers.iter().try_for_each(|answer| same(first, answer))
}

async fn parallel_claims(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let claims = [context.claim(0).await?, context.claim(1).await?];
    let answers = try_join_all(claims.iter().map(|claim| plugin.prepare(claim))).await?;
    claims.iter().zip(&answers).try_for_each(|(claim, answer)| require_device(answer, claim))
}

/// A call that is given up after `limit`, and then one that is not.
async fn given_up(
    context: &mut Context,
    call: impl AsyncFn(&Plugin, &Claim, Duration) -> Result<()>,
) -> Result<()> {
    let plugin = context.plugin().await?;
    // What it is in just then depends on the driver and the machine.
    for millis in [0, 1, 3, 10, 30, 100] {
        let claim = context.claim(0).await?;
        call(&plugin, &claim, Duration::from_millis(millis)).await?;
        let given_up = format!("a call was given up after {millis} ms");
        let devices = plugin.prepare(&claim).await.with_context(|| given_up.clone())?;
        require_device(&devices, &claim)?;
        plugin.unprepare(&claim).await.context(given_up)?;
        context.cluster.delete(&claim).await?;
    }
    Ok(())
}

async fn cancelled(context: &mut Context) -> Result<()> {
    given_up(context, async |plugin, claim, limit| {
        // Dropping the call resets its stream, as a cancelled context does.
        let version = plugin.version()?;
        let _ = tokio::time::timeout(limit, plugin.call_prepare(version, &[claim], CALL)).await;
        Ok(())
    })
    .await
}

async fn deadline(context: &mut Context) -> Result<()> {
    given_up(context, async |plugin, claim, limit| {
        let _ = plugin.call_prepare(plugin.version()?, &[claim], limit).await;
        Ok(())
    })
    .await
}

async fn versions(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    if !Version::ALL.into_iter().all(|version| plugin.lists(version.listed())) {
        bail!(NotApplicable("the driver serves one version of the service".to_owned()));
    }
    let claim = context.claim(0).await?;
    let mut answers = Vec::new();
    for version in Version::ALL {
        let answer = plugin.call_prepare(version, &[&claim], CALL).await;
        let mut answer = answer.map_err(|status| anyhow!("{}: {}", version.listed(), said(&status)))?;
        for device in answer.claims.values_mut().flat_map(|entry| &mut entry.devices) {
            device.share_id = None;
        }
        answers.push(answer);
    }
    ensure!(answers.first() == answers.last(), "{answers:?}");
    plugin.unprepare_with(Version::V1Beta1, &[&claim]).await
}

fn made_up(claim: &Claim) -> Claim {
    Claim { uid: "11111111-1111-4111-8111-111111111111".to_owned(), ..claim.clone() }
}

async fn unknown(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let claim = context.claim(0).await?;
    context.cluster.delete(&claim).await?;
    plugin.refusal(&claim).await.map(drop)
}

async fn replaced(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let claim = context.claim(0).await?;
    plugin.refusal(&made_up(&claim)).await.map(drop)
}

async fn unallocated(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let claim = context.unusual(0, Unusual { unallocated: true, ..Unusual::default() }).await?;
    plugin.refusal(&claim).await.map(drop)
}

async fn mixed(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let good = context.claim(0).await?;
    let other = context.claim(1).await?;
    let bad = made_up(&other);
    let answer = plugin.call_prepare(plugin.version()?, &[&bad, &good], CALL).await;
    let devices = match answer {
        Ok(answer) => {
            let refused = answer.claims.get(&bad.uid).context("the refused claim has no entry")?;
            ensure!(!refused.error.is_empty(), "a claim of another UID was prepared");
            let entry = answer.claims.get(&good.uid).context("the good claim has no entry")?;
            ensure!(entry.error.is_empty(), "the good claim failed with the other: {}", entry.error);
            entry.devices.clone()
        }
        Err(_) => plugin.prepare(&good).await?,
    };
    require_device(&devices, &good)
}

async fn foreign(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let claim = context.unusual(0, Unusual { foreign: true, ..Unusual::default() }).await?;
    require_device(&plugin.prepare(&claim).await?, &claim)
}

async fn alternatives(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let claim = context.unusual(0, Unusual { alternatives: true, ..Unusual::default() }).await?;
    require_device(&plugin.prepare(&claim).await?, &claim)
}

async fn parameters(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let nonsense = json!({"apiVersion": "conformance.invalid/v1", "kind": "Nonsense"});
    let claim = context.unusual(0, Unusual { parameters: Some(nonsense), ..Unusual::default() }).await?;
    plugin.refusal(&claim).await.map(drop)
}

async fn no_device(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let (pool, _) = context.claim(0).await?.device;
    let device = Some((pool, "never-published".to_owned()));
    let claim = context.unusual(0, Unusual { device, ..Unusual::default() }).await?;
    plugin.refusal(&claim).await.map(drop)
}

/// Two claims of which the first is prepared and has the other's device.
async fn rivals(context: &mut Context, plugin: &Plugin) -> Result<(Claim, Vec<Device>, Claim)> {
    let holder = context.claim(0).await?;
    let devices = plugin.prepare(&holder).await?;
    let device = Some(holder.device.clone());
    let rival = context.unusual(0, Unusual { device, ..Unusual::default() }).await?;
    Ok((holder, devices, rival))
}

async fn held(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let (holder, devices, rival) = rivals(context, &plugin).await?;
    let refused = join_all((0..3).map(|_| plugin.refusal(&rival))).await;
    refused.into_iter().collect::<Result<Vec<_>>>()?;
    same(&devices, &plugin.prepare(&holder).await?)
}

async fn freed(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let (holder, _, rival) = rivals(context, &plugin).await?;
    plugin.call_prepare(plugin.version()?, &[&rival], CALL).await.ok();
    plugin.unprepare(&holder).await?;
    require_device(&plugin.prepare(&rival).await?, &rival)
}
