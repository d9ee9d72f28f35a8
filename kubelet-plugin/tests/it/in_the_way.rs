//! What others put where the plugin writes.

use std::fs;
use std::os::unix::fs::symlink;

use kerf_kubelet_plugin::testing::{Fuse, claim};
use rustix::fs::{FileType, Mode};

use super::{node, prepare, unprepare, whole};

const SPEC: &str = "k8s.gpu.nvidia.com-claim_c-uid.json";

#[tokio::test]
async fn nothing_is_written_through_a_link_nor_into_what_a_crash_left() {
    let root = tempfile::tempdir().unwrap();
    let node = node(&root);
    let plugin = node.plugin(&Fuse::none()).unwrap();
    node.claims.put(claim("c", &[("r", whole(3))]));
    prepare(&plugin, "c").await.unwrap();
    let entry = node.files("plugin/state/claims").remove(0);
    unprepare(&plugin, "c").await.unwrap();
    let temporary = [format!("plugin/state/claims/.{entry}.tmp"), format!("cdi/.{SPEC}.tmp")];

    let theirs = root.path().join("theirs");
    fs::write(&theirs, "theirs").unwrap();
    for link in &temporary {
        symlink(&theirs, root.path().join(link)).unwrap();
    }
    prepare(&plugin, "c").await.unwrap();
    unprepare(&plugin, "c").await.unwrap();
    // What is left there may be a second name of another file.
    for link in &temporary {
        fs::hard_link(&theirs, root.path().join(link)).unwrap();
    }
    prepare(&plugin, "c").await.unwrap();
    assert_eq!(fs::read_to_string(&theirs).unwrap(), "theirs");
    assert_eq!(node.files("cdi"), [SPEC]);
    assert!(fs::symlink_metadata(root.path().join("cdi").join(SPEC)).unwrap().is_file());
}

#[tokio::test]
async fn an_empty_folder_in_the_place_of_a_spec_is_removed() {
    let root = tempfile::tempdir().unwrap();
    let node = node(&root);
    let plugin = node.plugin(&Fuse::none()).unwrap();
    node.claims.put(claim("c", &[("r", whole(3))]));
    let spec = root.path().join("cdi").join(SPEC);
    fs::create_dir_all(&spec).unwrap();
    prepare(&plugin, "c").await.unwrap();
    assert!(spec.is_file());
    fs::remove_file(&spec).unwrap();
    fs::create_dir(&spec).unwrap();
    unprepare(&plugin, "c").await.unwrap();
    assert!(!spec.exists());
    assert!(node.files("plugin/state/claims").is_empty());
}

#[tokio::test]
async fn a_folder_with_something_in_it_fails_a_prepare_with_what_to_do_and_holds_up_no_unprepare() {
    let root = tempfile::tempdir().unwrap();
    let node = node(&root);
    let plugin = node.plugin(&Fuse::none()).unwrap();
    node.claims.put(claim("c", &[("r", whole(3))]));
    let spec = root.path().join("cdi").join(SPEC);
    fs::create_dir_all(spec.join("theirs")).unwrap();
    let error = prepare(&plugin, "c").await.unwrap_err();
    let expected = "a folder that is not empty stands where the claim's CDI spec belongs";
    assert!(error.contains(expected) && error.contains(SPEC) && error.contains("move it away"), "{error}");
    // Nothing is held by what could not be prepared.
    assert!(node.files("plugin/state/claims").is_empty());

    fs::rename(&spec, root.path().join("moved")).unwrap();
    prepare(&plugin, "c").await.unwrap();
    fs::remove_file(&spec).unwrap();
    fs::rename(root.path().join("moved"), &spec).unwrap();
    unprepare(&plugin, "c").await.unwrap();
    assert!(node.files("plugin/state/claims").is_empty());
    plugin.reconcile_now().await;
    assert!(spec.join("theirs").exists(), "what is not ours is left");
}

#[tokio::test]
async fn a_pipe_or_an_endless_file_in_the_place_of_ours_keeps_nobody_waiting() {
    let places = [
        "plugin/state/claims/x-uid_0000-01-00-0.json",
        "plugin/state/quarantine/x-uid_0000-01-00-0.json",
        "plugin/state/gpus/0000-01-00-0.json",
        "cdi/k8s.gpu.nvidia.com-claim_x-uid.json",
        &format!("cdi/{SPEC}"),
    ];
    for (place, endless) in places.into_iter().flat_map(|place| [(place, false), (place, true)]) {
        let root = tempfile::tempdir().unwrap();
        let node = node(&root);
        let path = root.path().join(place);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        if endless {
            symlink("/dev/zero", &path).unwrap();
        } else {
            rustix::fs::mknodat(rustix::fs::CWD, &path, FileType::Fifo, Mode::from_raw_mode(0o600), 0)
                .unwrap();
        }
        node.claims.put(claim("c", &[("r", whole(3))]));
        let plugin = node.plugin(&Fuse::none()).unwrap();
        plugin.start().await.unwrap();
        prepare(&plugin, "c").await.unwrap_or_else(|error| panic!("{place}: {error}"));
        plugin.reconcile_now().await;
        unprepare(&plugin, "c").await.unwrap_or_else(|error| panic!("{place}: {error}"));
    }
}

#[tokio::test]
async fn folders_named_as_what_a_crash_leaves_do_not_keep_it_from_starting() {
    let root = tempfile::tempdir().unwrap();
    let node = node(&root);
    for folder in ["plugin/state/claims/.x.tmp/theirs", &format!("cdi/.{SPEC}.tmp/theirs")] {
        fs::create_dir_all(root.path().join(folder)).unwrap();
    }
    node.plugin(&Fuse::none()).unwrap().start().await.unwrap();
}
