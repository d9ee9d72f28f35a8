//! What was, or is about to be, published of one GPU, and how that changes.
//!
//! The allocator counts only published devices. If one that a claim holds
//! disappears, or costs something else, the same hardware is handed out twice.
//! So the record of what was published is an input of what is published next:
//! it is stored before its first publication (`state/gpus/<pci>.json`), and a
//! device leaves it only through [`withdraw`](crate::withdraw).
//!
//! This module owns the record and [`merge`]. It never decides when a device
//! may go, and knows no API types.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::inventory::{MigMode, Placement};
use crate::model::{Counters, GpuModel, ModelDevice, Occupied};
use crate::names::{DeviceName, PciAddress};

/// The version of the record's format. A newer one may be read as long as the
/// fields below keep their meaning; fields that are not known are kept.
pub const FORMAT_VERSION: u32 = 1;

/// What is published of one GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuRecord {
    /// [`FORMAT_VERSION`] of its writer.
    pub version: u32,
    /// Which GPU.
    pub pci: PciAddress,
    /// Whether the GPU is there.
    pub present: bool,
    /// The MIG mode it is in; absent where it has no MIG.
    pub mode: Option<MigMode>,
    /// Everything it has.
    pub counters: Counters,
    /// What of it can be allocated: [`counters`](Self::counters) without what
    /// foreign instances and held static partitions occupy.
    pub available: Counters,
    /// The devices.
    pub devices: BTreeMap<DeviceName, PublishedDevice>,
    /// The foreign GPU instances that were last seen.
    pub foreign: Vec<Occupied>,
    /// Devices that claims hold but whose cost nobody knows any more, so that
    /// they cannot be published. As long as there is one, nothing of the GPU
    /// is given out.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub unpublishable: BTreeMap<DeviceName, Leaving>,
    /// Fields of another version.
    #[serde(flatten)]
    pub unknown: serde_json::Map<String, serde_json::Value>,
}

/// One published device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PublishedDevice {
    /// The device as it is published.
    pub device: ModelDevice,
    /// Present while it is published only because it may not go yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leaving: Option<Leaving>,
    /// Whether a claim holds another device at the same place: a static
    /// partition that somebody made where a held device is published.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub contested: bool,
    /// Fields of another version.
    #[serde(flatten)]
    pub unknown: serde_json::Map<String, serde_json::Value>,
}

/// A device that is no longer wanted as it is published.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Leaving {
    /// Why.
    pub reason: LeavingReason,
}

/// Why a device is no longer wanted as it is published.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum LeavingReason {
    /// Its GPU, or the static partition that it was, is gone.
    Lost,
    /// A setting or a mode that is kept excludes it.
    Withheld,
    /// It costs something else now and is published anew once it has left.
    Changed,
    /// A foreign instance took its placement.
    Foreign,
}

impl GpuRecord {
    /// The devices that wait to be withdrawn, or forgotten where they could
    /// not even be published.
    pub fn leaving(&self) -> impl Iterator<Item = (&DeviceName, &Leaving)> {
        let published =
            self.devices.iter().filter_map(|(name, published)| Some((name, published.leaving.as_ref()?)));
        published.chain(&self.unpublishable)
    }

    /// Takes out what [`withdraw`](crate::withdraw) allowed.
    /// [`merge`] it again afterwards: what left may be wanted in another form.
    pub fn withdraw(&mut self, names: &[DeviceName]) {
        for name in names {
            self.unpublishable.remove(name);
            if self.devices.get(name).is_some_and(|published| published.leaving.is_some()) {
                self.devices.remove(name);
            }
        }
    }
}

/// What to publish of a GPU next.
///
/// `current` is absent where the GPU is gone or cannot be read. `held` are the
/// devices that claims hold, of any GPU. The answer is absent where nothing is
/// left to publish; then the record's file can go.
///
/// Nothing that was published is missing from the answer, and nothing in it
/// costs anything else than before. Merging twice gives the same.
pub fn merge(
    pci: PciAddress,
    previous: Option<&GpuRecord>,
    current: Option<&GpuModel>,
    held: &BTreeSet<DeviceName>,
) -> Option<GpuRecord> {
    let current = current.filter(|model| model.pci == pci);
    let mut devices: BTreeMap<DeviceName, PublishedDevice> = current
        .into_iter()
        .flat_map(|model| &model.devices)
        .map(|(name, device)| {
            let unknown = serde_json::Map::new();
            (
                name.clone(),
                PublishedDevice { device: device.clone(), leaving: None, contested: false, unknown },
            )
        })
        .collect();
    for (name, old) in previous.into_iter().flat_map(|record| &record.devices) {
        let wanted = devices.get_mut(name);
        match wanted {
            Some(wanted) if wanted.device.costs_as(&old.device) => {
                wanted.unknown.clone_from(&old.unknown);
                if let Some(model) = current {
                    keep_untold(model, &mut wanted.device, &old.device);
                }
            }
            wanted => {
                let reason = leaving_reason(&old.device, wanted.map(|wanted| &wanted.device), current);
                let leaving = Some(Leaving { reason });
                devices.insert(name.clone(), PublishedDevice { leaving, ..old.clone() });
            }
        }
    }
    let unpublishable = unpublishable(pci, previous, &devices, held);
    if devices.is_empty() && unpublishable.is_empty() && current.is_none() {
        return None;
    }
    mark_contested(&mut devices, held);
    let counters = total(previous, current, &devices);
    let foreign = match (current, previous) {
        (Some(model), _) => model.foreign.clone(),
        (None, Some(record)) => record.foreign.clone(),
        (None, None) => Vec::new(),
    };
    Some(GpuRecord {
        version: FORMAT_VERSION,
        pci,
        present: current.is_some(),
        mode: current.map_or_else(|| previous.and_then(|record| record.mode), |model| model.mode),
        available: available(&counters, &foreign, &devices, held),
        counters,
        devices,
        foreign,
        unpublishable,
        unknown: previous.map(|record| record.unknown.clone()).unwrap_or_default(),
    })
}

/// Keeps what cannot be told of a GPU now as it was published. Otherwise
/// slices would be rewritten, and selectors miss, at each prepare that turns
/// MIG mode on and for each call of NVML that fails.
fn keep_untold(model: &GpuModel, wanted: &mut ModelDevice, old: &ModelDevice) {
    for key in &model.untold {
        if let Some(value) = old.attributes.get(key) {
            wanted.attributes.insert(key.clone(), value.clone());
        }
    }
}

/// The held devices that cannot be published, and those of before that may
/// not be forgotten yet: their claims may not be prepared.
fn unpublishable(
    pci: PciAddress,
    previous: Option<&GpuRecord>,
    devices: &BTreeMap<DeviceName, PublishedDevice>,
    held: &BTreeSet<DeviceName>,
) -> BTreeMap<DeviceName, Leaving> {
    let mut all = previous.map(|record| record.unpublishable.clone()).unwrap_or_default();
    for name in held.iter().filter(|name| name.gpu() == Some(pci)) {
        all.entry(name.clone()).or_insert(Leaving { reason: LeavingReason::Withheld });
    }
    all.retain(|name, _| !devices.contains_key(name));
    all
}

/// Marks the static partitions that stand where a claim holds another device.
/// They consume no counters, so nothing else keeps the allocator from giving
/// the place out a second time.
fn mark_contested(devices: &mut BTreeMap<DeviceName, PublishedDevice>, held: &BTreeSet<DeviceName>) {
    let places: Vec<(DeviceName, Option<Placement>)> = devices
        .iter()
        .filter(|(name, _)| held.contains(*name))
        .map(|(name, published)| {
            (name.clone(), published.device.partition().map(|partition| partition.placement))
        })
        .collect();
    for (name, published) in devices {
        let fixed = published
            .device
            .partition()
            .filter(|partition| partition.fixed)
            .map(|partition| partition.placement);
        published.contested = fixed.is_some_and(|fixed| {
            places
                .iter()
                .any(|(holder, place)| holder != name && place.is_none_or(|place| place.overlaps(fixed)))
        });
    }
}

fn leaving_reason(
    old: &ModelDevice,
    wanted: Option<&ModelDevice>,
    current: Option<&GpuModel>,
) -> LeavingReason {
    let was_fixed = old.partition().is_some_and(|partition| partition.fixed);
    let is_fixed = wanted.and_then(ModelDevice::partition).is_some_and(|partition| partition.fixed);
    match (wanted, current) {
        (_, None) => LeavingReason::Lost,
        _ if was_fixed && !is_fixed => LeavingReason::Lost,
        _ if is_fixed && !was_fixed => LeavingReason::Foreign,
        (None, _) => LeavingReason::Withheld,
        (Some(_), _) => LeavingReason::Changed,
    }
}

/// The counter set. While devices of an earlier cost are published it is the
/// smaller of both, so that nothing is offered beside them, and it names each
/// counter that one of them consumes.
fn total(
    previous: Option<&GpuRecord>,
    current: Option<&GpuModel>,
    devices: &BTreeMap<DeviceName, PublishedDevice>,
) -> Counters {
    let Some(model) = current else {
        return previous.map(|record| record.counters.clone()).unwrap_or_default();
    };
    let leaving = || devices.values().filter(|published| published.leaving.is_some());
    match previous {
        Some(record) if leaving().next().is_some() => {
            let consumed = |name: &str| {
                leaving().any(|published| published.device.consumes.iter().any(|(other, _)| other == name))
            };
            model.counters.narrowed_to(&record.counters, consumed)
        }
        _ => model.counters.clone(),
    }
}

/// What foreign instances leave. Where a held device is published with its
/// cost at the same place, the allocator subtracts that already; only what the
/// foreign instance takes beyond it is subtracted here.
fn available(
    counters: &Counters,
    foreign: &[Occupied],
    devices: &BTreeMap<DeviceName, PublishedDevice>,
    held: &BTreeSet<DeviceName>,
) -> Counters {
    let mut available = counters.clone();
    let mut charged: Vec<(&ModelDevice, Counters)> = devices
        .iter()
        .filter(|(name, _)| held.contains(*name))
        .map(|(_, published)| (&published.device, published.device.consumes.clone()))
        .collect();
    for occupied in foreign {
        let mut cost = occupied.cost.clone();
        for (device, charge) in &mut charged {
            if device.partition().is_none_or(|partition| partition.placement.overlaps(occupied.placement)) {
                let shared = charge.common(&cost);
                charge.take(&shared);
                cost.take(&shared);
            }
        }
        available.take(&cost);
    }
    // A static partition whose instance is gone keeps its place until it has
    // left, as it would had it been published with a cost.
    for device in devices.values().map(|published| &published.device) {
        let placement = device.partition().map(|partition| partition.placement);
        let seen = foreign.iter().any(|occupied| Some(occupied.placement) == placement);
        if !seen {
            available.take(&device.reserves);
        }
    }
    available
}

#[cfg(test)]
mod tests;
