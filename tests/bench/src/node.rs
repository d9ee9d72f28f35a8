//! The process that is measured, and its sockets.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use hyper_util::rt::TokioIo;
use kerf_kubelet_plugin::proto::dra_v1::dra_plugin_client::DraPluginClient;
use kerf_kubelet_plugin::proto::dra_v1::{Claim, NodePrepareResourcesRequest, NodeUnprepareResourcesRequest};
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};
use xtask::cluster::Cluster;

use crate::claims::Allocated;
use crate::figures::Times;

/// A running `kerf node`, with folders of its own: no kubelet finds it.
#[derive(Debug)]
pub(crate) struct Node {
    child: Child,
    root: tempfile::TempDir,
    pub(crate) started: Instant,
}

impl Node {
    /// `driver` is the root of the emulated driver.
    pub(crate) fn start(cluster: &Cluster, binary: &Path, name: &str, driver: &Path) -> Result<Self> {
        // Beside the cluster's state, so that it is the disk that is measured.
        let parent =
            cluster.kubeconfig().parent().map(Path::to_path_buf).context("a kubeconfig has a folder")?;
        let root = tempfile::Builder::new().prefix("k").tempdir_in(parent)?;
        for folder in ["plugins_registry", "plugins/gpu.nvidia.com", "cdi"] {
            fs::create_dir_all(root.path().join(folder))?;
        }
        let started = Instant::now();
        let child = Command::new(binary)
            .arg("node")
            .args(["--node-name", name, "--http-address", "127.0.0.1:0", "--log-level", "warn"])
            .arg("--kubelet-root")
            .arg(root.path())
            .arg("--cdi-root")
            .arg(root.path().join("cdi"))
            .arg("--hook-root")
            .arg(root.path().join("hook"))
            .arg("--driver-root")
            .arg(driver.join("driver"))
            .arg("--dev-root")
            .arg(driver.join("dev"))
            .arg("--proc-root")
            .arg(driver.join("proc"))
            .arg("--sys-root")
            .arg(driver.join("sys"))
            .env("KUBECONFIG", cluster.kubeconfig())
            .stderr(Stdio::inherit())
            .spawn()
            .context("kerf cannot be started")?;
        Ok(Self { child, root, started })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    fn plugin_dir(&self) -> PathBuf {
        self.root.path().join("plugins/gpu.nvidia.com")
    }

    /// Writing and syncing a small file, as often as given.
    pub(crate) fn bare_fsync(&self, times: usize) -> Result<Times> {
        let path = self.plugin_dir().join("bare-fsync");
        let mut figures = Times::default();
        for _ in 0..times {
            let started = Instant::now();
            let mut file = File::create(&path)?;
            file.write_all(&[b'x'; 1024])?;
            file.sync_all()?;
            figures.add(started.elapsed());
        }
        fs::remove_file(path)?;
        Ok(figures)
    }

    pub(crate) async fn plugin(&self) -> Result<Plugin> {
        let path = self.plugin_dir().join("dra@plugin.sock");
        let connect = tower::service_fn(move |_| {
            let path = path.clone();
            async move { UnixStream::connect(path).await.map(TokioIo::new) }
        });
        let channel = Endpoint::from_static("http://localhost").connect_with_connector(connect).await?;
        Ok(Plugin { client: DraPluginClient::new(channel) })
    }

    /// Ends it as a kubelet would.
    pub(crate) fn stop(mut self) -> Result<()> {
        Command::new("kill").arg(self.pid().to_string()).status()?;
        let status = self.child.wait()?;
        ensure!(status.success(), "kerf node ended with {status}");
        Ok(())
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // After an error; a stopped one is not there any more.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The plugin's socket.
#[derive(Debug, Clone)]
pub(crate) struct Plugin {
    client: DraPluginClient<Channel>,
}

/// How long both calls for a claim took.
#[derive(Debug)]
pub(crate) struct Round {
    pub(crate) prepare: Duration,
    pub(crate) unprepare: Duration,
}

impl Plugin {
    pub(crate) async fn round(&mut self, claim: &Allocated) -> Result<Round> {
        Ok(Round { prepare: self.prepare(claim).await?, unprepare: self.unprepare(claim).await? })
    }

    pub(crate) async fn prepare(&mut self, claim: &Allocated) -> Result<Duration> {
        let request = NodePrepareResourcesRequest { claims: vec![wire(claim)] };
        let started = Instant::now();
        let mut response = self.client.node_prepare_resources(request).await?.into_inner();
        let elapsed = started.elapsed();
        let answer = response.claims.remove(&claim.uid).context("the claim is not answered")?;
        if !answer.error.is_empty() {
            bail!("not prepared: {}", answer.error);
        }
        ensure!(!answer.devices.is_empty(), "prepared without a device");
        Ok(elapsed)
    }

    pub(crate) async fn unprepare(&mut self, claim: &Allocated) -> Result<Duration> {
        let request = NodeUnprepareResourcesRequest { claims: vec![wire(claim)] };
        let started = Instant::now();
        let mut response = self.client.node_unprepare_resources(request).await?.into_inner();
        let elapsed = started.elapsed();
        let answer = response.claims.remove(&claim.uid).context("the claim is not answered")?;
        ensure!(answer.error.is_empty(), "not unprepared: {}", answer.error);
        Ok(elapsed)
    }
}

fn wire(claim: &Allocated) -> Claim {
    Claim { namespace: claim.namespace.clone(), name: claim.name.clone(), uid: claim.uid.clone() }
}
