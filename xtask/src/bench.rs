//! `cargo xtask bench`: builds what is shipped, and measures it.

use anyhow::Result;

use crate::{emulator, exec};

/// Prints the figures.
pub fn run() -> Result<()> {
    emulator::build()?;
    exec::inherit(&mut exec::cargo(&["build", "--release", "--package", "kerf"]))?;
    // As it is shipped, the client too: a debug build of it takes as long as the plugin.
    exec::inherit(&mut exec::cargo(&["run", "--quiet", "--release", "--package", "kerf-bench"]))
}
