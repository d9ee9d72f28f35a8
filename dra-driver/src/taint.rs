//! Which devices the scheduler may not give out, and under which keys that is
//! said.
//!
//! This is the one place that decides on taints. Conditions that only the
//! running process knows come from the inventory's owner as [`Conditions`];
//! the others stand in the record. A taint's value must be a label value, so
//! holders and errors are named in events, log and status instead.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::resource::v1::DeviceTaint;

use crate::inventory::MigMode;
use crate::model::{DeviceKind, ModelDevice};
use crate::names::{DeviceName, DriverName, PciAddress};
use crate::published::{GpuRecord, LeavingReason, PublishedDevice};

/// Why a device is not given out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Condition {
    /// A GPU instance that somebody else made is in its way.
    Foreign,
    /// It leaves because of a setting or a changed cost, or a claim holds
    /// something of its GPU that cannot be published.
    Withheld,
    /// A journal entry that concerns it cannot be read.
    Quarantined,
    /// The GPU did not change to the MIG mode it needs.
    ModeStuck,
    /// Its hardware is gone.
    Lost,
    /// Somebody else hands out the node's GPUs too.
    Rival,
}

/// Who else hands out the node's GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rivalry {
    /// A device plugin.
    DevicePlugin,
    /// Another DRA driver.
    Driver,
}

impl Condition {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::Foreign, Self::Withheld, Self::Quarantined, Self::ModeStuck, Self::Lost, Self::Rival];

    /// The taint's key without the driver name before it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Foreign => "foreign",
            Self::Withheld => "withheld",
            Self::Quarantined => "quarantined",
            Self::ModeStuck => "mode-stuck",
            Self::Lost => "lost",
            Self::Rival => "rival",
        }
    }
}

/// What the inventory's owner knows beside the records.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Conditions {
    /// GPUs that a journal entry which cannot be read may concern.
    pub quarantined: BTreeSet<PciAddress>,
    /// GPUs that twice did not change to a mode, with that mode.
    pub mode_stuck: BTreeMap<PciAddress, MigMode>,
    /// Devices that a journal entry which cannot be undone concerns.
    pub quarantined_devices: BTreeSet<DeviceName>,
    /// Who else hands out the node's GPUs.
    pub rival: Option<Rivalry>,
}

/// The taints of one device, ordered by key. Without a time: the API server
/// sets it.
pub fn taints(
    driver: &DriverName,
    conditions: &Conditions,
    record: &GpuRecord,
    name: &DeviceName,
    published: &PublishedDevice,
) -> Vec<DeviceTaint> {
    reasons(conditions, record, name, published)
        .into_iter()
        .map(|(condition, value)| taint(driver, condition, value))
        .collect()
}

/// A NoSchedule taint.
pub(crate) fn taint(driver: &DriverName, condition: Condition, value: &str) -> DeviceTaint {
    DeviceTaint {
        key: format!("{driver}/{}", condition.as_str()),
        value: Some(value.to_owned()),
        effect: "NoSchedule".to_owned(),
        time_added: None,
    }
}

/// The value of the taint of a device whose whole GPU is lost.
const GPU: &str = "gpu";

/// Whether a taint says that the device's GPU is lost, not only a static
/// partition of it.
pub(crate) fn is_gpu_lost(driver: &DriverName, found: &DeviceTaint) -> bool {
    let lost = taint(driver, Condition::Lost, GPU);
    (&found.key, &found.value) == (&lost.key, &lost.value)
}

/// Each condition of a device, with the value that says more.
fn reasons(
    conditions: &Conditions,
    record: &GpuRecord,
    name: &DeviceName,
    published: &PublishedDevice,
) -> BTreeMap<Condition, &'static str> {
    let mut reasons = BTreeMap::new();
    if !record.present {
        reasons.insert(Condition::Lost, GPU);
    }
    if let Some(leaving) = &published.leaving {
        let (condition, value) = match leaving.reason {
            LeavingReason::Lost => (Condition::Lost, "partition"),
            LeavingReason::Withheld => (Condition::Withheld, "not-offered"),
            LeavingReason::Changed => (Condition::Withheld, "cost-changed"),
            LeavingReason::Foreign => (Condition::Foreign, "gpu-instance"),
        };
        reasons.entry(condition).or_insert(value);
    }
    if !record.unpublishable.is_empty() {
        reasons.entry(Condition::Withheld).or_insert("unknown-device-held");
    }
    if published.contested {
        reasons.entry(Condition::Withheld).or_insert("place-held");
    }
    if foreign_in_the_way(record, &published.device) {
        reasons.insert(Condition::Foreign, "gpu-instance");
    }
    if conditions.quarantined.contains(&record.pci) {
        reasons.insert(Condition::Quarantined, "gpu");
    } else if conditions.quarantined_devices.contains(name) {
        reasons.insert(Condition::Quarantined, "device");
    }
    let needed = match published.device.kind {
        DeviceKind::Whole => MigMode::Disabled,
        DeviceKind::Partition(_) => MigMode::Enabled,
    };
    if conditions.mode_stuck.get(&record.pci) == Some(&needed) {
        let value = if needed == MigMode::Enabled { "enabled" } else { "disabled" };
        reasons.insert(Condition::ModeStuck, value);
    }
    match conditions.rival {
        Some(Rivalry::DevicePlugin) => drop(reasons.insert(Condition::Rival, "device-plugin")),
        Some(Rivalry::Driver) => drop(reasons.insert(Condition::Rival, "driver")),
        None => {}
    }
    reasons
}

/// Whether a foreign instance keeps the device from being made. The static
/// partition that *is* the foreign instance is not in its own way.
fn foreign_in_the_way(record: &GpuRecord, device: &ModelDevice) -> bool {
    match &device.kind {
        DeviceKind::Whole => !record.foreign.is_empty(),
        DeviceKind::Partition(partition) => {
            !partition.fixed
                && record.foreign.iter().any(|occupied| occupied.placement.overlaps(partition.placement))
        }
    }
}
