//! The plugin: claims in, prepared devices out, each claim on its own.
//!
//! An operation runs in a task of its own, so that a kubelet that hangs up
//! cancels nothing, and waits for locks without a thread. What happens under
//! the locks is blocking ([`crate::work`]) and takes the locks along: past its
//! budget the kubelet is answered, but nobody else gets the GPU until the
//! thread is back.
//!
//! A second request for a claim waits for the first and then answers from the
//! entry that the first one wrote, verified. The answer itself is not shared:
//! between the two the claim may have been allocated anew.

mod observe;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kerf_dra_driver::claim::{Claim, ClaimError, ClaimName, ClaimObject};
use kerf_dra_driver::hardware::Hardware;
use kerf_dra_driver::inventory::Inventory;
use kerf_dra_driver::journal::{BootId, GpusInName};
use kerf_dra_driver::model::Settings;
use kerf_dra_driver::names::{ClaimUid, PciAddress};
use kerf_dra_driver::status::FailedPrepare;
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::{info, warn};

pub use self::observe::{ObserveError, Observed};
use crate::cdi::{self, ExtraMount};
use crate::claims::{ClaimSource, Claims};
use crate::disk::{Disk, Files, HostFiles};
use crate::errors::{PrepareError, UndoError, WorkError};
use crate::failures::Failures;
use crate::health::NodeHealth;
use crate::hook_program::HookProgram;
use crate::lock::{Held, Locks};
use crate::metrics::{Metrics, Operation};
use crate::registration::Registration;
use crate::store::{Store, StoreError};
use crate::view::JournalView;
use crate::work::{Outcome, PreparedDevice, Work};

/// The kubelet waits 45 s for a call; the answer must be there before.
pub(crate) const BUDGET: Duration = Duration::from_secs(40);

/// What a plugin is made for.
#[derive(Debug, Clone)]
pub struct PluginConfig {
    /// The operator's choices; driver and node name among them.
    pub settings: Settings,
    /// The pool that this node's GPUs are published in.
    pub pool: String,
    /// What tells this process from others of the node: its pod's UID.
    pub instance: Option<String>,
    /// `/var/lib/kubelet/plugins/<driver>`: sockets and state.
    pub plugin_dir: PathBuf,
    /// `/var/lib/kubelet/plugins_registry`.
    pub registry_dir: PathBuf,
    /// `/var/lib/kubelet/device-plugins`, in which only others have sockets.
    pub device_plugins_dir: PathBuf,
    /// `/var/run/cdi`.
    pub cdi_dir: PathBuf,
    /// `/var/lib/kubelet/pod-resources/kubelet.sock`.
    pub pod_resources_socket: PathBuf,
    /// What containers get beside the driver's files.
    pub extra_mounts: Vec<ExtraMount>,
    /// What the container runtime calls for each container with a device.
    pub hook: HookProgram,
    /// Where `sys/kernel/random/boot_id` is: `/proc`.
    pub proc_root: PathBuf,
}

/// Why a plugin cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum PluginError {
    /// The boot id cannot be read.
    #[error("the boot id cannot be read ({}; --proc-root must be the host's /proc)", path.display())]
    BootId {
        /// Where it should be.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The state folder cannot be used.
    #[error("the folder for locks cannot be used (`state/locks` in the plugin's folder must be writable)")]
    Locks(#[source] std::io::Error),
    /// The journal cannot be read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The folder of CDI specs cannot be used.
    #[error(transparent)]
    Cdi(#[from] cdi::CdiError),
}

/// What a kubelet says of a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimRequest {
    /// Its namespace.
    pub namespace: String,
    /// Its name there.
    pub name: String,
    /// Its UID, unchecked.
    pub uid: String,
}

/// The kubelet side of a node. Clones are the same plugin.
#[derive(Debug, Clone)]
pub struct Plugin {
    pub(crate) inner: Arc<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) config: PluginConfig,
    pub(crate) disk: Disk,
    pub(crate) claims: Claims,
    pub(crate) inventory: watch::Receiver<Option<Arc<Inventory>>>,
    pub(crate) locks: Locks,
    pub(crate) work: Arc<Work>,
    pub(crate) registration: watch::Sender<Registration>,
    pub(crate) serving: watch::Sender<bool>,
    /// What the owner of the inventory says; nothing while there is none.
    pub(crate) health: watch::Sender<Option<NodeHealth>>,
    pub(crate) metrics: Metrics,
    failures: Failures,
    /// Since when a claim that has an entry is missing in the API.
    pub(crate) missing_since: Mutex<BTreeMap<ClaimUid, Instant>>,
}

impl Plugin {
    /// A plugin over a node's folders. The journal is read.
    ///
    /// `inventory` is what the node's owner task read last; while it has read
    /// nothing, no claim is prepared.
    pub fn new(
        config: PluginConfig,
        hardware: Arc<dyn Hardware>,
        claims: Arc<dyn ClaimSource>,
        inventory: watch::Receiver<Option<Arc<Inventory>>>,
    ) -> Result<Self, PluginError> {
        Self::with_files(config, hardware, claims, inventory, Arc::new(HostFiles))
    }

    /// A plugin whose state and CDI files are on another disk.
    pub fn with_files(
        config: PluginConfig,
        hardware: Arc<dyn Hardware>,
        claims: Arc<dyn ClaimSource>,
        inventory: watch::Receiver<Option<Arc<Inventory>>>,
        files: Arc<dyn Files>,
    ) -> Result<Self, PluginError> {
        let boot_file = config.proc_root.join("sys/kernel/random/boot_id");
        let boot = std::fs::read_to_string(&boot_file)
            .map_err(|source| PluginError::BootId { path: boot_file, source })?;
        let state = config.plugin_dir.join("state");
        let locks = Locks::open(state.join("locks")).map_err(PluginError::Locks)?;
        let disk = Disk::new(files);
        let work = Work {
            settings: config.settings.clone(),
            boot: BootId(boot.trim().to_owned()),
            extra_mounts: config.extra_mounts.clone(),
            hook: config.hook.clone(),
            hardware,
            store: Store::open(disk.clone(), &state)?,
            cdi: cdi::Folder::new(disk.clone(), config.cdi_dir.clone(), &config.settings.driver),
            mode_failures: Mutex::default(),
            hardware_changed: watch::Sender::new(0),
        };
        Ok(Self {
            inner: Arc::new(Inner {
                config,
                disk,
                claims: Claims::of(claims),
                inventory,
                locks,
                work: Arc::new(work),
                registration: watch::Sender::new(Registration::default()),
                serving: watch::Sender::new(false),
                health: watch::Sender::new(None),
                metrics: Metrics::default(),
                failures: Failures::default(),
                missing_since: Mutex::default(),
            }),
        })
    }

    /// What the journal says, now and whenever it changes.
    pub fn journal(&self) -> watch::Receiver<Arc<JournalView>> {
        self.inner.work.store.view().subscribe()
    }

    /// Whether the kubelet knows this plugin.
    pub fn registration(&self) -> watch::Receiver<Registration> {
        self.inner.registration.subscribe()
    }

    /// Whether the kubelet can be answered.
    pub fn serving(&self) -> watch::Receiver<bool> {
        self.inner.serving.subscribe()
    }

    /// The health of what is published; nothing while another instance describes
    /// the node.
    pub fn health(&self) -> watch::Receiver<Option<NodeHealth>> {
        self.inner.health.subscribe()
    }

    /// Changes whenever this plugin changed hardware: the inventory is to be
    /// read again.
    pub fn hardware_changed(&self) -> watch::Receiver<u64> {
        self.inner.work.hardware_changed.subscribe()
    }

    /// Reads the journal anew: another instance may have written it.
    pub async fn refresh(&self) {
        let work = Arc::clone(&self.inner.work);
        if let Some(Err(error)) = blocking(move || work.store.refresh()).await {
            warn!(error = crate::chain(&error), "the journal cannot be read anew");
        }
    }

    /// The running boot.
    pub fn boot_id(&self) -> &BootId {
        &self.inner.work.boot
    }

    /// What was counted.
    pub fn metrics(&self) -> &Metrics {
        &self.inner.metrics
    }

    /// The claims whose last prepare failed, oldest first.
    pub fn failed_prepares(&self) -> Vec<FailedPrepare> {
        self.inner.failures.all()
    }

    /// Prepares a claim. It goes on if the caller stops waiting.
    pub async fn prepare(&self, request: ClaimRequest) -> Result<Vec<PreparedDevice>, PrepareError> {
        let plugin = self.clone();
        let task = tokio::spawn(async move {
            let started = Instant::now();
            let result = tokio::time::timeout(BUDGET, plugin.inner.prepare(&request))
                .await
                .unwrap_or(Err(WorkError::Budget { seconds: BUDGET.as_secs() }.into()));
            let elapsed = started.elapsed();
            plugin.inner.metrics.record(Operation::Prepare, elapsed, result.is_ok());
            let (namespace, name, uid) = (&request.namespace, &request.name, &request.uid);
            match &result {
                Ok(devices) => {
                    plugin.inner.failures.forget(uid);
                    let devices = names(devices);
                    info!(namespace, name, uid, devices, elapsed_ms = millis(elapsed), "prepared");
                }
                Err(error) => {
                    let error = crate::chain(error);
                    warn!(namespace, name, uid, error, elapsed_ms = millis(elapsed), "not prepared");
                    let claim = ClaimName { namespace: namespace.clone(), name: name.clone() };
                    plugin.inner.failures.note(claim, uid, error);
                }
            }
            result
        });
        task.await.unwrap_or(Err(WorkError::Panicked.into()))
    }

    /// Undoes a claim. It goes on if the caller stops waiting.
    pub async fn unprepare(&self, uid: String) -> Result<(), UndoError> {
        let plugin = self.clone();
        let task = tokio::spawn(async move {
            let started = Instant::now();
            let uid: ClaimUid = uid.parse()?;
            let result = tokio::time::timeout(BUDGET, plugin.inner.unprepare(&uid))
                .await
                .unwrap_or(Err(WorkError::Budget { seconds: BUDGET.as_secs() }.into()));
            let elapsed = started.elapsed();
            plugin.inner.metrics.record(Operation::Unprepare, elapsed, result.is_ok());
            match &result {
                Ok(()) => {
                    plugin.inner.failures.forget(uid.as_str());
                    info!(%uid, elapsed_ms = millis(elapsed), "unprepared");
                }
                Err(error) => warn!(
                    %uid, error = crate::chain(error), elapsed_ms = millis(elapsed), "not unprepared"
                ),
            }
            result
        });
        task.await.unwrap_or(Err(WorkError::Panicked.into()))
    }
}

impl Inner {
    async fn prepare(&self, request: &ClaimRequest) -> Result<Vec<PreparedDevice>, PrepareError> {
        let uid: ClaimUid = request.uid.parse()?;
        let own = self.lock_claim(&uid).await?;
        let (namespace, name) = (&request.namespace, &request.name);
        let mut claim = self.resolve(self.claims.get(namespace, name).await?, &uid)?;
        let mut wanted = claim.gpus();
        wanted.extend(self.known_gpus(&uid));
        let mut again = false;
        loop {
            let gpus = self.lock_gpus(&wanted).await?;
            if gpus.waited || again {
                claim = self.resolve(self.claims.get_now(namespace, name).await?, &uid)?;
                let now = claim.gpus();
                if !now.is_subset(&wanted) {
                    wanted.extend(now);
                    again = true;
                    continue;
                }
            }
            let known = self.inventory.borrow().clone().ok_or(PrepareError::NoInventory)?;
            let (claim_here, locked) = (claim.clone(), wanted.clone());
            let outcome =
                self.under(&own, gpus, move |work| work.prepare(&claim_here, &locked, &known)).await??;
            match outcome {
                Outcome::Done(devices) => return Ok(devices),
                Outcome::NeedsGpus(more) => wanted.extend(more),
            }
            again = true;
        }
    }

    fn resolve(&self, object: Option<ClaimObject>, uid: &ClaimUid) -> Result<Claim, PrepareError> {
        let object = object.ok_or(ClaimError::NotFound)?;
        Ok(Claim::resolve(&object, uid, &self.config.settings.driver, &self.config.pool)?)
    }

    pub(crate) async fn unprepare(&self, uid: &ClaimUid) -> Result<(), UndoError> {
        self.settled(uid, Work::unprepare).await
    }

    /// Works on a claim under its lock and those of its GPUs, of more and more
    /// GPUs until they are enough.
    pub(crate) async fn settled<T, E>(
        &self,
        uid: &ClaimUid,
        work: impl Fn(&Work, &ClaimUid, &BTreeSet<PciAddress>) -> Result<Outcome<T>, E> + Clone + Send + 'static,
    ) -> Result<T, E>
    where
        T: Send + 'static,
        E: From<WorkError> + Send + 'static,
    {
        let own = self.lock_claim(uid).await?;
        self.settled_under(&own, uid, work).await
    }

    /// The same for who has the claim's lock.
    pub(crate) async fn settled_under<T, E>(
        &self,
        own: &Arc<Held>,
        uid: &ClaimUid,
        work: impl Fn(&Work, &ClaimUid, &BTreeSet<PciAddress>) -> Result<Outcome<T>, E> + Clone + Send + 'static,
    ) -> Result<T, E>
    where
        T: Send + 'static,
        E: From<WorkError> + Send + 'static,
    {
        let mut wanted = self.known_gpus(uid);
        loop {
            let gpus = self.lock_gpus(&wanted).await?;
            let (uid, locked, work) = (uid.clone(), wanted.clone(), work.clone());
            match self.under(own, gpus, move |all| work(all, &uid, &locked)).await?? {
                Outcome::Done(done) => return Ok(done),
                Outcome::NeedsGpus(more) => wanted.extend(more),
            }
        }
    }

    /// Runs work that takes its locks along.
    async fn under<T: Send + 'static>(
        &self,
        claim: &Arc<Held>,
        gpus: Held,
        work: impl FnOnce(&Work) -> T + Send + 'static,
    ) -> Result<T, WorkError> {
        let (all, claim) = (Arc::clone(&self.work), Arc::clone(claim));
        let done = blocking(move || {
            let done = work(&all);
            drop((gpus, claim));
            done
        });
        done.await.ok_or(WorkError::Panicked)
    }

    pub(crate) async fn lock_claim(&self, uid: &ClaimUid) -> Result<Arc<Held>, WorkError> {
        Ok(Arc::new(self.locks.claim(uid).await?))
    }

    pub(crate) async fn lock_gpus(&self, gpus: &BTreeSet<PciAddress>) -> Result<Held, WorkError> {
        Ok(self.locks.gpus(gpus).await?)
    }

    /// The GPUs that a claim's entry touches, as far as this process knows;
    /// also one that cannot be read.
    fn known_gpus(&self, uid: &ClaimUid) -> BTreeSet<PciAddress> {
        let view = self.work.store.view().borrow();
        let mut gpus = view.entries.get(uid).map(|entry| entry.gpus()).unwrap_or_default();
        for file in view.quarantined.values().filter(|file| file.uid == *uid) {
            if let GpusInName::These(these) = &file.gpus {
                gpus.extend(these);
            }
        }
        gpus
    }
}

/// Runs blocking work on a thread; absent if it panicked.
pub(crate) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    tokio::task::spawn_blocking(work).await.ok()
}

/// The devices' names for a log line, spaces between them.
fn names(devices: &[PreparedDevice]) -> String {
    devices.iter().map(|device| device.device.as_str()).collect::<Vec<_>>().join(" ")
}

fn millis(elapsed: Duration) -> u64 {
    u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX)
}
