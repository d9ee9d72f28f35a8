//! The API server's side: a node, its slices, and claims that are allocated
//! by hand, as the scheduler would.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice, ResourceSliceSpec};
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use serde_json::json;
use xtask::cluster::Cluster;

use crate::figures::Times;

const DRIVER: &str = "gpu.nvidia.com";
const NAMESPACE: &str = "default";
/// Only a hang takes this long.
const LIMIT: Duration = Duration::from_mins(1);

#[derive(Debug)]
pub(crate) struct Claims {
    api: Api<ResourceClaim>,
    slices: Api<ResourceSlice>,
    node: String,
    pod: String,
    made: AtomicU64,
}

/// A claim that is allocated and reserved.
#[derive(Debug)]
pub(crate) struct Allocated {
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) uid: String,
}

impl Claims {
    pub(crate) async fn connect(cluster: &Cluster, node: &str) -> Result<Self> {
        let kubeconfig = Kubeconfig::read_from(cluster.kubeconfig())?;
        let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
        let client = Client::try_from(config)?;
        let object: Node = serde_json::from_value(json!({"metadata": {"name": node}}))?;
        let nodes: Api<Node> = Api::all(client.clone());
        if nodes.get_opt(node).await?.is_none() {
            nodes.create(&PostParams::default(), &object).await?;
        }
        // The controller manager takes reservations of pods away that are not
        // there. This one never runs.
        let pods: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": "bench"},
            "spec": {
                "schedulingGates": [{"name": "gpu.kerf.dev/bench"}],
                "containers": [{"name": "main", "image": "none"}],
            },
        }))?;
        let pod = match pods.get_opt("bench").await? {
            Some(pod) => pod,
            None => pods.create(&PostParams::default(), &pod).await?,
        };
        Ok(Self {
            pod: pod.metadata.uid.context("a created pod has a UID")?,
            api: Api::namespaced(client.clone(), NAMESPACE),
            slices: Api::all(client),
            node: node.to_owned(),
            made: AtomicU64::new(0),
        })
    }

    pub(crate) fn node(&self) -> &str {
        &self.node
    }

    fn ours(&self) -> ListParams {
        ListParams::default().fields(&format!("spec.nodeName={},spec.driver={DRIVER}", self.node))
    }

    pub(crate) async fn withdraw_all(&self) -> Result<()> {
        self.slices.delete_collection(&DeleteParams::default(), &self.ours()).await?;
        Ok(())
    }

    /// Waits until the pool is complete with all whole GPUs.
    pub(crate) async fn await_published(&self, started: Instant, gpus: usize) -> Result<Duration> {
        loop {
            let slices = self.slices.list(&self.ours()).await?.items;
            let elapsed = started.elapsed();
            let complete = slices.first().is_some_and(|slice| {
                usize::try_from(slice.spec.pool.resource_slice_count).is_ok_and(|count| count == slices.len())
            });
            if complete && whole_gpus(&slices).len() == gpus {
                return Ok(elapsed);
            }
            if elapsed > LIMIT {
                bail!("the slices are not stored after {} s", LIMIT.as_secs());
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// The names of all whole GPUs.
    pub(crate) async fn gpus(&self) -> Result<Vec<String>> {
        Ok(whole_gpus(&self.slices.list(&self.ours()).await?.items))
    }

    /// What is published.
    pub(crate) async fn published(&self) -> Result<Vec<ResourceSliceSpec>> {
        Ok(self.slices.list(&self.ours()).await?.items.into_iter().map(|slice| slice.spec).collect())
    }

    pub(crate) async fn allocate(&self, devices: &[impl AsRef<str>]) -> Result<Allocated> {
        let name = format!("bench-{}", self.made.fetch_add(1, Ordering::Relaxed));
        let claim: ResourceClaim = serde_json::from_value(json!({
            "metadata": {"name": name},
            "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": DRIVER}}]}},
        }))?;
        self.api.delete(&name, &DeleteParams::default()).await.ok();
        let claim = self.api.create(&PostParams::default(), &claim).await?;
        let pool = format!("{}/gpu", self.node);
        let result =
            |device: &str| json!({"request": "gpu", "driver": DRIVER, "pool": pool, "device": device});
        let results: Vec<_> = devices.iter().map(|device| result(device.as_ref())).collect();
        let consumer = json!({"resource": "pods", "name": "bench", "uid": self.pod});
        let status = json!({
            "status": {"allocation": {"devices": {"results": results}}, "reservedFor": [consumer]},
        });
        self.api.patch_status(&name, &PatchParams::default(), &Patch::Merge(&status)).await?;
        let uid = claim.metadata.uid.context("a created claim has a UID")?;
        Ok(Allocated { namespace: NAMESPACE.to_owned(), name, uid })
    }

    /// What the API server alone takes of a prepare, as often as given.
    pub(crate) async fn bare_get(&self, times: usize) -> Result<Times> {
        let claim = self.allocate(&["gpu-none"]).await?;
        let mut figures = Times::default();
        for _ in 0..times {
            let started = Instant::now();
            self.api.get(&claim.name).await?;
            figures.add(started.elapsed());
        }
        self.delete(&claim).await?;
        Ok(figures)
    }

    pub(crate) async fn delete(&self, claim: &Allocated) -> Result<()> {
        let released = json!({"status": {"allocation": null, "reservedFor": null}});
        self.api.patch_status(&claim.name, &PatchParams::default(), &Patch::Merge(&released)).await?;
        self.api.delete(&claim.name, &DeleteParams::default()).await?;
        Ok(())
    }
}

fn whole_gpus(slices: &[ResourceSlice]) -> Vec<String> {
    let devices = slices.iter().flat_map(|slice| slice.spec.devices.iter().flatten());
    devices.filter(|device| !device.name.contains("-mig-")).map(|device| device.name.clone()).collect()
}
