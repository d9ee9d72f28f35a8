//! Journal ↔ hardware ↔ CDI folder ↔ API: what a crash, a reboot or somebody
//! else left crooked becomes right again.
//!
//! On a healthy node a round writes nothing. It never touches a GPU
//! instance that no entry made, and a CDI file that is not this driver's.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use futures::future::join_all;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kerf_dra_driver::claim::Claim;
use kerf_dra_driver::inventory::Inventory;
use kerf_dra_driver::journal::{Entry, Phase};
use kerf_dra_driver::names::{ClaimUid, PciAddress};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::claims::ClaimSourceError;
use crate::errors::{PrepareError, UndoError};
use crate::metrics::Operation;
use crate::plugin::{BUDGET, Inner, Plugin, PluginError, blocking};
use crate::pods;
use crate::work::Outcome;

/// How long a claim must be gone from the API before what it has is taken.
const GONE: Duration = Duration::from_mins(10);
/// The time between two rounds, ±20 %.
const ROUND: Duration = Duration::from_mins(4);

impl Plugin {
    /// Removes what a crash left half written and reconciles once. To be
    /// called before [`Plugin::serve`].
    pub async fn start(&self) -> Result<(), PluginError> {
        if self.inner.locks.is_alone() {
            self.inner.work.store.sweep()?;
            self.inner.work.cdi.sweep()?;
        }
        self.reconcile_now().await;
        Ok(())
    }

    /// Reconciles once. What cannot be made right now is logged, and tried
    /// again in the next round.
    pub async fn reconcile_now(&self) {
        let started = Instant::now();
        let entries = self.inner.reconcile_entries().await;
        self.inner.reconcile_claims().await;
        self.inner.metrics.record(Operation::Reconcile, started.elapsed(), entries);
    }

    /// Reconciles every few minutes, and the local part whenever the inventory
    /// changes, until cancelled.
    pub async fn keep_reconciled(&self, cancel: CancellationToken) {
        let mut inventory = self.inner.inventory.clone();
        loop {
            let pause = ROUND.mul_f64(0.8 + 0.4 * fastrand::f64());
            tokio::select! {
                () = cancel.cancelled() => return,
                () = tokio::time::sleep(pause) => self.reconcile_now().await,
                changed = inventory.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    self.inner.reconcile_entries().await;
                }
            }
        }
    }
}

impl Inner {
    /// Journal ↔ hardware ↔ CDI, entry by entry; whether all of it went well.
    async fn reconcile_entries(&self) -> bool {
        let work = Arc::clone(&self.work);
        match blocking(move || work.store.refresh()).await {
            Some(Ok(())) => {}
            Some(Err(error)) => {
                warn!(error = crate::chain(&error), "the journal cannot be reconciled");
                return false;
            }
            None => return false,
        }
        let uids: Vec<ClaimUid> = self.work.store.view().borrow().entries.keys().cloned().collect();
        let results = join_all(uids.iter().map(|uid| async move {
            let result = tokio::time::timeout(BUDGET, self.reconcile_entry(uid))
                .await
                .unwrap_or(Err(PrepareError::Budget { seconds: BUDGET.as_secs() }));
            if let Err(error) = &result {
                warn!(%uid, error = crate::chain(error), "an entry cannot be reconciled now");
            }
            result.is_ok()
        }));
        results.await.into_iter().all(|well| well)
    }

    async fn reconcile_entry(&self, uid: &ClaimUid) -> Result<(), PrepareError> {
        let own = Arc::new(self.locks.claim(uid).await.map_err(PrepareError::Lock)?);
        let mut wanted = self.known_gpus(uid);
        loop {
            let gpus = self.locks.gpus(&wanted).await.map_err(PrepareError::Lock)?;
            let known = self.inventory.borrow().clone();
            let (work, own, changed) =
                (Arc::clone(&self.work), Arc::clone(&own), self.hardware_changed.clone());
            let (uid, locked) = (uid.clone(), wanted.clone());
            let outcome = blocking(move || {
                let outcome = work.reconcile(&uid, &locked, known.as_deref());
                if work.take_hardware_touched() {
                    changed.send_modify(|count| *count = count.wrapping_add(1));
                }
                drop((gpus, own));
                outcome
            })
            .await
            .ok_or(PrepareError::Panicked)??;
            match outcome {
                Outcome::Done(()) => return Ok(()),
                Outcome::NeedsGpus(more) => wanted.extend(more),
            }
        }
    }

    /// Journal and CDI folder ↔ API. Each claim is asked for by name: a list
    /// would grow with the cluster.
    async fn reconcile_claims(&self) {
        self.reconcile_specs().await;
        self.unprepare_gone().await;
    }

    /// CDI files without an entry: of a claim that is allocated, the journal
    /// was lost, and the file tells what was in it; any other is left over.
    async fn reconcile_specs(&self) {
        let work = Arc::clone(&self.work);
        let Some(Ok(specs)) = blocking(move || work.cdi.claims()).await else { return };
        for uid in specs {
            if self.work.store.view().borrow().entries.contains_key(&uid) {
                continue;
            }
            let (work, of) = (Arc::clone(&self.work), uid.clone());
            let Some(written) = blocking(move || work.cdi.entry(&of)).await else { return };
            // A file that does not tell its claim was not written here as it is.
            let live = match &written {
                Some(written) => self.live(written).await,
                None => Ok(None),
            };
            let claim = match live {
                Ok(object) => object.and_then(|object| {
                    Claim::resolve(&object, &uid, &self.config.settings.driver, &self.config.pool).ok()
                }),
                Err(error) => {
                    warn!(%uid, error = crate::chain(&error), "a CDI file without a journal entry stays for now");
                    continue;
                }
            };
            let done = tokio::time::timeout(BUDGET, self.reconcile_spec(&uid, claim)).await;
            if let Ok(Err(error)) = done {
                warn!(%uid, error = crate::chain(&error), "a CDI file without a journal entry stays");
            }
        }
    }

    /// The claim of an entry, if the API still has it: another one of the same
    /// name is another claim.
    async fn live(&self, entry: &Entry) -> Result<Option<ResourceClaim>, ClaimSourceError> {
        let object = self.claims.get(&entry.claim.namespace, &entry.claim.name).await?;
        Ok(object.filter(|object| object.metadata.uid.as_deref() == Some(entry.uid.as_str())))
    }

    async fn reconcile_spec(&self, uid: &ClaimUid, claim: Option<Claim>) -> Result<(), PrepareError> {
        let own = self.locks.claim(uid).await.map_err(PrepareError::Lock)?;
        let gpus = claim.as_ref().map(Claim::gpus).unwrap_or_default();
        let held = self.locks.gpus(&gpus).await.map_err(PrepareError::Lock)?;
        let (work, uid) = (Arc::clone(&self.work), uid.clone());
        blocking(move || {
            let result = work.reconcile_spec(&uid, claim.as_ref(), &gpus);
            drop((held, own));
            result
        })
        .await
        .unwrap_or(Err(PrepareError::Panicked))
    }

    /// Entries of claims that have been gone from the API for long enough, and
    /// that no pod uses: the kubelet forgot them.
    async fn unprepare_gone(&self) {
        let view = self.work.store.view().borrow().clone();
        let mut gone = BTreeMap::new();
        for entry in view.entries.values() {
            match self.live(entry).await {
                Ok(Some(_)) => {}
                Ok(None) => {
                    gone.insert(&entry.uid, entry);
                }
                Err(error) => {
                    warn!(error = crate::chain(&error), "claims cannot be read; nothing is unprepared");
                    return;
                }
            }
        }
        let now = Instant::now();
        let due: Vec<_> = {
            let mut since = self.missing_since.lock().unwrap_or_else(PoisonError::into_inner);
            since.retain(|uid, _| gone.contains_key(uid));
            gone.into_values()
                .filter(|entry| {
                    let first = since.entry(entry.uid.clone()).or_insert(now);
                    now.duration_since(*first) >= GONE
                })
                .cloned()
                .collect()
        };
        if due.is_empty() {
            return;
        }
        let driver = &self.config.settings.driver;
        let in_use = match pods::in_use(&self.config.pod_resources_socket, driver).await {
            Ok(in_use) => in_use,
            Err(error) => {
                warn!(error = crate::chain(&error), "claims are gone, but nothing is unprepared");
                return;
            }
        };
        for entry in due {
            let prefix = format!("{}={}-", driver.cdi_kind(), entry.uid);
            if in_use.includes(&entry.claim, &prefix) {
                continue;
            }
            info!(claim = %entry.claim, uid = %entry.uid, "the claim is gone from the API; unpreparing it");
            let result = tokio::time::timeout(BUDGET, self.unprepare(&entry.uid))
                .await
                .unwrap_or(Err(UndoError::Budget { seconds: BUDGET.as_secs() }));
            if let Err(error) = result {
                warn!(claim = %entry.claim, error = crate::chain(&error), "it cannot be unprepared now");
            }
        }
    }
}

/// What of a round is done under the locks.
impl crate::work::Work {
    fn reconcile(
        &self,
        uid: &ClaimUid,
        gpus: &BTreeSet<PciAddress>,
        known: Option<&Inventory>,
    ) -> Result<Outcome<()>, PrepareError> {
        let mut entries = self.store.touching(Some(uid), gpus)?;
        if let Some(more) = crate::work::missing(&entries, gpus, uid) {
            return Ok(Outcome::NeedsGpus(more));
        }
        self.settle(&mut entries);
        let own = entries.iter().find(|entry| entry.uid == *uid && entry.phase == Phase::Completed).cloned();
        let (Some(own), Some(known)) = (own, known) else { return Ok(Outcome::Done(())) };
        if own.boot_id == self.boot {
            self.check(&own)?;
        } else {
            self.renew(&own, &entries, known)?;
        }
        Ok(Outcome::Done(()))
    }

    fn reconcile_spec(
        &self,
        uid: &ClaimUid,
        claim: Option<&Claim>,
        gpus: &BTreeSet<PciAddress>,
    ) -> Result<(), PrepareError> {
        let entries = self.store.touching(Some(uid), gpus)?;
        if entries.iter().any(|entry| entry.uid == *uid) {
            return Ok(());
        }
        let Some(claim) = claim else {
            info!(%uid, "removing a CDI file that no claim has");
            self.cdi.remove(uid)?;
            return Ok(());
        };
        let written = self.cdi.entry(uid).filter(|entry| {
            entry.boot_id == self.boot
                && entry.phase == Phase::Completed
                && entry.allocation == claim.allocation
                && entry.gpus().is_subset(gpus)
        });
        let Some(entry) = written else { return Ok(()) };
        let taken = entries.iter().any(|other| {
            let occupied = other.occupied(&self.boot);
            entry.devices.iter().any(|device| occupied.iter().any(|other| other.overlaps(device)))
        });
        if !taken {
            warn!(claim = %entry.claim, %uid, "the claim's journal entry was lost; it is written anew from its CDI file");
            self.store.write(&entry, crate::disk::Durability::Durable)?;
            self.store.release_quarantine(uid)?;
        }
        Ok(())
    }
}
