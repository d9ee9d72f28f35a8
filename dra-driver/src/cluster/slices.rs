//! ResourceSlices, as much of them as is asked for. A large cluster has hundreds
//! of thousands of devices of few kinds, so what many have in common is kept once.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kerf_api::quantity::Quantity;
use serde::Deserialize;

use super::claims::Metadata;
use crate::names::DeviceName;

/// A ResourceSlice, as it is sent. What is not asked for is passed over.
#[derive(Debug, Deserialize)]
pub struct SliceObject {
    metadata: Metadata,
    spec: Spec,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Spec {
    driver: String,
    pool: Pool,
    node_name: Option<String>,
    #[serde(default)]
    shared_counters: Vec<CounterSet>,
    #[serde(default)]
    devices: Vec<Device>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Pool {
    name: String,
    generation: i64,
    resource_slice_count: i64,
}

#[derive(Debug, Deserialize)]
struct CounterSet {
    name: String,
    #[serde(default)]
    counters: BTreeMap<String, Value>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Device {
    name: String,
    #[serde(default)]
    attributes: Attributes,
    #[serde(default)]
    capacity: Capacity,
    #[serde(default)]
    consumes_counters: Vec<Consumed>,
    #[serde(default)]
    taints: Box<[Taint]>,
}

/// By the names of `kerf_api::attributes`.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Attributes {
    product_name: Text,
    profile: Text,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Text {
    string: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
struct Capacity {
    memory: Option<Value>,
}

#[derive(Debug, Deserialize)]
struct Value {
    value: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Consumed {
    counter_set: String,
    #[serde(default)]
    counters: BTreeMap<String, Value>,
}

/// A taint of a device.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Taint {
    key: String,
    #[serde(default)]
    value: String,
    effect: String,
}

impl Taint {
    pub(super) fn kind(&self) -> (&str, &str) {
        (&self.key, &self.value)
    }
}

/// Amounts by counter.
pub(super) type Amounts = Arc<[(Arc<str>, Quantity)]>;

/// A ResourceSlice, as it is kept.
#[derive(Debug, Clone)]
pub struct SeenSlice {
    pub(super) name: String,
    pub(super) driver: Arc<str>,
    pub(super) pool: Arc<str>,
    pub(super) generation: i64,
    /// Of how many slices its pool is.
    pub(super) count: i64,
    pub(super) node: Option<Arc<str>>,
    /// By counter set.
    pub(super) counters: Box<[(Arc<str>, Amounts)]>,
    pub(super) devices: Box<[SeenDevice]>,
}

#[derive(Debug, Clone)]
pub(super) struct SeenDevice {
    pub(super) name: DeviceName,
    pub(super) product: Option<Arc<str>>,
    /// Of a partition.
    pub(super) profile: Option<Arc<str>>,
    /// In bytes.
    pub(super) memory: Option<u64>,
    pub(super) taints: Box<[Taint]>,
    /// What it takes of which counter set.
    pub(super) costs: Box<[(Arc<str>, Amounts)]>,
}

impl SeenDevice {
    /// Whether no new claim gets it, unless it tolerates that.
    pub(super) fn is_tainted(&self) -> bool {
        self.taints.iter().any(|taint| taint.effect != "None")
    }
}

/// Keeps slices, each text and each list of amounts of them once.
#[derive(Debug, Default)]
pub struct SliceKeeper {
    texts: BTreeSet<Arc<str>>,
    amounts: BTreeSet<Amounts>,
}

impl SliceKeeper {
    /// What is kept of a slice.
    pub fn keep(&mut self, slice: SliceObject) -> SeenSlice {
        let SliceObject { metadata, spec } = slice;
        let counters = spec.shared_counters.into_iter();
        SeenSlice {
            name: metadata.name,
            driver: self.text(&spec.driver),
            pool: self.text(&spec.pool.name),
            generation: spec.pool.generation,
            count: spec.pool.resource_slice_count,
            node: spec.node_name.map(|node| self.text(&node)),
            counters: counters.map(|set| (self.text(&set.name), self.amounts(&set.counters))).collect(),
            devices: spec.devices.into_iter().filter_map(|device| self.device(device)).collect(),
        }
    }

    fn device(&mut self, device: Device) -> Option<SeenDevice> {
        let consumed = device.consumes_counters.into_iter();
        Some(SeenDevice {
            // The API takes only DNS labels, so nothing is passed over.
            name: DeviceName::parse(&device.name).ok()?,
            product: device.attributes.product_name.string.map(|text| self.text(&text)),
            profile: device.attributes.profile.string.map(|text| self.text(&text)),
            memory: device.capacity.memory.and_then(|memory| memory.value.parse::<Quantity>().ok()?.units()),
            taints: device.taints,
            costs: consumed.map(|set| (self.text(&set.counter_set), self.amounts(&set.counters))).collect(),
        })
    }

    fn text(&mut self, text: &str) -> Arc<str> {
        once(&mut self.texts, text)
    }

    fn amounts(&mut self, counters: &BTreeMap<String, Value>) -> Amounts {
        let amounts: Vec<(Arc<str>, Quantity)> = counters
            .iter()
            .filter_map(|(counter, amount)| Some((self.text(counter), amount.value.parse().ok()?)))
            .collect();
        once(&mut self.amounts, amounts.as_slice())
    }
}

fn once<T: ?Sized + Ord>(kept: &mut BTreeSet<Arc<T>>, value: &T) -> Arc<T>
where
    Arc<T>: for<'a> From<&'a T>,
{
    if let Some(known) = kept.get(value) {
        return known.clone();
    }
    let new = Arc::from(value);
    kept.insert(Arc::clone(&new));
    new
}
