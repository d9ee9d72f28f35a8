//! Claims with administrative access (`adminAccess`), to which devices are
//! allocated that others have.

use anyhow::{Context as _, Result, bail, ensure};

use super::cdi::resolve_any;
use crate::api::{Claim, Unusual};
use crate::check::{NotApplicable, checks};
use crate::context::Context;
use crate::kubelet::{CALL, Plugin};
use crate::proto::dra_v1::Device;

checks! {
    "ADMIN-001" [Registry Claims] "A claim with administrative access to a device that another has is prepared, or refused, and the other's stays as it is.",
        "KEP-5018: it looks at devices in use" => beside;
    "ADMIN-002" [Registry Claims] "A claim with administrative access keeps no other from its device.",
        "KEP-5018: it does not count as use; the device may be allocated meanwhile" => no_use;
}

/// Whether one is prepared that has the device of the first, and its device.
async fn prepared(
    context: &mut Context,
    plugin: &Plugin,
    device: Option<(String, String)>,
) -> Result<(Claim, Option<Vec<Device>>)> {
    let is_new = context.cluster.allow_admin(true).await;
    let is_new =
        is_new.map_err(|error| NotApplicable(format!("the namespace cannot be labelled: {error:#}")))?;
    let claim = context.unusual(0, Unusual { device, admin: true, ..Unusual::default() }).await;
    if is_new {
        context.cluster.allow_admin(false).await?;
    }
    let claim = claim?;
    let answer = plugin.call_prepare(plugin.version()?, &[&claim], CALL).await;
    let entry = answer.ok().and_then(|mut answer| answer.claims.remove(&claim.uid));
    Ok((claim, entry.filter(|entry| entry.error.is_empty()).map(|entry| entry.devices)))
}

async fn beside(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let holder = context.claim(0).await?;
    let devices = plugin.prepare(&holder).await?;
    let (admin, seen) = prepared(context, &plugin, Some(holder.device.clone())).await?;
    if let Some(seen) = seen {
        resolve_any(context, &seen)?;
    }
    plugin.unprepare(&admin).await?;
    resolve_any(context, &devices).context("after the end of administrative access")?;
    let again = plugin.prepare(&holder).await?;
    ensure!(again == devices, "it was {devices:?} and is {again:?}");
    Ok(())
}

async fn no_use(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let (admin, seen) = prepared(context, &plugin, None).await?;
    if seen.is_none() {
        bail!(NotApplicable("the driver refuses administrative access".to_owned()));
    }
    let device = Some(admin.device.clone());
    let claim = context.unusual(0, Unusual { device, ..Unusual::default() }).await?;
    plugin.prepare(&claim).await.map(drop)
}
