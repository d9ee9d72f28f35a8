//! The plugin is killed at every call that reaches disk or hardware; the next
//! one, on the same folders, must be able to go on and leave no trace.

use kerf_dra_driver::inventory::GpuInstance;
use kerf_dra_driver::names::DeviceName;
use kerf_kubelet_plugin::testing::{Fuse, Node, claim, partition};

use super::{node, pci, prepare, unprepare, whole};

/// Every shape of work: outputs only, one partition, several on two GPUs, a
/// mode change in either direction.
pub(crate) fn scenarios() -> Vec<(&'static str, Vec<(&'static str, DeviceName)>)> {
    vec![
        ("a whole GPU", vec![("gpu", whole(3))]),
        ("a partition", vec![("mig", partition(pci(1), "1g.10gb", 4))]),
        (
            "partitions of two GPUs and a whole one",
            vec![
                ("a", partition(pci(1), "1g.10gb", 4)),
                ("b", partition(pci(1), "1g.10gb", 5)),
                ("c", partition(pci(2), "3g.40gb", 0)),
                ("d", whole(4)),
            ],
        ),
        ("a partition of a GPU in the other mode", vec![("mig", partition(pci(3), "3g.40gb", 4))]),
        ("a whole GPU in the other mode", vec![("gpu", whole(2))]),
    ]
}

pub(crate) fn instances(node: &Node) -> Vec<GpuInstance> {
    let machine = node.machine.lock().unwrap();
    (1..=4).flat_map(|bus| machine.instances(pci(bus))).collect()
}

struct Killed {
    node: Node,
    foreign: Vec<GpuInstance>,
    _root: tempfile::TempDir,
}

/// Sets a node up with a foreign instance beside the claim's place.
fn set_up(devices: &[(&'static str, DeviceName)]) -> Killed {
    let root = super::in_memory();
    let node = node(&root);
    node.machine.lock().unwrap().make_foreign(pci(1), 19, 0, true);
    node.machine.lock().unwrap().make_foreign(pci(1), 19, 1, false);
    node.claims.put(claim("c", devices));
    Killed { foreign: instances(&node), node, _root: root }
}

/// Runs work that is killed at every call in turn, before and after that call
/// has its effect, and shows each wreck to a check.
async fn killed_everywhere(
    devices: &[(&'static str, DeviceName)],
    prepared_before: bool,
    check: impl AsyncFn(&Killed, String),
) {
    for after in [false, true] {
        for call in 0.. {
            let killed = set_up(devices);
            if prepared_before {
                let plugin = killed.node.plugin(&Fuse::none()).unwrap();
                prepare(&plugin, "c").await.unwrap();
            }
            let fuse = Fuse::at(call, after);
            // It may die while it starts.
            if let Ok(plugin) = killed.node.plugin(&fuse) {
                let _ = if prepared_before {
                    unprepare(&plugin, "c").await
                } else {
                    prepare(&plugin, "c").await.map(|_| ())
                };
            }
            if !fuse.is_dead() {
                assert!(call > 3, "the work was not killed where it matters");
                break;
            }
            check(&killed, format!("killed {} call {call}", if after { "after" } else { "before" })).await;
        }
    }
}

fn assert_clean(killed: &Killed, what: &str) {
    assert_eq!(instances(&killed.node), killed.foreign, "{what}: only foreign instances are left");
    assert_eq!(killed.node.files("plugin/state/claims"), Vec::<String>::new(), "{what}");
    assert_eq!(killed.node.files("cdi"), Vec::<String>::new(), "{what}");
    assert_eq!(killed.node.files("plugin/state/quarantine"), Vec::<String>::new(), "{what}");
}

#[tokio::test]
async fn a_prepare_that_was_killed_anywhere_is_finished_by_the_next_one() {
    for (scenario, devices) in scenarios() {
        killed_everywhere(&devices, false, async |killed, what| {
            let what = format!("{scenario}, {what}");
            let plugin = killed.node.plugin(&Fuse::none()).unwrap();
            plugin.start().await.unwrap();
            let first = prepare(&plugin, "c").await.unwrap_or_else(|error| panic!("{what}: {error}"));
            let partitions = devices.iter().filter(|(_, device)| device.as_str().contains("-mig-")).count();
            assert_eq!(instances(&killed.node).len(), killed.foreign.len() + partitions, "{what}");
            assert_eq!(killed.node.files("cdi"), ["k8s.gpu.nvidia.com-claim_c-uid.json"], "{what}");
            assert_eq!(prepare(&plugin, "c").await.as_ref(), Ok(&first), "{what}");
            unprepare(&plugin, "c").await.unwrap_or_else(|error| panic!("{what}: {error}"));
            assert_clean(killed, &what);
        })
        .await;
    }
}

#[tokio::test]
async fn a_prepare_that_was_killed_anywhere_leaves_nothing_when_the_pod_is_gone() {
    for (scenario, devices) in scenarios() {
        killed_everywhere(&devices, false, async |killed, what| {
            let what = format!("{scenario}, {what}");
            killed.node.claims.delete("ns", "c");
            let plugin = killed.node.plugin(&Fuse::none()).unwrap();
            plugin.start().await.unwrap();
            let completed = plugin.journal().borrow().entries.len();
            if completed == 0 {
                assert_clean(killed, &what);
            }
            unprepare(&plugin, "c").await.unwrap_or_else(|error| panic!("{what}: {error}"));
            assert_clean(killed, &what);
        })
        .await;
    }
}

#[tokio::test]
async fn an_unprepare_that_was_killed_anywhere_is_finished_by_the_next_one() {
    for (scenario, devices) in scenarios() {
        killed_everywhere(&devices, true, async |killed, what| {
            let what = format!("{scenario}, {what}");
            killed.node.claims.delete("ns", "c");
            let plugin = killed.node.plugin(&Fuse::none()).unwrap();
            plugin.start().await.unwrap();
            unprepare(&plugin, "c").await.unwrap_or_else(|error| panic!("{what}: {error}"));
            assert_clean(killed, &what);
        })
        .await;
    }
}
