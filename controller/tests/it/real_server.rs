//! Layouts for nodes of 1 to 64 GPUs on a real API server. It runs where
//! `KERF_TEST_KUBECONFIG` names a cluster on which Nodes and `ResourceSlice`s
//! may be made, and makes them under names of its own.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kerf_controller::diff::same_spec;
use kerf_controller::{DesiredPools, Identity, Phase, Publisher};
use kerf_dra_driver::fixtures::{self, Model};
use kerf_dra_driver::layout::layout;
use kerf_dra_driver::model::{GpuModel, Settings};
use kerf_dra_driver::published::{self, GpuRecord};
use kerf_dra_driver::taint::Conditions;
use kube::api::{Api, DeleteParams, ListParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

const LIMIT: Duration = Duration::from_mins(2);

async fn client() -> Option<kube::Client> {
    let Ok(path) = std::env::var("KERF_TEST_KUBECONFIG") else {
        eprintln!("skipped: KERF_TEST_KUBECONFIG names no cluster");
        return None;
    };
    let kubeconfig = Kubeconfig::read_from(path).unwrap();
    let options = KubeConfigOptions::default();
    let config = kube::Config::from_custom_kubeconfig(kubeconfig, &options).await.unwrap();
    Some(kube::Client::try_from(config).unwrap())
}

/// What a node with so many H100s publishes.
fn desired(node: &str, gpus: u8) -> DesiredPools {
    let settings = Settings { node: node.to_owned(), ..fixtures::settings() };
    let gpus = (0..gpus).map(|index| fixtures::gpu(Model::H100, &format!("0000:{index:02x}:00.0")));
    let inventory = fixtures::inventory(gpus);
    let nothing_held = BTreeSet::new();
    let records: Vec<GpuRecord> = inventory
        .gpus
        .iter()
        .map(|gpu| {
            let model = GpuModel::of(&settings, &inventory, gpu, &[]);
            published::merge(gpu.pci, None, Some(&model), &nothing_held).unwrap()
        })
        .collect();
    layout(&settings, &records, &Conditions::default()).into_iter().collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_real_server_takes_and_keeps_the_slices_of_1_8_9_16_and_64_gpus() {
    let Some(client) = client().await else { return };
    let nodes: Api<Node> = Api::all(client.clone());
    let slices: Api<ResourceSlice> = Api::all(client.clone());
    let driver: kerf_dra_driver::names::DriverName = "gpu.nvidia.com".parse().unwrap();
    for gpus in [1, 8, 9, 16, 64] {
        let node = format!("kerf-test-{}-{gpus}", std::process::id());
        let object: Node = serde_json::from_value(serde_json::json!({"metadata": {"name": node}})).unwrap();
        nodes.create(&PostParams::default(), &object).await.unwrap();

        let desired = Arc::new(desired(&node, gpus));
        let (_desired_sender, desired_receiver) = watch::channel(Some(desired.clone()));
        let (_may_publish, may_publish) = watch::channel(true);
        let identity = Identity { driver: driver.clone(), node: node.clone() };
        let (publisher, mut status) = Publisher::new(client.clone(), identity, desired_receiver, may_publish);
        let cancel = CancellationToken::new();
        let begun = Instant::now();
        let task = tokio::spawn(publisher.run(cancel.clone()));
        let last = status.clone();
        let stored = status.wait_for(|status| status.phase == Phase::Stored && status.stored.is_some());
        let found = tokio::time::timeout(LIMIT, stored).await;
        let found = found.unwrap_or_else(|_| panic!("{gpus} GPUs: {:#?}", last.borrow())).unwrap().clone();
        let elapsed = begun.elapsed();
        cancel.cancel();
        task.await.unwrap();
        assert!(found.dropped.is_empty(), "{:?}", found.dropped);

        let selector = format!("spec.nodeName={node},spec.driver={driver}");
        let mut live = slices.list(&ListParams::default().fields(&selector)).await.unwrap().items;
        live.sort_by(|left, right| left.metadata.name.cmp(&right.metadata.name));
        let mut pools: BTreeMap<&str, Vec<&ResourceSlice>> = BTreeMap::new();
        for slice in &live {
            pools.entry(&slice.spec.pool.name).or_default().push(slice);
        }
        for pool in desired.pools() {
            let stored = &pools[pool.name()];
            assert_eq!(stored.len(), pool.slices().len());
            for (stored, sent) in stored.iter().zip(pool.slices()) {
                let mut sent = sent.clone();
                sent.pool = stored.spec.pool.clone();
                assert!(same_spec(&sent, &stored.spec), "{sent:#?} became {:#?}", stored.spec);
            }
        }
        eprintln!("{gpus} GPUs: {} slices stored in {elapsed:?}, {} writes", live.len(), found.writes);
        for slice in &live {
            slices.delete(slice.metadata.name.as_deref().unwrap(), &DeleteParams::default()).await.unwrap();
        }
        nodes.delete(&node, &DeleteParams::default()).await.unwrap();
    }
}
