//! What a driver keeps on disk, damaged as power cuts, full disks and restored
//! backups do.

use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

use super::cdi::resolve_any;
use crate::api::Claim;
use crate::check::checks;
use crate::context::{Context, FIRST};

checks! {
    "STATE-001" [Registry Claims Start State] "With all its state files cut to nothing, the driver starts, and unprepares a claim of before.",
        "NVIDIA/k8s-dra-driver-gpu 1100: a crash loop on a damaged checkpoint" => emptied;
    "STATE-002" [Registry Claims Start State] "With its state folder emptied, the driver starts, and prepares a claim of before anew.",
        "kubernetes/kubernetes 127653, 139069: expect a prepare for running pods and no state" => lost;
    "STATE-003" [Registry Claims Start State] "With its state put back to before an unprepare, the driver prepares the claim anew, and unprepares it.",
        "kubernetes/kubernetes 139069: checkpoints are rolled back" => rolled_back;
    "STATE-004" [Registry Claims Start State] "With the second half of each state file lost, the driver starts, and unprepares a claim of before.",
        "NVIDIA/k8s-dra-driver-gpu 1100; a file that is not synced ends anywhere after a power cut" => torn;
}

/// All files below a folder, with what is in them.
fn files(folder: &Path) -> Result<Vec<(PathBuf, Vec<u8>)>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).with_context(|| format!("{} cannot be read", folder.display()))? {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_dir() {
            found.extend(files(&entry.path())?);
        } else if kind.is_file() {
            found.push((entry.path(), std::fs::read(entry.path())?));
        }
    }
    Ok(found)
}

/// The files of the state, of which there must be some while a claim is prepared.
fn state(context: &Context) -> Result<Vec<(PathBuf, Vec<u8>)>> {
    let folder = context.profile.state.as_deref().context("the profile has no `state`")?;
    let files = files(folder)?;
    if files.iter().all(|(_, content)| content.is_empty()) {
        bail!("a claim is prepared, and there is nothing in {}: is it the right folder?", folder.display());
    }
    Ok(files)
}

/// Kills the driver while it has a claim prepared, damages each file of its
/// state, and starts it again.
async fn damaged(context: &mut Context, damage: impl Fn(&Path) -> io::Result<()>) -> Result<Claim> {
    let plugin = context.plugin().await?;
    let claim = context.claim(0).await?;
    plugin.prepare(&claim).await?;
    let files = state(context)?;
    context.kill(FIRST).await?;
    for (path, _) in files {
        damage(&path)?;
    }
    context.start(FIRST).await?;
    Ok(claim)
}

async fn emptied(context: &mut Context) -> Result<()> {
    let claim = damaged(context, |path| std::fs::write(path, "")).await?;
    context.plugin().await?.unprepare(&claim).await?;
    context.settled().await.map(drop)
}

async fn lost(context: &mut Context) -> Result<()> {
    let claim = damaged(context, |path| std::fs::remove_file(path)).await?;
    let plugin = context.plugin().await?;
    plugin.prepare(&claim).await?;
    plugin.unprepare(&claim).await
}

async fn rolled_back(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let claim = context.claim(0).await?;
    plugin.prepare(&claim).await?;
    let files = state(context)?;
    plugin.unprepare(&claim).await?;
    context.kill(FIRST).await?;
    for (path, content) in files {
        std::fs::write(path, content)?;
    }
    context.start(FIRST).await?;
    let plugin = context.plugin().await?;
    let devices = plugin.prepare(&claim).await?;
    resolve_any(context, &devices)?;
    plugin.unprepare(&claim).await
}

async fn torn(context: &mut Context) -> Result<()> {
    let claim = damaged(context, |path| {
        let whole = std::fs::read(path)?;
        std::fs::write(path, &whole[..whole.len() / 2])
    })
    .await?;
    context.plugin().await?.unprepare(&claim).await?;
    context.settled().await.map(drop)
}
