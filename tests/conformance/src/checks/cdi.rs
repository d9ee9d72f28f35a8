//! CDI specs: what a container runtime finds for the ids that a prepare names.

use anyhow::{Context as _, Result, bail, ensure};

use crate::api::{Claim, Unusual};
use crate::cdi::{self, Spec};
use crate::check::{NotApplicable, checks};
use crate::context::Context;
use crate::proto::dra_v1::Device;

checks! {
    "CDI-001" [Registry Claims Cdi] "Every CDI id of an answer is a device of exactly one spec.",
        "CDI specification: a device in two specs of one folder is a conflict" => resolved;
    "CDI-002" [Registry Claims Cdi] "The specs are valid.", "CDI specification" => valid;
    "CDI-003" [Registry Claims Cdi] "Devices that are made for a claim have its UID in their names.",
        "runtimes cache specs: a name must not come back with other content" => per_claim;
    "CDI-004" [Registry Claims Cdi] "What a prepare made is gone after the unprepare.", "KEP-4381" => removed;
    "CDI-005" [Registry Claims Cdi] "A refused prepare leaves no spec of its claim.", "kubernetes/kubernetes 139772" => refused;
    "CDI-006" [Registry Claims Cdi] "A spec that was removed is made again by the next prepare.",
        "kubernetes-sigs/dra-example-driver PR 259" => made_again;
    "CDI-007" [Registry Claims Cdi] "No draft is left in the folders.", "CDI: files are written beside and renamed" => drafts;
    "CDI-008" [Registry Claims Cdi] "Device nodes, mounts and hooks of a spec exist on the host.",
        "a container with the device would not start" => host_paths;
    "CDI-009" [Registry Claims Cdi] "Without a place for specs a prepare fails, and the retry is served once there is one.",
        "kubelet: a prepare is tried until it works" => no_folder;
    "CDI-010" [Registry Claims Cdi Start] "Killed and started again, the driver answers a prepare with specs that are there.",
        "/var/run is empty after a boot; kubernetes/kubernetes 141433" => restart;
}

fn ids(devices: &[Device]) -> Result<Vec<&String>> {
    let ids: Vec<&String> = devices.iter().flat_map(|device| &device.cdi_device_ids).collect();
    if ids.is_empty() {
        bail!(NotApplicable("the driver's devices have no CDI ids".to_owned()));
    }
    Ok(ids)
}

/// The specs that the ids of an answer are in.
pub(super) fn resolve(context: &Context, devices: &[Device]) -> Result<Vec<Spec>> {
    let specs = cdi::read(&context.profile.cdi)?;
    let index = cdi::index(&specs);
    let mut found: Vec<Spec> = Vec::new();
    for id in ids(devices)? {
        let places = index.get(id).map(Vec::as_slice).unwrap_or_default();
        let files: Vec<_> = places.iter().map(|spec| spec.path.display().to_string()).collect();
        let [spec] = places else { bail!("`{id}` is in {} specs {files:?}", files.len()) };
        if !found.iter().any(|known| known.path == spec.path) {
            found.push((*spec).clone());
        }
    }
    Ok(found)
}

/// As [`resolve`], where the driver has CDI ids and the profile their folders.
pub(super) fn resolve_any(context: &Context, devices: &[Device]) -> Result<()> {
    if context.profile.cdi.is_empty() || devices.iter().all(|device| device.cdi_device_ids.is_empty()) {
        return Ok(());
    }
    resolve(context, devices).map(drop)
}

async fn resolved(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    for kind in [0, 1] {
        let claim = context.claim(kind).await?;
        let devices = plugin.prepare(&claim).await?;
        resolve(context, &devices)?;
    }
    Ok(())
}

async fn prepared(context: &mut Context) -> Result<(Claim, Vec<Device>)> {
    let plugin = context.plugin().await?;
    let claim = context.claim(0).await?;
    let devices = plugin.prepare(&claim).await?;
    Ok((claim, devices))
}

async fn valid(context: &mut Context) -> Result<()> {
    let (_, devices) = prepared(context).await?;
    for spec in resolve(context, &devices)? {
        spec.valid().with_context(|| spec.path.display().to_string())?;
    }
    Ok(())
}

/// All devices in the folders that are not among `before`.
fn made(context: &Context, before: &[String]) -> Result<Vec<String>> {
    let specs = cdi::read(&context.profile.cdi)?;
    Ok(specs.iter().flat_map(Spec::ids).filter(|id| !before.contains(id)).collect())
}

async fn per_claim(context: &mut Context) -> Result<()> {
    let before = made(context, &[])?;
    let (claim, devices) = prepared(context).await?;
    resolve(context, &devices)?;
    let other: Vec<String> =
        made(context, &before)?.into_iter().filter(|id| !id.contains(&claim.uid)).collect();
    ensure!(other.is_empty(), "the claim is {}, these are new: {other:?}", claim.uid);
    Ok(())
}

async fn removed(context: &mut Context) -> Result<()> {
    let before = made(context, &[])?;
    let (claim, devices) = prepared(context).await?;
    resolve(context, &devices)?;
    context.plugin().await?.unprepare(&claim).await?;
    let left = made(context, &before)?;
    ensure!(left.is_empty(), "these are left: {left:?}");
    Ok(())
}

async fn refused(context: &mut Context) -> Result<()> {
    let (holder, devices) = prepared(context).await?;
    ids(&devices)?;
    let plugin = context.plugin().await?;
    let unusual =
        Unusual { device: Some((holder.device.0, "never-published".to_owned())), ..Unusual::default() };
    let claim = context.unusual(0, unusual).await?;
    plugin.refusal(&claim).await?;
    let left: Vec<String> = made(context, &[])?.into_iter().filter(|id| id.contains(&claim.uid)).collect();
    ensure!(left.is_empty(), "these are left: {left:?}");
    Ok(())
}

async fn made_again(context: &mut Context) -> Result<()> {
    let (claim, devices) = prepared(context).await?;
    for spec in resolve(context, &devices)? {
        if spec.ids().iter().any(|id| id.contains(&claim.uid)) {
            std::fs::remove_file(&spec.path).with_context(|| spec.path.display().to_string())?;
        }
    }
    let devices = context.plugin().await?.prepare(&claim).await?;
    resolve(context, &devices).map(drop)
}

async fn drafts(context: &mut Context) -> Result<()> {
    let before = cdi::others(&context.profile.cdi);
    let (claim, devices) = prepared(context).await?;
    ids(&devices)?;
    context.plugin().await?.unprepare(&claim).await?;
    let left: Vec<_> =
        cdi::others(&context.profile.cdi).into_iter().filter(|path| !before.contains(path)).collect();
    ensure!(left.is_empty(), "these are left: {left:?}");
    Ok(())
}

async fn host_paths(context: &mut Context) -> Result<()> {
    let (_, devices) = prepared(context).await?;
    let paths = resolve(context, &devices)?.into_iter().flat_map(|spec| spec.host_paths());
    let missing: Vec<_> = paths.filter(|path| !path.exists()).collect();
    ensure!(missing.is_empty(), "these do not exist: {missing:?}");
    Ok(())
}

async fn no_folder(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let (claim, devices) = prepared(context).await?;
    ids(&devices)?;
    plugin.unprepare(&claim).await?;
    // A file in its place: no folder can be made there, not even by root.
    let [folder] = context.profile.cdi.as_slice() else {
        bail!(NotApplicable("the profile has several folders of CDI specs".to_owned()))
    };
    let (folder, away) = (folder.clone(), folder.with_extension("conformance"));
    std::fs::rename(&folder, &away)?;
    std::fs::write(&folder, "")?;
    let refusal = plugin.refusal(&claim).await;
    std::fs::remove_file(&folder)?;
    std::fs::rename(&away, &folder)?;
    refusal.context("its spec cannot be there")?;
    let devices = plugin.prepare(&claim).await.context("after the folder was there again")?;
    resolve(context, &devices).map(drop)
}

async fn restart(context: &mut Context) -> Result<()> {
    let (claim, devices) = prepared(context).await?;
    ids(&devices)?;
    context.kill(crate::context::FIRST).await?;
    context.empty_cdi()?;
    context.start(crate::context::FIRST).await?;
    let devices = context.plugin().await?.prepare(&claim).await?;
    resolve(context, &devices).map(drop)
}
