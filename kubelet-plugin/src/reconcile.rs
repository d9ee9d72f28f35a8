//! Journal ↔ hardware ↔ CDI folder ↔ API: what a crash, a reboot or somebody
//! else left crooked becomes right again.
//!
//! On a healthy node a round writes nothing. It never touches a GPU
//! instance that no entry made, and a CDI file that is not this driver's.

use std::collections::BTreeSet;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use futures::StreamExt;
use futures::future::join_all;
use kerf_dra_driver::claim;
use kerf_dra_driver::journal::{Entry, Phase};
use kerf_dra_driver::names::{ClaimUid, PciAddress};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::claims::ClaimSourceError;
use crate::errors::{PrepareError, UndoError, WorkError};
use crate::instances::Others;
use crate::metrics::Operation;
use crate::owner::jittered;
use crate::plugin::{BUDGET, Inner, Plugin, PluginError, blocking};
use crate::pods;
use crate::server::ServeError;
use crate::socket::SocketFolders;
use crate::work::{Outcome, Work, missing};

/// How long a claim must be gone from the API before what it has is taken.
const GONE: Duration = Duration::from_mins(10);
/// How many claims are asked for at once.
const QUESTIONS: usize = 8;
/// The time between two rounds, ±20 %.
const ROUND: Duration = Duration::from_mins(4);

impl Plugin {
    /// Removes what a crash left half written, and settles what needs nobody
    /// else: the kubelet waits for this, so the API is not asked. To be called
    /// before [`Plugin::serve`].
    pub async fn start(&self) -> Result<(), PluginError> {
        if self.inner.locks.is_alone() {
            self.inner.work.store.sweep()?;
            self.inner.work.cdi.sweep()?;
        }
        // Before specs are made anew: those of the former version still name
        // its program.
        self.inner.work.cdi.sweep_programs(&self.inner.work.hook)?;
        if let Err(error) = self.inner.work.hook.verify() {
            // Prepares try it again, and fail until it works.
            warn!(error = crate::chain(&error), "no claim can be prepared yet");
        }
        self.inner.reconcile_entries().await;
        self.inner.reconcile_specs().await;
        Ok(())
    }

    /// Reads the journal anew whenever somebody writes it, as long as there is
    /// another instance: a former one ends what it has begun, and an elder must
    /// know what its successor set aside.
    pub async fn follow(&self, others: Others, cancel: CancellationToken) {
        let follow = async {
            let mut folders = SocketFolders::new(self.inner.work.store.folders().to_vec());
            loop {
                folders.watch()?;
                if others.are_there() {
                    self.refresh().await;
                }
                folders.changed().await?;
            }
        };
        tokio::select! {
            () = cancel.cancelled() => {}
            followed = follow => {
                let followed: Result<(), ServeError> = followed;
                if let Err(error) = followed {
                    warn!(error = crate::chain(&error), "what another instance writes is seen with the next round");
                }
            }
        }
    }

    /// Reconciles once. What cannot be made right now is logged, and tried
    /// again in the next round.
    pub async fn reconcile_now(&self) {
        let started = Instant::now();
        let entries = self.inner.reconcile_entries().await;
        self.inner.reconcile_specs().await;
        self.inner.reconcile_claims().await;
        self.inner.metrics.record(Operation::Reconcile, started.elapsed(), entries);
    }

    /// Reconciles at once and then every few minutes, and the local part
    /// whenever the inventory changes, until cancelled. A round that is left
    /// goes on where it has begun something: that holds its own locks.
    pub async fn keep_reconciled(&self, cancel: CancellationToken) {
        cancel.run_until_cancelled(self.reconcile_for_ever()).await;
    }

    async fn reconcile_for_ever(&self) {
        let mut inventory = self.inner.inventory.clone();
        let mut is_known = inventory.borrow().is_some();
        let mut due = Instant::now();
        loop {
            tokio::select! {
                () = tokio::time::sleep_until(due) => {
                    self.reconcile_now().await;
                    due = Instant::now() + jittered(ROUND);
                }
                changed = inventory.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    if !is_known && inventory.borrow_and_update().is_some() {
                        // What the first round could not take over.
                        is_known = true;
                        due = Instant::now();
                    } else {
                        self.inner.reconcile_entries().await;
                    }
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
        let uids: BTreeSet<ClaimUid> = {
            let view = self.work.store.view().borrow();
            let unreadable = view.quarantined.values().map(|file| &file.uid);
            view.entries.keys().chain(unreadable).cloned().collect()
        };
        let results = join_all(uids.iter().map(|uid| async move {
            let known = self.inventory.borrow().is_some();
            let work = move |work: &Work, uid: &ClaimUid, gpus: &BTreeSet<PciAddress>| {
                work.reconcile(uid, gpus, known)
            };
            let result = within_budget(self.settled(uid, work)).await;
            if let Err(error) = &result {
                warn!(%uid, error = crate::chain(error), "an entry cannot be reconciled now");
            }
            result.is_ok()
        }));
        let well = results.await.into_iter().all(|well| well);
        self.reconcile_modes().await;
        well
    }

    /// GPUs that did not take a mode: who was in the way may be gone.
    async fn reconcile_modes(&self) {
        for gpu in self.work.refused_modes() {
            if let Err(error) = within_budget(self.forgive_mode(gpu)).await {
                warn!(%gpu, error = crate::chain(&error), "whether the GPU can take its mode is not known");
            }
        }
    }

    async fn forgive_mode(&self, gpu: PciAddress) -> Result<(), PrepareError> {
        let held = self.lock_gpus(&BTreeSet::from([gpu])).await?;
        let work = Arc::clone(&self.work);
        let forgiven = blocking(move || {
            let forgiven = work.forgive_mode(gpu);
            drop(held);
            forgiven
        });
        forgiven.await.ok_or(WorkError::Panicked)?.map_err(PrepareError::Hardware)
    }

    /// CDI files without an entry: one of this boot tells what was in it, for
    /// the journal was lost; any other is left over.
    async fn reconcile_specs(&self) {
        let work = Arc::clone(&self.work);
        let Some(Ok(specs)) = blocking(move || work.cdi.claims()).await else { return };
        for uid in specs {
            if self.work.store.view().borrow().entries.contains_key(&uid) {
                continue;
            }
            let done = within_budget(self.settled(&uid, Work::reconcile_spec)).await;
            if let Err(error) = done {
                warn!(%uid, error = crate::chain(&error), "a CDI file without a journal entry stays");
            }
        }
    }

    /// Journal ↔ API. Each claim is asked for by name: a list would grow with
    /// the cluster.
    async fn reconcile_claims(&self) {
        let entries: Vec<Arc<Entry>> = self.work.store.view().borrow().entries.values().cloned().collect();
        let states: Vec<(Arc<Entry>, Option<bool>)> = futures::stream::iter(entries)
            .map(|entry| async move {
                let live = self.is_live(&entry).await;
                if let Err(error) = &live {
                    warn!(claim = %entry.claim, error = crate::chain(error), "the claim cannot be read now");
                }
                (entry, live.ok())
            })
            .buffered(QUESTIONS)
            .collect()
            .await;
        self.unprepare_gone(&states).await;
        let former = |entry: &Entry| entry.boot_id != self.work.boot && entry.phase == Phase::Completed;
        let live = states.into_iter().filter(|(entry, live)| *live == Some(true) && former(entry));
        for (entry, _) in live {
            let Some(known) = self.inventory.borrow().clone() else { return };
            let renew =
                move |work: &Work, uid: &ClaimUid, gpus: &BTreeSet<PciAddress>| work.renew(uid, gpus, &known);
            if let Err(error) = within_budget(self.settled(&entry.uid, renew)).await {
                warn!(claim = %entry.claim, error = crate::chain(&error), "it is not prepared again yet");
            }
        }
    }

    /// Whether the claim of an entry is still allocated as it was then: another
    /// one of the same name is another claim, and one that was deallocated has
    /// nothing here.
    async fn is_live(&self, entry: &Entry) -> Result<bool, ClaimSourceError> {
        let object = self.claims.get(&entry.claim.namespace, &entry.claim.name).await?;
        let (driver, pool) = (&self.config.settings.driver, &self.config.pool);
        Ok(object.is_some_and(|object| {
            object.uid() == Some(entry.uid.as_str())
                && claim::is_allocated(&object, driver, pool, &entry.allocation)
        }))
    }

    /// Entries whose claims have been gone, or not allocated any more, for long
    /// enough, and that no pod uses: the kubelet forgot them.
    async fn unprepare_gone(&self, states: &[(Arc<Entry>, Option<bool>)]) {
        let now = Instant::now();
        let due: Vec<&Arc<Entry>> = {
            let mut since = self.missing_since.lock().unwrap_or_else(PoisonError::into_inner);
            // What was not answered changes nothing.
            let kept: BTreeSet<_> =
                states.iter().filter(|(_, live)| *live != Some(true)).map(|(entry, _)| &entry.uid).collect();
            since.retain(|uid, _| kept.contains(uid));
            let gone = states.iter().filter(|(_, live)| *live == Some(false)).map(|(entry, _)| entry);
            gone.filter(|entry| now.duration_since(*since.entry(entry.uid.clone()).or_insert(now)) >= GONE)
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
            if let Err(error) = within_budget(self.unprepare_former(entry)).await {
                warn!(claim = %entry.claim, error = crate::chain(&error), "it cannot be unprepared now");
            }
        }
    }

    /// Undoes an entry, unless its claim came back and was prepared meanwhile:
    /// a named claim keeps its UID.
    async fn unprepare_former(&self, entry: &Arc<Entry>) -> Result<(), UndoError> {
        // Who prepares it after this asks the API under the same lock.
        let own = self.lock_claim(&entry.uid).await?;
        if !matches!(self.is_live(entry).await, Ok(false)) {
            return Ok(());
        }
        let former = Arc::clone(entry);
        let undo = move |work: &Work, uid: &ClaimUid, gpus: &BTreeSet<PciAddress>| {
            if !work.store.touching(Some(uid), gpus)?.contains(&former) {
                return Ok(Outcome::Done(()));
            }
            info!(claim = %former.claim, %uid, "the claim has nothing here any more; unpreparing it");
            work.unprepare(uid, gpus)
        };
        self.settled_under(&own, &entry.uid, undo).await
    }
}

/// One claim's part of a round. What takes longer goes on without the round.
async fn within_budget<T, E: From<WorkError>>(work: impl Future<Output = Result<T, E>>) -> Result<T, E> {
    let late = |_| Err(WorkError::Budget { seconds: BUDGET.as_secs() }.into());
    tokio::time::timeout(BUDGET, work).await.unwrap_or_else(late)
}

/// What of a round is done under the locks.
impl Work {
    fn reconcile(
        &self,
        uid: &ClaimUid,
        gpus: &BTreeSet<PciAddress>,
        known: bool,
    ) -> Result<Outcome<()>, PrepareError> {
        let mut entries = self.store.touching(Some(uid), gpus)?;
        if let Some(more) = missing(&entries, gpus, uid) {
            return Ok(Outcome::NeedsGpus(more));
        }
        self.settle(&mut entries);
        let own = entries.iter().find(|entry| entry.uid == *uid && entry.phase == Phase::Completed);
        if own.is_some() {
            // It was written anew, and whoever did it did not come to this.
            self.store.release_quarantine(uid)?;
        }
        if let Some(own) = own.filter(|own| known && own.boot_id == self.boot) {
            self.check(own)?;
        }
        Ok(Outcome::Done(()))
    }

    fn reconcile_spec(
        &self,
        uid: &ClaimUid,
        gpus: &BTreeSet<PciAddress>,
    ) -> Result<Outcome<()>, PrepareError> {
        let mut entries = self.store.touching(Some(uid), gpus)?;
        if let Some(more) = self.restore(uid, gpus, &mut entries)? {
            return Ok(Outcome::NeedsGpus(more));
        }
        // One that is proof, or may be to another version, stays.
        let stays = entries.iter().any(|entry| entry.uid == *uid)
            || self.proof(uid, &entries)?.is_some()
            || self.is_quarantined(uid);
        if !stays && self.cdi.remove(uid)? {
            info!(%uid, "removed a CDI file that no claim has");
        }
        Ok(Outcome::Done(()))
    }
}
