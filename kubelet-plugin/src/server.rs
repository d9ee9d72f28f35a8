//! What the kubelet calls: two sockets, served, and made anew when they are
//! gone.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

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
use crate::socket::{SocketFile, SocketFolders};

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
        let mut folders = SocketFolders::new(vec![config.plugin_dir.clone(), config.registry_dir.clone()])?;
        let mut dra_server = self.serve_dra(&dra)?;
        self.inner.serving.send_replace(true);
        let mut registration_server = self.serve_registration(&registration, &dra)?;
        let mut state = self.registration();
        let mut deadline = Instant::now() + REGISTRATION_TIME;
        let result = loop {
            folders.watch()?;
            let is_dra_gone = !dra_server.file.is_in_place();
            if is_dra_gone {
                warn!(socket = %dra.display(), "the socket was removed; making it anew");
                dra_server.stop().await;
                dra_server = self.serve_dra(&dra)?;
            }
            if is_dra_gone || !registration_server.file.is_in_place() {
                warn!(socket = %registration.display(), "making the socket anew, for the kubelet to register");
                registration_server.stop().await;
                registration_server = self.serve_registration(&registration, &dra)?;
                deadline = Instant::now() + REGISTRATION_TIME;
                // The folders may have gone with the sockets.
                continue;
            }
            let is_unregistered = *state.borrow_and_update() != Registration::Registered;
            tokio::select! {
                () = cancel.cancelled() => break Ok(()),
                changed = folders.changed() => if changed.is_err() { break changed },
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
        Ok(Self { file, stop, task })
    }

    async fn ended(&mut self) {
        let _ = (&mut self.task).await;
    }

    /// Removes the file and stops serving. Calls that run are not cancelled:
    /// their work is in tasks of its own.
    async fn stop(self) {
        let Self { file, stop, mut task } = self;
        // While its listener is open: see `SocketFile`.
        drop(file);
        stop.cancel();
        // Connections that the kubelet keeps open would hold it up for ever.
        if !task.is_finished() && tokio::time::timeout(Duration::from_secs(2), &mut task).await.is_err() {
            task.abort();
        }
    }
}
