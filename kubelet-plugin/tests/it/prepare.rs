//! Preparing and unpreparing, without anybody dying.

use std::sync::Arc;

use kerf_dra_driver::hardware::HardwareErrorKind;
use kerf_dra_driver::step::PartitionProgress;
use kerf_kubelet_plugin::testing::{Fuse, ModelHardware, Node, claim, partition};
use kerf_kubelet_plugin::{ClaimSource, Files, HostFiles, Plugin};

use super::{node, pci, prepare, unprepare, whole};

#[tokio::test]
async fn preparing_twice_answers_the_same_and_writes_nothing_the_second_time() {
    let root = tempfile::tempdir().unwrap();
    let node = node(&root);
    node.claims.put(claim("c", &[("mig/small", partition(pci(1), "1g.10gb", 4)), ("gpu", whole(3))]));
    let plugin = node.plugin(&Fuse::none()).unwrap();
    let first = prepare(&plugin, "c").await.unwrap();
    assert_eq!(first[0].request, "mig");
    assert_eq!(first[0].cdi_device, "k8s.gpu.nvidia.com/claim=c-uid-gpu-0000-01-00-0-mig-1g-10gb-4");
    // A process that dies at its first write or hardware change would fail.
    let fuse = Fuse::at(1, false);
    let readonly = node.plugin(&fuse).unwrap();
    assert_eq!(prepare(&readonly, "c").await, Ok(first));
    assert!(!fuse.is_dead());
}

#[tokio::test]
async fn another_allocation_of_the_same_claim_takes_the_place_of_the_former() {
    let root = tempfile::tempdir().unwrap();
    let node = node(&root);
    let plugin = node.plugin(&Fuse::none()).unwrap();
    node.claims.put(claim("c", &[("r", partition(pci(1), "1g.10gb", 4))]));
    prepare(&plugin, "c").await.unwrap();
    node.claims.put(claim("c", &[("r", whole(3))]));
    let devices = prepare(&plugin, "c").await.unwrap();
    assert_eq!(devices[0].device, "gpu-0000-03-00-0");
    assert!(node.machine.lock().unwrap().instances(pci(1)).is_empty());
    assert_eq!(node.files("plugin/state/claims"), ["c-uid_0000-03-00-0.json"]);
}

#[tokio::test]
async fn what_overlaps_is_refused_and_the_holder_is_named() {
    let root = tempfile::tempdir().unwrap();
    let node = node(&root);
    let plugin = node.plugin(&Fuse::none()).unwrap();
    node.claims.put(claim("slice", &[("r", partition(pci(1), "1g.10gb", 4))]));
    node.claims.put(claim("gpu", &[("r", whole(3))]));
    prepare(&plugin, "slice").await.unwrap();
    prepare(&plugin, "gpu").await.unwrap();
    for (device, holder) in [
        (partition(pci(1), "1g.10gb", 4), "ns/slice"),
        (partition(pci(1), "3g.40gb", 4), "ns/slice"),
        (whole(1), "ns/slice"),
        (whole(3), "ns/gpu"),
        (partition(pci(3), "1g.10gb", 0), "ns/gpu"),
    ] {
        node.claims.put(claim("other", &[("r", device.clone())]));
        let error = prepare(&plugin, "other").await.unwrap_err();
        assert!(error.contains(holder) && error.contains(device.as_str()), "{error}");
    }
    node.claims.put(claim("other", &[("r", partition(pci(1), "1g.10gb", 5))]));
    prepare(&plugin, "other").await.unwrap();
    unprepare(&plugin, "gpu").await.unwrap();
    node.claims.put(claim("later", &[("r", whole(3))]));
    prepare(&plugin, "later").await.unwrap();
}

#[tokio::test]
async fn a_create_that_fails_leaves_nothing_and_never_takes_a_later_foreigner_for_ours() {
    let root = tempfile::tempdir().unwrap();
    let node = node(&root);
    let plugin = node.plugin(&Fuse::none()).unwrap();
    node.claims.put(claim("c", &[("r", partition(pci(1), "1g.10gb", 4))]));
    for call in ["create_gpu_instance", "create_compute_instance"] {
        node.machine.lock().unwrap().failures.push_back((call, HardwareErrorKind::Other(999)));
        let error = prepare(&plugin, "c").await.unwrap_err();
        assert!(error.contains("NVML error 999"), "{error}");
        assert!(node.machine.lock().unwrap().instances(pci(1)).is_empty());
        assert!(node.files("plugin/state/claims").is_empty());
    }
    // Somebody else is faster: NVML says no, and what is there is theirs.
    {
        let mut machine = node.machine.lock().unwrap();
        machine.failures.push_back(("create_gpu_instance", HardwareErrorKind::InsufficientResources));
        machine.rival = Some((pci(1), 19, 4));
    }
    prepare(&plugin, "c").await.unwrap_err();
    assert_eq!(node.machine.lock().unwrap().instances(pci(1)).len(), 1);
    let error = prepare(&plugin, "c").await.unwrap_err();
    assert!(error.contains("did not make"), "{error}");
    unprepare(&plugin, "c").await.unwrap();
    assert_eq!(node.machine.lock().unwrap().instances(pci(1)).len(), 1);
}

#[tokio::test]
async fn a_partition_in_use_stays_with_its_error_until_it_can_be_undone() {
    let root = tempfile::tempdir().unwrap();
    let node = node(&root);
    let plugin = node.plugin(&Fuse::none()).unwrap();
    node.claims.put(claim("c", &[("r", partition(pci(1), "1g.10gb", 4))]));
    prepare(&plugin, "c").await.unwrap();
    node.machine.lock().unwrap().failures.push_back(("destroy_compute_instance", HardwareErrorKind::InUse));
    let error = unprepare(&plugin, "c").await.unwrap_err();
    assert!(error.contains("trainer (pid 4711)"), "{error}");
    node.claims.put(claim("d", &[("r", partition(pci(1), "1g.10gb", 4))]));
    // The next claim settles what is left, and gets the place.
    prepare(&plugin, "d").await.unwrap();
    assert_eq!(node.files("plugin/state/claims"), ["d-uid_0000-01-00-0.json"]);
}

#[tokio::test]
async fn a_foreign_partition_is_handed_out_as_it_is_and_never_destroyed() {
    let root = tempfile::tempdir().unwrap();
    let node = node(&root);
    let plugin = node.plugin(&Fuse::none()).unwrap();
    node.machine.lock().unwrap().make_foreign(pci(1), 19, 4, true);
    node.claims.put(claim("c", &[("r", partition(pci(1), "1g.10gb", 4))]));
    prepare(&plugin, "c").await.unwrap();
    unprepare(&plugin, "c").await.unwrap();
    assert_eq!(node.machine.lock().unwrap().instances(pci(1)).len(), 1);
    assert!(node.machine.lock().unwrap().changes.is_empty());
}

#[tokio::test]
async fn a_mode_in_use_is_refused_and_a_free_one_is_changed() {
    let root = tempfile::tempdir().unwrap();
    let node = node(&root);
    let plugin = node.plugin(&Fuse::none()).unwrap();
    node.machine.lock().unwrap().make_foreign(pci(1), 19, 0, true);
    node.claims.put(claim("c", &[("r", whole(1))]));
    let error = prepare(&plugin, "c").await.unwrap_err();
    assert!(error.contains("MIG disabled") && error.contains("a foreign GPU instance 1"), "{error}");
    node.claims.put(claim("c", &[("r", whole(2))]));
    prepare(&plugin, "c").await.unwrap();
    assert_eq!(node.machine.lock().unwrap().changes, ["set MIG mode of 0000:02:00.0"]);
}

#[tokio::test]
async fn many_claims_at_once_are_each_prepared_once() {
    let root = tempfile::tempdir().unwrap();
    let node = node(&root);
    let plugin = node.plugin(&Fuse::none()).unwrap();
    let names: Vec<String> = (0..14).map(|number| format!("c{number}")).collect();
    for (number, name) in (0u32..).zip(&names) {
        let gpu = pci(u8::try_from(1 + number / 7).unwrap());
        node.claims.put(claim(name, &[("r", partition(gpu, "1g.10gb", number % 7))]));
    }
    let twice = names.iter().chain(&names);
    let answers = futures::future::join_all(twice.map(|name| prepare(&plugin, name))).await;
    assert!(answers.iter().all(Result::is_ok), "{answers:?}");
    assert_eq!(answers[..14], answers[14..]);
    assert_eq!(node.machine.lock().unwrap().changes.len(), 28);
    futures::future::join_all(names.iter().map(|name| unprepare(&plugin, name))).await;
    assert!(node.machine.lock().unwrap().instances(pci(1)).is_empty());
    assert!(node.files("plugin/state/claims").is_empty());
    assert!(node.files("plugin/state/locks").iter().all(|name| !name.starts_with("claim")));
}

#[tokio::test]
#[expect(clippy::await_holding_lock, reason = "the guard is what makes another thread hang")]
async fn a_caller_that_stops_waiting_cancels_nothing_and_a_hanging_gpu_holds_up_nobody_else() {
    let root = tempfile::tempdir().unwrap();
    let node = node(&root);
    let fuse = Fuse::none();
    let hardware = ModelHardware::new(Arc::clone(&node.machine), Arc::clone(&fuse));
    let gate = hardware.gate();
    let plugin = node.plugin_with(hardware, &fuse).unwrap();
    node.claims.put(claim("hangs", &[("r", partition(pci(1), "1g.10gb", 4))]));
    node.claims.put(claim("fine", &[("r", whole(3))]));
    let shut = gate.lock().unwrap();
    let waiting = tokio::spawn({
        let plugin = plugin.clone();
        async move { prepare(&plugin, "hangs").await }
    });
    let mut journal = plugin.journal();
    journal.wait_for(|view| view.entries.len() == 1).await.unwrap();
    waiting.abort();
    prepare(&plugin, "fine").await.unwrap();
    drop(shut);
    journal
        .wait_for(|view| view.entries.values().all(|entry| entry.is_ready()) && view.entries.len() == 2)
        .await
        .unwrap();
    prepare(&plugin, "hangs").await.unwrap();
}

#[tokio::test]
#[expect(clippy::await_holding_lock, reason = "the guard is what makes another thread hang")]
async fn whoever_changed_hardware_says_so_when_done_whatever_others_said_before() {
    let root = tempfile::tempdir().unwrap();
    let node = node(&root);
    node.machine.lock().unwrap().make_foreign(pci(1), 19, 0, true);
    let fuse = Fuse::none();
    let hardware = ModelHardware::new(Arc::clone(&node.machine), Arc::clone(&fuse));
    let gate = hardware.gate();
    let plugin = node.plugin_with(hardware, &fuse).unwrap();
    node.claims.put(claim("slow", &[("r", partition(pci(1), "1g.10gb", 4))]));
    node.claims.put(claim("fast", &[("r", whole(2))]));
    let shut = gate.lock().unwrap();
    let slow = tokio::spawn({
        let plugin = plugin.clone();
        async move { prepare(&plugin, "slow").await }
    });
    plugin.journal().wait_for(|view| view.entries.len() == 1).await.unwrap();
    // What is elsewhere on the GPU may go, and its id be given to ours.
    let intent = PartitionProgress::Intent { existing: Vec::new() };
    let entry = plugin.journal().borrow().entries.values().next().cloned().unwrap();
    assert_eq!(entry.partitions().next().unwrap().progress, intent);
    prepare(&plugin, "fast").await.unwrap();
    let mut changed = plugin.hardware_changed();
    changed.mark_unchanged();
    drop(shut);
    slow.await.unwrap().unwrap();
    assert!(changed.has_changed().unwrap());
}

#[tokio::test]
async fn unpreparing_what_is_not_known_succeeds_and_touches_nothing() {
    let root = tempfile::tempdir().unwrap();
    let node = node(&root);
    let plugin = node.plugin(&Fuse::none()).unwrap();
    node.claims.fails.store(true, std::sync::atomic::Ordering::SeqCst);
    unprepare(&plugin, "never-seen").await.unwrap();
    assert!(plugin.unprepare("../../etc".to_owned()).await.is_err());
    assert!(node.machine.lock().unwrap().changes.is_empty());
}

#[tokio::test]
async fn a_partition_that_vanished_is_made_again_without_touching_the_others() {
    let root = tempfile::tempdir().unwrap();
    let node = node(&root);
    let plugin = node.plugin(&Fuse::none()).unwrap();
    node.claims
        .put(claim("c", &[("a", partition(pci(1), "1g.10gb", 4)), ("b", partition(pci(1), "1g.10gb", 5))]));
    let first = prepare(&plugin, "c").await.unwrap();
    {
        let mut machine = node.machine.lock().unwrap();
        machine.inventory.gpus[0].mig.as_mut().unwrap().instances.remove(0);
        machine.changes.clear();
        machine.failures.push_back(("create_gpu_instance", HardwareErrorKind::Other(999)));
    }
    // As long as it cannot be mended, what containers may use stays.
    prepare(&plugin, "c").await.unwrap_err();
    assert_eq!(node.machine.lock().unwrap().instances(pci(1)).len(), 1);
    assert_eq!(prepare(&plugin, "c").await, Ok(first));
    let expected =
        ["create GPU instance at 4 of 0000:01:00.0", "create compute instance in 1 of 0000:01:00.0"];
    assert_eq!(node.machine.lock().unwrap().changes, expected);
    unprepare(&plugin, "c").await.unwrap();
    assert!(node.machine.lock().unwrap().instances(pci(1)).is_empty());
}

#[tokio::test]
async fn what_somebody_made_in_the_place_of_a_claims_partition_is_neither_given_out_nor_destroyed() {
    let root = tempfile::tempdir().unwrap();
    let node = node(&root);
    let plugin = node.plugin(&Fuse::none()).unwrap();
    node.claims.put(claim("c", &[("r", partition(pci(1), "1g.10gb", 4))]));
    prepare(&plugin, "c").await.unwrap();
    let others = {
        let mut machine = node.machine.lock().unwrap();
        machine.inventory.gpus[0].mig.as_mut().unwrap().instances.clear();
        // It gets the number that ours had.
        machine.make_foreign(pci(1), 9, 4, true);
        machine.changes.clear();
        machine.instances(pci(1))
    };
    let error = prepare(&plugin, "c").await.unwrap_err();
    assert!(error.contains("GPU instance 1") && error.contains("did not make"), "{error}");
    plugin.reconcile_now().await;
    unprepare(&plugin, "c").await.unwrap();
    let machine = node.machine.lock().unwrap();
    assert_eq!((machine.instances(pci(1)), machine.changes.as_slice()), (others, &[][..]));
    assert!(node.files("plugin/state/claims").is_empty());
}

#[tokio::test]
async fn no_answer_in_time_keeps_the_intent_and_what_appears_later_is_ours() {
    let root = tempfile::tempdir().unwrap();
    let node = node(&root);
    let plugin = node.plugin(&Fuse::none()).unwrap();
    node.claims.put(claim("c", &[("r", partition(pci(1), "1g.10gb", 4))]));
    node.machine.lock().unwrap().failures.push_back(("create_gpu_instance", HardwareErrorKind::Timeout));
    prepare(&plugin, "c").await.unwrap_err();
    assert_eq!(plugin.journal().borrow().entries.len(), 1);
    // The call took effect after all.
    node.machine.lock().unwrap().make_foreign(pci(1), 19, 4, false);
    assert!(plugin.observe().await.unwrap().foreign.is_empty());
    plugin.reconcile_now().await;
    assert!(node.machine.lock().unwrap().instances(pci(1)).is_empty());
    assert!(plugin.journal().borrow().entries.is_empty());
}

#[tokio::test]
async fn garbage_in_a_config_fails_its_claim_alone() {
    use k8s_openapi::api::resource::v1::{DeviceAllocationConfiguration, OpaqueDeviceConfiguration};
    use k8s_openapi::apimachinery::pkg::runtime::RawExtension;
    let root = tempfile::tempdir().unwrap();
    let node = node(&root);
    let plugin = node.plugin(&Fuse::none()).unwrap();
    let with = |driver: &str, parameters: serde_json::Value| {
        let mut claim = claim("c", &[("r", whole(3))]);
        let status = claim.status.as_mut().unwrap();
        status.allocation.as_mut().unwrap().devices.as_mut().unwrap().config =
            Some(vec![DeviceAllocationConfiguration {
                source: "FromClaim".to_owned(),
                requests: None,
                opaque: Some(OpaqueDeviceConfiguration {
                    driver: driver.to_owned(),
                    parameters: RawExtension(parameters),
                }),
            }]);
        node.claims.put(claim);
    };
    for garbage in
        ["x".repeat(10 * 1024).into(), serde_json::json!({"kind": ["GpuConfig"]}), serde_json::Value::Null]
    {
        with("gpu.nvidia.com", garbage);
        prepare(&plugin, "c").await.unwrap_err();
        assert!(node.files("plugin/state/claims").is_empty());
    }
    with("other.example.com", "x".repeat(10 * 1024).into());
    prepare(&plugin, "c").await.unwrap();
}

/// The machine's files, with every call that waits for the disk written down.
#[derive(Debug, Default)]
struct Syncs {
    waits: std::sync::Mutex<Vec<String>>,
    /// Whether the journal cannot be written.
    is_full: std::sync::atomic::AtomicBool,
}

impl Syncs {
    fn note(&self, path: &std::path::Path) {
        let name = path.file_name().unwrap().to_str().unwrap();
        self.waits.lock().unwrap().push(name.split_once('_').map_or(name, |(name, _)| name).to_owned());
    }
}

impl Files for Syncs {
    fn read(&self, path: &std::path::Path) -> std::io::Result<Vec<u8>> {
        HostFiles.read(path)
    }

    fn list(&self, folder: &std::path::Path) -> std::io::Result<Vec<String>> {
        HostFiles.list(folder)
    }

    fn create_folder(&self, folder: &std::path::Path) -> std::io::Result<()> {
        HostFiles.create_folder(folder)
    }

    fn write(&self, path: &std::path::Path, content: &[u8], mode: u32) -> std::io::Result<()> {
        HostFiles.write(path, content, mode)
    }

    fn write_synced(&self, path: &std::path::Path, content: &[u8], mode: u32) -> std::io::Result<()> {
        self.note(path);
        if self.is_full.load(std::sync::atomic::Ordering::SeqCst)
            && path.parent().unwrap().ends_with("claims")
        {
            return Err(std::io::ErrorKind::StorageFull.into());
        }
        HostFiles.write_synced(path, content, mode)
    }

    fn rename(&self, from: &std::path::Path, to: &std::path::Path) -> std::io::Result<()> {
        HostFiles.rename(from, to)
    }

    fn remove(&self, path: &std::path::Path) -> std::io::Result<()> {
        HostFiles.remove(path)
    }

    fn sync_folder(&self, folder: &std::path::Path) -> std::io::Result<()> {
        self.note(folder);
        HostFiles.sync_folder(folder)
    }
}

fn with_syncs(node: &Node) -> (Plugin, Arc<Syncs>) {
    let files = Arc::new(Syncs::default());
    let inventory = node.machine.lock().unwrap().inventory.clone();
    let plugin = Plugin::with_files(
        node.config(),
        Arc::new(ModelHardware::new(Arc::clone(&node.machine), Fuse::none())),
        Arc::clone(&node.claims) as Arc<dyn ClaimSource>,
        tokio::sync::watch::Sender::new(Some(Arc::new(inventory))).subscribe(),
        Arc::clone(&files) as Arc<dyn Files>,
    )
    .unwrap();
    (plugin, files)
}

#[tokio::test]
async fn a_prepare_that_could_not_be_recorded_leaves_no_spec_that_would_prove_it() {
    let root = tempfile::tempdir().unwrap();
    let node = node(&root);
    node.claims.put(claim("c", &[("r", whole(3))]));
    let (plugin, files) = with_syncs(&node);
    files.is_full.store(true, std::sync::atomic::Ordering::SeqCst);
    prepare(&plugin, "c").await.unwrap_err();
    assert!(node.files("cdi").is_empty());
    plugin.reconcile_now().await;
    assert!(plugin.journal().borrow().entries.is_empty());
}

#[tokio::test]
async fn the_disk_is_waited_for_as_often_as_a_power_cut_demands_and_not_more() {
    let root = tempfile::tempdir().unwrap();
    let node = node(&root);
    node.claims.put(claim("gpu", &[("r", whole(3))]));
    node.claims.put(claim("mig", &[("r", partition(pci(1), "1g.10gb", 4))]));
    let (plugin, files) = with_syncs(&node);
    let waits = || std::mem::take(&mut *files.waits.lock().unwrap());
    prepare(&plugin, "gpu").await.unwrap();
    assert_eq!(waits(), [".gpu-uid"]);
    // Intent, completion.
    prepare(&plugin, "mig").await.unwrap();
    assert_eq!(waits(), [".mig-uid", ".mig-uid"]);
    // What is gone stays gone. A folder in which nothing changed costs nothing.
    unprepare(&plugin, "gpu").await.unwrap();
    assert_eq!(waits(), ["claims", "quarantine"]);
}

#[tokio::test]
async fn the_last_failure_of_a_claim_is_known_until_it_is_prepared_or_unprepared() {
    let root = tempfile::tempdir().unwrap();
    let node = node(&root);
    let plugin = node.plugin(&Fuse::none()).unwrap();
    let failed = || -> Vec<(String, String)> {
        let all = plugin.failed_prepares().into_iter();
        all.map(|failed| (failed.claim.to_string(), failed.error)).collect()
    };
    for name in ["here", "gone"] {
        node.claims.put(claim(name, &[("r", partition(pci(1), "1g.10gb", 4))]));
        node.machine
            .lock()
            .unwrap()
            .failures
            .push_back(("create_gpu_instance", HardwareErrorKind::Other(999)));
        prepare(&plugin, name).await.unwrap_err();
    }
    let all = failed();
    assert_eq!(all.iter().map(|(claim, _)| claim.as_str()).collect::<Vec<_>>(), ["ns/here", "ns/gone"]);
    assert!(all.iter().all(|(_, error)| error.contains("NVML error 999")), "{all:?}");
    prepare(&plugin, "here").await.unwrap();
    assert_eq!(failed().len(), 1);
    unprepare(&plugin, "gone").await.unwrap();
    assert_eq!(failed(), []);
}

#[tokio::test]
async fn what_may_still_be_made_on_one_gpu_is_not_forgotten_for_a_refusal_of_another() {
    let root = tempfile::tempdir().unwrap();
    let node = node(&root);
    let plugin = node.plugin(&Fuse::none()).unwrap();
    let devices = [("a", partition(pci(1), "1g.10gb", 4)), ("b", partition(pci(2), "1g.10gb", 4))];
    node.claims.put(claim("c", &devices));
    // GPU by GPU: the first refuses, the second does not answer.
    node.machine.lock().unwrap().failures.extend([
        ("create_gpu_instance", HardwareErrorKind::InsufficientResources),
        ("create_gpu_instance", HardwareErrorKind::Timeout),
    ]);
    prepare(&plugin, "c").await.unwrap_err();
    node.machine.lock().unwrap().make_foreign(pci(2), 19, 4, false);
    assert!(plugin.observe().await.unwrap().foreign.is_empty());
    plugin.reconcile_now().await;
    assert!(node.machine.lock().unwrap().instances(pci(2)).is_empty());
    assert!(plugin.journal().borrow().entries.is_empty());
}
