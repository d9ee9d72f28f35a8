//! Layouts for nodes of 1 to 64 GPUs on a real API server. It runs where
//! `KERF_TEST_KUBECONFIG` names a cluster on which Nodes and `ResourceSlice`s
//! may be made, and makes them under names of its own.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kerf_controller::diff::same_spec;
use kerf_controller::{DesiredPools, Identity, Phase, PublishStatus, Publisher};
use kerf_dra_driver::fixtures::{self, Model};
use kerf_dra_driver::layout::{PackedSlice, layout, layout_without_counters};
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
    // Built beside others, rustls has two kinds of cryptography and takes none.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let kubeconfig = Kubeconfig::read_from(path).unwrap();
    let options = KubeConfigOptions::default();
    let config = kube::Config::from_custom_kubeconfig(kubeconfig, &options).await.unwrap();
    Some(kube::Client::try_from(config).unwrap())
}

/// What a node with so many H100s publishes, with and without counters.
fn desired(node: &str, gpus: u8) -> [Arc<DesiredPools>; 2] {
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
    let conditions = Conditions::default();
    let full = layout(&settings, &records, &conditions);
    let plain = layout_without_counters(&settings, &records, &conditions, &nothing_held);
    [full, plain]
        .map(|slices| Arc::new(slices.iter().map(|slice| PackedSlice::pack(slice).unwrap()).collect()))
}

async fn until(
    status: &mut watch::Receiver<PublishStatus>,
    holds: impl FnMut(&PublishStatus) -> bool,
) -> PublishStatus {
    let last = status.clone();
    let waited = tokio::time::timeout(LIMIT, status.wait_for(holds)).await;
    waited.unwrap_or_else(|_| panic!("never: {:#?}", last.borrow())).unwrap().clone()
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

        let [full, plain] = desired(&node, gpus);
        let mut desired = full;
        let (sender, receiver) = watch::channel(Some(desired.clone()));
        let (_may_publish, may_publish) = watch::channel(true);
        let identity = Identity { driver: driver.clone(), node: node.clone() };
        let (publisher, mut status) = Publisher::new(client.clone(), identity, receiver, may_publish);
        let cancel = CancellationToken::new();
        let begun = Instant::now();
        let task = tokio::spawn(publisher.run(cancel.clone()));
        let selector = format!("spec.nodeName={node},spec.driver={driver}");
        let mine = ListParams::default().fields(&selector);
        let done = |status: &PublishStatus| matches!(status.phase, Phase::Stored | Phase::Withheld);
        let mut found = until(&mut status, done).await;
        if found.phase == Phase::Withheld {
            // A server without the gate: nothing stripped is left, and the
            // layout without counters is taken.
            eprintln!("{gpus} GPUs: {}", found.missing().unwrap_or_default());
            assert!(slices.list(&mine).await.unwrap().items.is_empty());
            desired = plain;
            sender.send_replace(Some(desired.clone()));
            found = until(&mut status, |status| status.phase == Phase::Stored).await;
        }
        let elapsed = begun.elapsed();
        assert!(found.dropped.is_empty(), "{:?}", found.dropped);

        let mut live = slices.list(&mine).await.unwrap().items;
        live.sort_by(|left, right| left.metadata.name.cmp(&right.metadata.name));
        let mut pools: BTreeMap<&str, Vec<&ResourceSlice>> = BTreeMap::new();
        for slice in &live {
            pools.entry(&slice.spec.pool.name).or_default().push(slice);
        }
        for pool in desired.pools() {
            let (stored, sent) = (&pools[pool.name()], pool.slices().unwrap());
            assert_eq!(stored.len(), sent.len());
            for (stored, mut sent) in stored.iter().zip(sent) {
                sent.pool = stored.spec.pool.clone();
                assert!(same_spec(&sent, &stored.spec), "{sent:#?} became {:#?}", stored.spec);
            }
        }
        eprintln!("{gpus} GPUs: {} slices stored in {elapsed:?}, {} writes", live.len(), found.writes);
        // A kubelet that wipes them all finds them back.
        let wiped = slices.delete_collection(&DeleteParams::default(), &mine).await.unwrap();
        drop(wiped);
        let begun = Instant::now();
        // The server deletes them one by one: some may be back, and taken to be
        // all right, before others are gone.
        loop {
            until(&mut status, |status| status.repairs > 0 && status.phase == Phase::Stored).await;
            let back = slices.list(&mine).await.unwrap().items.len();
            if back == live.len() {
                break;
            }
            assert!(begun.elapsed() < LIMIT, "{back} of {} slices are back", live.len());
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        eprintln!("{gpus} GPUs: back in {:?}", begun.elapsed());

        cancel.cancel();
        task.await.unwrap();
        for slice in &slices.list(&mine).await.unwrap().items {
            slices.delete(slice.metadata.name.as_deref().unwrap(), &DeleteParams::default()).await.unwrap();
        }
        nodes.delete(&node, &DeleteParams::default()).await.unwrap();
    }
}
