//! The driver is upgraded under a kerf that runs: first its files, then what
//! is loaded.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kerf_dra_driver::names::DeviceName;
use kerf_kubelet_plugin::{Channels, Instances, NodeLayout, Owner, Plugin, Stored};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::emulated::{Emulated, VERSION};

const LATER: &str = "590.10.01";

/// Generous: it is reached only by a failure.
const LIMIT: Duration = Duration::from_mins(1);

fn libraries(machine: &Emulated) -> PathBuf {
    machine.path(&format!("driver/usr/lib/{}-linux-gnu", std::env::consts::ARCH))
}

/// The devices of a layout, and the values of the taint `lost` among them.
fn devices(layout: &NodeLayout) -> BTreeMap<String, bool> {
    let slices = layout.slices.iter().map(|slice| slice.unpack().unwrap());
    let devices = slices.flat_map(|slice| slice.devices.into_iter().flatten());
    let is_lost = |taints: Option<Vec<_>>| {
        let taints: Vec<k8s_openapi::api::resource::v1::DeviceTaint> = taints.unwrap_or_default();
        taints.iter().any(|taint| taint.key == "gpu.nvidia.com/lost")
    };
    devices.map(|device| (device.name, is_lost(device.taints))).collect()
}

/// Runs an owner beside something, which sees its layout and its trouble.
async fn owned<T>(
    machine: &Emulated,
    plugin: &Plugin,
    what: impl AsyncFnOnce(watch::Receiver<Option<Arc<NodeLayout>>>, watch::Receiver<Option<String>>) -> T,
) -> T {
    let stored = watch::Sender::new(Stored::default());
    let channels = Channels {
        inventory: watch::Sender::new(None),
        layout: watch::Sender::new(None),
        trouble: watch::Sender::new(None),
        rivals: watch::Sender::new(None),
        stored: stored.subscribe(),
    };
    let (layout, trouble) = (channels.layout.subscribe(), channels.trouble.subscribe());
    let lead = Instances::join(&machine.node.config().plugin_dir).unwrap().lead().await.unwrap();
    let owner = Owner::new(plugin.clone(), channels, lead).unwrap();
    let cancel = CancellationToken::new();
    let task = tokio::spawn(owner.run(cancel.clone()));
    let result = tokio::time::timeout(LIMIT, what(layout, trouble)).await.unwrap();
    cancel.cancel();
    task.await.unwrap();
    result
}

#[tokio::test]
async fn a_driver_that_is_upgraded_under_kerf_is_taken_up_without_a_restart() {
    let machine = Emulated::new(&["h100-80:mig=on", "h100-80"]);
    if machine.lacks_nodes() {
        return;
    }
    let plugin = machine.plugin().await;
    let pci = machine.inventory().gpus[0].pci;
    let small = |start: u32| DeviceName::parse(&format!("gpu-{}-mig-1g-10gb-{start}", pci.dashed())).unwrap();
    let claims = |name: &str, start| BTreeMap::from([(name.to_owned(), vec![small(start)])]);
    machine.prepare(&plugin, &claims("held", 4)).await.unwrap();
    let before = owned(&machine, &plugin, async |mut layout, _| {
        devices(layout.wait_for(Option::is_some).await.unwrap().as_ref().unwrap())
    });
    let before = before.await;
    assert!(before.values().all(|lost| !lost));
    let spec = || {
        let folder = machine.node.root.join("cdi");
        fs::read_to_string(folder.join("k8s.gpu.nvidia.com-claim_held-uid.json")).unwrap()
    };
    assert!(spec().contains(VERSION));

    // The package manager removes the former files before it puts the new ones.
    let (link, name) = (libraries(&machine).join("libnvidia-ml.so.1"), format!("libnvidia-ml.so.{LATER}"));
    fs::remove_file(&link).unwrap();
    fs::rename(
        libraries(&machine).join(format!("libnvidia-ml.so.{VERSION}")),
        libraries(&machine).join(&name),
    )
    .unwrap();
    let error = machine.prepare(&plugin, &claims("next", 5)).await.unwrap_err();
    assert!(error.contains("libnvidia-ml.so.1"), "{error}");
    symlink(&name, &link).unwrap();
    // The former driver is loaded still.
    let error = machine.prepare(&plugin, &claims("next", 5)).await.unwrap_err();
    assert!(error.contains("LIB_RM_VERSION_MISMATCH"), "{error}");
    machine.unprepare(&plugin, "next").await.unwrap();
    owned(&machine, &plugin, async |mut layout, mut trouble| {
        let said = trouble.wait_for(Option::is_some).await.unwrap().clone().unwrap();
        assert!(said.contains("LIB_RM_VERSION_MISMATCH"), "{said}");
        let lost = devices(layout.wait_for(Option::is_some).await.unwrap().as_ref().unwrap());
        assert_eq!(lost.keys().collect::<Vec<_>>(), before.keys().collect::<Vec<_>>());
        assert!(lost.values().all(|lost| *lost), "{lost:?}");

        let loaded = |state: &mut kerf_emulator::state::State| {
            state.driver_version = LATER.to_owned();
            Ok(())
        };
        machine.control().change(loaded).unwrap();
        trouble.wait_for(Option::is_none).await.unwrap();
        let is_as_before = |layout: &Option<Arc<NodeLayout>>| {
            layout.as_ref().is_some_and(|layout| devices(layout) == before)
        };
        layout.wait_for(is_as_before).await.unwrap();
    })
    .await;
    // Containers that start from now on find the files that there are.
    plugin.reconcile_now().await;
    assert!(spec().contains(LATER) && !spec().contains(VERSION), "{}", spec());
    machine.prepare(&plugin, &claims("next", 5)).await.unwrap();
    for claim in ["held", "next"] {
        machine.unprepare(&plugin, claim).await.unwrap();
    }
    assert!(machine.instances().is_empty());
}
