//! The work under the locks: settle, prepare, unprepare, all of it blocking.
//!
//! Whoever calls holds the claim's lock and those of all GPUs named; entries
//! are read from disk after that, never before. A crash anywhere in here is
//! settled by the next call that locks the same GPUs, or by reconcile.
//!
//! Partitions cost two writes of their entry: their intents before hardware is
//! touched, and that they are ready, after. Between the two, an intent is enough
//! to know what was made. The CDI spec follows the entry that it is made from.

mod lanes;
mod modes;
mod proof;
mod undo;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use kerf_dra_driver::claim::{self, Claim};
use kerf_dra_driver::hardware::{Hardware, HardwareError, HardwareErrorKind};
use kerf_dra_driver::inventory::{Gpu, Inventory, MigMode};
use kerf_dra_driver::journal::{self, BootId, Device, Entry, Phase};
use kerf_dra_driver::model::Settings;
use kerf_dra_driver::names::{ClaimUid, PciAddress};
use kerf_dra_driver::plan::{Plan, Situation};
use kerf_dra_driver::step::{PartitionProgress, PartitionStep, Step};
use tokio::sync::watch;
use tracing::{info, warn};

use crate::cdi::{self, ExtraMount};
use crate::effects::{self, StepError};
use crate::errors::{PrepareError, UndoError};
use crate::hook_program::HookProgram;
use crate::store::Store;

/// What the work is done with.
#[derive(Debug)]
pub(crate) struct Work {
    pub(crate) settings: Settings,
    pub(crate) boot: BootId,
    pub(crate) extra_mounts: Vec<ExtraMount>,
    pub(crate) hook: HookProgram,
    pub(crate) hardware: Arc<dyn Hardware>,
    pub(crate) store: Store,
    pub(crate) cdi: cdi::Folder,
    /// How often in a row a GPU did not take a mode.
    pub(crate) mode_failures: Mutex<BTreeMap<PciAddress, u32>>,
    /// Changes when hardware was changed.
    pub(crate) hardware_changed: watch::Sender<u64>,
}

/// A device as the kubelet is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PreparedDevice {
    /// The request, without its subrequest.
    pub request: String,
    /// The pool.
    pub pool: String,
    /// The device.
    pub device: String,
    /// Its name for the container runtime.
    pub cdi_device: String,
    /// Which share of it.
    pub share_id: Option<String>,
}

/// How a piece of work ended.
#[derive(Debug)]
pub(crate) enum Outcome<T> {
    /// It is done.
    Done(T),
    /// Nothing was done: these GPUs must be locked too.
    NeedsGpus(BTreeSet<PciAddress>),
}

/// Hardware is being changed: says so in the end, whatever that end is.
struct Touching<'a>(&'a Work);

impl Drop for Touching<'_> {
    fn drop(&mut self) {
        self.0.announce();
    }
}

impl Work {
    /// Says that hardware was changed.
    pub(crate) fn announce(&self) {
        self.hardware_changed.send_modify(|count| *count = count.wrapping_add(1));
    }

    /// Prepares a claim. `known` is the last inventory; of the claim's GPUs it
    /// is read anew.
    pub(crate) fn prepare(
        &self,
        claim: &Claim,
        gpus: &BTreeSet<PciAddress>,
        known: &Inventory,
    ) -> Result<Outcome<Vec<PreparedDevice>>, PrepareError> {
        let mut entries = self.store.touching(Some(&claim.uid), gpus)?;
        if let Some(more) = missing(&entries, gpus, &claim.uid) {
            return Ok(Outcome::NeedsGpus(more));
        }
        self.refuse_quarantined(claim)?;
        self.settle(&mut entries);
        if let Some(more) = self.restore(&claim.uid, gpus, &mut entries)? {
            return Ok(Outcome::NeedsGpus(more));
        }
        let own = self.own_entry(claim, &mut entries)?;
        if claim.allocation.is_empty() {
            return Ok(Outcome::Done(Vec::new()));
        }
        if let Some(own) = own.as_ref().filter(|own| own.is_partly_unknown()) {
            // What this version would plan and write lacks what it does not know.
            let has_spec = self.cdi.entry(&own.uid)?.is_some();
            return if has_spec {
                Ok(Outcome::Done(self.answer(own)))
            } else {
                Err(StepError::Unknown.into())
            };
        }
        // What the spec will need, before hardware is changed for it: what is
        // made while a driver is upgraded cannot be undone before that ends.
        self.hook.ensure()?;
        self.hardware.driver_files().map_err(PrepareError::Hardware)?;
        let inventory = self.fresh(&claim.gpus(), known)?;
        let situation = Situation {
            settings: &self.settings,
            inventory: &inventory,
            entries: &entries,
            boot: &self.boot,
        };
        let plan = Plan::for_claim(claim, situation)?;
        let steps =
            plan.steps.into_iter().map(|step| keep_progress(step, own.as_ref(), &inventory)).collect();
        let mut entry = Entry {
            version: journal::VERSION,
            uid: claim.uid.clone(),
            claim: claim.name.clone(),
            boot_id: self.boot.clone(),
            allocation: claim.allocation.clone(),
            devices: plan.devices,
            steps,
            phase: Phase::Completed,
            error: None,
            unknown: own.as_ref().map(|own| own.unknown.clone()).unwrap_or_default(),
        };
        // The kubelet asks again for what it has forgotten: as a rule, all is
        // there.
        if own.as_ref() == Some(&entry) {
            self.cdi.ensure(&entry.uid, &self.project(&entry)?)?;
        } else if let Err(error) = self.finish(&mut entry, own.is_some()) {
            return Err(match own {
                // Containers may be running with the rest of it.
                Some(_) => self.keep_broken(entry, error),
                None => self.after_failure(entry, &entries, error),
            });
        }
        self.store.release_quarantine(&claim.uid)?;
        Ok(Outcome::Done(self.answer(&entry)))
    }

    /// Makes the outputs of a completed entry of this boot right.
    pub(crate) fn check(&self, entry: &Entry) -> Result<(), PrepareError> {
        if entry.is_partly_unknown() {
            return Ok(());
        }
        for step in entry.partitions() {
            let found = self.hardware.gpu_instances(step.gpu).map_err(PrepareError::Hardware)?;
            if !found.iter().any(|instance| step.owns(instance) && !instance.compute_instances.is_empty()) {
                // Its containers cannot get another one while they run.
                warn!(claim = %entry.claim, partition = step.label(), "a claim's partition is not there any more");
                return Ok(());
            }
        }
        self.hook.ensure()?;
        if self.cdi.ensure(&entry.uid, &self.project(entry)?)? {
            info!(claim = %entry.claim, uid = %entry.uid, "the claim's CDI file was made anew");
        }
        Ok(())
    }

    /// Takes a completed entry of another boot over into this one, where that
    /// needs nothing of the hardware. Partitions are made again when the
    /// kubelet asks.
    pub(crate) fn renew(
        &self,
        uid: &ClaimUid,
        gpus: &BTreeSet<PciAddress>,
        known: &Inventory,
    ) -> Result<Outcome<()>, PrepareError> {
        let entries = self.store.touching(Some(uid), gpus)?;
        if let Some(more) = missing(&entries, gpus, uid) {
            return Ok(Outcome::NeedsGpus(more));
        }
        let own = entries.iter().find(|entry| entry.uid == *uid && entry.phase == Phase::Completed);
        let former = |own: &&Entry| own.boot_id != self.boot && !own.is_partly_unknown();
        let Some(own) = own.filter(former) else { return Ok(Outcome::Done(())) };
        let inventory = self.fresh(&own.gpus(), known)?;
        let situation = Situation {
            settings: &self.settings,
            inventory: &inventory,
            entries: &entries,
            boot: &self.boot,
        };
        let claim =
            Claim { uid: own.uid.clone(), name: own.claim.clone(), allocation: own.allocation.clone() };
        let Ok(Plan { devices, steps }) = Plan::for_claim(&claim, situation) else {
            return Ok(Outcome::Done(()));
        };
        if !steps.is_empty() {
            return Ok(Outcome::Done(()));
        }
        let mut entry = Entry { boot_id: self.boot.clone(), devices, steps, ..own.clone() };
        info!(claim = %entry.claim, uid = %entry.uid, "the claim is prepared again after a reboot");
        self.hook.ensure()?;
        self.finish(&mut entry, true)?;
        Ok(Outcome::Done(()))
    }

    /// This claim's entry, where it is of this boot and the same allocation;
    /// any other is undone. It stays among the entries.
    fn own_entry(&self, claim: &Claim, entries: &mut Vec<Entry>) -> Result<Option<Entry>, UndoError> {
        let Some(at) = entries.iter().position(|entry| entry.uid == claim.uid) else { return Ok(None) };
        let all = entries.clone();
        let own = entries.get(at).filter(|own| {
            own.phase == Phase::Completed
                && own.boot_id == self.boot
                && claim::is_same(&own.allocation, &claim.allocation)
        });
        if own.is_some() {
            return Ok(own.cloned());
        }
        self.undo(entries.remove(at), &all)?;
        Ok(None)
    }

    /// Does what an entry says is to be done, and makes its outputs.
    ///
    /// An entry that was answered before (`mends`) stays completed whatever
    /// happens: it is never undone but on the kubelet's word.
    fn finish(&self, entry: &mut Entry, mends: bool) -> Result<(), PrepareError> {
        let to_do = entry.steps.iter().any(is_to_do);
        let _touching = to_do.then(|| Touching(self));
        if to_do {
            entry.phase = if mends { Phase::Completed } else { Phase::Started };
        }
        self.set_modes(entry)?;
        self.make_partitions(entry)?;
        entry.steps.retain(|step| !matches!(step, Step::MigMode(_)));
        entry.phase = Phase::Completed;
        entry.error = None;
        let spec = self.project(entry)?;
        self.store.write(entry)?;
        self.cdi.ensure(&entry.uid, &spec)?;
        Ok(())
    }

    fn set_modes(&self, entry: &Entry) -> Result<(), PrepareError> {
        let steps = entry.steps.iter().filter_map(|step| match step {
            Step::MigMode(step) => Some((step.gpu, step)),
            _ => None,
        });
        let steps = lanes::of(steps);
        if steps.is_empty() {
            return Ok(());
        }
        self.store.write(entry)?;
        let set = |steps: Vec<_>| steps.into_iter().try_for_each(|step| self.set_mode(step));
        lanes::first_grave(lanes::run(&*self.hardware, steps, set))?;
        Ok(())
    }

    fn make_partitions(&self, entry: &mut Entry) -> Result<(), PrepareError> {
        let hardware = &*self.hardware;
        let mut to_make = Vec::new();
        for (index, step) in entry.steps.iter_mut().enumerate() {
            match step {
                Step::Partition(step) => {
                    match step.progress {
                        PartitionProgress::Ready { .. } => continue,
                        // The record says otherwise: it was ready once.
                        PartitionProgress::Created { .. } => {}
                        _ => effects::intend(hardware, step)?,
                    }
                    to_make.push((step.gpu, (index, step.clone())));
                }
                Step::MigMode(_) => {}
                Step::Unknown(_) => return Err(StepError::Unknown.into()),
            }
        }
        if to_make.is_empty() {
            return Ok(());
        }
        self.store.write(entry)?;
        let make = |mut steps: Vec<(usize, PartitionStep)>| {
            let mut result = Ok(());
            for (_, step) in &mut steps {
                if result.is_ok() {
                    result = effects::create(hardware, step);
                } else if matches!(step.progress, PartitionProgress::Intent { .. }) {
                    // Not called for: what appears there is somebody else's.
                    step.progress = PartitionProgress::Absent;
                }
            }
            (steps, result)
        };
        let (steps, results): (Vec<_>, Vec<_>) =
            lanes::run(hardware, lanes::of(to_make), make).into_iter().unzip();
        // That they are ready is written with what follows.
        for (index, step) in steps.into_iter().flatten() {
            put(entry, index, step);
        }
        lanes::first_grave(results)?;
        Ok(())
    }

    /// Records why an entry that was answered before could not be mended.
    fn keep_broken(&self, mut entry: Entry, error: PrepareError) -> PrepareError {
        entry.phase = Phase::Completed;
        entry.error = Some(crate::chain(&error));
        if let Err(unwritten) = self.store.write(&entry) {
            warn!(claim = %entry.claim, error = crate::chain(&unwritten), "the error could not be recorded");
        }
        error
    }

    /// The GPUs of a claim as they are now; their locks are held.
    fn fresh(&self, gpus: &BTreeSet<PciAddress>, known: &Inventory) -> Result<Inventory, PrepareError> {
        let read = |gpu: &Gpu| {
            let mut gpu = gpu.clone();
            if let Some(mig) = &mut gpu.mig {
                (mig.current, mig.pending) = self.hardware.mig_mode(gpu.pci)?;
                mig.instances = match mig.current {
                    MigMode::Enabled => self.hardware.gpu_instances(gpu.pci)?,
                    MigMode::Disabled => Vec::new(),
                };
            }
            Ok(gpu)
        };
        Ok(Inventory {
            driver_version: known.driver_version.clone(),
            cuda_version: known.cuda_version,
            gpus: known
                .gpus
                .iter()
                .filter(|gpu| gpus.contains(&gpu.pci))
                .map(read)
                .collect::<Result<_, HardwareError>>()
                .map_err(PrepareError::Hardware)?,
            unreadable: known.unreadable.clone(),
        })
    }

    /// The CDI spec that an entry calls for. It names the hook's program, which
    /// the caller has made sure of.
    pub(crate) fn project(&self, entry: &Entry) -> Result<cdi::Spec, PrepareError> {
        let nodes = entry
            .devices
            .iter()
            .map(|device| match device {
                Device::Whole { gpu } => self.hardware.device_nodes(*gpu, None),
                Device::Fixed { gpu, instance, compute_instance, .. } => {
                    self.hardware.device_nodes(*gpu, Some((*instance, *compute_instance)))
                }
                Device::Unknown(_) => Err(HardwareError::new(
                    format!("device nodes of a device of another version (`{}`)", entry.claim),
                    HardwareErrorKind::NotSupported,
                )),
                Device::Partition { gpu, placement, .. } => match entry.partition(*gpu, *placement) {
                    Some(PartitionStep {
                        progress: PartitionProgress::Ready { instance, compute_instance, .. },
                        ..
                    }) => self.hardware.device_nodes(*gpu, Some((*instance, *compute_instance))),
                    _ => Err(HardwareError::new(
                        format!("device nodes of `{}`", entry.claim),
                        HardwareErrorKind::NotFound,
                    )),
                },
            })
            .collect::<Result<_, _>>()
            .map_err(PrepareError::Hardware)?;
        let files = self.hardware.driver_files().map_err(PrepareError::Hardware)?;
        Ok(cdi::project(&self.settings.driver, entry, nodes, &files, &self.extra_mounts, &self.hook))
    }

    fn answer(&self, entry: &Entry) -> Vec<PreparedDevice> {
        let kind = self.settings.driver.cdi_kind();
        entry
            .allocation
            .iter()
            .map(|allocated| PreparedDevice {
                request: allocated.main_request().to_owned(),
                pool: allocated.pool.clone(),
                device: allocated.device.to_string(),
                cdi_device: format!("{kind}={}", cdi::device_name(&entry.uid, &allocated.local_name())),
                share_id: allocated.share_id.clone(),
            })
            .collect()
    }

    fn refuse_quarantined(&self, claim: &Claim) -> Result<(), PrepareError> {
        let view = self.store.view().borrow();
        let gpus = claim.gpus();
        let in_the_way = view
            .quarantined
            .iter()
            // Its own entry stands in nobody's way: it is made anew.
            .filter(|(_, file)| file.uid != claim.uid)
            .find_map(|(name, file)| {
                gpus.iter().find(|gpu| file.gpus.may_include(**gpu)).map(|gpu| (*gpu, name))
            });
        match in_the_way {
            Some((gpu, file)) => Err(PrepareError::Quarantined { gpu, file: file.clone() }),
            None => Ok(()),
        }
    }
}

/// The GPUs that have to be locked too before entries can be worked on: those
/// of incomplete ones, which are undone, and of the claim's own.
pub(crate) fn missing(
    entries: &[Entry],
    gpus: &BTreeSet<PciAddress>,
    uid: &ClaimUid,
) -> Option<BTreeSet<PciAddress>> {
    let more: BTreeSet<PciAddress> = entries
        .iter()
        .filter(|entry| entry.phase != Phase::Completed || entry.uid == *uid)
        .flat_map(Entry::gpus)
        .filter(|gpu| !gpus.contains(gpu))
        .collect();
    (!more.is_empty()).then_some(more)
}

/// What a step of a new plan already has on the hardware.
fn keep_progress(step: Step, own: Option<&Entry>, inventory: &Inventory) -> Step {
    let Step::Partition(mut step) = step else { return step };
    let made = own
        .and_then(|own| own.partition(step.gpu, step.placement))
        .filter(|made| made.profile == step.profile);
    let instance = made.and_then(|made| {
        let mig = inventory.gpu(step.gpu)?.mig.as_ref()?;
        mig.instances.iter().find(|instance| made.owns(instance))
    });
    if let (Some(made), Some(instance)) = (made, instance) {
        step.progress = match (&made.progress, instance.compute_instances.first()) {
            (PartitionProgress::Ready { .. }, Some(_)) => made.progress.clone(),
            // Made, but its record was not written any more.
            (_, Some(compute)) => PartitionProgress::Ready {
                instance: instance.id,
                compute_instance: compute.id,
                uuid: compute.uuid.clone(),
            },
            (_, None) => PartitionProgress::Created { instance: instance.id },
        };
    }
    Step::Partition(step)
}

fn is_to_do(step: &Step) -> bool {
    match step {
        Step::Partition(step) => !matches!(step.progress, PartitionProgress::Ready { .. }),
        Step::MigMode(_) | Step::Unknown(_) => true,
    }
}

fn put(entry: &mut Entry, index: usize, step: PartitionStep) {
    if let Some(slot) = entry.steps.get_mut(index) {
        *slot = Step::Partition(step);
    }
}
