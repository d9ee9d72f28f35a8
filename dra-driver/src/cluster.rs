//! What a cluster's operator wants to see, as data: whose this driver's devices
//! are, and why claims wait for them. It is made from ResourceSlices and
//! ResourceClaims alone, so it says what the scheduler knows, not what nodes do.
//!
//! Selectors and tolerations are not evaluated: what a request asks for is told
//! by its class's name.

mod claims;
mod pool;
mod slices;
mod supply;
mod waiting;

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::jiff::Timestamp;
use serde::Serialize;

use crate::claim::ClaimName;
use crate::inventory::Bytes;
use crate::names::{DeviceName, DriverName, PciAddress, node_of_pool};
use crate::status;

pub use claims::{PendingPod, PodEvent, SeenClaim};
use pool::Pool;
use slices::SeenDevice;
pub use slices::{SeenSlice, SliceKeeper, SliceObject};
pub use waiting::{SchedulerEvent, WaitingClaim, WaitingRequest};

/// Why a claim that no pod uses has no devices.
pub const UNUSED: &str = "no pod that waits names it: it is allocated when a pod needs it";

/// A cluster at one instant. Programs read it as JSON: fields are added, none
/// changes its meaning.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ClusterStatus {
    /// The driver name.
    pub driver: String,
    /// The version of kerf that says so.
    pub version: String,
    /// The pools of GPUs, by node.
    pub nodes: Vec<NodeDevices>,
    /// The claims that ask for devices and have none yet, oldest first.
    pub waiting: Vec<WaitingClaim>,
    /// What is missing here or seems wrong, a sentence each.
    pub notes: Vec<String>,
}

/// A node's GPUs, as published and allocated.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeDevices {
    /// The node's name.
    pub node: String,
    /// The pool.
    pub pool: String,
    /// Whether all slices of the pool are there. The scheduler gives out nothing
    /// of a pool whose slices are not.
    pub complete: bool,
    /// The GPUs, in PCI order.
    pub gpus: Vec<GpuDevices>,
}

/// A GPU, as published and allocated.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuDevices {
    /// The name of the whole GPU's device.
    pub name: DeviceName,
    /// Its product name; empty where nothing of it is published.
    pub product: String,
    /// The board's memory, or that of its largest partition where the whole is
    /// not published; 0 where nobody knows it.
    pub memory: Bytes,
    /// Whether the whole GPU is published.
    pub whole_published: bool,
    /// What can be allocated now: the whole GPU, or so many of each profile
    /// beside what is held, if nothing else is.
    pub free: Vec<FreeDevices>,
    /// What claims hold of it.
    pub held: Vec<Holding>,
    /// What keeps devices from being allocated, a sentence each.
    pub conditions: Vec<String>,
}

/// Devices of one kind that can be allocated together.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FreeDevices {
    /// The profile; absent for the whole GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// How many.
    pub count: usize,
}

/// A device in a claim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Holding {
    /// The device.
    pub device: DeviceName,
    /// Its profile; absent for a whole GPU, and for what is not published.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// The claim.
    pub claim: ClaimName,
    /// The pods that the claim is reserved for.
    pub pods: Vec<String>,
    /// Whether it is administrative access, which leaves the device to others.
    pub admin_access: bool,
}

impl ClusterStatus {
    /// What slices and claims of the whole cluster say of a driver's devices.
    pub fn of(
        driver: &DriverName,
        version: &str,
        slices: &[SeenSlice],
        claims: &[SeenClaim],
        now: Timestamp,
    ) -> Self {
        let mut holdings: BTreeMap<&str, Vec<Holding>> = BTreeMap::new();
        for claim in claims {
            for (pool, holding) in claim.holdings(driver) {
                holdings.entry(pool).or_default().push(holding);
            }
        }
        let held = |pool: &str| {
            let all = holdings.get(pool).into_iter().flatten();
            all.filter(|holding| !holding.admin_access).map(|holding| holding.device.clone()).collect()
        };
        let pools = Pool::all(driver, slices, held);
        let mut nodes: Vec<NodeDevices> = pools
            .iter()
            .map(|pool| NodeDevices {
                node: pool.node.to_owned(),
                pool: pool.name.to_owned(),
                complete: pool.complete,
                gpus: gpus(Some(pool), &holdings.remove(pool.name).unwrap_or_default()),
            })
            .collect();
        // Of a node that is gone claims may be left.
        nodes.extend(holdings.into_iter().map(|(pool, held)| NodeDevices {
            node: node_of_pool(pool).to_owned(),
            pool: pool.to_owned(),
            complete: false,
            gpus: gpus(None, &held),
        }));
        nodes.sort_by(|one, other| (&one.node, &one.pool).cmp(&(&other.node, &other.pool)));
        let waiting = waiting::waiting(driver, &pools, claims, now);
        let mut status = Self {
            driver: driver.to_string(),
            version: version.to_owned(),
            nodes,
            waiting,
            notes: Vec::new(),
        };
        if pools.is_empty() {
            status.notes.push(format!(
                "no ResourceSlices of {driver}: is kerf running on a node, and is this the right cluster?"
            ));
        }
        status
    }

    /// The claims of pods that have waited for so long though what they ask for
    /// is free: what is in the way is not to be seen in slices and claims.
    pub fn waiting_beside_free(&self, seconds: u64) -> impl Iterator<Item = &WaitingClaim> {
        self.waiting.iter().filter(move |waiting| {
            // Of several requests each may be free, and not all together.
            let is_free = matches!(waiting.requests.as_slice(), [request] if request.enough_free);
            is_free && waiting.owned_by_pod && waiting.waited_seconds >= seconds
        })
    }

    /// Tells claims which of a namespace's pending pods name them. Of one that
    /// none names or owns, what is free is not the reason.
    pub fn name_pods(&mut self, namespace: &str, pods: &[PendingPod]) {
        for waiting in self.waiting.iter_mut().filter(|waiting| waiting.claim.namespace == namespace) {
            let using = pods.iter().filter(|pod| pod.names(&waiting.claim.name));
            let pods = waiting.pods.get_or_insert_default();
            pods.extend(using.map(|pod| pod.name().to_owned()));
            pods.sort();
            pods.dedup();
            if pods.is_empty() {
                for request in &mut waiting.requests {
                    UNUSED.clone_into(&mut request.why);
                }
            }
        }
    }
}

fn gpus<'a>(pool: Option<&Pool<'a>>, held: &[Holding]) -> Vec<GpuDevices> {
    let mut devices: BTreeMap<PciAddress, Vec<&'a SeenDevice>> = BTreeMap::new();
    for device in pool.iter().flat_map(|pool| &pool.devices) {
        if let Some(gpu) = device.name.gpu() {
            devices.entry(gpu).or_default().push(device);
        }
    }
    for gpu in held.iter().filter_map(|holding| holding.device.gpu()) {
        devices.entry(gpu).or_default();
    }
    devices.into_iter().map(|(gpu, devices)| describe(gpu, &devices, pool, held)).collect()
}

fn describe<'a>(
    gpu: PciAddress,
    devices: &[&'a SeenDevice],
    pool: Option<&Pool<'a>>,
    held: &[Holding],
) -> GpuDevices {
    let held = held.iter().filter(|holding| holding.device.gpu() == Some(gpu));
    let mut held: Vec<Holding> = held.cloned().collect();
    for holding in &mut held {
        let device = devices.iter().find(|device| device.name == holding.device);
        holding.profile = device.and_then(|device| device.profile.as_deref()).map(str::to_owned);
    }
    held.sort_by(|one, other| (&one.device, &one.claim).cmp(&(&other.device, &other.claim)));
    let kinds: BTreeSet<Option<&str>> = devices.iter().map(|device| device.profile.as_deref()).collect();
    let whole_published = kinds.contains(&None);
    let free = pool.into_iter().flat_map(|pool| {
        kinds.iter().map(|kind| {
            let of_kind = devices.iter().copied().filter(|device| device.profile.as_deref() == *kind);
            let count = pool.free(&of_kind.collect::<Vec<_>>());
            FreeDevices { profile: kind.map(str::to_owned), count }
        })
    });
    let product = devices.iter().find_map(|device| device.product.as_deref());
    let taints = devices.iter().flat_map(|device| &device.taints);
    GpuDevices {
        name: DeviceName::whole(gpu),
        product: product.unwrap_or_default().to_owned(),
        memory: Bytes(devices.iter().filter_map(|device| device.memory).max().unwrap_or(0)),
        whole_published,
        free: free.filter(|free| free.count > 0).collect(),
        held,
        conditions: status::conditions(taints.map(slices::Taint::kind)),
    }
}

#[cfg(test)]
mod tests;
