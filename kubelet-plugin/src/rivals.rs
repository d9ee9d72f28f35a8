//! Others on the node that hand out the same GPUs: NVIDIA's device plugin, or
//! another DRA driver, also one under our name.
//!
//! They are told by the sockets on which the kubelet reaches them. A killed
//! one leaves its file, so only one that answers counts; that it ends is told
//! by the end of the connection to it.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::future::select_all;
use kerf_dra_driver::names::DriverName;
use kerf_dra_driver::taint::Rivalry;
use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;
use tokio::sync::watch;
use tracing::warn;

use crate::plugin::PluginConfig;
use crate::server::ServeError;
use crate::socket::SocketFolders;

/// How long a connection may take. Who does not take it lives all the same.
const PATIENCE: Duration = Duration::from_secs(1);
/// When folders that cannot be watched are tried again.
const RETRY: Duration = Duration::from_secs(10);

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
}

impl RivalKind {
    /// The same, as a taint says it.
    pub(crate) fn rivalry(self) -> Rivalry {
        match self {
            Self::SameName | Self::OtherDriver => Rivalry::Driver,
            Self::DevicePlugin => Rivalry::DevicePlugin,
        }
    }
}

impl fmt::Display for Rival {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (who, remedy) = match self.kind {
            RivalKind::SameName => {
                ("another driver of kerf's name", "uninstall it, or give kerf another driver name")
            }
            RivalKind::OtherDriver => {
                ("another DRA driver for NVIDIA GPUs", "uninstall it, or keep it off kerf's nodes")
            }
            RivalKind::DevicePlugin => ("NVIDIA's device plugin", "keep it off kerf's nodes"),
        };
        let socket = self.socket.display();
        write!(
            f,
            "{who} hands out this node's GPUs too ({socket}): kerf gives out none until it ends; {remedy}"
        )
    }
}

/// The folders in which rivals have their sockets.
#[derive(Debug, Clone)]
pub struct RivalFolders {
    /// `/var/lib/kubelet/plugins_registry`.
    pub registry: PathBuf,
    /// `/var/lib/kubelet/device-plugins`.
    pub device_plugins: PathBuf,
}

impl RivalFolders {
    pub(crate) fn of(config: &PluginConfig) -> Self {
        Self { registry: config.registry_dir.clone(), device_plugins: config.device_plugins_dir.clone() }
    }

    /// The sockets that would be a rival's, whether or not anybody answers.
    pub fn candidates(&self, ours: &DriverName) -> Vec<Rival> {
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
        let plugin = |name: &str| name.starts_with("nvidia").then_some(RivalKind::DevicePlugin);
        let mut rivals = found(&self.registry, driver);
        rivals.extend(found(&self.device_plugins, plugin));
        rivals.sort();
        rivals
    }
}

fn found(folder: &Path, kind: impl Fn(&str) -> Option<RivalKind>) -> Vec<Rival> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| Some(Rival { kind: kind(entry.file_name().to_str()?)?, socket: entry.path() }))
        .collect()
}

/// Keeps what is known of rivals true. The first look is at once.
pub(crate) async fn keep(
    folders: RivalFolders,
    ours: DriverName,
    rivals: watch::Sender<Option<Arc<[Rival]>>>,
) {
    loop {
        let Err(error) = follow(&folders, &ours, &rivals).await else { return };
        warn!(error = crate::chain(&error), "whether others hand out the GPUs is looked at on a timer only");
        let _ = look(&folders, &ours, &rivals).await;
        tokio::time::sleep(RETRY).await;
    }
}

async fn follow(
    folders: &RivalFolders,
    ours: &DriverName,
    rivals: &watch::Sender<Option<Arc<[Rival]>>>,
) -> Result<(), ServeError> {
    let mut watched = SocketFolders::new(vec![folders.registry.clone(), folders.device_plugins.clone()])?;
    loop {
        watched.watch()?;
        let alive = look(folders, ours, rivals).await;
        let ends = async {
            if alive.is_empty() {
                std::future::pending::<()>().await;
            }
            select_all(alive.into_iter().map(|stream| Box::pin(ended(stream)))).await;
        };
        tokio::select! {
            changed = watched.changed() => changed?,
            () = ends => {}
        }
    }
}

/// Looks once; the connections to those that answer.
async fn look(
    folders: &RivalFolders,
    ours: &DriverName,
    rivals: &watch::Sender<Option<Arc<[Rival]>>>,
) -> Vec<Option<UnixStream>> {
    let (mut found, mut alive) = (Vec::new(), Vec::new());
    for rival in folders.candidates(ours) {
        match tokio::time::timeout(PATIENCE, UnixStream::connect(&rival.socket)).await {
            Ok(Err(error)) if !is_busy(&error) => continue,
            connected => alive.push(connected.ok().and_then(Result::ok)),
        }
        found.push(rival);
    }
    rivals.send_if_modified(|last| {
        let changed = last.as_deref() != Some(&found);
        if changed {
            for rival in &found {
                warn!(rival = %rival, "somebody else hands out the GPUs");
            }
            *last = Some(found.into());
        }
        changed
    });
    alive
}

/// Whether somebody listens who does not take connections now.
fn is_busy(error: &std::io::Error) -> bool {
    error.kind() == std::io::ErrorKind::WouldBlock
}

/// Returns when the other side of a connection is closed: it ended, or it does
/// not wait for us any more. Without a connection, after a while.
async fn ended(stream: Option<UnixStream>) {
    let Some(mut stream) = stream else { return tokio::time::sleep(RETRY).await };
    let mut buffer = [0; 256];
    while let Ok(length) = stream.read(&mut buffer).await {
        if length == 0 {
            break;
        }
    }
    // Whoever closes connections at once is not asked in a loop.
    tokio::time::sleep(PATIENCE).await;
}
