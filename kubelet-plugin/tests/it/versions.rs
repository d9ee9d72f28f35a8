//! What the next version of kerf wrote, met by this one: a downgrade, and the
//! way up again.

use std::fs;
use std::path::PathBuf;

use kerf_dra_driver::journal::{Device, Entry, VERSION};
use kerf_dra_driver::names::DeviceName;
use kerf_dra_driver::step::Step;
use kerf_kubelet_plugin::PreparedDevice;
use kerf_kubelet_plugin::testing::{Fuse, Node, claim, partition};
use serde_json::{Value, json};

use super::{node, pci, prepare, unprepare};

/// A claim `c` with a partition that the next version has prepared.
struct Later {
    root: tempfile::TempDir,
    node: Node,
    answer: Vec<PreparedDevice>,
}

impl Later {
    async fn new(change: impl FnOnce(&mut Entry)) -> Self {
        let root = tempfile::tempdir().unwrap();
        let node = node(&root);
        node.claims.put(claim("c", &[("r", partition(pci(1), "1g.10gb", 4))]));
        let answer = prepare(&node.plugin(&Fuse::none()).unwrap(), "c").await.unwrap();
        let later = Self { root, node, answer };
        later.write(|entry| {
            entry.version = VERSION + 1;
            entry.unknown.insert("later".to_owned(), json!({ "a": 1 }));
            change(entry);
        });
        let mut spec: Value = serde_json::from_slice(&fs::read(later.spec()).unwrap()).unwrap();
        spec["containerEdits"]["env"] = json!(["LATER=1"]);
        fs::write(later.spec(), spec.to_string()).unwrap();
        later
    }

    fn spec(&self) -> PathBuf {
        self.root.path().join("cdi/k8s.gpu.nvidia.com-claim_c-uid.json")
    }

    fn file(&self) -> PathBuf {
        self.root.path().join("plugin/state/claims/c-uid_0000-01-00-0.json")
    }

    fn entry(&self) -> Entry {
        Entry::decode(&fs::read(self.file()).unwrap()).unwrap()
    }

    fn write(&self, change: impl FnOnce(&mut Entry)) {
        let mut entry = self.entry();
        change(&mut entry);
        fs::write(self.file(), entry.encode()).unwrap();
    }

    fn nothing_is_left(&self) {
        assert!(self.node.machine.lock().unwrap().instances(pci(1)).is_empty());
        for folder in ["cdi", "plugin/state/claims", "plugin/state/quarantine"] {
            assert!(self.node.files(folder).is_empty(), "{folder}");
        }
    }
}

#[tokio::test]
async fn fields_of_the_next_version_stay_when_the_claim_is_prepared_again_and_mended() {
    let later = Later::new(|_| {}).await;
    let plugin = later.node.plugin(&Fuse::none()).unwrap();
    plugin.start().await.unwrap();
    for vanished in [false, true] {
        if vanished {
            let mut machine = later.node.machine.lock().unwrap();
            machine.inventory.gpus[0].mig.as_mut().unwrap().instances.clear();
        }
        assert_eq!(prepare(&plugin, "c").await.unwrap(), later.answer);
        assert_eq!(later.entry().unknown["later"]["a"], 1);
    }
    unprepare(&plugin, "c").await.unwrap();
    later.nothing_is_left();
}

#[tokio::test]
async fn a_device_or_step_of_the_next_version_stays_with_its_spec_however_often_the_kubelet_asks() {
    let device = |entry: &mut Entry| entry.devices = vec![Device::Unknown(json!({ "device": "share" }))];
    let step = |entry: &mut Entry| entry.steps.push(Step::Unknown(json!({ "step": "timeSlice" })));
    let changes: [fn(&mut Entry); 2] = [device, step];
    for change in changes {
        let later = Later::new(change).await;
        let (entry, spec) = (later.entry(), fs::read(later.spec()).unwrap());
        let plugin = later.node.plugin(&Fuse::none()).unwrap();
        plugin.start().await.unwrap();
        plugin.reconcile_now().await;
        // As a kubelet that was restarted does.
        assert_eq!(prepare(&plugin, "c").await.unwrap(), later.answer);
        assert_eq!(later.entry(), entry);
        assert_eq!(fs::read(later.spec()).unwrap(), spec);
        // Without it this version cannot tell what the containers are to get.
        fs::remove_file(later.spec()).unwrap();
        let error = prepare(&plugin, "c").await.unwrap_err();
        assert!(error.contains("does not know"), "{error}");
        assert_eq!(later.entry(), entry);
    }
}

#[tokio::test]
async fn a_step_of_the_next_version_is_left_for_it_to_undo() {
    let later = Later::new(|entry| entry.steps.push(Step::Unknown(json!({ "step": "timeSlice" })))).await;
    let plugin = later.node.plugin(&Fuse::none()).unwrap();
    plugin.start().await.unwrap();
    for _ in 0..2 {
        let error = unprepare(&plugin, "c").await.unwrap_err();
        assert!(error.contains("the version that wrote it can undo it"), "{error}");
        let steps = later.entry().steps;
        assert!(steps.iter().any(|step| matches!(step, Step::Unknown(_))), "{steps:?}");
    }
    drop(plugin);
    // The way up again: that version undoes its step.
    later.write(|entry| entry.steps.retain(|step| !matches!(step, Step::Unknown(_))));
    let plugin = later.node.plugin(&Fuse::none()).unwrap();
    plugin.start().await.unwrap();
    unprepare(&plugin, "c").await.unwrap();
    later.nothing_is_left();
}

#[tokio::test]
async fn a_device_of_the_next_version_is_left_alone_after_a_reboot_too() {
    let root = tempfile::tempdir().unwrap();
    let node = node(&root);
    node.claims.put(claim("c", &[("r", DeviceName::whole(pci(3)))]));
    prepare(&node.plugin(&Fuse::none()).unwrap(), "c").await.unwrap();
    let file = root.path().join("plugin/state/claims/c-uid_0000-03-00-0.json");
    let mut entry = Entry::decode(&fs::read(&file).unwrap()).unwrap();
    entry.version = VERSION + 1;
    entry.devices = vec![Device::Unknown(json!({"device": "share", "gpu": "0000:03:00.0"}))];
    fs::write(&file, entry.encode()).unwrap();
    node.boot("boot-2").unwrap();
    fs::remove_dir_all(root.path().join("cdi")).unwrap();
    let plugin = node.plugin(&Fuse::none()).unwrap();
    plugin.start().await.unwrap();
    plugin.reconcile_now().await;
    assert_eq!(Entry::decode(&fs::read(&file).unwrap()).unwrap(), entry);
    assert!(node.files("cdi").is_empty());
}
