//! Runs other programs to their end, so that a failure says which program
//! failed, with what arguments and with its own words.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use crate::paths;

/// How often a long build says that it is still running.
const HEARTBEAT: Duration = Duration::from_secs(20);

/// `cargo` in the repository, as if it were typed there.
///
/// A program that cargo runs finds its package described in the environment.
/// Build scripts that look at such variables (ring's does) would run again, and
/// with them half of the build, whenever another package calls cargo.
pub fn cargo(arguments: &[&str]) -> Command {
    let mut command = Command::new("cargo");
    command.args(arguments).current_dir(paths::root());
    for (name, _) in std::env::vars_os() {
        let described = name.to_string_lossy();
        if ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_", "CARGO_CRATE_", "CARGO_PRIMARY_"]
            .iter()
            .any(|prefix| described.starts_with(prefix))
        {
            command.env_remove(&name);
        }
    }
    command
}

/// Runs `command` and returns its standard output.
pub fn output(command: &mut Command) -> Result<String> {
    let output =
        command.stdin(Stdio::null()).output().with_context(|| format!("cannot run {}", spell(command)))?;
    if !output.status.success() {
        bail!(
            "{} failed ({}): {}",
            spell(command),
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    String::from_utf8(output.stdout).with_context(|| format!("{} did not print text", spell(command)))
}

/// Runs `command` with the caller's standard output and error.
pub fn inherit(command: &mut Command) -> Result<()> {
    let status =
        command.stdin(Stdio::null()).status().with_context(|| format!("cannot run {}", spell(command)))?;
    if !status.success() {
        bail!("{} failed ({status})", spell(command));
    }
    Ok(())
}

/// Runs `command` with its output appended to `log`, saying every few seconds
/// that `what` still runs. A failure ends with the last lines of the log.
pub fn logged(what: &str, command: &mut Command, log: &Path) -> Result<()> {
    let file = File::options().create(true).append(true).open(log);
    let file = file.with_context(|| format!("cannot open {}", log.display()))?;
    let started = Instant::now();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(file.try_clone()?)
        .stderr(file)
        .spawn()
        .with_context(|| format!("cannot run {}", spell(command)))?;
    let mut said = started;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if said.elapsed() >= HEARTBEAT {
            said = Instant::now();
            eprintln!("  {what}: {} s so far", started.elapsed().as_secs());
        }
        std::thread::sleep(Duration::from_millis(100));
    };
    if !status.success() {
        bail!("{what}: {} failed ({status}); {}:\n{}", spell(command), log.display(), tail(log, 30));
    }
    Ok(())
}

/// The last `lines` lines of a log, or why there are none.
pub fn tail(log: &Path, lines: usize) -> String {
    const WINDOW: u64 = 64 * 1024;
    let read = || -> Result<String> {
        let mut file = File::open(log)?;
        let from = file.metadata()?.len().saturating_sub(WINDOW);
        file.seek(SeekFrom::Start(from))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        let text = String::from_utf8_lossy(&bytes);
        let all: Vec<&str> = text.lines().collect();
        Ok(all[all.len().saturating_sub(lines)..].join("\n"))
    };
    read().unwrap_or_else(|error| format!("(cannot read {}: {error})", log.display()))
}

/// A command as a person would type it.
fn spell(command: &Command) -> String {
    let mut text = command.get_program().to_string_lossy().into_owned();
    for argument in command.get_args() {
        let _ = write!(text, " {}", argument.to_string_lossy());
    }
    text
}
