//! Takes a cluster away, whatever there is of it. Works from the name alone and
//! never asks the cluster itself: any part of it may be dead.

use std::fs;
use std::time::Duration;

use anyhow::Result;

use super::components::Component;
use super::layout::Layout;
use super::process::{self, Record};
use super::{cgroups, check_owner, mounts, network, require_root};
use crate::{files, paths};

/// Where a kubelet links the logs of containers, always.
const LOG_LINKS: &str = "/var/log/containers";

/// Ends every process of the cluster and removes all it made. Its logs are kept
/// under `target/cluster/logs/<name>` until the next time.
///
/// Nothing of the cluster's state is kept, so nothing needs an orderly end; the
/// API server goes before etcd all the same, since it hangs without it.
pub fn down(name: &str) -> Result<()> {
    let layout = Layout::new(name)?;
    require_root()?;
    let _lock = files::Lock::take(&layout.lock())?;
    check_owner(&layout)?;
    let was_there = layout.state.exists();

    for component in Component::ALL.iter().rev().filter(|component| **component != Component::Etcd) {
        end(&layout, *component)?;
    }
    end(&layout, Component::Etcd)?;
    // Shims, and what the components had started. A shim may have been about to
    // start a process, and a process in the group to start another.
    loop {
        process::end_marked(&layout.run, None, Duration::ZERO)?;
        cgroups::kill(&layout)?;
        if process::marked(&layout.run, None)?.is_empty() {
            break;
        }
    }

    mounts::detach(&layout.folders())?;
    network::remove(&layout)?;
    cgroups::remove(&layout)?;
    remove_log_links(&layout)?;
    keep_logs(&layout)?;
    // The owner is named in the first folder, so that goes last.
    for folder in layout.folders().iter().rev() {
        files::remove(folder)?;
    }
    // What is left without its folder, the loop above has ended too.
    eprintln!("cluster {name} {}", if was_there { "is down" } else { "was not there" });
    Ok(())
}

fn end(layout: &Layout, component: Component) -> Result<()> {
    if let Some(record) = Record::load(&layout.record(component.name())) {
        record.end(Duration::ZERO)?;
    }
    process::end_marked(&layout.run, Some(component.name()), Duration::ZERO)
}

fn remove_log_links(layout: &Layout) -> Result<()> {
    let Ok(links) = fs::read_dir(LOG_LINKS) else { return Ok(()) };
    for link in links {
        let link = link?.path();
        if fs::read_link(&link).is_ok_and(|log| log.starts_with(layout.pod_logs())) {
            files::remove(&link)?;
        }
    }
    Ok(())
}

fn keep_logs(layout: &Layout) -> Result<()> {
    let logs = layout.state.join("logs");
    if !logs.is_dir() {
        return Ok(());
    }
    let kept = paths::cluster_logs().join(&layout.name);
    files::remove(&kept)?;
    if let Some(parent) = kept.parent() {
        fs::create_dir_all(parent)?;
    }
    fs::rename(&logs, &kept)?;
    Ok(())
}
