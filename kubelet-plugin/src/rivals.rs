//! Others on the node that hand out the same GPUs: NVIDIA's device plugin, or
//! another DRA driver, also one under our name; and pods that still have what a
//! device plugin gave them.
//!
//! They are told by the sockets on which the kubelet reaches them. A killed
//! one leaves its file, so only one that answers counts; that it ends is told
//! by the end of the connection to it. One that starts has a file before it
//! answers, and nothing tells when it does: what is silent is looked at again.
//! Its pods outlive it: the kubelet tells of them, and is asked again as long as
//! there are any.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::future::select_all;
use kerf_dra_driver::names::DriverName;
use kerf_dra_driver::taint::Rivalry;
use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until};
use tracing::warn;

use crate::plugin::PluginConfig;
use crate::pods;
use crate::server::ServeError;
use crate::socket::{SocketFolders, knock};

/// The pause before somebody is looked at again who tells nobody of his end.
const PAUSE: Duration = Duration::from_secs(10);
/// How long after its file appeared a socket that is silent is looked at again;
/// then after twice that, and so on: a dead one costs less and less.
const SILENCE: Duration = Duration::from_millis(50);
/// The longest time between such looks.
const LONGEST_SILENCE: Duration = Duration::from_mins(1);
/// More than these say nothing more.
const MOST: usize = 16;
/// Whoever closes connections at once is not asked in a loop.
const SPACING: Duration = Duration::from_secs(1);
/// How long somebody who ended counts as there: one that is restarted, or comes
/// and goes, does not have every slice written each time.
const LEAVING: Duration = Duration::from_secs(5);

/// Somebody who hands out the same GPUs.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rival {
    /// What it is.
    pub kind: RivalKind,
    /// The socket on which it answers.
    pub socket: PathBuf,
}

/// What a rival is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum RivalKind {
    /// A driver under our own name.
    SameName,
    /// A driver under the name that NVIDIA's has.
    OtherDriver,
    /// NVIDIA's device plugin, or one that stands in for it.
    DevicePlugin,
    /// Pods that have GPUs of a device plugin.
    PluginsPods,
}

impl RivalKind {
    /// The same, as a taint says it.
    pub(crate) fn rivalry(self) -> Rivalry {
        match self {
            Self::SameName | Self::OtherDriver => Rivalry::Driver,
            Self::DevicePlugin | Self::PluginsPods => Rivalry::DevicePlugin,
        }
    }
}

impl fmt::Display for Rival {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (who, until) = match self.kind {
            RivalKind::SameName => (
                "another driver of kerf's name hands out this node's GPUs too",
                "until it ends; uninstall it, or give kerf another driver name",
            ),
            RivalKind::OtherDriver => (
                "another DRA driver hands out this node's GPUs too",
                "until it ends; uninstall it, or keep it off kerf's nodes",
            ),
            RivalKind::DevicePlugin => (
                "NVIDIA's device plugin hands out this node's GPUs too",
                "until it ends; keep it off kerf's nodes",
            ),
            RivalKind::PluginsPods => {
                ("pods of this node have GPUs that a device plugin gave them", "until they end; delete them")
            }
        };
        write!(f, "{who} ({}): kerf gives out none {until}", self.socket.display())
    }
}

/// The folders in which rivals have their sockets.
#[derive(Debug, Clone)]
pub struct RivalFolders {
    /// `/var/lib/kubelet/plugins_registry`.
    pub registry: PathBuf,
    /// `/var/lib/kubelet/device-plugins`.
    pub device_plugins: PathBuf,
    /// `/var/lib/kubelet/pod-resources/kubelet.sock`.
    pub pod_resources: PathBuf,
}

/// What the sockets of possible rivals answer.
struct Answers {
    /// Those that answer, with a connection where they take one.
    answering: Vec<(Rival, Option<std::os::unix::net::UnixStream>)>,
    /// Whether there are others: of dead ones, or of ones that only start.
    is_any_silent: bool,
    /// Everything in the folders, of whomever.
    files: BTreeSet<File>,
}

/// A file, and what tells it from another one of its name: inodes are used again.
type File = (PathBuf, Option<(u64, i64, i64)>);

impl RivalFolders {
    pub(crate) fn of(config: &PluginConfig) -> Self {
        Self {
            registry: config.registry_dir.clone(),
            device_plugins: config.device_plugins_dir.clone(),
            pod_resources: config.pod_resources_socket.clone(),
        }
    }

    /// Those whose sockets answer.
    ///
    /// # Errors
    /// It cannot be told who answers.
    pub fn answering(&self, ours: &DriverName) -> io::Result<Vec<Rival>> {
        Ok(self.knock(ours)?.answering.into_iter().map(|(rival, _)| rival).collect())
    }

    fn knock(&self, ours: &DriverName) -> io::Result<Answers> {
        let of = |name: &str, driver: &str| {
            name.strip_prefix(driver).is_some_and(|rest| rest.starts_with(['-', '@']) || rest == ".sock")
        };
        let driver = |name: &str| match name {
            // Another instance of this driver, or this one.
            name if ours.is_registration_socket(name) => None,
            name if of(name, ours.as_str()) => Some(RivalKind::SameName),
            name if of(name, DriverName::DEFAULT) => Some(RivalKind::OtherDriver),
            _ => None,
        };
        // Of NVIDIA's, of those that stand in for it, and of GKE's.
        let is_plugin = |name: &str| name.starts_with("nvidia-") || name.starts_with("nvidiaGPU");
        let plugin = |name: &str| is_plugin(name).then_some(RivalKind::DevicePlugin);
        let mut files = BTreeSet::new();
        let mut candidates = found(&self.registry, driver, &mut files)?;
        candidates.extend(found(&self.device_plugins, plugin, &mut files)?);
        candidates.sort();
        let mut answers = Answers { answering: Vec::new(), is_any_silent: false, files };
        for rival in candidates {
            if answers.answering.len() == MOST {
                break;
            }
            match knock(&rival.socket)? {
                Some(connection) => answers.answering.push((rival, connection)),
                None => answers.is_any_silent = true,
            }
        }
        Ok(answers)
    }

    /// Whether pods have GPUs of a device plugin.
    async fn plugins_pods(&self) -> Result<Option<Rival>, ServeError> {
        let socket = &self.pod_resources;
        if socket.symlink_metadata().is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
            return Ok(None);
        }
        let has = pods::have_plugin_devices(socket).await.map_err(|error| ServeError::Rivals {
            path: socket.clone(),
            source: io::Error::other(crate::chain(&error)),
        })?;
        Ok(has.then(|| Rival { kind: RivalKind::PluginsPods, socket: socket.clone() }))
    }
}

/// The possible rivals of a folder; `files` is told all that is in it.
fn found(
    folder: &Path,
    kind: impl Fn(&str) -> Option<RivalKind>,
    files: &mut BTreeSet<File>,
) -> io::Result<Vec<Rival>> {
    let entries = match std::fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut rivals = Vec::new();
    for entry in entries {
        let entry = entry?;
        let identity = entry.metadata().ok().map(|file| (file.ino(), file.ctime(), file.ctime_nsec()));
        files.insert((entry.path(), identity));
        if let Some(kind) = entry.file_name().to_str().and_then(&kind) {
            rivals.push(Rival { kind, socket: entry.path() });
        }
    }
    Ok(rivals)
}

/// Keeps what is known of rivals true. The first look is at once.
pub(crate) async fn keep(
    folders: RivalFolders,
    ours: DriverName,
    rivals: watch::Sender<Option<Arc<[Rival]>>>,
) {
    let mut said = String::new();
    loop {
        let Err(error) = follow(&folders, &ours, &rivals).await else { return };
        // What was known stays so: not to know of anybody is not nobody.
        let error = crate::chain(&error);
        if error != said {
            warn!(error, "whether others hand out the GPUs is not known now");
            said = error;
        }
        sleep(PAUSE).await;
    }
}

async fn follow(
    folders: &RivalFolders,
    ours: &DriverName,
    rivals: &watch::Sender<Option<Arc<[Rival]>>>,
) -> Result<(), ServeError> {
    let mut watched = SocketFolders::new(vec![folders.registry.clone(), folders.device_plugins.clone()]);
    let (mut files, mut silence) = (BTreeSet::new(), SILENCE);
    // Asking is not cheap: the kubelet tells of all pods.
    let (mut pods, mut ask_at) = (None, Instant::now());
    let (mut answered, mut leaving) = (BTreeSet::new(), BTreeMap::new());
    loop {
        watched.watch()?;
        let failed = |source| ServeError::Rivals { path: folders.registry.clone(), source };
        let answers = folders.knock(ours).map_err(failed)?;
        if files != answers.files {
            (files, silence, ask_at) = (answers.files, SILENCE, Instant::now());
        }
        let mut ends: Vec<std::pin::Pin<Box<dyn Future<Output = ()> + Send>>> = Vec::new();
        let mut found = BTreeSet::new();
        for (rival, connection) in answers.answering {
            found.insert(rival);
            match connection.map(UnixStream::from_std) {
                Some(connection) => ends.push(Box::pin(ended(connection.map_err(failed)?))),
                None => ends.push(Box::pin(sleep(PAUSE))),
            }
        }
        let now = Instant::now();
        for gone in answered.difference(&found) {
            leaving.insert(Rival::clone(gone), now + LEAVING);
        }
        leaving.retain(|rival, until| *until > now && !found.contains(rival));
        answered.clone_from(&found);
        for (rival, until) in &leaving {
            found.insert(rival.clone());
            ends.push(Box::pin(sleep_until(*until)));
        }
        if ask_at <= now {
            pods = folders.plugins_pods().await?;
            ask_at = Instant::now() + PAUSE;
        }
        if let Some(pods) = &pods {
            found.insert(pods.clone());
            ends.push(Box::pin(sleep_until(ask_at)));
        }
        tell(rivals, found.into_iter().collect());
        let end = async {
            if ends.is_empty() {
                std::future::pending::<()>().await;
            }
            select_all(ends).await;
        };
        tokio::select! {
            changed = watched.changed() => changed?,
            // It may have left pods.
            () = end => ask_at = Instant::now(),
            () = sleep(silence), if answers.is_any_silent => silence = (silence * 2).min(LONGEST_SILENCE),
        }
    }
}

fn tell(rivals: &watch::Sender<Option<Arc<[Rival]>>>, found: Vec<Rival>) {
    rivals.send_if_modified(|last| {
        let changed = last.as_deref() != Some(&found);
        if changed {
            for rival in found.iter().filter(|rival| last.iter().all(|last| !last.contains(rival))) {
                warn!(rival = %rival, "somebody else hands out the GPUs");
            }
            *last = Some(found.into());
        }
        changed
    });
}

/// Returns when the other side of a connection is closed: it ended, or it does
/// not wait for us any more.
async fn ended(mut stream: UnixStream) {
    let mut buffer = [0; 256];
    while stream.read(&mut buffer).await.is_ok_and(|length| length > 0) {}
    sleep(SPACING).await;
}
