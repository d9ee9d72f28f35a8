//! `status.sock`: whoever connects is sent the node's status as JSON, once.

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::time::Duration;

use kerf_kubelet_plugin::{ServeError, SocketFile, SocketFolders};
use tokio::io::AsyncWriteExt;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

/// A reader that does not read is not waited for longer.
const PATIENCE: Duration = Duration::from_secs(5);

/// A status being made.
pub(crate) type Answer = Pin<Box<dyn Future<Output = Vec<u8>> + Send>>;

/// When a socket that could not be made is tried again, if nothing happens in
/// its folder before.
const RETRY: Duration = Duration::from_secs(10);

/// Answers in a plugin's folder until cancelled, one reader at a time. The
/// socket is made anew when it is removed or replaced. Nothing else depends on
/// it: what keeps it from being made is logged, and waited for.
pub(crate) async fn serve(
    plugin_dir: PathBuf,
    status: impl Fn() -> Answer + Send + Sync,
    cancel: CancellationToken,
) {
    let path = plugin_dir.join("status.sock");
    let keep = async {
        let mut said = String::new();
        loop {
            let Err(error) = keep_answering(&plugin_dir, &path, &status).await else { return };
            let error = kerf_kubelet_plugin::chain(&error);
            if error != said {
                warn!(error, "`kerf status` is not answered");
                said = error;
            }
            SocketFolders::changed_within(RETRY, vec![plugin_dir.clone()]).await;
        }
    };
    tokio::select! {
        () = cancel.cancelled() => {}
        () = keep => {}
    }
}

async fn keep_answering(
    plugin_dir: &Path,
    path: &Path,
    status: &(impl Fn() -> Answer + Send + Sync),
) -> Result<(), ServeError> {
    let mut folders = SocketFolders::new(vec![plugin_dir.to_owned()]);
    let (mut listener, mut file) = SocketFile::bind(path)?;
    loop {
        folders.watch()?;
        if !file.is_in_place() {
            warn!(socket = %path.display(), "the socket was removed; making it anew");
            // A file is dropped before its listener: see `SocketFile`.
            let (new_listener, new_file) = SocketFile::bind(path)?;
            file = new_file;
            listener = new_listener;
            // Its folder may have gone with it.
            continue;
        }
        let mut stream = tokio::select! {
            changed = folders.changed() => {
                changed?;
                continue;
            }
            accepted = listener.accept() => match accepted {
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

#[cfg(test)]
mod tests {
    use std::fs;

    use rustix::fs::{CWD, RenameFlags, renameat_with};
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
        let task = tokio::spawn(serve(folder.clone(), answer, cancel.clone()));
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
        task.await.expect("no panic");
        assert!(!path.exists(), "it is removed in the end");
    }

    #[tokio::test]
    async fn a_folder_in_its_place_is_waited_for_unless_it_is_empty() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("status.sock");
        let cancel = CancellationToken::new();
        let answer = || -> Answer { Box::pin(async { b"status".to_vec() }) };
        fs::create_dir_all(path.join("full")).expect("a folder");
        let task = tokio::spawn(serve(folder.path().to_owned(), answer, cancel.clone()));
        fs::rename(&path, folder.path().join("moved")).expect("moved away");
        until_answered(&path, "status").await;
        // While it serves, as well.
        let moved = folder.path().join("moved");
        renameat_with(CWD, &moved, CWD, &path, RenameFlags::EXCHANGE).expect("exchanged");
        fs::rename(&path, folder.path().join("away")).expect("moved away");
        until_answered(&path, "status").await;
        assert!(!task.is_finished());
        cancel.cancel();
        task.await.expect("no panic");
        assert!(!path.exists(), "it is removed in the end");
    }
}
