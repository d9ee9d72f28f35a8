use serde_json::json;

use super::*;

fn spec(change: impl FnOnce(&mut Value)) -> Spec {
    let mut value = json!({
        "cdiVersion": "0.6.0",
        "kind": "k8s.example.com/claim",
        "containerEdits": {"env": ["A=b"], "hooks": [{"hookName": "createContainer", "path": "/bin/hook"}]},
        "devices": [{
            "name": "uid-gpu-0",
            "containerEdits": {
                "deviceNodes": [{"path": "/dev/gpu0", "hostPath": "/run/dev/gpu0"}, {"path": "/dev/ctl"}],
                "mounts": [{"hostPath": "/lib/a", "containerPath": "/usr/lib/a"}, {"hostPath": "tmpfs", "containerPath": "/t"}],
            },
        }],
    });
    change(&mut value);
    Spec { path: PathBuf::from("/cdi/spec.json"), value }
}

#[test]
fn a_spec_that_is_right_has_names_and_paths_of_the_host() {
    let spec = spec(|_| {});
    spec.valid().expect("it is right");
    assert_eq!(spec.ids(), ["k8s.example.com/claim=uid-gpu-0"]);
    let paths = ["/run/dev/gpu0", "/dev/ctl", "/lib/a", "/bin/hook"].map(PathBuf::from);
    assert_eq!(spec.host_paths(), paths);
}

#[test]
fn what_is_wrong_with_a_spec_is_said() {
    type Change = fn(&mut Value);
    let wrong: [(Change, &str); 10] = [
        (|spec| spec["cdiVersion"] = json!("1"), "cdiVersion is `1`"),
        (|spec| spec["kind"] = json!("example.com"), "kind is `example.com`"),
        (|spec| spec["kind"] = json!("0.com/gpu"), "kind is `0.com/gpu`"),
        (|spec| spec["devices"] = json!([]), "it has no devices"),
        (|spec| spec["devices"][0]["name"] = json!("gpu 0"), "the name `gpu 0`"),
        (|spec| spec["devices"] = json!([spec["devices"][0], spec["devices"][0]]), "two devices"),
        (|spec| spec["devices"][0]["containerEdits"] = json!({}), "no containerEdits"),
        (|spec| spec["containerEdits"]["env"] = json!(["A"]), "not NAME=value"),
        (|spec| spec["containerEdits"]["hooks"][0]["hookName"] = json!("later"), "a hook is called `later`"),
        (
            |spec| spec["devices"][0]["containerEdits"]["mounts"][0]["containerPath"] = json!("lib"),
            "containerPath",
        ),
    ];
    for (change, says) in wrong {
        let error = spec(change).valid().expect_err(says);
        assert!(error.to_string().contains(says), "{error}");
    }
}

#[test]
fn ids_are_vendor_class_and_name() {
    for good in ["example.com/gpu=0", "k8s.example.com/claim=a_b-c.d:e"] {
        assert!(is_id(good), "{good}");
    }
    for bad in [
        "gpu=0",
        "example.com/gpu",
        "example.com/gpu=",
        "example.com/gpu=-a",
        "example.com/gpu=a/b",
        "/gpu=a",
    ] {
        assert!(!is_id(bad), "{bad}");
    }
}
