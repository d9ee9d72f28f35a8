//! The sockets: bound, watched, made anew, removed.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures::StreamExt;
use inotify::{Inotify, WatchMask};
use tokio::net::UnixListener;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tracing::{info, warn};

use crate::plugin::Plugin;
use crate::proto::dra_v1::dra_plugin_server::DraPluginServer as V1;
use crate::proto::dra_v1beta1::dra_plugin_server::DraPluginServer as V1Beta1;
use crate::proto::registration::registration_server::RegistrationServer;
use crate::registration::{Registration, Service};

/// The DRA socket's file name. It contains `@`: see
/// `DriverName::registration_socket`.
pub const DRA_SOCKET: &str = "dra@plugin.sock";

/// How long the kubelet has to register before the socket is made anew.
const REGISTRATION_TIME: Duration = Duration::from_secs(30);

/// Why the plugin cannot serve.
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
}

impl Plugin {
    /// Serves the kubelet until `cancel`; then the sockets are removed.
    ///
    /// The DRA socket comes first: once registered, the kubelet may call.
    pub async fn serve(&self, cancel: CancellationToken) -> Result<(), ServeError> {
        let config = &self.inner.config;
        let dra = config.plugin_dir.join(DRA_SOCKET);
        let registration = config.registry_dir.join(config.settings.driver.registration_socket());
        let mut changes = Changes::of(&[&config.plugin_dir, &config.registry_dir])?;
        let mut dra_server = self.serve_dra(&dra)?;
        self.inner.serving.send_replace(true);
        let mut registration_server = self.serve_registration(&registration, &dra)?;
        let mut state = self.registration();
        let mut deadline = Instant::now() + REGISTRATION_TIME;
        let result = loop {
            let is_unregistered = *state.borrow_and_update() != Registration::Registered;
            tokio::select! {
                () = cancel.cancelled() => break Ok(()),
                event = changes.next() => {
                    if let Err(error) = event {
                        break Err(error);
                    }
                    if !dra_server.is_in_place() {
                        warn!(socket = %dra.display(), "the socket was removed; making it anew");
                        dra_server.stop().await;
                        dra_server = self.serve_dra(&dra)?;
                        registration_server.stop().await;
                        registration_server = self.serve_registration(&registration, &dra)?;
                        deadline = Instant::now() + REGISTRATION_TIME;
                    } else if !registration_server.is_in_place() {
                        warn!(socket = %registration.display(), "the socket was removed; making it anew");
                        registration_server.stop().await;
                        registration_server = self.serve_registration(&registration, &dra)?;
                        deadline = Instant::now() + REGISTRATION_TIME;
                    }
                }
                said = state.changed() => if said.is_err() { break Ok(()) },
                () = tokio::time::sleep_until(deadline), if is_unregistered => {
                    warn!("the kubelet has not registered this plugin; making the socket anew");
                    deadline = Instant::now() + REGISTRATION_TIME;
                    registration_server.stop().await;
                    registration_server = self.serve_registration(&registration, &dra)?;
                }
                () = dra_server.ended() => break Err(ServeError::Ended { path: dra.clone() }),
                () = registration_server.ended() => break Err(ServeError::Ended { path: registration.clone() }),
            }
        };
        // The registration first: the kubelet must not call what is gone.
        registration_server.stop().await;
        dra_server.stop().await;
        self.inner.registration.send_replace(Registration::Waiting);
        result
    }

    fn serve_dra(&self, path: &Path) -> Result<Socket, ServeError> {
        let (v1, v1beta1) = (V1::new(self.clone()), V1Beta1::new(self.clone()));
        Socket::serve(path, |incoming, stop| {
            tokio::spawn(async move {
                Server::builder()
                    .add_service(v1)
                    .add_service(v1beta1)
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
    /// What identifies the file that was bound.
    inode: Option<u64>,
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
        let failed = |source| ServeError::Bind { path: path.to_owned(), source };
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).map_err(failed)?;
        }
        // One that a killed process left would refuse the bind.
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
            _ => {}
        }
        let listener = UnixListener::bind(path).map_err(failed)?;
        let stop = CancellationToken::new();
        let task = start(UnixListenerStream::new(listener), stop.clone());
        info!(socket = %path.display(), "serving");
        Ok(Self { path: path.to_owned(), inode: inode(path), stop, task })
    }

    fn is_in_place(&self) -> bool {
        inode(&self.path) == self.inode
    }

    async fn ended(&mut self) {
        let _ = (&mut self.task).await;
    }

    /// Stops serving and removes the file. Calls that run are not cancelled:
    /// their work is in tasks of its own.
    async fn stop(&mut self) {
        if self.is_in_place() {
            let _ = fs::remove_file(&self.path);
        }
        self.stop.cancel();
        // Connections that the kubelet keeps open would hold it up for ever.
        if !self.task.is_finished()
            && tokio::time::timeout(Duration::from_secs(2), &mut self.task).await.is_err()
        {
            self.task.abort();
        }
    }
}

fn inode(path: &Path) -> Option<u64> {
    use std::os::unix::fs::MetadataExt;
    fs::symlink_metadata(path).ok().map(|metadata| metadata.ino())
}

/// Removals in the folders of the sockets.
struct Changes {
    events: inotify::EventStream<[u8; 4096]>,
    path: PathBuf,
}

impl Changes {
    fn of(folders: &[&Path]) -> Result<Self, ServeError> {
        let first = folders.first().map(|folder| folder.to_path_buf()).unwrap_or_default();
        let inotify = Inotify::init().map_err(|source| ServeError::Watch { path: first.clone(), source })?;
        for folder in folders {
            let failed = |source| ServeError::Watch { path: folder.to_path_buf(), source };
            fs::create_dir_all(folder).map_err(failed)?;
            let mask = WatchMask::DELETE | WatchMask::MOVED_FROM | WatchMask::MOVED_TO | WatchMask::CREATE;
            inotify.watches().add(folder, mask).map_err(failed)?;
        }
        let events = inotify
            .into_event_stream([0; 4096])
            .map_err(|source| ServeError::Watch { path: first.clone(), source })?;
        Ok(Self { events, path: first })
    }

    async fn next(&mut self) -> Result<(), ServeError> {
        match self.events.next().await {
            Some(Ok(_)) => Ok(()),
            Some(Err(source)) => Err(ServeError::Watch { path: self.path.clone(), source }),
            None => Err(ServeError::Watch {
                path: self.path.clone(),
                source: io::ErrorKind::UnexpectedEof.into(),
            }),
        }
    }
}
