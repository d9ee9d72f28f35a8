//! `cargo xtask bench`: builds what is shipped, and measures it.

use std::process::Command;

use anyhow::Result;

use crate::{emulator, exec, paths};

/// Prints the figures.
pub fn run() -> Result<()> {
    emulator::build()?;
    let cargo =
        |arguments: &[&str]| exec::inherit(Command::new("cargo").args(arguments).current_dir(paths::root()));
    cargo(&["build", "--release", "--package", "kerf"])?;
    // As it is shipped, the client too: a debug build of it takes as long as the plugin.
    cargo(&["run", "--quiet", "--release", "--package", "kerf-bench"])
}
