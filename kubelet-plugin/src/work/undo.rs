//! Undoing: on the kubelet's word, of what a crash left incomplete, of a
//! prepare that failed. In reverse, and only what is provably ours; what cannot
//! be undone stays in the journal with its error.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use kerf_dra_driver::inventory::GpuInstance;
use kerf_dra_driver::journal::{Entry, Phase};
use kerf_dra_driver::names::{ClaimUid, PciAddress};
use kerf_dra_driver::step::{PartitionStep, Step};
use tracing::{info, warn};

use super::{Outcome, Touching, Work, lanes, missing, put};
use crate::effects::{self, StepError};
use crate::errors::{PrepareError, UndoError};

impl Work {
    /// Undoes what a claim has here. A claim that has nothing is undone.
    pub(crate) fn unprepare(
        &self,
        uid: &ClaimUid,
        gpus: &BTreeSet<PciAddress>,
    ) -> Result<Outcome<()>, UndoError> {
        let mut entries = self.store.touching(Some(uid), gpus)?;
        let proof = self.proof(uid, &entries)?;
        // Where another claim has what was this one's, the proof must wait.
        let is_free = proof.as_ref().is_none_or(|proof| !self.is_taken(proof, &entries));
        entries.extend(proof.filter(|_| is_free));
        let own: Vec<Entry> = entries.iter().filter(|entry| entry.uid == *uid).cloned().collect();
        if let Some(more) = missing(&own, gpus, uid) {
            return Ok(Outcome::NeedsGpus(more));
        }
        let removed = !own.is_empty();
        for entry in own {
            self.undo(entry, &entries)?;
        }
        if is_free && self.is_quarantined(uid) {
            self.cdi.remove(uid)?;
            self.store.release_quarantine(uid)?;
        }
        self.store.settle_removals(removed)?;
        Ok(Outcome::Done(()))
    }

    /// Undoes what is incomplete among entries: nobody works on them, for
    /// their GPUs are locked. What cannot be undone stays, with its error.
    pub(crate) fn settle(&self, entries: &mut Vec<Entry>) {
        let all = entries.clone();
        entries.retain_mut(|entry| {
            if entry.phase == Phase::Completed {
                return true;
            }
            info!(claim = %entry.claim, uid = %entry.uid, phase = %entry.phase, "undoing what was left incomplete");
            match self.undo(entry.clone(), &all) {
                Ok(()) => false,
                Err(error) => {
                    warn!(claim = %entry.claim, error = crate::chain(&error), "it stays incomplete");
                    if let Some(now) = self.store.view().borrow().entries.get(&entry.uid) {
                        *entry = Entry::clone(now);
                    }
                    true
                }
            }
        });
    }

    /// Undoes an entry that could not be finished, and gives the reason back.
    pub(super) fn after_failure(
        &self,
        mut entry: Entry,
        entries: &[Entry],
        error: PrepareError,
    ) -> PrepareError {
        if !self.store.view().borrow().entries.contains_key(&entry.uid) {
            return error;
        }
        entry.error = Some(crate::chain(&error));
        // No answer in time: the call may still take effect, so the intent
        // stays as it is until somebody looks again.
        if error.is_timeout() {
            entry.phase = Phase::Started;
            if let Err(error) = self.store.write(&entry) {
                warn!(claim = %entry.claim, error = crate::chain(&error), "the error could not be recorded");
            }
            return error;
        }
        if let Err(undo) = self.undo(entry, entries) {
            warn!(error = crate::chain(&undo), "what was begun for the claim could not be undone yet");
        }
        error
    }

    /// Undoes an entry: CDI spec, steps in reverse, the entry itself.
    pub(super) fn undo(&self, mut entry: Entry, entries: &[Entry]) -> Result<(), UndoError> {
        let result = self.undo_effects(&mut entry, entries);
        if let Err(error) = &result {
            entry.error = Some(crate::chain(error));
            self.store.write(&entry)?;
            return result;
        }
        self.store.remove(&entry)?;
        Ok(())
    }

    fn undo_effects(&self, entry: &mut Entry, entries: &[Entry]) -> Result<(), UndoError> {
        let resumed = entry.phase == Phase::Undoing;
        if entry.has_hardware(&self.boot) {
            // From here on it is not prepared any more, whatever happens.
            entry.phase = Phase::Undoing;
            self.store.write(entry)?;
        }
        self.cdi.remove(&entry.uid)?;
        if !entry.has_hardware(&self.boot) {
            return Ok(());
        }
        let _touching = Touching(self);
        let (mut steps, mut first) = (Vec::new(), None);
        for (index, step) in entry.steps.iter().enumerate().rev() {
            match step {
                Step::Partition(step) => steps.push((step.gpu, (index, step.clone()))),
                Step::Unknown(_) => first = Some(StepError::Unknown),
                Step::MigMode(_) => {}
            }
        }
        let uid = entry.uid.clone();
        let entry = Mutex::new(entry);
        let undo = |steps: Vec<(usize, PartitionStep)>| {
            let mut first = None;
            for (index, mut step) in steps {
                let gpu = step.gpu;
                let others = |instance: &GpuInstance| {
                    entries.iter().any(|other| other.uid != uid && other.owns(&self.boot, gpu, instance))
                };
                let keep = |step: &PartitionStep| {
                    let mut entry = entry.lock().unwrap_or_else(PoisonError::into_inner);
                    put(&mut entry, index, step.clone());
                    entry
                };
                let mut record = |step: &PartitionStep| self.store.write(&keep(step));
                let undone =
                    effects::undo_partition(&*self.hardware, &mut step, resumed, &others, &mut record);
                drop(keep(&step));
                first = first.or(undone.err());
            }
            first
        };
        let failed = lanes::run(&*self.hardware, lanes::of(steps), undo).into_iter().flatten().next();
        first.or(failed).map_or(Ok(()), |error| Err(error.into()))
    }
}
