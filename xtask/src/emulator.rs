//! The emulated NVIDIA driver of a cluster: built, and laid out under a root.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, anyhow};
use kerf_emulator::install::Slot;
use kerf_emulator::model;

use crate::cluster::mounts;
use crate::{exec, files, paths};

/// Written when the emulated driver's root is whole.
const DONE: &str = "done.json";

/// Whether there are such GPUs. Asked before a cluster remembers them: what it
/// remembers it keeps.
pub(crate) fn check(gpus: &[String]) -> Result<()> {
    let models = model::built_in().context("the emulator's models cannot be read")?;
    for gpu in gpus {
        let wrong = |error: String| anyhow!("--gpu {gpu}: {error}");
        let slot: Slot = gpu.parse().map_err(wrong)?;
        model::find(&models, &slot.model).map_err(wrong)?;
    }
    Ok(())
}

/// Makes the emulated driver's root once, in memory, as a driver's own state is.
/// What a cluster's GPUs hold survives every process, as it would on hardware.
pub(crate) fn ensure(root: &Path, gpus: &[String]) -> Result<()> {
    let done = root.join(DONE);
    if done.is_file() {
        return Ok(());
    }
    build()?;
    mounts::in_memory(root)?;
    make(root, gpus)?;
    files::replace(&done, &serde_json::to_vec(gpus)?)
}

/// Makes the emulated driver's root. The emulator must be built.
pub(crate) fn make(root: &Path, gpus: &[String]) -> Result<()> {
    let mut command = Command::new(paths::release().join("nvidia-emulator"));
    command.arg("init").arg("--root").arg(root);
    for gpu in gpus {
        command.args(["--gpu", gpu]);
    }
    exec::output(&mut command).context("cannot make the emulated driver's root").map(drop)
}

/// Builds the emulator's library and programs as they are shipped.
pub fn build() -> Result<()> {
    exec::inherit(&mut exec::cargo(&["build", "--release", "--package", "kerf-emulator"]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_that_there_is_not_is_told_with_those_there_are() {
        let check = |gpu: &str| check(&[gpu.to_owned()]).map_err(|error| error.to_string());
        assert_eq!(check("h100-80:mig=on"), Ok(()));
        let error = check("nope").expect_err("no model");
        assert!(error.starts_with("--gpu nope: no model `nope`; known: a100-40, "), "{error}");
        let error = check("a30:mig=yes").expect_err("no option");
        assert!(error.contains("`mig=yes` is not mig=on|off"), "{error}");
    }
}
