//! `cargo xtask chaos`: the whole table of points and what was survived.

use anyhow::Result;

use crate::exec;

/// Prints it; fails where something was not survived. With words, only works
/// with all of them in their names; or only those names.
pub fn run(words: &[String], lists: bool) -> Result<()> {
    // Not quiet: the build takes minutes, and is seen to go on.
    let command = ["run", "--profile", "chaos", "--package", "kerf-chaos", "--"];
    exec::inherit(exec::cargo(&command).args(lists.then_some("--list")).args(words))
}
