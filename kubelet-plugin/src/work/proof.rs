//! Entries that the journal lost, from the CDI specs that were made of them.

use std::collections::BTreeSet;

use kerf_dra_driver::journal::{Entry, Phase};
use kerf_dra_driver::names::{ClaimUid, PciAddress};
use tracing::warn;

use super::{Work, missing};
use crate::cdi::CdiError;
use crate::errors::PrepareError;

impl Work {
    /// What a claim's CDI spec says that was prepared here in this boot, where
    /// the journal has no entry for it any more.
    ///
    /// No undo leaves a spec behind and no failed prepare does, so an intact one
    /// is proof by itself, whatever the API says of the claim meanwhile.
    pub(crate) fn proof(&self, uid: &ClaimUid, entries: &[Entry]) -> Result<Option<Entry>, CdiError> {
        if entries.iter().any(|entry| entry.uid == *uid) {
            return Ok(None);
        }
        let written = self.cdi.entry(uid)?;
        Ok(written.filter(|written| written.boot_id == self.boot && written.phase == Phase::Completed))
    }

    /// Whether other claims have something of what an entry has.
    pub(super) fn is_taken(&self, entry: &Entry, entries: &[Entry]) -> bool {
        entries
            .iter()
            .filter(|other| other.uid != entry.uid)
            .flat_map(|other| other.occupied(&self.boot))
            .any(|occupied| entry.devices.iter().any(|device| device.overlaps(occupied)))
    }

    /// Writes a lost entry anew from its CDI spec; the GPUs that must be locked
    /// for that, where they are not.
    pub(crate) fn restore(
        &self,
        uid: &ClaimUid,
        gpus: &BTreeSet<PciAddress>,
        entries: &mut Vec<Entry>,
    ) -> Result<Option<BTreeSet<PciAddress>>, PrepareError> {
        let Some(proof) = self.proof(uid, entries)? else { return Ok(None) };
        if let Some(more) = missing(std::slice::from_ref(&proof), gpus, uid) {
            return Ok(Some(more));
        }
        if self.is_taken(&proof, entries) {
            warn!(claim = %proof.claim, %uid, "the claim's journal entry was lost, and others have its devices");
            return Ok(None);
        }
        warn!(claim = %proof.claim, %uid, "the claim's journal entry was lost; it is written anew from its CDI file");
        self.store.write(&proof)?;
        self.store.release_quarantine(uid)?;
        entries.push(proof);
        Ok(None)
    }

    /// Whether a claim's entry could not be read.
    pub(crate) fn is_quarantined(&self, uid: &ClaimUid) -> bool {
        self.store.view().borrow().quarantined.values().any(|file| file.uid == *uid)
    }
}
