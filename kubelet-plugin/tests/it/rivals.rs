//! Others who hand out the same GPUs: nothing is given out beside them.

use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::Duration;

use kerf_kubelet_plugin::testing::Fuse;
use kerf_kubelet_plugin::{Channels, NodeLayout, Owner, Stored};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::node;

/// Generous: it is reached only by a failure.
const LIMIT: Duration = Duration::from_mins(1);

/// The values of the taint `rival` of all devices, and how many have none.
fn taints(layout: &NodeLayout) -> (Vec<String>, usize) {
    let devices = layout.slices.iter().flat_map(|slice| slice.devices.iter().flatten());
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

#[tokio::test]
async fn beside_a_rival_nothing_is_published_and_what_was_published_is_not_given_out() {
    let root = tempfile::tempdir().unwrap();
    let node = node(&root);
    for folder in ["device-plugins", "registry"] {
        std::fs::create_dir(root.path().join(folder)).unwrap();
    }
    let bind = |path: &str| UnixListener::bind(root.path().join(path)).unwrap();
    let plugin = bind("device-plugins/nvidia-gpu.sock");
    // Files that dead ones left, another vendor's plugin, and our own socket.
    drop(bind("registry/gpu.nvidia.com-dead-reg.sock"));
    let _others = [bind("device-plugins/example.sock"), bind("registry/gpu.nvidia.com@reg.sock")];

    let stored = watch::Sender::new(Stored::default());
    let channels = Channels {
        inventory: watch::Sender::new(None),
        layout: watch::Sender::new(None),
        trouble: watch::Sender::new(None),
        rivals: watch::Sender::new(None),
        stored: stored.subscribe(),
    };
    let (mut layout, mut trouble) = (channels.layout.subscribe(), channels.trouble.subscribe());
    let mut inventory = channels.inventory.subscribe();
    let owner = Owner::new(node.plugin(&Fuse::none()).unwrap(), channels).unwrap();
    let cancel = CancellationToken::new();
    let task = tokio::spawn(owner.run(cancel.clone()));

    let says = |text: &'static str| {
        move |trouble: &Option<String>| trouble.as_deref().is_some_and(|trouble| trouble.contains(text))
    };
    let told = tokio::time::timeout(LIMIT, trouble.wait_for(says("NVIDIA's device plugin hands out")));
    told.await.unwrap().unwrap();
    tokio::time::timeout(LIMIT, inventory.wait_for(Option::is_some)).await.unwrap().unwrap();
    assert!(layout.borrow().is_none(), "nothing was published before it was there");

    // It is killed: its file stays.
    drop(plugin);
    let published =
        tokio::time::timeout(LIMIT, layout.wait_for(Option::is_some)).await.unwrap().unwrap().clone();
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
    cancel.cancel();
    task.await.unwrap();
}
