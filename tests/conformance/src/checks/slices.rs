//! ResourceSlices, as an observer of the API server sees them.

use std::path::Path;

use anyhow::{Context as _, Result, bail, ensure};
use k8s_openapi::api::resource::v1::{Device, ResourceSlice};
use kube::api::{DeleteParams, PostParams};
use serde_json::json;

use crate::api::FOREIGN;
use crate::check::{NotApplicable, checks};
use crate::context::{Context, until, written};
use crate::profile::seconds;
use crate::rules;

checks! {
    "SLICE-001" [] "The driver publishes for its node, and every pool is complete.",
        "ResourcePool.resourceSliceCount; the allocator passes over incomplete pools" => complete;
    "SLICE-002" [] "No slice of an older generation is left.", "ResourcePool.generation" => one_generation;
    "SLICE-003" [] "Slices of a node are owned by the Node, so that they go with it.", "Go helper: the owner is the Node" => owner;
    "SLICE-004" [] "Device names are DNS labels, and none is twice in a pool.", "Device.name; the allocator passes over such a pool" => device_names;
    "SLICE-005" [] "Counter sets are not twice in a pool, and what devices consume is in it.",
        "KEP-4815; the allocator passes over such a pool" => counters;
    "SLICE-006" [] "No limit of the API is exceeded.", "ResourceSliceSpec" => limits;
    "SLICE-007" [] "Every slice has room for a taint: at most 64 devices.",
        "ResourceSliceSpec.devices: 64 if any device has taints" => room_for_taints;
    "SLICE-008" [] "Attributes and capacities have names that a selector can write, and one value.", "QualifiedName, DeviceAttribute" => attributes;
    "SLICE-009" [] "Attributes of resource.kubernetes.io have the standard's form.",
        "deviceattribute package: pciBusID, pcieRoot, numaNode" => standard_attributes;
    "SLICE-010" [] "Nothing is written while nothing happens.", "every write of a slice goes to all schedulers" => quiet;
    "SLICE-011" [Disturb] "A slice that is deleted comes back, and the pool is complete again.",
        "kubelet deletes slices when a plugin is not seen for 30 s" => one_deleted;
    "SLICE-012" [Disturb] "When all are deleted, all come back with the same devices in the same order.",
        "kubelet deletes all slices of its node at its start; NVIDIA/k8s-dra-driver-gpu 330" => all_deleted;
    "SLICE-013" [Disturb] "A slice that somebody edits is set right.", "Go helper: a difference is undone" => edited;
    "SLICE-014" [Disturb] "A pool's generation never falls while slices of it are there.", "ResourcePool.generation" => generations;
    "SLICE-015" [Disturb] "Slices of other drivers and of other nodes are left alone.", "ResourceSlice: each driver's own" => others;
    "SLICE-016" [Registry Claims] "A prepared claim's device stays published.",
        "the allocator counts published devices only: what its claim consumes would be given out again" => held_device;
    "SLICE-017" [Disturb Registry] "When the Node is made anew, slices are owned by the new one.",
        "garbage collection deletes what the old UID owns" => new_node;
    "SLICE-018" [Disturb] "Slices that a former version of the driver has left for the node are deleted.",
        "Go helper: pools that are not wanted go; the allocator would give their devices out" => left_behind;
}

async fn complete(context: &mut Context) -> Result<()> {
    context.settled().await.map(drop)
}

/// Holds now, or within the time that a change may take.
async fn holds(context: &Context, rule: fn(&[ResourceSlice]) -> Result<()>) -> Result<()> {
    rule(&context.settled().await?)
}

async fn one_generation(context: &mut Context) -> Result<()> {
    // Between two writes an older one may be there.
    context.settled_when(async |slices| rules::one_generation(slices)).await.map(drop)
}

async fn owner(context: &mut Context) -> Result<()> {
    let uid = context.cluster.node_uid().await?;
    for slice in context.settled().await? {
        owned_by(&slice, &uid)?;
    }
    Ok(())
}

fn owned_by(slice: &ResourceSlice, uid: &str) -> Result<()> {
    let mut owners = slice.metadata.owner_references.iter().flatten();
    let is_owned = owners.any(|owner| owner.kind == "Node" && owner.uid == uid);
    let name = slice.metadata.name.as_deref().unwrap_or_default();
    ensure!(is_owned, "{name} is not owned by the Node of UID {uid}: {:?}", slice.metadata.owner_references);
    Ok(())
}

async fn device_names(context: &mut Context) -> Result<()> {
    holds(context, rules::device_names).await
}

async fn counters(context: &mut Context) -> Result<()> {
    holds(context, rules::counters).await
}

async fn limits(context: &mut Context) -> Result<()> {
    holds(context, rules::limits).await
}

async fn room_for_taints(context: &mut Context) -> Result<()> {
    holds(context, rules::room_for_taints).await
}

async fn attributes(context: &mut Context) -> Result<()> {
    holds(context, rules::attributes).await
}

async fn standard_attributes(context: &mut Context) -> Result<()> {
    holds(context, rules::standard_attributes).await
}

async fn quiet(context: &mut Context) -> Result<()> {
    let before = context.quiet().await?;
    let time = seconds(context.profile.limits.quiet);
    tokio::time::sleep(time).await;
    match written(&before, &context.cluster.published().await?) {
        None => Ok(()),
        Some(slice) => bail!("{slice} was written within {} s", time.as_secs_f32()),
    }
}

/// Devices of each pool, in order.
pub(super) fn devices(slices: &[ResourceSlice]) -> Vec<(String, Vec<Device>)> {
    let pools = rules::pools(slices).into_iter();
    let listed = pools.map(|(pool, slices)| {
        let mut slices = slices;
        slices.sort_by_key(|slice| slice.metadata.name.clone());
        let mut devices: Vec<Device> = slices.into_iter().flat_map(rules::devices).cloned().collect();
        // When a taint was added is the API server's to say.
        for taint in devices.iter_mut().flat_map(|device| device.taints.iter_mut().flatten()) {
            taint.time_added = None;
        }
        (pool.to_owned(), devices)
    });
    listed.collect()
}

/// Says the first difference, for whole pools are too long to read.
pub(super) fn same_devices(before: &[ResourceSlice], after: &[ResourceSlice]) -> Result<()> {
    let (before, after) = (devices(before), devices(after));
    let pools = |all: &[(String, Vec<Device>)]| all.iter().map(|(pool, _)| pool.clone()).collect::<Vec<_>>();
    ensure!(
        pools(&before) == pools(&after),
        "the pools were {:?} and are {:?}",
        pools(&before),
        pools(&after)
    );
    for ((pool, before), (_, after)) in before.iter().zip(&after) {
        let (had, has) = (before.len(), after.len());
        ensure!(had == has, "the pool `{pool}` had {had} devices and has {has}");
        if let Some((old, new)) = before.iter().zip(after).find(|(old, new)| old != new) {
            bail!(
                "in the pool `{pool}` was {}, and is {}",
                serde_json::to_string(old)?,
                serde_json::to_string(new)?
            );
        }
    }
    Ok(())
}

async fn one_deleted(context: &mut Context) -> Result<()> {
    let before = context.quiet().await?;
    // The last one: of a pool with several, the others stay.
    let deleted = before.last().cloned().into_iter().collect::<Vec<_>>();
    context.cluster.delete_slices(&deleted).await?;
    context.settled_when(async |after| same_devices(&before, after)).await.map(drop)
}

async fn all_deleted(context: &mut Context) -> Result<()> {
    let before = context.quiet().await?;
    context.cluster.delete_slices(&before).await?;
    context.settled_when(async |after| same_devices(&before, after)).await.map(drop)
}

async fn edited(context: &mut Context) -> Result<()> {
    let before = context.quiet().await?;
    let with_devices = before.iter().find(|slice| rules::devices(slice).next().is_some());
    let mut slice = with_devices.context("no slice has a device")?.clone();
    slice.spec.devices.iter_mut().for_each(Vec::clear);
    let name = slice.metadata.name.clone().context("a slice has a name")?;
    context
        .cluster
        .slices
        .replace(&name, &PostParams::default(), &slice)
        .await
        .context("cannot edit a slice")?;
    context.settled_when(async |after| same_devices(&before, after)).await.map(drop)
}

async fn generations(context: &mut Context) -> Result<()> {
    let newest =
        |slices: &[ResourceSlice]| slices.iter().map(|slice| slice.spec.pool.generation).max().unwrap_or(0);
    let before = context.quiet().await?;
    let mut highest = newest(&before);
    // One that another writer has raised is to be kept or exceeded.
    let mut slice = before.first().context("there is a slice")?.clone();
    slice.spec.pool.generation += 5;
    let name = slice.metadata.name.clone().context("a slice has a name")?;
    context
        .cluster
        .slices
        .replace(&name, &PostParams::default(), &slice)
        .await
        .context("cannot edit a slice")?;
    let pool = slice.spec.pool.name.clone();
    let limit = seconds(context.profile.limits.publish);
    until(limit, async || {
        let mut slices = context.cluster.published().await?;
        slices.retain(|slice| slice.spec.pool.name == pool);
        let now = newest(&slices);
        // Not within `until`'s patience: what fell once has fallen.
        if now < highest && !slices.is_empty() {
            return Ok(Err((highest, now)));
        }
        highest = highest.max(now);
        rules::complete(&slices)?;
        rules::one_generation(&slices)?;
        same_devices(&before, &context.cluster.published().await?)?;
        Ok(Ok(()))
    })
    .await?
    .map_err(|(was, is)| anyhow::anyhow!("the pool `{pool}` was at generation {was} and is at {is}"))
}

/// A slice that is not the driver's.
fn strange(name: &str, driver: &str, node: &str) -> Result<ResourceSlice> {
    Ok(serde_json::from_value(json!({
        "metadata": {"name": name},
        "spec": {
            "driver": driver,
            "nodeName": node,
            "pool": {"name": name, "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": "strange"}],
        },
    }))?)
}

async fn others(context: &mut Context) -> Result<()> {
    context.rest().await?;
    let (driver, node) = (&context.profile.driver, &context.profile.node);
    let other = context.cluster.named("other-node");
    let strangers =
        [strange(&context.cluster.named("other-driver"), FOREIGN, node)?, strange(&other, driver, &other)?];
    let made = context.cluster.create_strangers(&strangers).await?;
    let checked = left_alone(context, &made).await;
    context.cluster.delete_slices(&strangers).await?;
    checked
}

async fn left_alone(context: &Context, made: &[ResourceSlice]) -> Result<()> {
    // So that the driver has looked at slices since.
    let own = context.settled().await?;
    context.cluster.delete_slices(&own).await?;
    context.quiet().await?;
    for slice in made {
        let name = slice.metadata.name.as_deref().unwrap_or_default();
        let now = context.cluster.slices.get_opt(name).await?;
        let now = now.with_context(|| format!("{name} was deleted"))?;
        ensure!(now.metadata.resource_version == slice.metadata.resource_version, "{name} was changed");
    }
    Ok(())
}

async fn held_device(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let claim = context.claim(0).await?;
    plugin.prepare(&claim).await?;
    let slices = context.quiet().await?;
    let (pool, device) = &claim.device;
    let mut published = slices.iter().filter(|slice| slice.spec.pool.name == *pool).flat_map(rules::devices);
    ensure!(
        published.any(|published| published.name == *device),
        "{} is not published any more",
        Path::new(pool).join(device).display()
    );
    Ok(())
}

async fn new_node(context: &mut Context) -> Result<()> {
    if !context.cluster.has_made_node().await? {
        bail!(NotApplicable("the Node was there before, so it is not deleted".to_owned()));
    }
    context.rest().await?;
    let before = context.quiet().await?;
    context.cluster.nodes.delete(&context.profile.node, &DeleteParams::default()).await?;
    context.cluster.ensure_node().await?;
    let uid = context.cluster.node_uid().await?;
    // The garbage collector's part.
    context.cluster.delete_slices(&before).await?;
    context
        .settled_when(async |after| {
            after.iter().try_for_each(|slice| owned_by(slice, &uid))?;
            same_devices(&before, after)
        })
        .await
        .map(drop)
}

async fn left_behind(context: &mut Context) -> Result<()> {
    context.rest().await?;
    let before = context.quiet().await?;
    let node = &context.profile.node;
    let left = strange(&context.cluster.named("left-behind"), &context.profile.driver, node)?;
    context.cluster.create_strangers(std::slice::from_ref(&left)).await?;
    let gone = context.settled_when(async |after| same_devices(&before, after)).await;
    context.cluster.delete_slices(&[left]).await?;
    gone.map(drop)
}
