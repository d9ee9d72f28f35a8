//! `cargo xtask chaos`: the whole table of points and what was survived.

use anyhow::Result;

use crate::exec;

/// Prints it; fails where something was not survived. With words, only works
/// with all of them in their names.
pub fn run(words: &[String]) -> Result<()> {
    let command = ["run", "--quiet", "--profile", "chaos", "--package", "kerf-chaos", "--"];
    exec::inherit(exec::cargo(&command).args(words))
}
