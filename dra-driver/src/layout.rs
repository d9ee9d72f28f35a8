//! Records into ResourceSlices: which device stands in which slice, and in
//! which order.
//!
//! The allocator takes the first device that fits, slices by name and devices
//! as listed, so the order is the packing policy. It depends on nothing that a
//! running claim changes, and a GPU keeps its slice, so that a taint rewrites
//! one slice. This module owns order and chunks; names of slices, generations
//! and everything about storing them belong to the publisher.

mod packed;

use std::cmp::Reverse;
use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::{
    Counter, CounterSet, Device, DeviceAttribute, DeviceCapacity, DeviceCounterConsumption, DeviceTaint,
    ResourcePool, ResourceSliceSpec,
};
use kerf_api::attributes::Amount;

pub use packed::PackedSlice;

use crate::model::{AttributeValue, Counters, DeviceKind, Partition, Settings, quantity};
use crate::names::{DeviceName, PciAddress, gpu_pool};
use crate::published::{GpuRecord, PublishedDevice};
use crate::taint::{self, Condition, Conditions};

/// Most devices in a slice. The API takes 128 of plain ones but only 64 once
/// one of them has a taint, and a taint may come at any time.
pub const MAX_DEVICES: usize = 64;
/// Most counter sets in a slice.
pub const MAX_COUNTER_SETS: usize = 8;

/// The slices of the node's GPU pool, in the order the allocator shall see
/// them: counter sets, whole GPUs, partitions.
///
/// The pool's generation is left at zero: it is the publisher's. A pool
/// without devices has one empty slice, which says that it is complete.
pub fn layout(settings: &Settings, records: &[GpuRecord], conditions: &Conditions) -> Vec<ResourceSliceSpec> {
    let records = in_pci_order(records);
    let device = |record: &GpuRecord, name: &DeviceName, published: &PublishedDevice| {
        let taints = taint::taints(&settings.driver, conditions, record, name, published);
        device(Some(record.pci), name, published, taints)
    };
    let chunks = chunks(&records, |_, _, _| true, device);
    let sets: Vec<CounterSet> = records.iter().filter_map(|record| counter_set(record)).collect();
    let counter_slices = sets.chunks(MAX_COUNTER_SETS).map(|sets| Content::CounterSets(sets.to_vec()));
    pool(settings, counter_slices.chain(chunks.into_iter().map(Content::Devices)).collect())
}

/// The slices where the server does not keep counter sets: without them
/// nothing would keep a whole GPU and its partitions apart.
///
/// Of a GPU that serves whole there is the whole GPU, of one that serves
/// partitions those that exist already. Whatever else `held` names stays, as
/// everywhere, tainted.
pub fn layout_without_counters(
    settings: &Settings,
    records: &[GpuRecord],
    conditions: &Conditions,
    held: &std::collections::BTreeSet<DeviceName>,
) -> Vec<ResourceSliceSpec> {
    let records = in_pci_order(records);
    let keep = |record: &GpuRecord, name: &DeviceName, published: &PublishedDevice| {
        is_static(record, published) || held.contains(name)
    };
    let device = |record: &GpuRecord, name: &DeviceName, published: &PublishedDevice| {
        let mut taints = taint::taints(&settings.driver, conditions, record, name, published);
        let withheld = taint::taint(&settings.driver, Condition::Withheld, "no-shared-counters");
        if !is_static(record, published) && taints.iter().all(|taint| taint.key != withheld.key) {
            taints.push(withheld);
        }
        device(None, name, published, taints)
    };
    pool(settings, chunks(&records, keep, device).into_iter().map(Content::Devices).collect())
}

/// Whether a device can be given out without any counter: nothing else of its
/// GPU that would share hardware with it can.
fn is_static(record: &GpuRecord, published: &PublishedDevice) -> bool {
    use crate::inventory::MigMode;
    match &published.device.kind {
        DeviceKind::Whole => record.mode != Some(MigMode::Enabled),
        DeviceKind::Partition(partition) => partition.fixed && record.mode == Some(MigMode::Enabled),
    }
}

/// The name of a GPU's counter set.
pub fn counter_set_name(gpu: PciAddress) -> String {
    format!("gpu-{}", gpu.dashed())
}

/// What a slice holds: the API takes one or the other.
enum Content {
    CounterSets(Vec<CounterSet>),
    Devices(Vec<Device>),
}

fn pool(settings: &Settings, mut contents: Vec<Content>) -> Vec<ResourceSliceSpec> {
    if contents.is_empty() {
        contents.push(Content::Devices(Vec::new()));
    }
    let count = i64::try_from(contents.len()).unwrap_or(i64::MAX);
    contents
        .into_iter()
        .map(|content| {
            let (devices, shared_counters) = match content {
                Content::CounterSets(sets) => (None, Some(sets)),
                Content::Devices(devices) => (Some(devices).filter(|devices| !devices.is_empty()), None),
            };
            ResourceSliceSpec {
                driver: settings.driver.to_string(),
                node_name: Some(settings.node.clone()),
                pool: ResourcePool {
                    name: gpu_pool(&settings.node),
                    generation: 0,
                    resource_slice_count: count,
                },
                devices,
                shared_counters,
                ..ResourceSliceSpec::default()
            }
        })
        .collect()
}

fn in_pci_order(records: &[GpuRecord]) -> Vec<&GpuRecord> {
    let mut records: Vec<&GpuRecord> = records.iter().collect();
    records.sort_by_key(|record| record.pci);
    records
}

/// Devices in published order, cut into slices.
fn chunks(
    records: &[&GpuRecord],
    keep: impl Fn(&GpuRecord, &DeviceName, &PublishedDevice) -> bool,
    device: impl Fn(&GpuRecord, &DeviceName, &PublishedDevice) -> Device,
) -> Vec<Vec<Device>> {
    // Whole GPUs from the last one on, partitions from the first: so that
    // partitions fill few GPUs, and whole ones stay free.
    let wholes: Vec<Device> = records
        .iter()
        .rev()
        .flat_map(|record| record.devices.iter().map(move |(name, published)| (*record, name, published)))
        .filter(|(record, name, published)| {
            published.device.kind == DeviceKind::Whole && keep(record, name, published)
        })
        .map(|(record, name, published)| device(record, name, published))
        .collect();
    let mut slices: Vec<Vec<Device>> = wholes.chunks(MAX_DEVICES).map(<[Device]>::to_vec).collect();
    let mut open: Vec<Device> = Vec::new();
    for record in records {
        let mut partitions: Vec<(PackingKey<'_>, Device)> = record
            .devices
            .iter()
            .filter(|(name, published)| keep(record, name, published))
            .filter_map(|(name, published)| {
                let partition = published.device.partition()?;
                Some((packing_key(partition, &published.device.capacity), device(record, name, published)))
            })
            .collect();
        partitions.sort_by_key(|(key, _)| *key);
        let partitions: Vec<Device> = partitions.into_iter().map(|(_, device)| device).collect();
        if open.len() + partitions.len() > MAX_DEVICES && !open.is_empty() {
            slices.push(std::mem::take(&mut open));
        }
        for part in partitions.chunks(MAX_DEVICES) {
            if open.len() + part.len() > MAX_DEVICES {
                slices.push(std::mem::take(&mut open));
            }
            open.extend_from_slice(part);
        }
    }
    if !open.is_empty() {
        slices.push(open);
    }
    slices
}

/// The place of a partition among those of its GPU: small profiles first, so
/// that a request by size takes the smallest that serves; within a profile
/// first the placements that prevent the fewest others, then the higher.
type PackingKey<'a> = (u32, u64, u64, &'a str, u32, Reverse<u32>);

fn packing_key<'a>(partition: &'a Partition, capacity: &BTreeMap<String, u64>) -> PackingKey<'a> {
    let of = |amount: Amount| capacity.get(amount.capacity()).copied().unwrap_or(0);
    let engines =
        [Amount::CopyEngines, Amount::Decoders, Amount::Encoders, Amount::JpegEngines, Amount::OfaEngines];
    (
        partition.placement.size,
        of(Amount::Multiprocessors),
        engines.into_iter().map(of).sum(),
        partition.profile_name.as_str(),
        partition.crowding,
        Reverse(partition.placement.start),
    )
}

/// A GPU's counter set. A GPU of which nothing is known but that a claim holds
/// it has none: the API refuses an empty one.
fn counter_set(record: &GpuRecord) -> Option<CounterSet> {
    let name = counter_set_name(record.pci);
    (!record.available.is_empty()).then(|| CounterSet { name, counters: counters(&record.available) })
}

fn counters(counters: &Counters) -> BTreeMap<String, Counter> {
    counters
        .iter()
        .map(|(name, value)| (name.to_owned(), Counter { value: quantity(name, value).into() }))
        .collect()
}

/// A device as the API wants it, with its costs where a counter set is named.
fn device(
    counter_set: Option<PciAddress>,
    name: &DeviceName,
    published: &PublishedDevice,
    taints: Vec<DeviceTaint>,
) -> Device {
    let model = &published.device;
    let consumes = counter_set.filter(|_| !model.consumes.is_empty()).map(|gpu| {
        vec![DeviceCounterConsumption {
            counter_set: counter_set_name(gpu),
            counters: counters(&model.consumes),
            compatibility_groups: None,
        }]
    });
    Device {
        name: name.to_string(),
        attributes: Some(
            model.attributes.iter().map(|(key, value)| (key.clone(), attribute(value))).collect(),
        ),
        capacity: Some(&model.capacity).filter(|capacity| !capacity.is_empty()).map(|capacity| {
            capacity
                .iter()
                .map(|(name, value)| {
                    let value = quantity(name, *value).into();
                    (name.clone(), DeviceCapacity { value, request_policy: None })
                })
                .collect()
        }),
        consumes_counters: consumes,
        taints: Some(taints).filter(|taints| !taints.is_empty()),
        ..Device::default()
    }
}

fn attribute(value: &AttributeValue) -> DeviceAttribute {
    match value.clone() {
        AttributeValue::String(text) => DeviceAttribute { string: Some(text), ..DeviceAttribute::default() },
        AttributeValue::Version(version) => {
            DeviceAttribute { version: Some(version), ..DeviceAttribute::default() }
        }
        AttributeValue::Int(number) => DeviceAttribute { int: Some(number), ..DeviceAttribute::default() },
        AttributeValue::Bool(flag) => DeviceAttribute { bool: Some(flag), ..DeviceAttribute::default() },
    }
}

#[cfg(test)]
mod tests;
