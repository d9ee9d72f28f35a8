//! A small driver that is right in all that is checked, unless it is told to be
//! wrong in one way. Each instance has a runtime of its own: a kill ends its
//! connections too.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use anyhow::{Context as _, Result};
use dra_conformance::{Disk as Room, Fault, Launcher, Running};
use futures::FutureExt as _;
use futures::future::LocalBoxFuture;
use serde::{Deserialize, Serialize};
use tokio::runtime::Runtime;

use crate::api::Api;
use crate::publisher;
use crate::services;

pub(crate) const NAME: &str = "driver.example.com";
pub(crate) const NODE: &str = "node-1";
/// The device that many can have shares of.
pub(crate) const SHARED: &str = "shared";

/// One way of being wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Defect {
    // Registration
    SlowInfo,
    WrongType,
    BadName,
    DeadEndpoint,
    BetaFirst,
    ListsMore,
    PlainRegistrationSocket,
    LocalhostRefused,
    PlainDraSocket,
    InfoDiffers,
    RegistersOnce,
    GivesUp,
    UnknownMethodServed,
    SocketsStay,
    StaleSocketsInTheWay,
    // Prepare
    OtherDevice,
    BadIds,
    NewIdsEachTime,
    FirstClaimOnly,
    BusyWithTheClaim,
    BusyWithAnyClaim,
    CancelledStaysBusy,
    BetaDiffers,
    MissingAccepted,
    UidIgnored,
    UnallocatedAccepted,
    OneFailsAll,
    ForeignTaken,
    AlternativeNamed,
    AnyParameters,
    AnyDevice,
    DoubleUse,
    RefusedForEver,
    // Unprepare
    UnprepareFails,
    UnknownFails,
    UnprepareReadsApi,
    KeyedByName,
    BusyUnprepare,
    UnknownUnanswered,
    NeverFreed,
    UnpreparedForEver,
    RemembersClaims,
    CrossedLost,
    // CDI
    NoSpec,
    InvalidSpec,
    NamesWithoutUid,
    SpecStays,
    SpecBeforeRefusal,
    SpecOnlyOnce,
    DraftLeft,
    MissingDeviceNode,
    SpecErrorsIgnored,
    SpecCutShort,
    // Several devices, shares, administrative access
    FirstDeviceOnly,
    KeepsHalf,
    ShareIdsMissing,
    SharesMerged,
    ShareEndsAll,
    AdminEndsAll,
    AdminHolds,
    // Device metadata
    MetadataOfOther,
    MetadataStays,
    // Slices
    WrongCount,
    OldGenerationLeft,
    NoOwner,
    NameTwice,
    MissingCounter,
    ManyAttributes,
    Crowded,
    BadAttribute,
    BadPciAddress,
    WritesAlways,
    OneNotRestored,
    NothingRestored,
    ReversedWhenRestored,
    EditsKept,
    GenerationFalls,
    DeletesOthers,
    HidesHeld,
    OldOwner,
    LeftBehind,
    // Health
    HealthOfSome,
    HealthOnce,
    HealthOnFirstStream,
    HealthStatusUnknown,
    HealthUnlisted,
    // Restart
    IdsOfTheProcess,
    Forgets,
    PrepareInterrupted,
    UnprepareInterrupted,
    DeletesAtItsEnd,
    WritesAtItsStart,
    OtherBootRefused,
    // Outage
    OutageRemembered,
    EndsPublishing,
    WaitsForApi,
    OneLock,
    // Answers of the API server
    EndsOnConflict,
    EndsOnForbidden,
    EndsOnTooMany,
    EndsWatching,
    StatusNeeded,
    WritesDropped,
    KeepsUncounted,
    // Hang
    AsksDevices,
    GivesUpOnDevices,
    PrepareHangsForEver,
    UnprepareHangsForEver,
    // State
    DamageEndsIt,
    UnknownSpecRefused,
    TornEndsIt,
    NoRoomRemembered,
    // Claims that end without a word
    NeverCollects,
    CollectsAll,
    // Update
    SameSockets,
    Fights,
    SweepsAtItsEnd,
    /// None: the health service is optional.
    WithoutHealth,
    /// None: there are other ways to the API server than the one with trouble.
    WayAround,
    /// None: not every claim needs the devices' word.
    AsksNoDevices,
}

/// What survives the driver's process: in memory, and as the file of which a new
/// process takes it.
#[derive(Debug, Default, Clone, Serialize, Deserialize)]
pub(crate) struct Disk {
    pub(crate) claims: BTreeMap<String, Entry>,
    pub(crate) unprepared: BTreeSet<String>,
    /// The machine's boot, which is not the file's.
    #[serde(skip)]
    pub(crate) boot: u32,
    /// So are its devices.
    #[serde(skip)]
    pub(crate) does_hang: bool,
    #[serde(skip)]
    pub(crate) is_slow: bool,
    /// The folder in which there is no room.
    #[serde(skip)]
    pub(crate) full: Option<PathBuf>,
}

/// Fails if there is no room in a folder.
pub(crate) fn is_full(disk: &Disk, folder: &Path) -> Result<()> {
    anyhow::ensure!(disk.full.as_deref() != Some(folder), "no room in {}", folder.display());
    Ok(())
}

impl Disk {
    pub(crate) fn save(&self, root: &Path) {
        std::fs::write(root.join("state/claims.json"), serde_json::to_string(self).unwrap()).unwrap();
    }

    /// Nothing, where there is nothing to read.
    pub(crate) fn load(&mut self, root: &Path) {
        let text = std::fs::read_to_string(root.join("state/claims.json")).unwrap_or_default();
        *self = Self {
            boot: self.boot,
            does_hang: self.does_hang,
            is_slow: self.is_slow,
            full: self.full.clone(),
            ..serde_json::from_str(&text).unwrap_or_default()
        };
    }
}

/// A claim, from the beginning of its prepare to the end of its unprepare.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Entry {
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) uid: String,
    /// What nobody else can have at the same time.
    pub(crate) parts: Vec<String>,
    /// The first.
    pub(crate) device: String,
    pub(crate) is_admin: bool,
    pub(crate) is_complete: bool,
    pub(crate) boot: u32,
}

/// What an instance works with.
#[derive(Clone)]
pub(crate) struct Instance {
    pub(crate) defect: Option<Defect>,
    pub(crate) root: PathBuf,
    pub(crate) name: String,
    /// Counts starts.
    pub(crate) process: u32,
    pub(crate) client: kube::Client,
    pub(crate) disk: Arc<Mutex<Disk>>,
    pub(crate) memory: Arc<Mutex<services::Memory>>,
}

impl Instance {
    pub(crate) fn has(&self, defect: Defect) -> bool {
        self.defect == Some(defect)
    }

    fn socket_name(&self, is_plain: bool, suffix: &str) -> String {
        let at = if is_plain { "-" } else { "@" };
        let name = if self.has(Defect::SameSockets) { "only" } else { &self.name };
        format!("driver.example.com{at}{name}{suffix}")
    }

    pub(crate) fn registration_socket(&self) -> PathBuf {
        let name = self.socket_name(self.has(Defect::PlainRegistrationSocket), "-reg.sock");
        self.root.join("registry").join(name)
    }

    pub(crate) fn dra_socket(&self) -> PathBuf {
        self.root.join("plugin").join(self.socket_name(self.has(Defect::PlainDraSocket), ".sock"))
    }
}

/// Starts instances of the driver in this process.
pub(crate) struct InProcess {
    pub(crate) defect: Option<Defect>,
    pub(crate) root: PathBuf,
    pub(crate) api: Api,
    pub(crate) client: kube::Client,
    pub(crate) disk: Arc<Mutex<Disk>>,
    pub(crate) starts: u32,
}

impl std::fmt::Debug for InProcess {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.defect)
    }
}

impl Launcher for InProcess {
    fn start(&mut self, instance: &str) -> LocalBoxFuture<'_, Result<Box<dyn Running>>> {
        self.starts += 1;
        let text = std::fs::read_to_string(self.root.join("state/claims.json"));
        let is_damaged = text.is_ok_and(|text| {
            let is_torn = serde_json::from_str::<Disk>(&text).is_err();
            is_torn
                && self.defect
                    == Some(if text.is_empty() { Defect::DamageEndsIt } else { Defect::TornEndsIt })
        });
        self.disk.lock().unwrap().load(&self.root);
        if self.defect == Some(Defect::Forgets) {
            self.disk.lock().unwrap().claims.clear();
        }
        let instance = Instance {
            defect: self.defect,
            root: self.root.clone(),
            name: instance.to_owned(),
            process: self.starts,
            client: self.client.clone(),
            disk: self.disk.clone(),
            memory: Arc::default(),
        };
        async move {
            let runtime =
                tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
            if !is_damaged {
                runtime.spawn(services::serve(instance.clone()));
            }
            runtime.spawn(publisher::publish(instance.clone()));
            runtime.spawn(instance.clone().collect());
            Ok(Box::new(InRuntime { runtime: Some(runtime), instance }) as Box<dyn Running>)
        }
        .boxed_local()
    }

    fn reboot(&mut self) -> LocalBoxFuture<'_, Result<()>> {
        self.disk.lock().unwrap().boot += 1;
        std::future::ready(Ok(())).boxed_local()
    }

    fn hang(&mut self, does_hang: bool) -> LocalBoxFuture<'_, Result<()>> {
        self.disk.lock().unwrap().does_hang = does_hang;
        std::future::ready(Ok(())).boxed_local()
    }

    fn slow(&mut self, is_slow: bool) -> LocalBoxFuture<'_, Result<()>> {
        self.disk.lock().unwrap().is_slow = is_slow;
        std::future::ready(Ok(())).boxed_local()
    }

    fn trouble(&mut self, fault: Fault) {
        self.api.way().set(fault);
    }

    fn met(&self) -> u32 {
        self.api.way().met()
    }

    fn disk(&mut self, folder: &Path, room: Room) -> Result<()> {
        self.disk.lock().unwrap().full = (room == Room::Full).then(|| folder.to_owned());
        Ok(())
    }

    fn has_slowness(&self) -> bool {
        true
    }

    fn has_instances(&self) -> bool {
        true
    }

    fn has_hangs(&self) -> bool {
        true
    }

    fn has_outages(&self) -> bool {
        true
    }

    fn has_reboot(&self) -> bool {
        true
    }
}

struct InRuntime {
    runtime: Option<Runtime>,
    instance: Instance,
}

impl std::fmt::Debug for InRuntime {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.instance.name)
    }
}

impl InRuntime {
    fn stop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Drop for InRuntime {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Running for InRuntime {
    fn terminate(mut self: Box<Self>) -> LocalBoxFuture<'static, Result<()>> {
        async move {
            self.stop();
            let instance = &self.instance;
            if instance.has(Defect::DeletesAtItsEnd) {
                publisher::withdraw(&instance.client).await?;
            }
            let mut sockets = vec![instance.registration_socket(), instance.dra_socket()];
            if instance.has(Defect::SweepsAtItsEnd) {
                for folder in ["registry", "plugin"] {
                    let entries = std::fs::read_dir(instance.root.join(folder))?;
                    sockets.extend(entries.map(|entry| entry.unwrap().path()));
                }
            }
            if !instance.has(Defect::SocketsStay) {
                for path in sockets {
                    std::fs::remove_file(path).ok();
                }
            }
            Ok(())
        }
        .boxed_local()
    }

    fn kill(mut self: Box<Self>) -> LocalBoxFuture<'static, Result<()>> {
        self.stop();
        std::future::ready(Ok(())).boxed_local()
    }

    fn ended(&mut self) -> Option<String> {
        None
    }
}

/// The devices' numbers; the driver has as many as two claims need, and more.
pub(crate) fn devices(defect: Option<Defect>) -> Vec<String> {
    let number = if defect == Some(Defect::Crowded) { 65 } else { 4 };
    let plain = (0..number).map(|index| format!("device-{index}"));
    let shared = (defect != Some(Defect::Crowded)).then(|| SHARED.to_owned());
    plain.chain(shared).collect()
}

pub(crate) fn pool() -> String {
    format!("{NODE}/pool")
}

/// Folders as a kubelet has them.
pub(crate) fn folders(root: &Path) -> Result<()> {
    for folder in ["registry", "plugin", "cdi", "state", "metadata"] {
        std::fs::create_dir(root.join(folder)).context("a folder")?;
    }
    Ok(())
}
