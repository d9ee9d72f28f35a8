//! Processes that outlive `xtask`: started, recorded, found again, ended.
//!
//! A process is known by its id, its start time and the boot in which it
//! started, so that a reused id is never taken for it. Signals go through a
//! pidfd opened before that is checked. Each process carries a mark in its
//! environment, by which it is found even if `xtask` died before recording it.

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, pidfd_open, pidfd_send_signal, waitpid};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::programs::hex;
use crate::{debian, files, paths};

/// Which cluster started a process: the path that only it has on this machine.
const CLUSTER: &str = "KERF_CLUSTER";
/// As which component it was started. Children inherit both.
const COMPONENT: &str = "KERF_COMPONENT";

/// How a component is started.
#[derive(Debug)]
pub(crate) struct Launch {
    pub(crate) name: &'static str,
    pub(crate) program: PathBuf,
    pub(crate) arguments: Vec<String>,
    /// Files whose content decides what the process does.
    pub(crate) inputs: Vec<PathBuf>,
}

/// A process that was started, as remembered on disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) pid: i32,
    /// Clock ticks between boot and start.
    started: u64,
    boot: String,
    /// Of program, arguments and inputs; another one means that it must restart.
    fingerprint: String,
}

impl Launch {
    /// Starts the process apart from this one's terminal and records it.
    pub(crate) fn start(&self, mark: &Path, record: &Path, log: &Path) -> Result<Record> {
        let fingerprint = self.fingerprint()?;
        let output = fs::File::options().create(true).append(true).open(log)?;
        let search = format!("{}:{}", paths::cluster_programs().display(), debian::search_path());
        let child = Command::new(&self.program)
            .arg0(self.name)
            .args(&self.arguments)
            .env_clear()
            .env("PATH", search)
            .env("HOME", "/root")
            .env(CLUSTER, mark)
            .env(COMPONENT, self.name)
            .current_dir("/")
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .spawn()
            .with_context(|| format!("cannot start {}", self.name))?;
        let pid = i32::try_from(child.id())?;
        let started = stat(pid).with_context(|| format!("{} is gone at once", self.name))?.started;
        let new = Record { pid, started, boot: boot_id()?, fingerprint };
        files::replace(record, &serde_json::to_vec(&new)?)?;
        Ok(new)
    }

    pub(crate) fn fingerprint(&self) -> Result<String> {
        let mut hash = Sha256::new();
        let program =
            fs::metadata(&self.program).with_context(|| format!("there is no {}", self.program.display()))?;
        hash.update(format!("{} {:?}\0", program.len(), program.modified()?));
        for argument in &self.arguments {
            hash.update(argument);
            hash.update([0]);
        }
        for input in &self.inputs {
            hash.update(fs::read(input).with_context(|| format!("cannot read {}", input.display()))?);
        }
        Ok(hex(&hash.finalize()))
    }
}

impl Record {
    /// The record of a component, if it was ever started. A record that cannot
    /// be read is none: the mark finds the process.
    pub(crate) fn load(path: &Path) -> Option<Self> {
        serde_json::from_slice(&fs::read(path).ok()?).ok()
    }

    /// Whether it still runs.
    pub(crate) fn alive(&self) -> bool {
        stat(self.pid).is_some_and(|stat| !stat.ended && stat.started == self.started)
            && boot_id().is_ok_and(|boot| boot == self.boot)
    }

    pub(crate) fn runs(&self, fingerprint: &str) -> bool {
        self.fingerprint == fingerprint && self.alive()
    }

    /// Ends it: by SIGTERM, and by SIGKILL when that takes longer than `grace`.
    pub(crate) fn end(&self, grace: Duration) -> Result<()> {
        end(self.pid, grace, || self.alive())
    }
}

/// Processes with the cluster's mark; with `component`, only those started as
/// that component, and not their children.
pub(crate) fn marked(mark: &Path, component: Option<&str>) -> Result<Vec<i32>> {
    let mut found = Vec::new();
    for pid in all()? {
        if is_marked(pid, mark, component) {
            found.push(pid);
        }
    }
    Ok(found)
}

/// Ends marked processes, as [`marked`] tells them.
pub(crate) fn end_marked(mark: &Path, component: Option<&str>, grace: Duration) -> Result<()> {
    for pid in marked(mark, component)? {
        end(pid, grace, || is_marked(pid, mark, component))?;
    }
    Ok(())
}

/// Ends process `pid` while `still_ours` holds.
///
/// The pidfd names one process for good; asked after it was opened,
/// `still_ours` speaks of that process or of none.
pub(crate) fn end(pid: i32, grace: Duration, still_ours: impl Fn() -> bool) -> Result<()> {
    let Some(id) = Pid::from_raw(pid) else { return Ok(()) };
    let process = match pidfd_open(id, PidfdFlags::empty()) {
        Ok(process) => process,
        Err(Errno::SRCH) => return Ok(()),
        Err(error) => return Err(error).with_context(|| format!("cannot watch process {pid}")),
    };
    if !still_ours() {
        return Ok(());
    }
    for (signal, wait) in [(Signal::TERM, grace), (Signal::KILL, Duration::from_secs(30))] {
        if wait.is_zero() {
            continue;
        }
        match pidfd_send_signal(&process, signal) {
            Ok(()) | Err(Errno::SRCH) => {}
            Err(error) => return Err(error).with_context(|| format!("cannot signal process {pid}")),
        }
        if ended_within(&process, wait)? {
            // It is a zombie only if this process started it.
            let _ = waitpid(Some(id), WaitOptions::NOHANG);
            return Ok(());
        }
    }
    bail!("process {pid} does not end, even by SIGKILL")
}

fn ended_within(process: &OwnedFd, limit: Duration) -> Result<bool> {
    let deadline = Instant::now() + limit;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec { tv_sec: left.as_secs().try_into()?, tv_nsec: left.subsec_nanos().into() };
        match poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&timeout)) {
            Ok(ready) => return Ok(ready > 0),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error).context("cannot wait for a process"),
        }
    }
}

fn is_marked(pid: i32, mark: &Path, component: Option<&str>) -> bool {
    let Some(environment) = environment(pid) else { return false };
    let has = |name: &str, value: &[u8]| {
        environment.split(|byte| *byte == 0).any(|entry| {
            entry.strip_prefix(name.as_bytes()).and_then(|rest| rest.strip_prefix(b"=")) == Some(value)
        })
    };
    if !has(CLUSTER, mark.as_os_str().as_encoded_bytes()) {
        return false;
    }
    let Some(component) = component else { return true };
    // A child that inherited the mark was called by another name.
    let called = fs::read(format!("/proc/{pid}/cmdline"))
        .is_ok_and(|line| line.split(|byte| *byte == 0).next() == Some(component.as_bytes()));
    has(COMPONENT, component.as_bytes()) && called
}

/// A process's environment. In the middle of an `execve` the kernel shows none,
/// when whoever started the process goes on already.
fn environment(pid: i32) -> Option<Vec<u8>> {
    const ATTEMPTS: u32 = 10;
    for _ in 0..ATTEMPTS {
        let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
        if !environment.is_empty() {
            return Some(environment);
        }
        // The kernel's own threads have neither.
        fs::read_link(format!("/proc/{pid}/exe")).ok()?;
        std::thread::sleep(Duration::from_millis(1));
    }
    None
}

/// Every process id there is now.
fn all() -> Result<Vec<i32>> {
    let mut ids = Vec::new();
    for entry in fs::read_dir("/proc").context("cannot list processes")? {
        if let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) {
            ids.push(pid);
        }
    }
    Ok(ids)
}

struct Stat {
    ended: bool,
    started: u64,
}

/// Reads `/proc/<pid>/stat` (proc(5)): state is field 3, start time field 22.
/// The name in field 2 may hold anything, so counting begins after its end.
fn stat(pid: i32) -> Option<Stat> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = text.get(text.rfind(')')? + 1..)?.split_ascii_whitespace();
    let ended = matches!(fields.next()?, "Z" | "X");
    let started = fields.nth(18)?.parse().ok()?;
    Some(Stat { ended, started })
}

fn boot_id() -> Result<String> {
    let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").context("cannot read the boot id")?;
    Ok(id.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sleeper(folder: &Path) -> Record {
        let launch = Launch {
            name: "sleep",
            program: PathBuf::from("/bin/sleep"),
            arguments: vec!["600".to_owned()],
            inputs: Vec::new(),
        };
        launch.start(folder, &folder.join("record"), &folder.join("log")).expect("it starts")
    }

    #[test]
    fn a_process_whose_record_was_never_written_is_found_by_its_mark() {
        let folder = tempfile::tempdir().expect("a folder");
        let record = sleeper(folder.path());
        fs::remove_file(folder.path().join("record")).expect("no record");
        assert_eq!(marked(folder.path(), Some("sleep")).expect("a list"), [record.pid]);
        end_marked(folder.path(), None, Duration::ZERO).expect("it ends");
        assert!(!record.alive());
    }

    #[test]
    fn a_reused_process_id_is_neither_alive_nor_killed() {
        let folder = tempfile::tempdir().expect("a folder");
        let process = sleeper(folder.path());
        let former = Record { started: process.started - 1, ..process.clone() };
        assert!(!former.alive());
        former.end(Duration::from_secs(1)).expect("nothing to do");
        assert!(process.alive());
        process.end(Duration::from_secs(1)).expect("it ends");
        assert!(!process.alive());
    }
}
