//! Others who hand out the same GPUs: nothing is given out beside them.

use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kerf_dra_driver::inventory::Inventory;
use kerf_kubelet_plugin::proto::podresources as wire;
use kerf_kubelet_plugin::proto::podresources::pod_resources_lister_server::{
    PodResourcesLister, PodResourcesListerServer,
};
use kerf_kubelet_plugin::testing::{Fuse, Node};
use kerf_kubelet_plugin::{Channels, Instances, NodeLayout, Owner, Plugin, Rival, Stored};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, listen, socket};
use tokio::sync::watch;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;

use super::node;

/// Generous: it is reached only by a failure.
const LIMIT: Duration = Duration::from_mins(1);

/// The values of the taint `rival` of all devices, and how many have none.
fn taints(layout: &NodeLayout) -> (Vec<String>, usize) {
    let slices = layout.slices.iter().map(|slice| slice.unpack().unwrap());
    let devices = slices.flat_map(|slice| slice.devices.into_iter().flatten());
    let (mut values, mut without) = (Vec::new(), 0);
    for device in devices {
        let taints = device.taints.iter().flatten();
        match taints.into_iter().find(|taint| taint.key == "gpu.nvidia.com/rival") {
            Some(taint) => values.extend(taint.value.clone()),
            None => without += 1,
        }
    }
    values.sort_unstable();
    values.dedup();
    (values, without)
}

/// A kubelet whose pods have a device plugin's GPUs, or not.
struct Kubelet(Arc<AtomicBool>);

#[tonic::async_trait]
impl PodResourcesLister for Kubelet {
    async fn list(
        &self,
        _: tonic::Request<wire::ListPodResourcesRequest>,
    ) -> Result<tonic::Response<wire::ListPodResourcesResponse>, tonic::Status> {
        let gpu = wire::ContainerDevices {
            resource_name: "nvidia.com/gpu".to_owned(),
            device_ids: vec!["GPU-0".to_owned()],
        };
        let other = wire::ContainerDevices { resource_name: "example.com/gpu".to_owned(), ..gpu.clone() };
        let devices = if self.0.load(Ordering::SeqCst) { vec![other, gpu] } else { vec![other] };
        let container = wire::ContainerResources { devices, ..wire::ContainerResources::default() };
        let pod = wire::PodResources { containers: vec![container], ..wire::PodResources::default() };
        Ok(tonic::Response::new(wire::ListPodResourcesResponse { pod_resources: vec![pod] }))
    }
}

/// An owner that runs, and what it says.
pub(super) struct Running {
    pub(super) plugin: Plugin,
    pub(super) node: Node,
    pub(super) layout: watch::Receiver<Option<Arc<NodeLayout>>>,
    pub(super) trouble: watch::Receiver<Option<String>>,
    inventory: watch::Receiver<Option<Arc<Inventory>>>,
    rivals: watch::Receiver<Option<Arc<[Rival]>>>,
    pub(super) cancel: CancellationToken,
    pub(super) task: tokio::task::JoinHandle<()>,
    /// What it has the other end of.
    pub(super) stored: watch::Sender<Stored>,
}

impl Running {
    async fn start(root: &tempfile::TempDir) -> Self {
        Self::on(node(root)).await
    }

    /// The owner of a new process on a node.
    pub(super) async fn on(node: Node) -> Self {
        let stored = watch::Sender::new(Stored::default());
        let channels = Channels {
            inventory: watch::Sender::new(None),
            layout: watch::Sender::new(None),
            trouble: watch::Sender::new(None),
            rivals: watch::Sender::new(None),
            stored: stored.subscribe(),
        };
        let (layout, trouble) = (channels.layout.subscribe(), channels.trouble.subscribe());
        let (inventory, rivals) = (channels.inventory.subscribe(), channels.rivals.subscribe());
        let plugin = node.plugin(&Fuse::none()).unwrap();
        let lead = Instances::join(&node.config().plugin_dir).unwrap().lead().await.unwrap();
        let owner = Owner::new(plugin.clone(), channels, lead).unwrap();
        let cancel = CancellationToken::new();
        let task = tokio::spawn(owner.run(cancel.clone()));
        Self { plugin, node, layout, trouble, inventory, rivals, cancel, task, stored }
    }
}

#[tokio::test]
async fn a_rival_whose_file_is_there_before_it_answers_is_seen_when_it_does() {
    let root = tempfile::tempdir().unwrap();
    let mut owner = Running::start(&root).await;
    let none = |rivals: &Option<Arc<[Rival]>>| rivals.as_deref().is_some_and(<[Rival]>::is_empty);
    tokio::time::timeout(LIMIT, owner.rivals.wait_for(none)).await.unwrap().unwrap();

    let path = root.path().join("device-plugins/nvidia-gpu.sock");
    let socket = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
    bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    let seen = |path: PathBuf| {
        move |rivals: &Option<Arc<[Rival]>>| rivals.iter().any(|all| all.iter().any(|one| one.socket == path))
    };
    // That this one is seen tells that the other was looked at.
    let later = root.path().join("device-plugins/nvidia-later.sock");
    let _later = UnixListener::bind(&later).unwrap();
    tokio::time::timeout(LIMIT, owner.rivals.wait_for(seen(later))).await.unwrap().unwrap();
    listen(&socket, 1).unwrap();
    tokio::time::timeout(LIMIT, owner.rivals.wait_for(seen(path))).await.unwrap().unwrap();
    owner.cancel.cancel();
    owner.task.await.unwrap();
}

#[tokio::test]
async fn beside_a_rival_nothing_is_published_and_what_was_published_is_not_given_out() {
    let root = tempfile::tempdir().unwrap();
    for folder in ["device-plugins", "registry"] {
        std::fs::create_dir(root.path().join(folder)).unwrap();
    }
    let bind = |path: &str| UnixListener::bind(root.path().join(path)).unwrap();
    let plugin = bind("device-plugins/nvidia-gpu.sock");
    // Files that dead ones left, another vendor's plugin, and our own socket.
    drop(bind("registry/gpu.nvidia.com-dead-reg.sock"));
    let _others = [bind("device-plugins/example.sock"), bind("registry/gpu.nvidia.com@reg.sock")];

    let Running { mut layout, mut trouble, mut inventory, cancel, task, stored: _stored, .. } =
        Running::start(&root).await;

    let says = |text: &'static str| {
        move |trouble: &Option<String>| trouble.as_deref().is_some_and(|trouble| trouble.contains(text))
    };
    let told = tokio::time::timeout(LIMIT, trouble.wait_for(says("NVIDIA's device plugin hands out")));
    told.await.unwrap().unwrap();
    tokio::time::timeout(LIMIT, inventory.wait_for(Option::is_some)).await.unwrap().unwrap();
    let empty = |layout: &Option<Arc<NodeLayout>>| layout.as_deref().is_some_and(|all| all.slices.is_empty());
    tokio::time::timeout(LIMIT, layout.wait_for(empty)).await.unwrap().unwrap();

    // It is killed: its file stays.
    drop(plugin);
    let published =
        tokio::time::timeout(LIMIT, layout.wait_for(|layout| !empty(layout))).await.unwrap().unwrap().clone();
    let (values, without) = taints(&published.unwrap());
    assert!(values.is_empty() && without > 0, "{values:?}");
    assert_eq!(*trouble.borrow_and_update(), None);

    let driver = bind("registry/gpu.nvidia.com-5b4ba64e-reg.sock");
    let tainted = |layout: &Option<Arc<NodeLayout>>| {
        layout.as_deref().is_some_and(|layout| taints(layout) == (vec!["driver".to_owned()], 0))
    };
    tokio::time::timeout(LIMIT, layout.wait_for(tainted)).await.unwrap().unwrap();
    let told = tokio::time::timeout(LIMIT, trouble.wait_for(says("another driver of kerf's name")));
    told.await.unwrap().unwrap();
    drop(driver);
    let free = |layout: &Option<Arc<NodeLayout>>| {
        layout.as_deref().is_some_and(|layout| taints(layout).0.is_empty())
    };
    tokio::time::timeout(LIMIT, layout.wait_for(free)).await.unwrap().unwrap();

    // Pods outlive the plugin that gave them their GPUs.
    let kubelet = Kubelet(Arc::new(AtomicBool::new(true)));
    let has = Arc::clone(&kubelet.0);
    let listener = tokio::net::UnixListener::bind(root.path().join("pod-resources.sock")).unwrap();
    let service = PodResourcesListerServer::new(kubelet);
    let server = tonic::transport::Server::builder().add_service(service);
    let server = tokio::spawn(server.serve_with_incoming(UnixListenerStream::new(listener)));
    let look_again = |name: &str| std::fs::write(root.path().join("registry").join(name), "").unwrap();
    look_again("one");
    let tainted = |layout: &Option<Arc<NodeLayout>>| {
        layout.as_deref().is_some_and(|layout| taints(layout) == (vec!["device-plugin".to_owned()], 0))
    };
    tokio::time::timeout(LIMIT, layout.wait_for(tainted)).await.unwrap().unwrap();
    let told = tokio::time::timeout(LIMIT, trouble.wait_for(says("that a device plugin gave them")));
    told.await.unwrap().unwrap();
    has.store(false, Ordering::SeqCst);
    look_again("two");
    tokio::time::timeout(LIMIT, layout.wait_for(free)).await.unwrap().unwrap();
    server.abort();
    cancel.cancel();
    task.await.unwrap();
}
