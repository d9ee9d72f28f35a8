//! The owner of the inventory: one task that reads the hardware, decides what
//! is foreign, and says what is to be published.
//!
//! Everybody else gets snapshots. Prepare and unprepare never change what is
//! published on the side: a change of hardware comes back as a new inventory,
//! a change of the journal as a new view.
//!
//! It owns the [`Records`] of what was published. One is stored before its
//! first publication.

mod bearing;
mod deciding;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kerf_dra_driver::inventory::{GpuInstance, Inventory};
use kerf_dra_driver::journal::Entry;
use kerf_dra_driver::layout::PackedSlice;
use kerf_dra_driver::model::Settings;
use kerf_dra_driver::names::{DeviceName, PciAddress, gpu_pool};
use kerf_dra_driver::publication::Publication;
use kerf_dra_driver::withdraw::{ClaimList, Timestamp};
use rustix::time::{ClockId, clock_gettime};
use tokio::sync::watch;
use tokio::task::{JoinError, JoinHandle};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use self::bearing::Bearing;
use crate::claims::ClaimSourceError;
use crate::instances::Lead;
use crate::plugin::{ObserveError, Observed, Plugin};
use crate::records::{RecordError, Records};
use crate::rivals::{self, Rival, RivalFolders};
use crate::view::JournalView;

/// How long a reading of all GPUs may take before the last one is kept.
const READ_BUDGET: Duration = Duration::from_secs(30);
/// Events come in bursts: a partition is two of them, and a reading asks every
/// GPU.
const SETTLE_EVENTS: Duration = Duration::from_secs(1);
/// How often the hardware is read without an event, ±20 %. A driver that is
/// reloaded tells nobody.
const REREAD: Duration = Duration::from_mins(5);
/// The pause after a failed reading or writing; it doubles up to the longest.
const FIRST_RETRY: Duration = Duration::from_secs(1);
const LAST_RETRY: Duration = Duration::from_secs(30);

/// What is to be published of the node's GPUs.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct NodeLayout {
    /// The pool's slices, in order.
    pub slices: Vec<PackedSlice>,
}

/// What the publisher says about it.
#[derive(Debug, Clone)]
pub struct Stored {
    /// The layout that the API server holds as it was sent.
    pub layout: Option<Arc<NodeLayout>>,
    /// Whether the API server keeps shared counters.
    pub counters: bool,
}

impl Default for Stored {
    fn default() -> Self {
        Self { layout: None, counters: true }
    }
}

/// The channels between the owner and everybody else.
#[derive(Debug)]
pub struct Channels {
    /// The last inventory.
    pub inventory: watch::Sender<Option<Arc<Inventory>>>,
    /// What is to be published; nothing until the hardware was read.
    pub layout: watch::Sender<Option<Arc<NodeLayout>>>,
    /// What keeps the owner from saying more, as a sentence.
    pub trouble: watch::Sender<Option<String>>,
    /// Who else hands out the node's GPUs; nothing until that was looked at.
    pub rivals: watch::Sender<Option<Arc<[Rival]>>>,
    /// What the publisher says.
    pub stored: watch::Receiver<Stored>,
}

/// Why the owner looks again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Woken {
    /// The hardware may have changed.
    Hardware,
    /// Something else did, or it is time.
    Other,
}

/// Why the owner cannot say what it should. It tries again by itself.
#[derive(Debug, thiserror::Error)]
pub enum OwnerError {
    /// A reading of the GPUs takes too long: no new claim gets any of them.
    #[error("the driver has not answered for {} s", READ_BUDGET.as_secs())]
    Silent,
    /// The GPUs cannot be read.
    #[error(transparent)]
    Observe(#[from] ObserveError),
    /// A defect of this program.
    #[error("reading the GPUs ended by itself")]
    Ended(#[source] JoinError),
    /// Who holds what is not known.
    #[error(transparent)]
    Claims(#[from] ClaimSourceError),
    /// What is to be published cannot be stored before.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// A defect of this program.
    #[error("a slice cannot be written")]
    Slice(#[from] serde_json::Error),
}

/// One kind of thing that is tried until it works.
#[derive(Debug, Default)]
struct Attempts {
    /// What went wrong the last time. It stays said until it works.
    trouble: Option<OwnerError>,
    failures: u32,
    /// What wakes the owner meanwhile makes it no later.
    again_at: Option<Instant>,
}

impl Attempts {
    /// Notes how one went. Of one that failed the answer is when to try again.
    fn note<T>(&mut self, result: Result<T, OwnerError>) -> Result<T, Instant> {
        match result {
            Ok(done) => {
                *self = Self::default();
                Ok(done)
            }
            Err(error) => {
                self.failures += 1;
                let again = Instant::now() + retry_after(self.failures);
                (self.trouble, self.again_at) = (Some(error), Some(again));
                Err(again)
            }
        }
    }
}

/// The owner task.
#[derive(Debug)]
pub struct Owner {
    plugin: Plugin,
    records: Records,
    publication: Publication,
    channels: Channels,
    journal: watch::Receiver<Arc<JournalView>>,
    hardware_changed: watch::Receiver<u64>,
    rivals: watch::Receiver<Option<Arc<[Rival]>>>,
    foreign: BTreeMap<PciAddress, Vec<GpuInstance>>,
    /// The partitions that entries had at the last reading and the hardware not.
    vanished: BTreeMap<DeviceName, Entry>,
    list: Option<ClaimList>,
    /// Where records are missing, nobody here knows what was published before:
    /// which claims are allocated but not prepared has to be asked before
    /// anything is published.
    must_list: bool,
    /// Why the driver did not answer at the last reading.
    unanswered: Option<String>,
    read_at: Option<Instant>,
    /// What the last decision was made on.
    decided_on: Bearing,
    /// Whether the API server keeps counters, as far as is known.
    counters: bool,
    reading: Option<JoinHandle<Result<Observed, ObserveError>>>,
}

impl Owner {
    /// The owner of what a plugin serves.
    ///
    /// The lead is held as long as a record is being written.
    ///
    /// # Errors
    /// The folder of the records cannot be read.
    pub fn new(plugin: Plugin, channels: Channels, lead: Lead) -> Result<Self, RecordError> {
        let inner = &plugin.inner;
        let records = Records::new(inner.disk.clone(), &inner.config.plugin_dir.join("state"), lead);
        let (known, complete) = records.load()?;
        let publication = Publication::new(known);
        let must_list = publication.is_empty() || !complete;
        let (journal, hardware_changed) = (plugin.journal(), plugin.hardware_changed());
        let rivals = channels.rivals.subscribe();
        Ok(Self {
            plugin,
            records,
            publication,
            rivals,
            channels,
            journal,
            hardware_changed,
            foreign: BTreeMap::new(),
            vanished: BTreeMap::new(),
            list: None,
            must_list,
            unanswered: None,
            read_at: None,
            decided_on: Bearing::default(),
            counters: true,
            reading: None,
        })
    }

    /// Reads and decides until cancelled.
    pub async fn run(mut self, cancel: CancellationToken) {
        let config = &self.plugin.inner.config;
        let (folders, driver) = (RivalFolders::of(config), config.settings.driver.clone());
        let rivals = rivals::keep(folders, driver, self.channels.rivals.clone());
        tokio::select! {
            () = cancel.cancelled() => {}
            () = self.keep_true() => {}
            () = rivals => {}
        }
        // What another instance reads from now on is not known here.
        self.plugin.inner.health.send_replace(None);
    }

    async fn keep_true(&mut self) {
        let mut read_at = Instant::now();
        let mut list_at = self.must_list.then_some(read_at);
        let [mut reading, mut listing, mut deciding] = [(); 3].map(|()| Attempts::default());
        loop {
            if read_at <= Instant::now() {
                let read = reading.note(self.read().await);
                read_at = read.map_or_else(|again| again, |pause| Instant::now() + jittered(pause));
            }
            if list_at.is_some_and(|at| at <= Instant::now()) {
                // When it is made anew stands below.
                let _ = listing.note(self.list_claims().await);
            }
            let decided = deciding.note(self.decide().await);
            self.tell_health();
            list_at = decided.unwrap_or(list_at);
            if list_at.is_none() {
                listing = Attempts::default();
            }
            let failed = [&reading, &listing, &deciding];
            let troubles = failed.into_iter().filter_map(|attempts| attempts.trouble.as_ref());
            let rivals = self.rivals.borrow().clone();
            let rivals = rivals.iter().flat_map(|rivals| rivals.iter()).map(ToString::to_string);
            self.report(&troubles.map(|error| crate::chain(error)).chain(rivals).collect::<Vec<_>>());
            list_at = list_at.max(listing.again_at.filter(|_| list_at.is_some()));
            let wake = [list_at, deciding.again_at].into_iter().flatten().fold(read_at, Instant::min);
            let Some(reason) = self.woken(wake).await else { return };
            if reason == Woken::Hardware {
                sleep(SETTLE_EVENTS).await;
                self.hardware_changed.mark_unchanged();
                read_at = Instant::now();
            }
        }
    }

    /// Waits until something is new that bears on what is published; nothing
    /// once the plugin is gone.
    async fn woken(&mut self, at: Instant) -> Option<Woken> {
        loop {
            tokio::select! {
                changed = self.hardware_changed.changed() => return changed.is_ok().then_some(Woken::Hardware),
                changed = self.channels.stored.changed() => return changed.is_ok().then_some(Woken::Other),
                changed = self.rivals.changed() => return changed.is_ok().then_some(Woken::Other),
                () = sleep_until(at) => return Some(Woken::Other),
                changed = self.journal.changed() => {
                    changed.ok()?;
                    let view = Arc::clone(&self.journal.borrow_and_update());
                    // Most claims come and go without a trace here.
                    if self.bearing(&view) != self.decided_on {
                        return Some(Woken::Other);
                    }
                }
            }
        }
    }

    fn settings(&self) -> &Settings {
        &self.plugin.inner.config.settings
    }

    fn report(&self, troubles: &[String]) {
        let trouble = (!troubles.is_empty()).then(|| troubles.join("; "));
        self.channels.trouble.send_if_modified(|last| {
            if *last == trouble {
                return false;
            }
            if let Some(trouble) = &trouble {
                warn!(trouble, "the node's GPUs cannot be given out as they should");
            }
            *last = trouble;
            true
        });
    }

    /// Reads the hardware, and what of it is foreign. The answer is how long
    /// that may be believed without an event.
    async fn read(&mut self) -> Result<Duration, OwnerError> {
        let plugin = self.plugin.clone();
        // A reading that took longer than its budget is waited for, not
        // repeated: the driver hangs already.
        let reading = self.reading.get_or_insert_with(|| tokio::spawn(async move { plugin.observe().await }));
        let Ok(observed) = timeout(READ_BUDGET, reading).await else {
            // Nobody knows which GPU hangs. No new claim gets any of them;
            // those that are prepared already go on with the last inventory.
            self.unanswered = Some(OwnerError::Silent.to_string());
            return Err(OwnerError::Silent);
        };
        self.reading = None;
        match observed.map_err(OwnerError::Ended)? {
            Ok(observed) => {
                let unreadable = observed.inventory.unreadable.clone();
                let known = self.channels.inventory.borrow().clone();
                if known.is_none_or(|known| known.unreadable != unreadable) {
                    for gpu in &unreadable {
                        warn!(index = gpu.index, error = gpu.error, "a GPU cannot be read");
                    }
                }
                self.foreign = observed.foreign;
                // What cannot be told now is as it was.
                self.vanished
                    .retain(|device, _| device.gpu().is_some_and(|gpu| observed.undecided.contains(&gpu)));
                self.vanished.extend(observed.vanished);
                self.unanswered = None;
                self.read_at = Some(Instant::now());
                self.channels.inventory.send_if_modified(|last| {
                    let changed = last.as_ref() != Some(&observed.inventory);
                    *last = Some(observed.inventory);
                    changed
                });
                // A GPU that comes back does not say so.
                Ok(if unreadable.is_empty() && observed.undecided.is_empty() { REREAD } else { LAST_RETRY })
            }
            Err(error) => {
                self.unanswered = Some(crate::chain(&error));
                self.channels.inventory.send_if_modified(|last| last.take().is_some());
                Err(error.into())
            }
        }
    }

    async fn list_claims(&mut self) -> Result<(), OwnerError> {
        let began = now();
        let (driver, pool) = (&self.settings().driver, gpu_pool(&self.settings().node));
        let allocated = self.plugin.inner.claims.source.allocated(driver, &pool).await?;
        self.list = Some(ClaimList { began, allocated });
        self.must_list = false;
        Ok(())
    }
}

fn now() -> Timestamp {
    let since = Duration::try_from(clock_gettime(ClockId::Boottime)).unwrap_or_default();
    Timestamp(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}

fn retry_after(failures: u32) -> Duration {
    FIRST_RETRY.saturating_mul(1 << failures.clamp(1, 6).saturating_sub(1)).min(LAST_RETRY)
}

/// A time ±20 %, so that a fleet that started together does not stay in step.
pub(crate) fn jittered(duration: Duration) -> Duration {
    duration.mul_f64(fastrand::f64().mul_add(0.4, 0.8))
}
