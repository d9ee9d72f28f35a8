//! The cluster's network: one bridge with two addresses, and a CNI network on
//! it. No packet filter rule is needed or made: the address of the service
//! `kubernetes` is an address of the bridge, where the API server listens, so
//! pods reach it through their gateway without kube-proxy.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use serde_json::json;

use super::layout::Layout;
use super::settings::Settings;
use crate::{debian, exec, files};

/// Where the CNI library keeps the results of plugins; it cannot be told to
/// keep them elsewhere.
const RESULTS: &str = "/var/lib/cni/results";

/// Makes the bridge, its addresses and the CNI network's file.
pub(crate) fn ensure(layout: &Layout, settings: &Settings) -> Result<()> {
    let bridge = layout.node();
    if !exists(&bridge) {
        let address = settings.bridge_hardware_address();
        ip(&["link", "add", &bridge, "address", &address, "type", "bridge"])?;
    }
    ip(&["address", "replace", &format!("{}/24", settings.node_address()), "dev", &bridge])?;
    ip(&["address", "replace", &format!("{}/32", settings.service_address()), "dev", &bridge])?;
    ip(&["link", "set", &bridge, "up"])?;

    let folder = configuration(layout);
    fs::create_dir_all(&folder)?;
    let network = json!({
        "cniVersion": "1.0.0",
        "name": bridge,
        "plugins": [{
            "type": "bridge",
            "bridge": bridge,
            "hairpinMode": true,
            "ipam": {
                "type": "host-local",
                "dataDir": layout.cni().join("addresses"),
                "ranges": [[{ "subnet": settings.pod_range(), "gateway": settings.node_address() }]],
                "routes": [{ "dst": "0.0.0.0/0" }],
            },
        }],
    });
    files::replace(&folder.join("10-kerf.conflist"), &serde_json::to_vec_pretty(&network)?)
}

/// Takes away the bridge and what the CNI library remembered.
pub(crate) fn remove(layout: &Layout) -> Result<()> {
    let bridge = layout.node();
    if exists(&bridge) {
        ip(&["link", "delete", &bridge])?;
    }
    let prefix = format!("{bridge}-");
    let Ok(results) = fs::read_dir(RESULTS) else { return Ok(()) };
    for entry in results {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(&prefix) {
            files::remove(&entry.path())?;
        }
    }
    Ok(())
}

/// The folder that containerd reads networks from.
pub(crate) fn configuration(layout: &Layout) -> PathBuf {
    layout.cni().join("net.d")
}

fn exists(bridge: &str) -> bool {
    Path::new("/sys/class/net").join(bridge).exists()
}

fn ip(arguments: &[&str]) -> Result<()> {
    let program = debian::program("ip").context("there is no program `ip`")?;
    exec::output(Command::new(program).args(arguments)).map(drop)
}
