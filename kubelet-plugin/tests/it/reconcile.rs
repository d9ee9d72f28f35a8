//! What becomes right by itself.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kerf_dra_driver::hardware::HardwareErrorKind;
use kerf_dra_driver::inventory::Inventory;
use kerf_kubelet_plugin::testing::{Fuse, ModelHardware, Node, claim, partition, pod_resources};
use kerf_kubelet_plugin::{ClaimSource, HostFiles, JournalView, Operation, Plugin};
use tokio::sync::watch::Sender;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::{node, pci, prepare, unprepare, whole};

/// Serves the socket of a kubelet whose pods use these claims.
fn kubelet(
    root: &tempfile::TempDir,
    used: &[&'static str],
    meanwhile: impl Fn() + Send + Sync + 'static,
) -> JoinHandle<Result<(), tonic::transport::Error>> {
    pod_resources(&root.path().join("pod-resources.sock"), used, meanwhile).unwrap()
}

async fn minutes(minutes: u64) {
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(minutes * 60)).await;
    tokio::time::resume();
}

/// The claims that have an entry.
fn entries(plugin: &Plugin) -> Vec<String> {
    plugin.journal().borrow().entries.keys().map(ToString::to_string).collect()
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
    plugin.reconcile_now().await;
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
    plugin.reconcile_now().await;
    minutes(9).await;
    plugin.reconcile_now().await;
    minutes(2).await;
    // The kubelet cannot be asked: nothing happens.
    plugin.reconcile_now().await;
    assert_eq!(entries(&plugin).len(), 3);

    let kubelet = kubelet(&root, &["used"], || ());
    plugin.reconcile_now().await;
    kubelet.abort();
    assert_eq!(entries(&plugin), ["there-uid", "used-uid"]);
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

/// A plugin that keeps itself reconciled and learns of the GPUs from a sender.
fn kept_reconciled(
    node: &Node,
    inventory: &Sender<Option<Arc<Inventory>>>,
) -> (Plugin, CancellationToken, JoinHandle<()>) {
    let plugin = Plugin::with_files(
        node.config(),
        Arc::new(ModelHardware::new(Arc::clone(&node.machine), Fuse::none())),
        Arc::clone(&node.claims) as Arc<dyn ClaimSource>,
        inventory.subscribe(),
        Arc::new(HostFiles),
    )
    .unwrap();
    let cancel = CancellationToken::new();
    let rounds = tokio::spawn({
        let (plugin, cancel) = (plugin.clone(), cancel.clone());
        async move { plugin.keep_reconciled(cancel).await }
    });
    (plugin, cancel, rounds)
}

#[tokio::test(start_paused = true)]
async fn after_a_reboot_claims_are_taken_over_as_soon_as_the_gpus_are_known() {
    let root = tempfile::tempdir().unwrap();
    let node = node(&root);
    node.claims.put(claim("c", &[("r", whole(3))]));
    prepare(&node.plugin(&Fuse::none()).unwrap(), "c").await.unwrap();
    node.boot("boot-2").unwrap();
    let sender = Sender::new(None);
    let began = tokio::time::Instant::now();
    let (plugin, cancel, rounds) = kept_reconciled(&node, &sender);
    tokio::time::sleep(Duration::from_secs(5)).await;
    sender.send_replace(Some(Arc::new(node.machine.lock().unwrap().inventory.clone())));
    let renewed = |view: &Arc<JournalView>| {
        view.entries.values().all(|entry| entry.boot_id.0 == "boot-2") && !view.entries.is_empty()
    };
    plugin.journal().wait_for(renewed).await.unwrap();
    cancel.cancel();
    rounds.await.unwrap();
    // The clock stands still but for what is waited for.
    assert!(began.elapsed() < Duration::from_mins(1));
}

#[tokio::test(start_paused = true)]
async fn a_round_comes_in_time_however_often_the_inventory_changes() {
    let root = tempfile::tempdir().unwrap();
    let node = node(&root);
    let inventory = Arc::new(node.machine.lock().unwrap().inventory.clone());
    let sender = Sender::new(Some(Arc::clone(&inventory)));
    let (plugin, cancel, rounds) = kept_reconciled(&node, &sender);
    for _ in 0..60 {
        tokio::time::sleep(Duration::from_mins(1)).await;
        sender.send_replace(Some(Arc::clone(&inventory)));
    }
    cancel.cancel();
    rounds.await.unwrap();
    let counted = plugin.metrics().counted(Operation::Reconcile);
    assert!(counted.succeeded > 5, "an hour has more rounds than {}", counted.succeeded);
}

#[tokio::test]
async fn a_gpu_that_did_not_take_a_mode_is_believed_again_when_its_holder_is_gone() {
    let root = tempfile::tempdir().unwrap();
    let node = node(&root);
    node.claims.put(claim("c", &[("r", whole(2))]));
    let plugin = node.plugin(&Fuse::none()).unwrap();
    for _ in 0..2 {
        node.machine.lock().unwrap().failures.push_back(("set_mig_mode", HardwareErrorKind::InUse));
        prepare(&plugin, "c").await.unwrap_err();
    }
    plugin.reconcile_now().await;
    assert_eq!(plugin.journal().borrow().stuck_modes.len(), 1, "the holder is still there");
    node.machine.lock().unwrap().holders.clear();
    plugin.reconcile_now().await;
    assert!(plugin.journal().borrow().stuck_modes.is_empty());
}

#[tokio::test]
async fn a_spec_proves_what_was_made_here_whatever_the_api_says_of_its_claim() {
    for what in ["API down", "being deleted", "not reserved", "gone"] {
        let root = tempfile::tempdir().unwrap();
        let node = node(&root);
        let mut object = claim("c", &[("r", partition(pci(1), "1g.10gb", 4))]);
        node.claims.put(object.clone());
        let plugin = node.plugin(&Fuse::none()).unwrap();
        prepare(&plugin, "c").await.unwrap();
        drop(plugin);
        std::fs::remove_dir_all(root.path().join("plugin")).unwrap();
        match what {
            "API down" => node.claims.fails.store(true, Ordering::SeqCst),
            "gone" => node.claims.delete("ns", "c"),
            "being deleted" => {
                object.metadata.deletion_timestamp = Some(Time(Timestamp::UNIX_EPOCH));
                node.claims.put(object);
            }
            _ => {
                object.status.as_mut().unwrap().reserved_for = None;
                node.claims.put(object);
            }
        }
        let plugin = node.plugin(&Fuse::none()).unwrap();
        plugin.start().await.unwrap();
        plugin.reconcile_now().await;
        assert!(plugin.observe().await.unwrap().foreign.is_empty(), "{what}");
        assert_eq!(entries(&plugin), ["c-uid"], "{what}");
        unprepare(&plugin, "c").await.unwrap();
        assert!(node.machine.lock().unwrap().instances(pci(1)).is_empty(), "{what}");
        assert!(node.files("cdi").is_empty(), "{what}");
    }
}

#[tokio::test]
async fn a_partition_whose_entry_is_damaged_or_lost_is_still_ours_to_prepare_and_unprepare() {
    for (damaged, again) in [(false, false), (false, true), (true, false), (true, true)] {
        let root = tempfile::tempdir().unwrap();
        let node = node(&root);
        node.claims.put(claim("c", &[("r", partition(pci(1), "1g.10gb", 4))]));
        let plugin = node.plugin(&Fuse::none()).unwrap();
        let first = prepare(&plugin, "c").await.unwrap();
        drop(plugin);
        let file = root.path().join("plugin/state/claims/c-uid_0000-01-00-0.json");
        if damaged {
            std::fs::write(&file, "{\"sha256\":\"").unwrap();
        } else {
            std::fs::remove_file(&file).unwrap();
        }
        let plugin = node.plugin(&Fuse::none()).unwrap();
        if again {
            assert_eq!(prepare(&plugin, "c").await.unwrap(), first);
        }
        unprepare(&plugin, "c").await.unwrap();
        assert!(node.machine.lock().unwrap().instances(pci(1)).is_empty(), "{damaged} {again}");
        for folder in ["cdi", "plugin/state/claims", "plugin/state/quarantine"] {
            assert!(node.files(folder).is_empty(), "{damaged} {again} {folder}");
        }
    }
}

#[tokio::test]
async fn a_damaged_file_closes_its_gpu_at_once_but_is_moved_only_under_its_locks() {
    let root = tempfile::tempdir().unwrap();
    let node = node(&root);
    node.claims.put(claim("c", &[("r", whole(3))]));
    let plugin = node.plugin(&Fuse::none()).unwrap();
    prepare(&plugin, "c").await.unwrap();
    drop(plugin);
    std::fs::write(root.path().join("plugin/state/claims/c-uid_0000-03-00-0.json"), "{}").unwrap();
    std::fs::remove_dir_all(root.path().join("cdi")).unwrap();
    let plugin = node.plugin(&Fuse::none()).unwrap();
    assert_eq!(plugin.journal().borrow().quarantined.len(), 1);
    assert!(node.files("plugin/state/quarantine").is_empty());
    plugin.start().await.unwrap();
    assert_eq!(plugin.journal().borrow().quarantined.len(), 1);
    assert_eq!(node.files("plugin/state/quarantine").len(), 1);
}

#[tokio::test]
async fn a_claim_that_has_lost_its_allocation_is_unprepared_like_one_that_is_gone() {
    let root = tempfile::tempdir().unwrap();
    let node = node(&root);
    let plugin = node.plugin(&Fuse::none()).unwrap();
    for (name, start) in [("none", 4), ("another", 5), ("same", 6)] {
        node.claims.put(claim(name, &[("r", partition(pci(1), "1g.10gb", start))]));
        prepare(&plugin, name).await.unwrap();
    }
    let mut deallocated = claim("none", &[]);
    deallocated.status = None;
    node.claims.put(deallocated);
    node.claims.put(claim("another", &[("r", partition(pci(2), "1g.10gb", 5))]));
    let kubelet = kubelet(&root, &[], || ());
    plugin.reconcile_now().await;
    assert_eq!(entries(&plugin).len(), 3);
    minutes(11).await;
    plugin.reconcile_now().await;
    kubelet.abort();
    assert_eq!(entries(&plugin), ["same-uid"]);
}

#[tokio::test]
async fn after_a_reboot_only_a_claim_that_is_still_allocated_occupies_its_gpu_again() {
    let root = tempfile::tempdir().unwrap();
    let node = node(&root);
    node.claims.put(claim("former", &[("r", whole(3))]));
    let plugin = node.plugin(&Fuse::none()).unwrap();
    prepare(&plugin, "former").await.unwrap();
    drop(plugin);
    node.boot("boot-2").unwrap();
    let mut deallocated = claim("former", &[]);
    deallocated.status = None;
    node.claims.put(deallocated);
    node.claims.put(claim("next", &[("r", whole(3))]));
    let plugin = node.plugin(&Fuse::none()).unwrap();
    plugin.start().await.unwrap();
    plugin.reconcile_now().await;
    prepare(&plugin, "next").await.unwrap();
}

#[tokio::test]
async fn a_claim_that_cannot_be_read_holds_up_no_other() {
    let root = tempfile::tempdir().unwrap();
    let node = node(&root);
    let plugin = node.plugin(&Fuse::none()).unwrap();
    for (name, start) in [("a", 4), ("b", 5)] {
        node.claims.put(claim(name, &[("r", partition(pci(1), "1g.10gb", start))]));
        prepare(&plugin, name).await.unwrap();
        node.claims.delete("ns", name);
    }
    node.claims.unreadable.lock().unwrap().insert("a".to_owned());
    let kubelet = kubelet(&root, &[], || ());
    plugin.reconcile_now().await;
    minutes(11).await;
    plugin.reconcile_now().await;
    kubelet.abort();
    assert_eq!(entries(&plugin), ["a-uid"]);
}

#[tokio::test]
async fn a_claim_that_comes_back_while_the_kubelet_is_asked_keeps_what_it_has() {
    let root = tempfile::tempdir().unwrap();
    let node = node(&root);
    let plugin = node.plugin(&Fuse::none()).unwrap();
    let object = claim("c", &[("r", partition(pci(1), "1g.10gb", 4))]);
    node.claims.put(object.clone());
    prepare(&plugin, "c").await.unwrap();
    node.claims.delete("ns", "c");
    plugin.reconcile_now().await;
    minutes(11).await;
    let claims = Arc::clone(&node.claims);
    let kubelet = kubelet(&root, &[], move || claims.put(object.clone()));
    plugin.reconcile_now().await;
    kubelet.abort();
    assert_eq!(entries(&plugin), ["c-uid"]);
}

#[tokio::test]
async fn a_journal_file_that_is_a_folder_closes_its_gpu_and_no_other() {
    let root = tempfile::tempdir().unwrap();
    let node = node(&root);
    std::fs::create_dir_all(root.path().join("plugin/state/claims/x-uid_0000-03-00-0.json")).unwrap();
    node.claims.put(claim("c", &[("r", whole(3))]));
    node.claims.put(claim("d", &[("r", partition(pci(1), "1g.10gb", 4))]));
    let plugin = node.plugin(&Fuse::none()).unwrap();
    plugin.start().await.unwrap();
    prepare(&plugin, "d").await.unwrap();
    prepare(&plugin, "c").await.unwrap_err();
}

#[tokio::test]
async fn a_journal_file_under_the_name_of_another_gpu_is_not_believed() {
    let root = tempfile::tempdir().unwrap();
    let node = node(&root);
    node.claims.put(claim("c", &[("r", whole(3))]));
    let plugin = node.plugin(&Fuse::none()).unwrap();
    prepare(&plugin, "c").await.unwrap();
    drop(plugin);
    let claims = root.path().join("plugin/state/claims");
    std::fs::rename(claims.join("c-uid_0000-03-00-0.json"), claims.join("c-uid_0000-01-00-0.json")).unwrap();
    let plugin = node.plugin(&Fuse::none()).unwrap();
    plugin.start().await.unwrap();
    plugin.unprepare("c-uid".to_owned()).await.unwrap();
    assert!(node.files("plugin/state/claims").is_empty());
}

#[tokio::test]
async fn folders_that_somebody_removed_are_made_again() {
    let root = tempfile::tempdir().unwrap();
    let node = node(&root);
    node.claims.put(claim("c", &[("r", whole(3))]));
    let plugin = node.plugin(&Fuse::none()).unwrap();
    std::fs::remove_dir_all(root.path().join("plugin/state/locks")).unwrap();
    std::fs::remove_dir_all(root.path().join("plugin/state/claims")).unwrap();
    prepare(&plugin, "c").await.unwrap();
    assert_eq!(node.files("plugin/state/claims").len(), 1);
    plugin.unprepare("c-uid".to_owned()).await.unwrap();
}

#[tokio::test]
async fn an_instance_that_is_said_to_be_gone_and_is_not_stays_ours() {
    let root = tempfile::tempdir().unwrap();
    let node = node(&root);
    node.claims.put(claim("d", &[("r", partition(pci(1), "1g.10gb", 4))]));
    let plugin = node.plugin(&Fuse::none()).unwrap();
    prepare(&plugin, "d").await.unwrap();
    let lie = ("destroy_gpu_instance", HardwareErrorKind::NotFound);
    node.machine.lock().unwrap().failures.push_back(lie);
    plugin.unprepare("d-uid".to_owned()).await.unwrap_err();
    plugin.unprepare("d-uid".to_owned()).await.unwrap();
    assert!(node.machine.lock().unwrap().instances(pci(1)).is_empty());
}

/// What a passing error of the disk had hidden, or another version in between.
#[tokio::test]
async fn an_entry_in_quarantine_that_can_be_read_again_is_used() {
    let root = tempfile::tempdir().unwrap();
    let node = node(&root);
    let plugin = node.plugin(&Fuse::none()).unwrap();
    for (name, start) in [("c", 4), ("d", 5)] {
        node.claims.put(claim(name, &[("r", partition(pci(1), "1g.10gb", start))]));
        prepare(&plugin, name).await.unwrap();
        // Nothing else tells of it.
        std::fs::remove_file(root.path().join(format!("cdi/k8s.gpu.nvidia.com-claim_{name}-uid.json")))
            .unwrap();
    }
    let folder = |name: &str| root.path().join("plugin/state").join(name);
    std::fs::create_dir_all(folder("quarantine")).unwrap();
    for file in node.files("plugin/state/claims") {
        std::fs::rename(folder("claims").join(&file), folder("quarantine").join(&file)).unwrap();
    }
    let plugin = node.plugin(&Fuse::none()).unwrap();
    assert_eq!(plugin.journal().borrow().quarantined.len(), 2);
    unprepare(&plugin, "c").await.unwrap();
    assert_eq!(node.machine.lock().unwrap().instances(pci(1)).len(), 1);
    // Another claim's, since its GPU is worked on.
    assert_eq!(entries(&plugin), ["d-uid"]);
    assert!(plugin.journal().borrow().quarantined.is_empty());
    unprepare(&plugin, "d").await.unwrap();
    assert!(node.machine.lock().unwrap().instances(pci(1)).is_empty());
    assert!(node.files("plugin/state/quarantine").is_empty());
}

#[tokio::test]
async fn a_kill_at_any_point_of_writing_an_entry_anew_closes_its_gpu_to_nobody_for_long() {
    for at in 0.. {
        let root = tempfile::tempdir().unwrap();
        let node = node(&root);
        for (name, start) in [("c", 4), ("d", 5)] {
            node.claims.put(claim(name, &[("r", partition(pci(1), "1g.10gb", start))]));
        }
        prepare(&node.plugin(&Fuse::none()).unwrap(), "c").await.unwrap();
        std::fs::write(root.path().join("plugin/state/claims/c-uid_0000-01-00-0.json"), "x").unwrap();
        let fuse = Fuse::at(at, false);
        if let Ok(plugin) = node.plugin(&fuse) {
            // Its end is what this is about.
            let _ = plugin.start().await;
        }
        let plugin = node.plugin(&Fuse::none()).unwrap();
        plugin.start().await.unwrap();
        plugin.reconcile_now().await;
        prepare(&plugin, "d").await.unwrap_or_else(|error| panic!("killed at {at}: {error}"));
        assert_eq!(entries(&plugin), ["c-uid", "d-uid"], "killed at {at}");
        if !fuse.is_dead() {
            assert!(at > 3, "nothing was written anew");
            return;
        }
    }
}
