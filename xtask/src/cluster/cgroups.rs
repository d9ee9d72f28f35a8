//! The control group under which the cluster's pods run. One of its own: a
//! kubelet removes pod groups that it does not know, and on one machine there
//! may be other kubelets. It also finds every process of a container, even when
//! the container's shim is dead.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use super::layout::Layout;
use super::process;

/// Makes the group in every hierarchy, as the kubelet demands of its root.
pub(crate) fn ensure(layout: &Layout) -> Result<()> {
    for root in hierarchies()? {
        let group = root.join(layout.node());
        fs::create_dir_all(&group).with_context(|| format!("cannot make {}", group.display()))?;
        // A new cpuset (v1) is empty, and nothing can run in it.
        for file in ["cpuset.cpus", "cpuset.mems"] {
            let own = group.join(file);
            if fs::read_to_string(&own).is_ok_and(|value| value.trim().is_empty())
                && let Ok(value) = fs::read(root.join(file))
            {
                fs::write(&own, value).with_context(|| format!("cannot write {}", own.display()))?;
            }
        }
    }
    Ok(())
}

/// Kills every process in the group.
pub(crate) fn kill(layout: &Layout) -> Result<()> {
    let deadline = Instant::now() + Duration::from_mins(1);
    loop {
        let pids = processes(layout)?;
        if pids.is_empty() {
            return Ok(());
        }
        if Instant::now() > deadline {
            bail!("processes of pods do not end: {pids:?}");
        }
        for pid in pids {
            process::end(pid, Duration::ZERO, || is_member(pid, layout))?;
        }
    }
}

/// Removes the group, which must hold no process any more.
pub(crate) fn remove(layout: &Layout) -> Result<()> {
    for root in hierarchies()? {
        remove_below(&root.join(layout.node()))?;
    }
    Ok(())
}

fn remove_below(group: &Path) -> Result<()> {
    for child in children(group) {
        remove_below(&child)?;
    }
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        match fs::remove_dir(group) {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            // A process that has just ended still counts for a moment.
            Err(error) if error.kind() == std::io::ErrorKind::ResourceBusy && Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(20));
            }
            Err(error) => return Err(error).with_context(|| format!("cannot remove {}", group.display())),
        }
    }
}

fn processes(layout: &Layout) -> Result<Vec<i32>> {
    let mut found = Vec::new();
    for root in hierarchies()? {
        collect(&root.join(layout.node()), &mut found);
    }
    found.sort_unstable();
    found.dedup();
    Ok(found)
}

fn collect(group: &Path, found: &mut Vec<i32>) {
    if let Ok(text) = fs::read_to_string(group.join("cgroup.procs")) {
        // Zero is a process of another pid namespace; it is nobody we may kill.
        found.extend(text.lines().filter_map(|line| line.parse().ok()).filter(|pid: &i32| *pid > 0));
    }
    for child in children(group) {
        collect(&child, found);
    }
}

fn children(group: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(group) else { return Vec::new() };
    entries.flatten().map(|entry| entry.path()).filter(|path| path.is_dir()).collect()
}

fn is_member(pid: i32, layout: &Layout) -> bool {
    let group = format!("/{}", layout.node());
    fs::read_to_string(format!("/proc/{pid}/cgroup")).is_ok_and(|text| {
        text.lines().filter_map(|line| line.splitn(3, ':').nth(2)).any(|path| {
            path.strip_prefix(&group).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        })
    })
}

/// Roots of all control group hierarchies, of either version.
fn hierarchies() -> Result<Vec<PathBuf>> {
    let text = fs::read_to_string("/proc/self/mountinfo").context("cannot list mounts")?;
    let roots: Vec<PathBuf> = text
        .lines()
        .filter(|line| line.contains(" - cgroup ") || line.contains(" - cgroup2 "))
        .filter_map(|line| line.split(' ').nth(4).map(PathBuf::from))
        .collect();
    if roots.is_empty() {
        bail!("no control group file system is mounted");
    }
    Ok(roots)
}
