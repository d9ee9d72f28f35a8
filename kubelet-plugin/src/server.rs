//! What the kubelet calls: two sockets, served, and made anew when they are
//! gone. What keeps one from being made is said, and tried again.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tracing::{info, warn};

use crate::health;
use crate::plugin::{Plugin, PluginConfig};
use crate::proto::dra_v1::dra_plugin_server::DraPluginServer as V1;
use crate::proto::dra_v1beta1::dra_plugin_server::DraPluginServer as V1Beta1;
use crate::proto::health_v1::dra_resource_health_server::DraResourceHealthServer as HealthV1;
use crate::proto::health_v1alpha1::dra_resource_health_server::DraResourceHealthServer as HealthV1Alpha1;
use crate::proto::registration::registration_server::RegistrationServer;
use crate::registration::{Registration, Service};
use crate::socket::{self, SocketFile, SocketFolders};

/// How long the kubelet has to register before the socket is made anew.
const REGISTRATION_TIME: Duration = Duration::from_secs(30);
/// When a socket that could not be made is tried again, if nothing happens in
/// its folder before.
const RETRY: Duration = Duration::from_secs(10);

/// The longest path of a socket: `sun_path` less its end, see unix(7).
const MAX_PATH: usize = 107;

/// Why something cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// A socket cannot be made.
    #[error("the socket {} cannot be made", path.display())]
    Bind {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A folder cannot be watched.
    #[error("the folder {} cannot be watched", path.display())]
    Watch {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A server ended by itself.
    #[error("the server on {} ended", path.display())]
    Ended {
        /// On which socket.
        path: PathBuf,
    },
    /// It cannot be told who else hands out the GPUs.
    #[error("who else hands out the GPUs cannot be told ({})", path.display())]
    Rivals {
        /// What was looked at.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It cannot be told which instance of the node publishes.
    #[error("which instance publishes cannot be told ({})", path.display())]
    Instances {
        /// The folder of the instances.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// Where the kubelet finds this instance.
///
/// A pod's UID is in both names: in a rolling update the former instance serves
/// until the kubelet knows the new one.
#[derive(Debug, Clone)]
pub(crate) struct SocketPaths {
    pub(crate) dra: PathBuf,
    pub(crate) registration: PathBuf,
}

impl SocketPaths {
    pub(crate) fn of(config: &PluginConfig) -> Self {
        let paths = |instance: Option<&str>| {
            // Both names contain `@`: see `DriverName::registration_socket`.
            let dra = instance
                .map_or_else(|| "dra@plugin.sock".to_owned(), |instance| format!("dra@{instance}.sock"));
            let registration = config.settings.driver.registration_socket(instance);
            Self { dra: config.plugin_dir.join(dra), registration: config.registry_dir.join(registration) }
        };
        let whole = paths(config.instance.as_deref());
        if whole.dra.as_os_str().len().max(whole.registration.as_os_str().len()) <= MAX_PATH {
            return whole;
        }
        // The last group of a UID is random enough for two instances.
        paths(config.instance.as_deref().and_then(|instance| instance.rsplit('-').next()))
    }
}

/// The two sockets, as far as they are served.
#[derive(Default)]
struct Sockets {
    dra: Option<Socket>,
    registration: Option<Socket>,
}

impl Sockets {
    /// The registration first: the kubelet must not call what is gone.
    async fn stop(&mut self) {
        for socket in [self.registration.take(), self.dra.take()].into_iter().flatten() {
            socket.stop().await;
        }
    }

    /// Returns when one of the servers ended by itself.
    async fn ended(&mut self) -> ServeError {
        let path = tokio::select! {
            path = ended(&mut self.dra) => path,
            path = ended(&mut self.registration) => path,
        };
        ServeError::Ended { path }
    }
}

async fn ended(socket: &mut Option<Socket>) -> PathBuf {
    match socket {
        Some(socket) => {
            socket.ended().await;
            socket.path.clone()
        }
        None => std::future::pending().await,
    }
}

impl Plugin {
    /// Serves the kubelet until `cancel`; then the sockets are removed.
    ///
    /// The DRA socket comes first: once registered, the kubelet may call.
    pub async fn serve(&self, cancel: CancellationToken) {
        let mut sockets = Sockets::default();
        let paths = SocketPaths::of(&self.inner.config);
        for path in [&paths.dra, &paths.registration] {
            socket::sweep(path);
        }
        loop {
            tokio::select! {
                () = cancel.cancelled() => break,
                Err(error) = self.keep_served(&mut sockets, &paths) => {
                    let error = crate::chain(&error);
                    warn!(error, "the kubelet cannot be served, trying again");
                    self.inner.registration.send_replace(Registration::Unserved(error));
                }
            }
            tokio::select! {
                () = cancel.cancelled() => break,
                () = SocketFolders::changed_within(RETRY, self.socket_folders()) => {}
            }
        }
        sockets.stop().await;
        self.inner.registration.send_replace(Registration::Waiting);
    }

    fn socket_folders(&self) -> Vec<PathBuf> {
        vec![self.inner.config.plugin_dir.clone(), self.inner.config.registry_dir.clone()]
    }

    async fn keep_served(&self, sockets: &mut Sockets, paths: &SocketPaths) -> Result<(), ServeError> {
        let mut folders = SocketFolders::new(self.socket_folders());
        let mut state = self.registration();
        let mut deadline = Instant::now() + REGISTRATION_TIME;
        loop {
            folders.watch()?;
            let is_dra_gone = !Socket::is_in_place(sockets.dra.as_ref());
            if is_dra_gone {
                if let Some(gone) = sockets.dra.take() {
                    warn!(socket = %paths.dra.display(), "the socket was removed; making it anew");
                    gone.stop().await;
                }
                sockets.dra = Some(self.serve_dra(&paths.dra)?);
                self.inner.serving.send_replace(true);
            }
            if is_dra_gone || !Socket::is_in_place(sockets.registration.as_ref()) {
                if let Some(gone) = sockets.registration.take() {
                    warn!(socket = %paths.registration.display(), "making the socket anew, for the kubelet to register");
                    gone.stop().await;
                }
                sockets.registration = Some(self.serve_registration(&paths.registration, &paths.dra)?);
                deadline = Instant::now() + REGISTRATION_TIME;
                // The folders may have gone with the sockets.
                continue;
            }
            let is_unregistered = *state.borrow_and_update() != Registration::Registered;
            tokio::select! {
                changed = folders.changed() => changed?,
                said = state.changed() => if said.is_err() { return Ok(()) },
                () = tokio::time::sleep_until(deadline), if is_unregistered => {
                    warn!("the kubelet has not registered this plugin; making the socket anew");
                    if let Some(unheard) = sockets.registration.take() {
                        unheard.stop().await;
                    }
                }
                error = sockets.ended() => {
                    sockets.stop().await;
                    return Err(error);
                }
            }
        }
    }

    fn serve_dra(&self, path: &Path) -> Result<Socket, ServeError> {
        let (v1, v1beta1) = (V1::new(self.clone()), V1Beta1::new(self.clone()));
        Socket::serve(path, |incoming, stop| {
            let health = health::Service::new(&self.inner.config.pool, self.health(), stop.clone());
            tokio::spawn(async move {
                Server::builder()
                    .add_service(v1)
                    .add_service(v1beta1)
                    .add_service(HealthV1::new(health.clone()))
                    .add_service(HealthV1Alpha1::new(health))
                    .serve_with_incoming_shutdown(incoming, stop.cancelled_owned())
                    .await
            })
        })
    }

    fn serve_registration(&self, path: &Path, endpoint: &Path) -> Result<Socket, ServeError> {
        self.inner.registration.send_replace(Registration::Waiting);
        let service = RegistrationServer::new(Service {
            driver: self.inner.config.settings.driver.to_string(),
            endpoint: endpoint.to_owned(),
            state: self.inner.registration.clone(),
        });
        Socket::serve(path, |incoming, stop| {
            tokio::spawn(async move {
                Server::builder()
                    .add_service(service)
                    .serve_with_incoming_shutdown(incoming, stop.cancelled_owned())
                    .await
            })
        })
    }
}

/// A served socket.
struct Socket {
    path: PathBuf,
    file: SocketFile,
    stop: CancellationToken,
    task: JoinHandle<Result<(), tonic::transport::Error>>,
}

impl Socket {
    fn serve(
        path: &Path,
        start: impl FnOnce(
            UnixListenerStream,
            CancellationToken,
        ) -> JoinHandle<Result<(), tonic::transport::Error>>,
    ) -> Result<Self, ServeError> {
        let (listener, file) = SocketFile::bind(path)?;
        let stop = CancellationToken::new();
        let task = start(UnixListenerStream::new(listener), stop.clone());
        info!(socket = %path.display(), "serving");
        Ok(Self { path: path.to_owned(), file, stop, task })
    }

    fn is_in_place(socket: Option<&Self>) -> bool {
        socket.is_some_and(|socket| socket.file.is_in_place())
    }

    async fn ended(&mut self) {
        let _ = (&mut self.task).await;
    }

    /// Removes the file and stops serving. Calls that run are not cancelled:
    /// their work is in tasks of its own.
    async fn stop(self) {
        let Self { path: _, file, stop, mut task } = self;
        // While its listener is open: see `SocketFile`.
        drop(file);
        stop.cancel();
        // Connections that the kubelet keeps open would hold it up for ever.
        if !task.is_finished() && tokio::time::timeout(Duration::from_secs(2), &mut task).await.is_err() {
            task.abort();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use crate::testing::Node;

    use super::*;

    #[test]
    fn the_sockets_of_a_pod_fit_into_a_socket_address() {
        let root = tempfile::tempdir().expect("a folder");
        let config = Node::new(root.path(), Vec::new()).expect("a node").config();
        let uid = "0f2c8f0e-5a43-4d5f-9c57-2b9d6f2f4f0d";
        let root = "/var/lib/kubelet";
        for (registry, ends) in
            [(root.to_owned(), uid), (format!("{root}{}", "/x".repeat(25)), "2b9d6f2f4f0d")]
        {
            let paths = SocketPaths::of(&PluginConfig {
                instance: Some(uid.to_owned()),
                plugin_dir: Path::new(root).join("plugins"),
                registry_dir: registry.into(),
                ..config.clone()
            });
            assert!(paths.dra.ends_with(format!("dra@{ends}.sock")), "{paths:?}");
            assert!(paths.registration.ends_with(format!("gpu.nvidia.com@{ends}-reg.sock")), "{paths:?}");
            assert!(paths.registration.as_os_str().len() <= MAX_PATH, "{paths:?}");
        }
    }
}
