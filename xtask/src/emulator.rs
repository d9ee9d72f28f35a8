//! The emulated NVIDIA driver of a cluster: built, and laid out under a root.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::{exec, files, paths};

/// Makes the emulated driver's root once; `done` is written when it is whole.
/// What a cluster's GPUs hold survives, as it would on hardware.
pub(crate) fn ensure(root: &Path, done: &Path, gpus: &[String]) -> Result<()> {
    if done.is_file() {
        return Ok(());
    }
    build()?;
    files::remove(root)?;
    let mut command = Command::new(paths::release().join("nvidia-emulator"));
    command.arg("init").arg("--root").arg(root);
    for gpu in gpus {
        command.args(["--gpu", gpu]);
    }
    exec::output(&mut command).context("cannot make the emulated driver's root")?;
    files::replace(done, &serde_json::to_vec(gpus)?)
}

/// Builds the emulator's library and programs as they are shipped.
pub fn build() -> Result<()> {
    exec::inherit(&mut exec::cargo(&["build", "--release", "--package", "kerf-emulator"]))
}
