//! Files in containers that say what their devices are (KEP-5304).

use std::path::PathBuf;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;

use super::cdi::resolve;
use crate::api::{Claim, REQUEST};
use crate::cdi::{Mount, Spec};
use crate::check::{NotApplicable, checks};
use crate::context::Context;
use crate::kubelet::Plugin;

checks! {
    "META-001" [Registry Claims Cdi] "A claim's file of device metadata says what is allocated to it, and its containers can only read it.",
        "KEP-5304" => right;
    "META-002" [Registry Claims Cdi] "A claim's file of device metadata is gone after its unprepare.", "KEP-5304" => gone;
}

/// Where containers find them.
const FOLDER: &str = "/var/run/kubernetes.io/dra-device-attributes";

async fn mounted(context: &mut Context, plugin: &Plugin) -> Result<(Claim, Vec<Mount>)> {
    let claim = context.claim(0).await?;
    let devices = plugin.prepare(&claim).await?;
    let specs = resolve(context, &devices)?;
    let mounts = specs.iter().flat_map(Spec::mounts);
    let mounts: Vec<Mount> = mounts.filter(|mount| mount.container.starts_with(FOLDER)).collect();
    if mounts.is_empty() {
        bail!(NotApplicable("the driver has no files of device metadata".to_owned()));
    }
    Ok((claim, mounts))
}

async fn right(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let (claim, mounts) = mounted(context, &plugin).await?;
    let driver = context.profile.driver.clone();
    let expected = PathBuf::from(FOLDER)
        .join("resourceclaims")
        .join(&claim.name)
        .join(REQUEST)
        .join(format!("{driver}-metadata.json"));
    let [mount] = mounts.as_slice() else { bail!("there are {} files: {mounts:?}", mounts.len()) };
    ensure!(mount.container == expected, "it is {}, not {}", mount.container.display(), expected.display());
    ensure!(mount.is_read_only, "it can be written in containers");
    let text = std::fs::read_to_string(&mount.host)
        .with_context(|| format!("{} cannot be read", mount.host.display()))?;
    // One document for each version, the newest first.
    let documents: Vec<Value> =
        serde_json::Deserializer::from_str(&text).into_iter().collect::<Result<_, _>>().context("no JSON")?;
    ensure!(!documents.is_empty(), "{} is empty", mount.host.display());
    for document in &documents {
        let version = document["apiVersion"].as_str().unwrap_or_default();
        ensure!(version.starts_with("metadata.resource.k8s.io/"), "apiVersion is `{version}`");
        ensure!(document["kind"] == "DeviceMetadata", "kind is {}", document["kind"]);
        for (key, expected) in [("name", &claim.name), ("namespace", &claim.namespace), ("uid", &claim.uid)] {
            let told = &document["metadata"][key];
            ensure!(told == expected.as_str(), "metadata.{key} is {told}, not `{expected}`");
        }
        let requests = document["requests"].as_array().context("it has no requests")?;
        let request = requests.iter().find(|request| request["name"] == REQUEST);
        let devices = &request.with_context(|| format!("it has no request `{REQUEST}`"))?["devices"];
        let (pool, name) = &claim.device;
        let is_told = devices.as_array().into_iter().flatten().any(|device| {
            device["driver"] == driver.as_str()
                && device["pool"] == pool.as_str()
                && device["name"] == name.as_str()
        });
        ensure!(is_told, "{:?} is allocated, it has {devices}", claim.device);
    }
    Ok(())
}

async fn gone(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let (claim, mounts) = mounted(context, &plugin).await?;
    plugin.unprepare(&claim).await?;
    let left: Vec<_> = mounts.iter().map(|mount| &mount.host).filter(|path| path.exists()).collect();
    ensure!(left.is_empty(), "these are left: {left:?}");
    Ok(())
}
