//! What a cluster's operator wants to see, as data: whose this driver's devices
//! are, and why claims wait for them. It is made from ResourceSlices and
//! ResourceClaims alone, so it says what the scheduler knows, not what nodes do.
//!
//! Selectors are not evaluated: what a request asks for is told by its class's
//! name.

mod claims;
mod pool;
mod waiting;

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::resource::v1::{Device, ResourceSlice};
use k8s_openapi::jiff::Timestamp;
use kerf_api::attributes::{Amount, attribute};
use kerf_api::quantity::Quantity;
use serde::Serialize;

use crate::claim::ClaimName;
use crate::inventory::Bytes;
use crate::names::{DeviceName, DriverName, PciAddress};
use crate::status;

pub use claims::{PendingPod, PodEvent, SeenClaim};
use pool::Pool;
pub use waiting::{SchedulerEvent, WaitingClaim, WaitingRequest};

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
    /// What could not be looked at, a sentence each.
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
        slices: &[ResourceSlice],
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
            all.filter(|holding| !holding.admin_access).map(|holding| &holding.device).collect()
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
            node: pool.split('/').next().unwrap_or_default().to_owned(),
            pool: pool.to_owned(),
            complete: false,
            gpus: gpus(None, &held),
        }));
        nodes.sort_by(|one, other| (&one.node, &one.pool).cmp(&(&other.node, &other.pool)));
        let waiting = waiting::waiting(driver, &pools, claims, now);
        Self { driver: driver.to_string(), version: version.to_owned(), nodes, waiting, notes: Vec::new() }
    }

    /// The claims of pods that have waited for so long though what they ask for
    /// is free: what is in the way is not to be seen in slices and claims.
    pub fn waiting_beside_free(&self, seconds: u64) -> impl Iterator<Item = &WaitingClaim> {
        self.waiting.iter().filter(move |waiting| {
            // Of several requests each may be free, and not all together.
            let is_free = matches!(waiting.requests.as_slice(), [request] if request.enough_free);
            is_free && waiting.from_template && waiting.waited_seconds >= seconds
        })
    }

    /// Tells claims that no pod owns which of a namespace's pending pods wait
    /// for them.
    pub fn name_pods(&mut self, namespace: &str, pods: &[PendingPod]) {
        for waiting in self.waiting.iter_mut().filter(|waiting| waiting.claim.namespace == namespace) {
            let using = pods.iter().filter(|pod| pod.names(&waiting.claim.name));
            waiting.pods.extend(using.map(|pod| pod.name().to_owned()));
            waiting.pods.sort();
            waiting.pods.dedup();
        }
    }
}

fn gpus<'a>(pool: Option<&Pool<'a>>, held: &[Holding]) -> Vec<GpuDevices> {
    let mut devices: BTreeMap<PciAddress, Vec<&'a Device>> = BTreeMap::new();
    for device in pool.iter().flat_map(|pool| &pool.devices) {
        if let Some(gpu) = status::gpu_of(device) {
            devices.entry(gpu).or_default().push(device);
        }
    }
    for gpu in held.iter().filter_map(|holding| holding.device.gpu()) {
        devices.entry(gpu).or_default();
    }
    devices
        .into_iter()
        .map(|(gpu, devices)| {
            let mut held: Vec<Holding> =
                held.iter().filter(|holding| holding.device.gpu() == Some(gpu)).cloned().collect();
            for holding in &mut held {
                let device = devices.iter().find(|device| device.name == holding.device.as_str());
                holding.profile = device.and_then(|device| profile(device)).map(str::to_owned);
            }
            held.sort_by(|one, other| (&one.device, &one.claim).cmp(&(&other.device, &other.claim)));
            let kinds: BTreeSet<Option<&str>> = devices.iter().map(|device| profile(device)).collect();
            let free = pool.into_iter().flat_map(|pool| {
                kinds.iter().map(|kind| FreeDevices {
                    profile: kind.map(str::to_owned),
                    count: pool.free(devices.iter().copied().filter(|device| profile(device) == *kind)),
                })
            });
            let product = devices.iter().find_map(|device| text(device, attribute::PRODUCT_NAME));
            GpuDevices {
                name: DeviceName::whole(gpu),
                product: product.unwrap_or_default().to_owned(),
                memory: Bytes(devices.iter().filter_map(|device| memory(device)).max().unwrap_or(0)),
                free: free.filter(|free| free.count > 0).collect(),
                held,
                conditions: status::conditions(&devices),
            }
        })
        .collect()
}

fn text<'a>(device: &'a Device, key: &str) -> Option<&'a str> {
    device.attributes.as_ref()?.get(key)?.string.as_deref()
}

/// The profile of a partition.
fn profile(device: &Device) -> Option<&str> {
    text(device, attribute::PROFILE)
}

fn memory(device: &Device) -> Option<u64> {
    Quantity::try_from(&device.capacity.as_ref()?.get(Amount::Memory.capacity())?.value).ok()?.units()
}

#[cfg(test)]
mod tests;
