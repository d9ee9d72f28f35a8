//! `status.sock`: whoever connects is sent the node's status as JSON, once.

use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::UnixListener;
use tokio_util::sync::CancellationToken;
use tracing::debug;

/// A reader that does not read is not waited for longer.
const PATIENCE: Duration = Duration::from_secs(5);

/// A status being made.
pub(crate) type Answer = Pin<Box<dyn Future<Output = Vec<u8>> + Send>>;

/// The socket, removed with this value.
#[derive(Debug)]
pub(crate) struct StatusSocket {
    listener: UnixListener,
    path: PathBuf,
}

impl StatusSocket {
    /// Binds in a plugin's folder. What a killed process left there is replaced.
    pub(crate) fn bind(plugin_dir: &Path) -> io::Result<Self> {
        let path = plugin_dir.join("status.sock");
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        Ok(Self { listener: UnixListener::bind(&path)?, path })
    }

    /// Answers until cancelled, one reader at a time.
    pub(crate) async fn serve(self, status: impl Fn() -> Answer, cancel: CancellationToken) {
        loop {
            let mut stream = tokio::select! {
                () = cancel.cancelled() => return,
                accepted = self.listener.accept() => match accepted {
                    Ok((stream, _)) => stream,
                    Err(error) => {
                        debug!(%error, "a reader of the status was lost");
                        tokio::time::sleep(Duration::from_millis(100)).await;
                        continue;
                    }
                },
            };
            let answer = status().await;
            let write = async {
                stream.write_all(&answer).await?;
                stream.shutdown().await
            };
            if let Ok(Err(error)) = tokio::time::timeout(PATIENCE, write).await {
                debug!(%error, "a reader of the status went away");
            }
        }
    }
}

impl Drop for StatusSocket {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}
