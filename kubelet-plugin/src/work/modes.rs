//! MIG modes that GPUs do not take: counted, published as stuck, and forgotten
//! as soon as nothing speaks for it any more.

use std::collections::BTreeSet;
use std::sync::PoisonError;

use kerf_dra_driver::hardware::HardwareError;
use kerf_dra_driver::names::PciAddress;
use kerf_dra_driver::step::MigModeStep;

use super::Work;
use crate::effects::{self, StepError};
use crate::view::StuckMode;

impl Work {
    pub(super) fn set_mode(&self, step: &MigModeStep) -> Result<(), StepError> {
        let result = effects::set_mig_mode(&*self.hardware, step);
        let Err(error) = &result else {
            self.forget_mode(step.gpu);
            return Ok(());
        };
        let mut failures = self.mode_failures.lock().unwrap_or_else(PoisonError::into_inner);
        let count = failures.entry(step.gpu).or_default();
        *count += 1;
        if *count >= 2 {
            let stuck = StuckMode { wanted: step.mode, failures: *count, error: crate::chain(error) };
            self.store.modify(|view| {
                view.stuck_modes.insert(step.gpu, stuck);
            });
        }
        result
    }

    /// The GPUs that did not take a mode.
    pub(crate) fn refused_modes(&self) -> BTreeSet<PciAddress> {
        let failures = self.mode_failures.lock().unwrap_or_else(PoisonError::into_inner);
        failures.keys().chain(self.store.view().borrow().stuck_modes.keys()).copied().collect()
    }

    /// Forgets that a GPU, whose lock is held, did not take a mode, where it has
    /// it by now or nobody is left who keeps it from it.
    pub(crate) fn forgive_mode(&self, gpu: PciAddress) -> Result<(), HardwareError> {
        let wanted = self.store.view().borrow().stuck_modes.get(&gpu).map(|stuck| stuck.wanted);
        let (current, _) = self.hardware.mig_mode(gpu)?;
        if wanted != Some(current) && !self.hardware.holders(gpu)?.is_empty() {
            return Ok(());
        }
        self.forget_mode(gpu);
        Ok(())
    }

    fn forget_mode(&self, gpu: PciAddress) {
        self.mode_failures.lock().unwrap_or_else(PoisonError::into_inner).remove(&gpu);
        if self.store.view().borrow().stuck_modes.contains_key(&gpu) {
            self.store.modify(|view| {
                view.stuck_modes.remove(&gpu);
            });
        }
    }
}
