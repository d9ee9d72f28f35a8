//! Hardware and journal, read so that they fit together: whose the GPU
//! instances are, and which partitions are gone. It changes neither.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use kerf_dra_driver::health;
use kerf_dra_driver::inventory::{GpuInstance, Inventory};
use kerf_dra_driver::journal::Entry;
use kerf_dra_driver::names::{DeviceName, PciAddress};
use tracing::warn;

use super::{Inner, Plugin, blocking};
use crate::store::StoreError;

/// How long a reading waits for whoever works on a GPU.
const FOREIGN_BUDGET: Duration = Duration::from_secs(10);

/// The hardware and the journal, read so that they fit together.
#[derive(Debug, Clone)]
pub struct Observed {
    /// What is there.
    pub inventory: Arc<Inventory>,
    /// The GPU instances that somebody else made, of each GPU that has any.
    pub foreign: BTreeMap<PciAddress, Vec<GpuInstance>>,
    /// The prepared entries of which partitions are not there any more, with their
    /// devices.
    pub vanished: BTreeMap<DeviceName, Entry>,
    /// The GPUs that could not be compared with the journal: what is foreign there
    /// may be ours after all, and what vanished is not known. Look again soon.
    pub undecided: BTreeSet<PciAddress>,
}

/// Why hardware and journal could not be read together.
#[derive(Debug, thiserror::Error)]
pub enum ObserveError {
    /// The hardware did not answer.
    #[error(transparent)]
    Hardware(#[from] kerf_dra_driver::hardware::HardwareError),
    /// The journal cannot be read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A lock file cannot be used.
    #[error("a GPU cannot be locked (`state/locks` in the plugin's folder must be writable)")]
    Lock(#[from] std::io::Error),
    /// Somebody works on a GPU for longer than is waited here.
    #[error("a prepare or unprepare works on the GPU; it is read again")]
    Busy,
    /// A defect of this program.
    #[error("an internal error of kerf; the log of its pod on this node has more, and it is tried again")]
    Panicked,
}

impl Plugin {
    /// Reads the hardware, and tells whose its GPU instances are.
    ///
    /// An instance that no entry knew before nor after the reading is looked
    /// at again under its GPU's lock before it is called foreign, and so is a
    /// partition that an entry has and the GPU has not.
    ///
    /// # Errors
    /// As [`Hardware::inventory`], or where the journal cannot be read.
    pub async fn observe(&self) -> Result<Observed, ObserveError> {
        let before = self.journal().borrow().clone();
        let work = Arc::clone(&self.inner.work);
        let inventory = blocking(move || work.hardware.inventory()).await.ok_or(ObserveError::Panicked)??;
        let after = self.journal().borrow().clone();
        let boot = self.boot_id();
        let compared = inventory.gpus.iter().filter_map(|gpu| {
            let is_unknown = |instance: &&GpuInstance| {
                before.owner(boot, gpu.pci, instance).is_none()
                    && after.owner(boot, gpu.pci, instance).is_none()
            };
            let instances = gpu.mig.as_ref().map_or(&[][..], |mig| &mig.instances);
            let suspects: Vec<GpuInstance> = instances.iter().filter(is_unknown).cloned().collect();
            let is_whole =
                |entry: &Arc<Entry>| health::vanished(entry, boot, gpu.pci, instances).next().is_none();
            if suspects.is_empty() && after.entries.values().all(is_whole) {
                return None;
            }
            let compare = tokio::time::timeout(FOREIGN_BUDGET, self.inner.compare(gpu.pci));
            Some(async move { (gpu.pci, suspects, compare.await.unwrap_or(Err(ObserveError::Busy))) })
        });
        // At once: a burst on several GPUs must not look like a driver that hangs.
        let compared = join_all(compared).await;
        let (mut foreign, mut vanished) = (BTreeMap::new(), BTreeMap::new());
        let mut undecided = BTreeSet::new();
        for (gpu, suspects, decided) in compared {
            let found = match decided {
                Ok((found, missing)) => {
                    vanished.extend(missing);
                    found
                }
                Err(error) => {
                    // One GPU never hides the others. What cannot be told from
                    // a foreign instance may be in use: nothing beside it is
                    // given out.
                    let error = crate::chain(&error);
                    warn!(%gpu, error, "a GPU cannot be compared with the journal; instances that no entry made count as foreign for now");
                    undecided.insert(gpu);
                    suspects
                }
            };
            if !found.is_empty() {
                foreign.insert(gpu, found);
            }
        }
        Ok(Observed { inventory: Arc::new(inventory), foreign, vanished, undecided })
    }
}

impl Inner {
    /// The GPU instances of a GPU that no entry made, and the entries that have
    /// what is not among them, decided under its lock.
    async fn compare(
        &self,
        gpu: PciAddress,
    ) -> Result<(Vec<GpuInstance>, Vec<(DeviceName, Entry)>), ObserveError> {
        let gpus = BTreeSet::from([gpu]);
        let held = self.locks.gpus(&gpus).await?;
        let work = Arc::clone(&self.work);
        blocking(move || {
            let entries = work.store.touching(None, &gpus)?;
            let mut found = work.hardware.gpu_instances(gpu)?;
            let missing = entries.iter().flat_map(|entry| {
                let devices = health::vanished(entry, &work.boot, gpu, &found);
                devices.map(|device| (device.clone(), entry.clone()))
            });
            let missing = missing.collect();
            found.retain(|instance| !entries.iter().any(|entry| entry.owns(&work.boot, gpu, instance)));
            drop(held);
            Ok((found, missing))
        })
        .await
        .unwrap_or(Err(ObserveError::Panicked))
    }
}
