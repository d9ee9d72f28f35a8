//! What bears on giving devices out: what the journal says, and who else
//! hands out the node's GPUs. It decides nothing.

use std::collections::{BTreeMap, BTreeSet};

use kerf_dra_driver::claim::ClaimName;
use kerf_dra_driver::inventory::Inventory;
use kerf_dra_driver::journal::Entry;
use kerf_dra_driver::names::{DeviceName, PciAddress};
use kerf_dra_driver::published::GpuRecord;
use kerf_dra_driver::taint::Conditions;

use super::Owner;
use crate::rivals::Rival;
use crate::view::JournalView;

/// What of the journal bears on what is published: what keeps devices from
/// being given out, and the held devices that are not just published as they
/// are.
#[derive(Debug, PartialEq, Eq, Default)]
pub(super) struct Bearing {
    conditions: Conditions,
    held: BTreeSet<DeviceName>,
    vanished: BTreeMap<DeviceName, ClaimName>,
}

impl Owner {
    /// What of the journal bears on what is published.
    pub(super) fn bearing(&self, view: &JournalView) -> Bearing {
        let inventory = self.channels.inventory.borrow().clone().unwrap_or_default();
        let is_plain = |name: &DeviceName| {
            let record = self.publication.records().find(|record| name.gpu() == Some(record.pci));
            record.is_some_and(|record| {
                self.counters
                    && record.leaving().next().is_none()
                    && record.foreign.is_empty()
                    && record.devices.get(name).is_some_and(|published| !published.contested)
            })
        };
        Bearing {
            conditions: conditions(
                view,
                &inventory,
                self.publication.records(),
                self.rivals.borrow().as_deref(),
            ),
            held: view.held().map(|(name, _)| name).filter(|name| !is_plain(name)).cloned().collect(),
            vanished: self.vanished(view),
        }
    }

    /// The partitions that had vanished and whose entries are still as they were.
    pub(super) fn vanished(&self, view: &JournalView) -> BTreeMap<DeviceName, ClaimName> {
        let is_so = |entry: &Entry| view.entries.get(&entry.uid).is_some_and(|known| **known == *entry);
        let vanished = self.vanished.iter().filter(|(_, entry)| is_so(entry));
        vanished.map(|(device, entry)| (device.clone(), entry.claim.clone())).collect()
    }
}

/// What the journal says that keeps devices from being given out.
pub(super) fn conditions<'a>(
    view: &JournalView,
    inventory: &Inventory,
    records: impl Iterator<Item = &'a GpuRecord>,
    rivals: Option<&[Rival]>,
) -> Conditions {
    let gpus: BTreeSet<PciAddress> =
        inventory.gpus.iter().map(|gpu| gpu.pci).chain(records.map(|record| record.pci)).collect();
    let mut conditions = Conditions {
        quarantined: view.quarantined_among(gpus).map(|(gpu, _)| gpu).collect(),
        rival: rivals.and_then(<[Rival]>::first).map(|rival| rival.kind.rivalry()),
        ..Conditions::default()
    };
    for (gpu, stuck) in &view.stuck_modes {
        conditions.mode_stuck.insert(*gpu, stuck.wanted);
    }
    for entry in view.entries.values().filter(|entry| entry.error.is_some()) {
        conditions
            .quarantined_devices
            .extend(entry.allocation.iter().map(|allocated| allocated.device.clone()));
    }
    conditions
}
