//! The emulated NVIDIA driver of a cluster: built, and laid out under a root.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::cluster::mounts;
use crate::{exec, files, paths};

/// Written when the emulated driver's root is whole.
const DONE: &str = "done.json";

/// Makes the emulated driver's root once, in memory, as a driver's own state is.
/// What a cluster's GPUs hold survives every process, as it would on hardware.
pub(crate) fn ensure(root: &Path, gpus: &[String]) -> Result<()> {
    let done = root.join(DONE);
    if done.is_file() {
        return Ok(());
    }
    build()?;
    mounts::in_memory(root)?;
    let mut command = Command::new(paths::release().join("nvidia-emulator"));
    command.arg("init").arg("--root").arg(root);
    for gpu in gpus {
        command.args(["--gpu", gpu]);
    }
    exec::output(&mut command).context("cannot make the emulated driver's root")?;
    files::replace(&done, &serde_json::to_vec(gpus)?)
}

/// Builds the emulator's library and programs as they are shipped.
pub fn build() -> Result<()> {
    exec::inherit(&mut exec::cargo(&["build", "--release", "--package", "kerf-emulator"]))
}
