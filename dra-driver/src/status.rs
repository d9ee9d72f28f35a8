//! What a node's operator wants to see, as data: the answer of `kerf node` on
//! its status socket, drawn by `kerf status`.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::Device;
use serde::{Deserialize, Serialize};

use crate::inventory::{Bytes, Gpu, Inventory, MigMode, Placement};
use crate::journal::{BootId, Entry};
use crate::names::{DeviceName, PciAddress};

/// A node at one instant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeStatus {
    /// The node's name.
    pub node: String,
    /// The driver name.
    pub driver: String,
    /// The version of kerf.
    pub version: String,
    /// The NVIDIA driver's version, where there is one.
    pub nvidia_driver: Option<String>,
    /// What is missing until the node is ready, a sentence each; none when it is.
    pub missing: Vec<String>,
    /// What is published.
    pub publication: Publication,
    /// The GPUs, in PCI order.
    pub gpus: Vec<GpuStatus>,
}

/// What the API server holds of this node.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Publication {
    /// The pool.
    pub pool: String,
    /// The generation of the pool that is stored.
    pub generation: i64,
    /// The number of slices that are stored.
    pub slices: usize,
}

/// A GPU at one instant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuStatus {
    /// The name of the whole GPU's device.
    pub name: DeviceName,
    /// Its address.
    pub pci: PciAddress,
    /// Its product name; empty where the GPU is lost.
    pub product: String,
    /// The board's memory.
    pub memory: Bytes,
    /// Its MIG mode; absent where it has no MIG profiles.
    pub mig: Option<MigMode>,
    /// How many memory slices it has; 0 where it has no MIG profiles.
    pub memory_slices: u32,
    /// The claims that hold the whole GPU, `namespace/name`.
    pub held_by: Vec<String>,
    /// The partitions on it, ordered by start.
    pub partitions: Vec<PartitionStatus>,
    /// What keeps it from being allocated, a sentence each.
    pub conditions: Vec<String>,
}

/// A partition at one instant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PartitionStatus {
    /// The profile's name.
    pub profile: String,
    /// Where it is.
    pub placement: Placement,
    /// The claim that holds it, `namespace/name`; absent for a partition that
    /// kerf did not make.
    pub held_by: Option<String>,
}

/// Describes GPUs for an operator: what is there, whose it is, and what of it
/// is not given out.
pub fn gpus(
    inventory: &Inventory,
    entries: &[&Entry],
    boot: &BootId,
    published: &[Device],
) -> Vec<GpuStatus> {
    let mut gpus: Vec<GpuStatus> = inventory.gpus.iter().map(|gpu| describe(gpu, entries, boot)).collect();
    // A GPU that is lost is still published, and claims may still hold it.
    for device in published.iter().filter_map(|device| DeviceName::parse(&device.name).ok()) {
        if let Some(pci) = device.gpu().filter(|pci| gpus.iter().all(|gpu| gpu.pci != *pci)) {
            gpus.push(lost(pci, entries));
        }
    }
    for gpu in &mut gpus {
        gpu.conditions = conditions(gpu.pci, published);
    }
    gpus.sort_by_key(|gpu| gpu.pci);
    gpus
}

fn describe(gpu: &Gpu, entries: &[&Entry], boot: &BootId) -> GpuStatus {
    let mig = gpu.mig.as_ref();
    let partitions = mig.into_iter().flat_map(|mig| {
        mig.instances.iter().map(move |instance| PartitionStatus {
            profile: mig.profile(instance.profile).map_or_else(
                || format!("profile {}", instance.profile.0),
                |profile| profile.name.to_string(),
            ),
            placement: instance.placement,
            held_by: entries
                .iter()
                .find(|entry| entry.owns(boot, gpu.pci, instance))
                .map(|entry| entry.claim.to_string()),
        })
    });
    let mut partitions: Vec<PartitionStatus> = partitions.collect();
    partitions.sort_by_key(|partition| partition.placement);
    let placements = mig.into_iter().flat_map(|mig| &mig.profiles).flat_map(|profile| &profile.placements);
    GpuStatus {
        name: DeviceName::whole(gpu.pci),
        pci: gpu.pci,
        product: gpu.product.clone(),
        memory: gpu.memory,
        mig: mig.map(|mig| mig.current),
        memory_slices: placements
            .map(|placement| placement.start.saturating_add(placement.size))
            .max()
            .unwrap_or(0),
        held_by: whole_holders(gpu.pci, entries),
        partitions,
        conditions: Vec::new(),
    }
}

fn lost(pci: PciAddress, entries: &[&Entry]) -> GpuStatus {
    GpuStatus {
        name: DeviceName::whole(pci),
        pci,
        product: String::new(),
        memory: Bytes(0),
        mig: None,
        memory_slices: 0,
        held_by: whole_holders(pci, entries),
        partitions: Vec::new(),
        conditions: Vec::new(),
    }
}

fn whole_holders(pci: PciAddress, entries: &[&Entry]) -> Vec<String> {
    let whole = DeviceName::whole(pci);
    entries
        .iter()
        .filter(|entry| entry.allocation.iter().any(|allocated| allocated.device == whole))
        .map(|entry| entry.claim.to_string())
        .collect()
}

/// The taints of a GPU's devices, one sentence for each kind.
fn conditions(pci: PciAddress, published: &[Device]) -> Vec<String> {
    let mut kinds: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    for device in published {
        if DeviceName::parse(&device.name).ok().and_then(|name| name.gpu()) != Some(pci) {
            continue;
        }
        for taint in device.taints.iter().flatten() {
            *kinds.entry((&taint.key, taint.value.as_deref().unwrap_or_default())).or_default() += 1;
        }
    }
    kinds
        .into_iter()
        .map(|((key, value), count)| format!("{count} device(s) not given out: {key}={value}"))
        .collect()
}
