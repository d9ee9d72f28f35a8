//! What a former run has left, or a process that is not ours any more: it would
//! be taken for the driver under test, or for what was made of it.

use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use tokio::net::UnixStream;

use crate::context::Context;
use crate::disk;
use crate::kubelet;

impl Context {
    /// Refuses what a former run has left, and says what to do. A small disk is
    /// taken away. Before [`Self::look`], and nothing is to be ended if it fails.
    pub async fn alone(&self) -> Result<()> {
        let node = &self.profile.node;
        let mut left = Vec::new();
        if self.profile.registry.is_some() && self.cluster.has_made_node().await? {
            left.push(format!(
                "the Node `{node}` is of another run: see that none is under way, and `kubectl delete node {node}`"
            ));
        }
        if self.starts() {
            left.extend(self.answering().await.into_iter().map(|(path, process)| {
                format!("{process} answers on {} before the driver was started: end it", path.display())
            }));
        }
        ensure!(
            left.is_empty(),
            "there is something that this run would take for its own: {}",
            left.join("; ")
        );
        if self.starts() {
            for folder in self.profile.state.iter().chain(&self.profile.cdi) {
                disk::reclaim(folder)?;
            }
        }
        Ok(())
    }

    /// An error if somebody answers for the driver though no instance runs.
    pub(crate) async fn silent(&self) -> Result<()> {
        if let Some((path, process)) = self.answering().await.first() {
            anyhow::bail!(
                "{process} still answers on {}, though the driver was ended: `start` must not lead out of its \
                 process group",
                path.display()
            );
        }
        Ok(())
    }

    /// The sockets on which the driver answers, and who that is.
    async fn answering(&self) -> Vec<(PathBuf, String)> {
        let Some(registry) = &self.profile.registry else { return Vec::new() };
        // The driver may make that folder.
        let found = kubelet::look(registry).await.unwrap_or_default();
        let ours =
            |found: &kubelet::Found| found.info.as_ref().is_ok_and(|info| info.name == self.profile.driver);
        let mut answering = Vec::new();
        for found in found.into_iter().filter(ours) {
            let process = listener(&found.path).await;
            answering.push((found.path, process));
        }
        answering
    }
}

async fn listener(path: &Path) -> String {
    let peer = async { UnixStream::connect(path).await?.peer_cred() }.await;
    let pid = peer.ok().and_then(|peer| peer.pid());
    pid.map_or("a process".to_owned(), |pid| format!("the process {pid}"))
}
