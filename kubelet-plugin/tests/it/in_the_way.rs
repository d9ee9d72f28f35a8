//! What others put where the plugin writes.

use std::fs;
use std::os::unix::fs::symlink;

use kerf_kubelet_plugin::testing::{Fuse, claim};

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
