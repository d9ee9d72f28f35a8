//! What becomes right by itself.

use std::time::Duration;

use kerf_kubelet_plugin::proto::podresources as wire;
use kerf_kubelet_plugin::proto::podresources::pod_resources_lister_server::{
    PodResourcesLister, PodResourcesListerServer,
};
use kerf_kubelet_plugin::testing::{Fuse, claim, partition};
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status};

use super::{node, pci, prepare, unprepare, whole};

/// A kubelet whose pods use these claims.
struct Kubelet(Vec<&'static str>);

#[tonic::async_trait]
impl PodResourcesLister for Kubelet {
    async fn list(
        &self,
        _: Request<wire::ListPodResourcesRequest>,
    ) -> Result<Response<wire::ListPodResourcesResponse>, Status> {
        let dynamic_resources = self
            .0
            .iter()
            .map(|name| wire::DynamicResource {
                claim_name: (*name).to_owned(),
                claim_namespace: "ns".to_owned(),
                claim_resources: vec![wire::ClaimResource {
                    driver_name: "gpu.nvidia.com".to_owned(),
                    ..wire::ClaimResource::default()
                }],
            })
            .collect();
        let containers = vec![wire::ContainerResources { name: "main".to_owned(), dynamic_resources }];
        let pod = wire::PodResources { containers, ..wire::PodResources::default() };
        Ok(Response::new(wire::ListPodResourcesResponse { pod_resources: vec![pod] }))
    }
}

#[tokio::test]
async fn on_a_healthy_node_nothing_is_written() {
    let root = tempfile::tempdir().unwrap();
    let node = node(&root);
    node.claims.put(claim("a", &[("r", whole(3))]));
    node.claims.put(claim("b", &[("r", partition(pci(1), "1g.10gb", 4))]));
    let plugin = node.plugin(&Fuse::none()).unwrap();
    prepare(&plugin, "a").await.unwrap();
    prepare(&plugin, "b").await.unwrap();
    let fuse = Fuse::at(1, false);
    let readonly = node.plugin(&fuse).unwrap();
    readonly.reconcile_now().await;
    assert!(!fuse.is_dead());
}

#[tokio::test]
async fn after_a_reboot_specs_are_made_again_and_partitions_wait_for_the_kubelet() {
    let root = tempfile::tempdir().unwrap();
    let node = node(&root);
    node.claims.put(claim("gpu", &[("r", whole(3))]));
    node.claims.put(claim("mig", &[("r", partition(pci(1), "1g.10gb", 4))]));
    let plugin = node.plugin(&Fuse::none()).unwrap();
    prepare(&plugin, "gpu").await.unwrap();
    let before = prepare(&plugin, "mig").await.unwrap();
    drop(plugin);
    node.boot("boot-2").unwrap();
    std::fs::remove_dir_all(root.path().join("cdi")).unwrap();
    for gpu in &mut node.machine.lock().unwrap().inventory.gpus {
        gpu.mig.as_mut().unwrap().instances.clear();
    }
    // Somebody else's, with the id that ours had.
    node.machine.lock().unwrap().make_foreign(pci(1), 19, 0, true);

    let plugin = node.plugin(&Fuse::none()).unwrap();
    plugin.start().await.unwrap();
    assert_eq!(node.files("cdi"), ["k8s.gpu.nvidia.com-claim_gpu-uid.json"]);
    assert_eq!(plugin.journal().borrow().held().count(), 2, "both stay held");
    assert_eq!(prepare(&plugin, "mig").await.unwrap(), before);
    unprepare(&plugin, "mig").await.unwrap();
    assert_eq!(node.machine.lock().unwrap().instances(pci(1)).len(), 1);
}

#[tokio::test]
async fn a_spec_that_somebody_changed_or_removed_becomes_right_and_a_strange_one_goes() {
    let root = tempfile::tempdir().unwrap();
    let node = node(&root);
    node.claims.put(claim("c", &[("r", whole(3))]));
    let plugin = node.plugin(&Fuse::none()).unwrap();
    prepare(&plugin, "c").await.unwrap();
    let path = root.path().join("cdi/k8s.gpu.nvidia.com-claim_c-uid.json");
    let right = std::fs::read(&path).unwrap();
    std::fs::write(&path, "{}").unwrap();
    std::fs::write(root.path().join("cdi/k8s.gpu.nvidia.com-claim_left-over.json"), "{}").unwrap();
    std::fs::write(root.path().join("cdi/nvidia.json"), "{}").unwrap();
    plugin.reconcile_now().await;
    assert_eq!(std::fs::read(&path).unwrap(), right);
    assert_eq!(node.files("cdi"), ["k8s.gpu.nvidia.com-claim_c-uid.json", "nvidia.json"]);
}

#[tokio::test]
async fn a_claim_that_is_gone_for_ten_minutes_is_unprepared_unless_a_pod_may_use_it() {
    let root = tempfile::tempdir().unwrap();
    let node = node(&root);
    let plugin = node.plugin(&Fuse::none()).unwrap();
    for (name, start) in [("used", 4), ("unused", 5), ("there", 6)] {
        node.claims.put(claim(name, &[("r", partition(pci(1), "1g.10gb", start))]));
        prepare(&plugin, name).await.unwrap();
    }
    node.claims.delete("ns", "used");
    node.claims.delete("ns", "unused");
    let entries = || plugin.journal().borrow().entries.len();
    let minutes = async |minutes: u64| {
        tokio::time::pause();
        tokio::time::advance(Duration::from_secs(minutes * 60)).await;
        tokio::time::resume();
    };
    plugin.reconcile_now().await;
    minutes(9).await;
    plugin.reconcile_now().await;
    minutes(2).await;
    // The kubelet cannot be asked: nothing happens.
    plugin.reconcile_now().await;
    assert_eq!(entries(), 3);

    let listener = UnixListener::bind(root.path().join("pod-resources.sock")).unwrap();
    let service = PodResourcesListerServer::new(Kubelet(vec!["used"]));
    let kubelet = tokio::spawn(
        tonic::transport::Server::builder()
            .add_service(service)
            .serve_with_incoming(UnixListenerStream::new(listener)),
    );
    plugin.reconcile_now().await;
    kubelet.abort();
    let left: Vec<String> = plugin.journal().borrow().entries.keys().map(ToString::to_string).collect();
    assert_eq!(left, ["there-uid", "used-uid"]);
    assert_eq!(node.machine.lock().unwrap().instances(pci(1)).len(), 2);
}

#[tokio::test]
async fn a_lost_journal_is_written_anew_before_anything_is_called_foreign() {
    let root = tempfile::tempdir().unwrap();
    let node = node(&root);
    node.machine.lock().unwrap().make_foreign(pci(1), 19, 0, true);
    node.claims.put(claim("c", &[("r", partition(pci(1), "1g.10gb", 4))]));
    node.claims.put(claim("fixed", &[("r", partition(pci(1), "1g.10gb", 0))]));
    let plugin = node.plugin(&Fuse::none()).unwrap();
    let before = prepare(&plugin, "c").await.unwrap();
    prepare(&plugin, "fixed").await.unwrap();
    drop(plugin);
    std::fs::remove_dir_all(root.path().join("plugin")).unwrap();

    let plugin = node.plugin(&Fuse::none()).unwrap();
    plugin.start().await.unwrap();
    let foreign = plugin.observe().await.unwrap().foreign;
    assert_eq!(foreign[&pci(1)].len(), 1);
    assert_eq!(foreign[&pci(1)][0].placement.start, 0);
    assert_eq!(prepare(&plugin, "c").await.unwrap(), before);
    unprepare(&plugin, "c").await.unwrap();
    unprepare(&plugin, "fixed").await.unwrap();
    assert_eq!(node.machine.lock().unwrap().instances(pci(1)).len(), 1);
}

#[tokio::test]
async fn an_entry_that_cannot_be_read_closes_its_gpu_only_and_only_until_its_claim_is_served() {
    let root = tempfile::tempdir().unwrap();
    let node = node(&root);
    node.claims.put(claim("c", &[("r", whole(3))]));
    node.claims.put(claim("same", &[("r", whole(3))]));
    node.claims.put(claim("other", &[("r", whole(4))]));
    let plugin = node.plugin(&Fuse::none()).unwrap();
    let first = prepare(&plugin, "c").await.unwrap();
    drop(plugin);
    let file = root.path().join("plugin/state/claims/c-uid_0000-03-00-0.json");
    std::fs::write(&file, "{\"sha256\":\"").unwrap();
    std::fs::remove_dir_all(root.path().join("cdi")).unwrap();

    let plugin = node.plugin(&Fuse::none()).unwrap();
    plugin.start().await.unwrap();
    assert_eq!(node.files("plugin/state/quarantine"), ["c-uid_0000-03-00-0.json"]);
    let error = prepare(&plugin, "same").await.unwrap_err();
    assert!(error.contains("in quarantine"), "{error}");
    prepare(&plugin, "other").await.unwrap();
    assert_eq!(prepare(&plugin, "c").await.unwrap(), first);
    assert!(node.files("plugin/state/quarantine").is_empty());
    unprepare(&plugin, "c").await.unwrap();
    prepare(&plugin, "same").await.unwrap();
}
