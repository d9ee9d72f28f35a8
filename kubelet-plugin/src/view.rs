//! What the journal says, as an immutable picture for everybody else: the
//! layout, the status page, metrics.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kerf_dra_driver::claim::ClaimName;
use kerf_dra_driver::inventory::{GpuInstance, MigMode};
use kerf_dra_driver::journal::{BootId, Entry, FileName};
use kerf_dra_driver::names::{ClaimUid, DeviceName, PciAddress};

/// The journal at one instant.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct JournalView {
    /// Grows with every change.
    pub revision: u64,
    /// The entries, by claim.
    pub entries: BTreeMap<ClaimUid, Arc<Entry>>,
    /// The files that could not be read, by name. Their GPUs are not handed
    /// out.
    pub quarantined: BTreeMap<String, FileName>,
    /// The GPUs whose MIG mode could not be changed, twice or more in a row.
    pub stuck_modes: BTreeMap<PciAddress, StuckMode>,
}

/// A MIG mode that a GPU does not take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StuckMode {
    /// The mode that was wanted.
    pub wanted: MigMode,
    /// How many attempts in a row failed.
    pub failures: u32,
    /// Why the last one did, with the holders named.
    pub error: String,
}

impl JournalView {
    /// The devices that claims hold, with who holds them. An entry of another
    /// boot holds its devices too.
    pub fn held(&self) -> impl Iterator<Item = (&DeviceName, &ClaimName)> {
        self.entries
            .values()
            .flat_map(|entry| entry.allocation.iter().map(|allocated| (&allocated.device, &entry.claim)))
    }

    /// The claim whose entry made a GPU instance.
    pub fn owner(&self, boot: &BootId, gpu: PciAddress, instance: &GpuInstance) -> Option<&Arc<Entry>> {
        self.entries.values().find(|entry| entry.owns(boot, gpu, instance))
    }

    /// Which of some GPUs may be held by an entry that could not be read, with
    /// the file.
    pub fn quarantined_among<'a>(
        &'a self,
        gpus: impl IntoIterator<Item = PciAddress> + 'a,
    ) -> impl Iterator<Item = (PciAddress, &'a str)> + 'a {
        let gpus: BTreeSet<_> = gpus.into_iter().collect();
        self.quarantined.iter().flat_map(move |(name, file)| {
            gpus.iter()
                .filter(|gpu| file.gpus.may_include(**gpu))
                .map(|gpu| (*gpu, name.as_str()))
                .collect::<Vec<_>>()
        })
    }
}
