//! The plugin on a machine in memory and real files, as the kubelet sees it.
//! What is left when it is killed is seen in `tests/chaos`.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod bursts;
mod events;
mod health;
mod in_the_way;
mod instances;
mod outputs;
mod owner;
mod prepare;
mod reconcile;
mod rivals;
mod sockets;
mod versions;

use kerf_dra_driver::inventory::MigMode;
use kerf_dra_driver::names::{DeviceName, PciAddress};
use kerf_kubelet_plugin::testing::{Node, h100};
use kerf_kubelet_plugin::{ClaimRequest, Plugin, PreparedDevice};

fn pci(bus: u8) -> PciAddress {
    PciAddress { domain: 0, bus, device: 0, function: 0 }
}

fn whole(bus: u8) -> DeviceName {
    DeviceName::whole(pci(bus))
}

/// Two GPUs that partitions are made on, and two that are used whole.
fn node(root: &tempfile::TempDir) -> Node {
    let gpus = vec![
        h100(pci(1), 0, MigMode::Enabled),
        h100(pci(2), 1, MigMode::Enabled),
        h100(pci(3), 2, MigMode::Disabled),
        h100(pci(4), 3, MigMode::Disabled),
    ];
    Node::new(root.path(), gpus).unwrap()
}

async fn prepare(plugin: &Plugin, name: &str) -> Result<Vec<PreparedDevice>, String> {
    let request =
        ClaimRequest { namespace: "ns".to_owned(), name: name.to_owned(), uid: format!("{name}-uid") };
    plugin.prepare(request).await.map_err(|error| error.to_string())
}

async fn unprepare(plugin: &Plugin, name: &str) -> Result<(), String> {
    plugin.unprepare(format!("{name}-uid")).await.map_err(|error| error.to_string())
}
