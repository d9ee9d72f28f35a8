//! What a node publishes next: everything that is known, put together.
//!
//! [`Publication`] holds the records of the node's GPUs and is asked again
//! whenever something is new. It decides which records have to be stored, what
//! is to be published after they are, and when a LIST of claims is due. It
//! stores and publishes nothing itself.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::resource::v1::ResourceSliceSpec;

use crate::inventory::{GpuInstance, Inventory};
use crate::layout::{layout, layout_without_counters};
use crate::model::{GpuModel, Settings};
use crate::names::{DeviceName, PciAddress};
use crate::published::{GpuRecord, merge};
use crate::taint::Conditions;
use crate::withdraw::{self, ClaimList, Timestamp};

/// The records of a node's GPUs, as they are stored.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Publication {
    records: BTreeMap<PciAddress, GpuRecord>,
}

/// What is known at an instant.
#[derive(Debug, Clone, Copy)]
pub struct Knowledge<'a> {
    /// The operator's choices.
    pub settings: &'a Settings,
    /// What is there. Nothing where the driver does not answer: then every GPU
    /// that was published counts as lost.
    pub inventory: &'a Inventory,
    /// The GPU instances that no journal entry made, decided under their GPU's
    /// lock.
    pub foreign: &'a BTreeMap<PciAddress, Vec<GpuInstance>>,
    /// The devices that claims hold, by the journal.
    pub held: &'a BTreeSet<DeviceName>,
    /// The last LIST of claims.
    pub list: Option<&'a ClaimList>,
    /// What else keeps devices from being given out.
    pub conditions: &'a Conditions,
    /// Whether the API server holds what was published last.
    pub is_stored: bool,
    /// Whether the API server keeps counters.
    pub counters: bool,
    /// The time.
    pub now: Timestamp,
}

/// What follows from it.
#[derive(Debug, Clone, PartialEq)]
pub struct Next {
    /// These records differ from what is stored. They are to be stored before
    /// anything is published.
    pub write: Vec<GpuRecord>,
    /// The records of these GPUs can go.
    pub remove: Vec<PciAddress>,
    /// The slices to publish once the records are stored.
    pub slices: Vec<ResourceSliceSpec>,
    /// When a LIST of claims is needed.
    pub list_at: Option<Timestamp>,
    all: BTreeMap<PciAddress, GpuRecord>,
}

impl Publication {
    /// Takes the records that were stored before.
    pub fn new(records: impl IntoIterator<Item = GpuRecord>) -> Self {
        Self { records: records.into_iter().map(|record| (record.pci, record)).collect() }
    }

    /// Whether nothing was ever published, as far as is stored.
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// The records.
    pub fn records(&self) -> impl Iterator<Item = &GpuRecord> {
        self.records.values()
    }

    /// Decides what comes next. Nothing changes until it is [`taken`].
    ///
    /// [`taken`]: Self::take
    pub fn next(&self, knowledge: Knowledge<'_>) -> Next {
        let Knowledge { settings, inventory, foreign, held, list, conditions, is_stored, counters, now } = knowledge;
        // What the last LIST showed counts as held: its claims may not have
        // been prepared yet.
        let mut holding = held.clone();
        holding.extend(list.into_iter().flat_map(|list| list.allocated.iter().cloned()));
        let models: BTreeMap<PciAddress, GpuModel> = inventory
            .gpus
            .iter()
            .map(|gpu| {
                let foreign = foreign.get(&gpu.pci).map_or(&[][..], Vec::as_slice);
                (gpu.pci, GpuModel::of(settings, inventory, gpu, foreign))
            })
            .collect();
        let merged = |pci: PciAddress, previous: Option<&GpuRecord>| merge(pci, previous, models.get(&pci), &holding);

        let mut known: BTreeSet<PciAddress> = self.records.keys().chain(models.keys()).copied().collect();
        known.extend(holding.iter().filter_map(DeviceName::gpu));
        let mut all: BTreeMap<PciAddress, GpuRecord> = known
            .iter()
            .filter_map(|pci| {
                let mut previous = self.records.get(pci).cloned();
                if let Some(record) = previous.as_mut().filter(|_| is_stored) {
                    record.stored(now);
                }
                Some((*pci, merged(*pci, previous.as_ref())?))
            })
            .collect();

        let decision = withdraw::decide(all.values(), held, list, now);
        let leaving: BTreeSet<PciAddress> = decision.withdraw.iter().filter_map(DeviceName::gpu).collect();
        for pci in leaving {
            let Some(mut record) = all.remove(&pci) else { continue };
            record.withdraw(&decision.withdraw);
            if let Some(record) = merged(pci, Some(&record)) {
                all.insert(pci, record);
            }
        }

        let records: Vec<GpuRecord> = all.values().cloned().collect();
        let slices = if counters {
            layout(settings, &records, conditions)
        } else {
            layout_without_counters(settings, &records, conditions, &holding)
        };
        let write = records.into_iter().filter(|record| self.records.get(&record.pci) != Some(record)).collect();
        let remove = self.records.keys().filter(|pci| !all.contains_key(pci)).copied().collect();
        Next { write, remove, slices, list_at: decision.list_at, all }
    }

    /// Takes over what was decided, once its records are stored. The answer is
    /// what to publish.
    pub fn take(&mut self, next: Next) -> Vec<ResourceSliceSpec> {
        self.records = next.all;
        next.slices
    }
}
