//! `status.sock`: whoever connects is sent the node's status as JSON, once.

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::time::Duration;

use kerf_kubelet_plugin::{ServeError, SocketFile, SocketFolders};
use tokio::io::AsyncWriteExt;
use tokio::net::UnixListener;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

/// A reader that does not read is not waited for longer.
const PATIENCE: Duration = Duration::from_secs(5);

/// A status being made.
pub(crate) type Answer = Pin<Box<dyn Future<Output = Vec<u8>> + Send>>;

/// The socket, removed with this value.
#[derive(Debug)]
pub(crate) struct StatusSocket {
    path: PathBuf,
    folders: SocketFolders,
    // Dropped before its listener: see `SocketFile`.
    file: SocketFile,
    listener: UnixListener,
}

impl StatusSocket {
    /// Binds in a plugin's folder. What a killed process left there is replaced.
    pub(crate) fn bind(plugin_dir: &Path) -> Result<Self, ServeError> {
        let path = plugin_dir.join("status.sock");
        let folders = SocketFolders::new(vec![plugin_dir.to_owned()])?;
        let (listener, file) = SocketFile::bind(&path)?;
        Ok(Self { path, folders, file, listener })
    }

    /// Answers until cancelled, one reader at a time. The socket is made anew
    /// when it is removed or replaced.
    pub(crate) async fn serve(
        mut self,
        status: impl Fn() -> Answer,
        cancel: CancellationToken,
    ) -> Result<(), ServeError> {
        loop {
            self.folders.watch()?;
            if !self.file.is_in_place() {
                warn!(socket = %self.path.display(), "the socket was removed; making it anew");
                (self.listener, self.file) = SocketFile::bind(&self.path)?;
                // Its folder may have gone with it.
                continue;
            }
            let mut stream = tokio::select! {
                () = cancel.cancelled() => return Ok(()),
                changed = self.folders.changed() => {
                    changed?;
                    continue;
                }
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

#[cfg(test)]
mod tests {
    use std::fs;

    use tokio::io::AsyncReadExt;
    use tokio::net::UnixStream;

    use super::*;

    /// Generous: it is reached only by a failure.
    const LIMIT: Duration = Duration::from_mins(1);

    /// What is read from the socket, once that is what is expected.
    async fn until_answered(path: &Path, expected: &str) {
        let answered = async {
            loop {
                let mut answer = String::new();
                if let Ok(mut stream) = UnixStream::connect(path).await {
                    let _ = stream.read_to_string(&mut answer).await;
                }
                if answer == expected {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(LIMIT, answered).await.expect("the socket answers");
    }

    #[tokio::test]
    async fn a_socket_that_is_removed_or_replaced_is_made_anew_and_so_is_its_folder() {
        let root = tempfile::tempdir().expect("a folder");
        let (folder, path) = (root.path().join("plugin"), root.path().join("plugin/status.sock"));
        let cancel = CancellationToken::new();
        let answer = || -> Answer { Box::pin(async { b"status".to_vec() }) };
        let socket = StatusSocket::bind(&folder).expect("binds");
        let task = tokio::spawn(socket.serve(answer, cancel.clone()));
        until_answered(&path, "status").await;
        fs::remove_file(&path).expect("removed");
        until_answered(&path, "status").await;
        fs::remove_file(&path).expect("removed");
        fs::write(&path, "no socket").expect("replaced");
        until_answered(&path, "status").await;
        for round in 0..2 {
            fs::rename(&folder, root.path().join(format!("moved-{round}"))).expect("moved away");
            until_answered(&path, "status").await;
        }
        cancel.cancel();
        task.await.expect("no panic").expect("no error");
        assert!(!path.exists(), "it is removed in the end");
    }

    #[tokio::test]
    async fn the_socket_of_a_newer_instance_stays_when_an_older_one_ends() {
        let root = tempfile::tempdir().expect("a folder");
        let older = StatusSocket::bind(root.path()).expect("binds");
        let _newer = StatusSocket::bind(root.path()).expect("binds");
        drop(older);
        UnixStream::connect(root.path().join("status.sock")).await.expect("the newer one listens");
    }
}
