//! What a node's operator wants to see, as data: the answer of `kerf node` on
//! its status socket, drawn by `kerf status`.

use serde::{Deserialize, Serialize};

use crate::inventory::{Bytes, MigMode, Placement};
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
