//! `kerf doctor` on an emulated node: nothing is found on a healthy one, and
//! everything it can find is staged.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;

use kerf_dra_driver::journal::Entry;
use kerf_emulator::model::built_in;
use kerf_emulator::state::Fault;
use serde_json::{Value, json};

use crate::emulated::{VERSION, install_on};

const UID: &str = "5b4ba64e-3b1b-4a2c-9d3e-0123456789ab";

/// A healthy node: an emulated machine, a kubelet's folders, a status socket.
struct Node {
    root: tempfile::TempDir,
    sockets: Vec<UnixListener>,
}

impl Node {
    fn new(gpus: &[&str]) -> Self {
        let mut node = Self { root: tempfile::tempdir().unwrap(), sockets: Vec::new() };
        // Folders for a test are closed to others, those of a node are not.
        fs::set_permissions(node.root.path(), fs::Permissions::from_mode(0o755)).unwrap();
        install_on(node.root.path(), gpus);
        node.put(&format!("{}/libcuda.so.{VERSION}", Node::libraries()), "x");
        node.put("etc/containerd/config.toml", "version = 3\n");
        fs::create_dir_all(node.path("cdi")).unwrap();
        node.bind("kubelet/plugins_registry/gpu.nvidia.com@reg.sock");
        node.serve_status(&[]);
        node
    }

    fn libraries() -> String {
        format!("driver/usr/lib/{}-linux-gnu", std::env::consts::ARCH)
    }

    fn path(&self, path: &str) -> PathBuf {
        self.root.path().join(path)
    }

    fn put(&self, path: &str, text: impl AsRef<[u8]>) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn remove(&self, path: &str) {
        let path = self.path(path);
        if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }.unwrap();
    }

    fn bind(&mut self, path: &str) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        self.sockets.push(UnixListener::bind(path).unwrap());
    }

    /// What `kerf node` would answer.
    fn serve_status(&self, missing: &[&str]) {
        self.serve(&json!({
            "node": "node-1", "driver": "gpu.nvidia.com", "version": "0.1.0", "nvidiaDriver": VERSION,
            "missing": missing, "publication": {"pool": "node-1/gpu", "generation": 1, "slices": 2}, "gpus": [],
        }));
    }

    fn serve(&self, status: &Value) {
        let status = status.to_string();
        let path = self.path("kubelet/plugins/gpu.nvidia.com/status.sock");
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let _ = fs::remove_file(&path);
        let listener = UnixListener::bind(path).unwrap();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                stream.unwrap().write_all(status.as_bytes()).unwrap();
            }
        });
    }

    fn control(&self) -> kerf_emulator::machine::Machine {
        kerf_emulator::machine::Machine::host(self.root.path()).unwrap()
    }

    /// Lets every call of a function of NVML answer a code.
    fn fail(&self, call: &str, code: u32) {
        let fault = Fault::answer(call, code);
        let _ = self.control().change(|state| {
            state.faults.push(fault.clone());
            Ok(())
        });
    }

    fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kerf"));
        command.env_clear().arg("doctor").args(["--node-name", "node-1"]);
        command.env("KUBECONFIG", self.path("kubeconfig"));
        for (flag, path) in [
            ("--kubelet-root", "kubelet"),
            ("--cdi-root", "cdi"),
            ("--hook-root", "hook"),
            ("--driver-root", "driver"),
            ("--dev-root", "dev"),
            ("--proc-root", "proc"),
            ("--sys-root", "sys"),
            ("--etc-root", "etc"),
        ] {
            command.arg(flag).arg(self.path(path));
        }
        command
    }

    /// The ids of what is found, and their details. The exit code is checked.
    fn found(&self) -> Vec<(String, String)> {
        let output = self.command().arg("--json").output().unwrap();
        let report: Value = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
        let findings = report["findings"].as_array().unwrap();
        let errors = findings.iter().any(|finding| finding["severity"] == "error");
        assert_eq!(output.status.code(), Some(i32::from(errors)), "{report}");
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        findings.iter().map(|finding| (text(&finding["id"]), text(&finding["detail"]))).collect()
    }

    /// Asserts that exactly these are found, and that a detail says something.
    #[track_caller]
    fn finds(&self, id: &str, says: &str) {
        let found = self.found();
        assert!(!found.is_empty() && found.iter().all(|(found, _)| found == id), "{id} wanted: {found:?}");
        assert!(found.iter().any(|(_, detail)| detail.contains(says)), "`{says}` is not in {found:?}");
    }
}

/// Every path below a folder with what tells whether it was changed.
fn tree(folder: &Path) -> Vec<(PathBuf, std::time::SystemTime, u64)> {
    let mut all = Vec::new();
    for entry in fs::read_dir(folder).unwrap().flatten() {
        let metadata = entry.path().symlink_metadata().unwrap();
        all.push((entry.path(), metadata.modified().unwrap(), metadata.len()));
        if metadata.is_dir() {
            all.extend(tree(&entry.path()));
        }
    }
    all.sort();
    all
}

#[test]
fn nothing_is_found_on_a_healthy_node_and_nothing_is_changed() {
    // Without a right to make device nodes the emulator makes files.
    for gpus in [&["h100-80:mig=on", "h100-80"][..], &["l4"]] {
        let node = Node::new(gpus);
        if !may_make_nodes(&node) {
            return;
        }
        let before =
            ["kubelet", "cdi", "dev", "driver", "proc", "sys", "etc"].map(|part| tree(&node.path(part)));
        assert_eq!(node.found(), []);
        let after =
            ["kubelet", "cdi", "dev", "driver", "proc", "sys", "etc"].map(|part| tree(&node.path(part)));
        assert_eq!(before, after);
        let output = node.command().output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success() && text.ends_with("nothing was found to be wrong\n"), "{text}");
    }
}

fn may_make_nodes(node: &Node) -> bool {
    let is_node = !node.path("dev/nvidiactl").is_file();
    if !is_node {
        eprintln!("skipped: this user may not make device nodes (CAP_MKNOD)");
    }
    is_node
}

/// Runs a test on a healthy node, where device nodes can be made.
fn on_node(test: impl FnOnce(&mut Node)) {
    let mut node = Node::new(&["h100-80"]);
    if may_make_nodes(&node) {
        test(&mut node);
    }
}

#[test]
fn a_driver_that_does_not_answer_is_told_by_its_reason() {
    let library = format!("{}/libnvidia-ml.so.1", Node::libraries());
    on_node(|node| {
        node.remove(&library);
        node.finds("driver-library-missing", "no libnvidia-ml.so.1 under");
        let output = node.command().env("HOST_DRIVER_ROOT", "/opt/nvidia").output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(text.contains("` is `/opt/nvidia` of the host)"), "{text}");
    });
    on_node(|node| {
        node.remove(&library);
        node.put(&library, "no library");
        node.finds("driver-library-unusable", "libnvidia-ml.so.1");
    });
    for (code, id) in [
        (4, "driver-no-permission"),
        (9, "kernel-module-not-loaded"),
        (18, "driver-version-mismatch"),
        (999, "driver-library-unusable"),
    ] {
        on_node(|node| {
            node.fail("nvmlInit", code);
            node.finds(id, "nvmlInit_v2 answered");
        });
    }
}

#[test]
fn gpus_that_do_not_serve_are_named() {
    on_node(|node| {
        node.fail("nvmlDeviceGetUUID", 15);
        node.finds("gpu-unreadable", "0000:17:00.0 could not be read");
    });
    on_node(|node| {
        let _ = node.control().change(|state| {
            state.gpus.clear();
            Ok(())
        });
        node.finds("no-gpus", "counts 0 GPUs");
    });
}

#[test]
fn a_mode_that_waits_is_told_with_whoever_is_in_its_way() {
    let node = Node::new(&["a100-40"]);
    if !may_make_nodes(&node) {
        return;
    }
    node.control().set_mig_mode(0, true).unwrap();
    node.finds("mig-mode-pending", "MIG is Disabled, and Enabled after a reset");
    let uuid = node.control().state().unwrap().gpus[0].uuid.clone();
    let _held = node.control().clients().hold(&uuid, kerf_emulator::clients::Use::Compute).unwrap();
    let found = node.found();
    let ids: Vec<&str> = found.iter().map(|(id, _)| id.as_str()).collect();
    assert_eq!(ids, ["mig-mode-pending", "mode-change-blocked"]);
    assert!(found[1].1.contains(&format!("({})", std::process::id())), "{found:?}");
}

#[test]
fn driver_files_that_do_not_fit_together_are_told() {
    on_node(|node| {
        node.remove(&format!("{}/libcuda.so.{VERSION}", Node::libraries()));
        node.finds("driver-files-incomplete", "libcuda.so.580.95.05 is not under the driver root");
    });
}

#[test]
fn device_nodes_that_cannot_be_had_are_told() {
    on_node(|node| {
        node.put("proc/devices", "Character devices:\n195 nvidia-frontend\n511 nvidia-caps\n");
        node.remove("dev/nvidia-uvm");
        node.finds("device-node-unknown", "nvidia-uvm is not in /proc/devices");
        node.put("proc/devices", "Character devices:\n195 nvidia-frontend\n510 nvidia-uvm\n");
        node.finds("device-node-unknown", "nvidia-caps is not in /proc/devices");
        // kerf makes it at the next prepare.
        node.put(
            "proc/devices",
            "Character devices:\n195 nvidia-frontend\n510 nvidia-uvm\n511 nvidia-caps\n",
        );
        assert_eq!(node.found(), []);
        node.put(
            "proc/devices",
            "Character devices:\n196 nvidia-frontend\n510 nvidia-uvm\n511 nvidia-caps\n",
        );
        node.finds("device-node-outdated", "nvidia0 is 195:0 instead of 196:0");
    });
    on_node(|node| {
        node.remove("dev/nvidia0");
        fs::create_dir(node.path("dev/nvidia0")).unwrap();
        node.finds("device-node-unusable", "not a character device");
    });
}

#[test]
fn folders_of_the_kubelet_that_cannot_be_used_are_told() {
    on_node(|node| {
        node.remove("proc/sys/kernel/random/boot_id");
        node.finds("boot-id-unreadable", "boot_id");
    });
    on_node(|node| {
        node.remove("kubelet");
        node.finds("kubelet-root-missing", "kubelet");
    });
    on_node(|node| {
        node.remove("kubelet/plugins");
        node.finds("kerf-node-not-running", "status.sock");
        node.remove("kubelet/plugins_registry");
        node.put("kubelet/plugins_registry", "");
        let ids: Vec<String> = node.found().into_iter().map(|(id, _)| id).collect();
        assert_eq!(ids, ["registry-folder-unusable", "kerf-node-not-running"]);
    });
    on_node(|node| {
        node.remove("kubelet/plugins");
        node.put("kubelet/plugins", "");
        let ids: Vec<String> = node.found().into_iter().map(|(id, _)| id).collect();
        assert_eq!(ids, ["plugin-folder-unusable", "kerf-node-not-running"]);
    });
}

#[test]
fn a_node_that_is_not_registered_or_not_ready_is_told() {
    on_node(|node| {
        node.serve_status(&["the kubelet has not registered the plugin"]);
        node.finds("kerf-node-not-ready", "the kubelet has not registered the plugin");
    });
    on_node(|node| {
        node.remove("kubelet/plugins_registry/gpu.nvidia.com@reg.sock");
        node.finds("registration-socket-missing", "gpu.nvidia.com@reg.sock");
    });
}

#[test]
fn profiles_that_are_wanted_and_no_gpu_has_are_told() {
    on_node(|node| {
        node.serve(&json!({
            "node": "node-1", "driver": "gpu.nvidia.com", "version": "0.1.0", "nvidiaDriver": VERSION,
            "missing": [], "publication": {"pool": "node-1/gpu", "generation": 1, "slices": 2}, "gpus": [],
            "absentProfiles": ["1g.18gb", "1g.24gb-me"],
        }));
        node.finds("mig-profile-absent", "1g.24gb-me");
    });
}

#[test]
fn a_vgpu_guest_of_which_nothing_is_offered_is_told() {
    on_node(|node| {
        node.serve(&json!({
            "node": "node-1", "driver": "gpu.nvidia.com", "version": "0.1.0", "nvidiaDriver": VERSION,
            "missing": [], "publication": {"pool": "node-1/gpu", "generation": 1, "slices": 1}, "gpus": [{
                "name": "gpu-0000-65-00-0", "pci": "0000:65:00.0", "product": "NVIDIA H100 80GB HBM3",
                "memory": 85_520_809_984_u64, "mig": "enabled", "offered": "nothing", "memorySlices": 8,
                "heldBy": [], "partitions": [], "conditions": [],
            }],
        }));
        node.finds("nothing-offered", "0000:65:00.0 (NVIDIA H100 80GB HBM3)");
    });
}

#[test]
fn whoever_else_hands_out_gpus_is_told() {
    on_node(|node| {
        node.put("kubelet/plugins_registry/gpu.nvidia.com-reg.sock", "a file that a dead process left");
        assert_eq!(node.found(), []);
    });
    for (socket, id) in [
        ("plugins_registry/gpu.nvidia.com-5b4ba64e-reg.sock", "driver-name-taken"),
        ("plugins_registry/compute-domain.nvidia.com-reg.sock", "compute-domain-beside"),
        ("device-plugins/nvidia-gpu.sock", "device-plugin-beside"),
    ] {
        on_node(|node| {
            node.bind(&format!("kubelet/{socket}"));
            node.finds(id, socket);
        });
    }
    on_node(|node| {
        let output = node.command().args(["--json", "--driver-name", "gpu.example.com"]).output().unwrap();
        let report = String::from_utf8(output.stdout).unwrap();
        let found: Value = serde_json::from_str(&report).unwrap();
        let ids: Vec<&Value> =
            found["findings"].as_array().unwrap().iter().map(|finding| &finding["id"]).collect();
        assert!(ids.contains(&&json!("other-driver-beside")), "{report}");
    });
}

#[test]
fn a_journal_that_is_not_as_it_should_be_is_told() {
    let file = format!("kubelet/plugins/gpu.nvidia.com/state/claims/{UID}_0000-17-00-0.json");
    let entry = |boot: &str| -> Entry {
        serde_json::from_value(json!({
            "version": 1, "uid": UID, "claim": {"namespace": "team", "name": "train"}, "bootId": boot,
            "allocation": [], "devices": [], "steps": [], "phase": "completed",
        }))
        .unwrap()
    };
    on_node(|node| {
        let boot = fs::read_to_string(node.path("proc/sys/kernel/random/boot_id")).unwrap();
        node.put(&file, entry(boot.trim()).encode());
        assert_eq!(node.found(), []);
        node.put(&file, entry("another").encode());
        node.finds("journal-of-another-boot", "claim team/train");
        node.put(&file, "{}");
        node.finds("journal-entry-unreadable", "not a journal entry");
        node.remove(&file);
        node.put(&file.replace("claims", "quarantine"), "{}");
        node.finds("journal-quarantine", UID);
    });
}

#[test]
fn a_container_runtime_that_would_not_give_devices_is_told() {
    on_node(|node| {
        node.remove("cdi");
        node.put("cdi", "");
        node.finds("cdi-folder-unusable", "not a folder");
    });
    on_node(|node| {
        node.put("hook/gpu.nvidia.com", "");
        node.finds("hook-folder-unusable", "not a folder");
    });
    on_node(|node| {
        fs::create_dir(node.path("hook")).unwrap();
        fs::set_permissions(node.path("hook"), fs::Permissions::from_mode(0o750)).unwrap();
        node.finds("hook-folder-closed", "/hook");
    });
    for folder in ["cdi", "etc/cdi"] {
        on_node(|node| {
            let spec = json!({"kind": "nvidia.com/gpu", "devices": [{"name": "0"}, {"name": "all"}]});
            node.put(&format!("{folder}/nvidia.json"), spec.to_string());
            node.finds("cdi-spec-all-gpus", "nvidia.com/gpu=all");
        });
    }
    on_node(|node| {
        node.put("etc/containerd/config.toml", "version = 2\n[plugins.cri]\nenable_cdi = false\n");
        node.finds("containerd-cdi-off", "config.toml");
        node.put("etc/containerd/config.toml", "version = 2\n");
        node.finds("containerd-cdi-unset", "config.toml");
        node.remove("etc/containerd/config.toml");
        assert_eq!(node.found(), []);
        let text = String::from_utf8(node.command().output().unwrap().stdout).unwrap();
        assert!(text.contains("skipped: whether containerd reads CDI specs"), "{text}");
    });
}

#[test]
fn what_a_gpu_answers_is_its_model() {
    let node = Node::new(&["a100-40", "h100-80:mig=on", "l4"]);
    node.control().create_gpu_instance(1, 9, None).unwrap();
    let output = node.command().arg("--dump-nvml").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let dumped: kerf_emulator::model::Models = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(dumped.len(), 3);
    for (key, name) in
        [("a100-40", "nvidia-a100-sxm4-40gb"), ("h100-80", "nvidia-h100-80gb-hbm3"), ("l4", "nvidia-l4")]
    {
        let known = serde_json::to_value(&built_in().unwrap()[key]).unwrap();
        let found = serde_json::to_value(&dumped[name]).unwrap();
        assert_eq!(numbers(found), numbers(known), "{key}");
    }
    let h100 = dumped["nvidia-h100-80gb-hbm3"].mig.as_ref().unwrap();
    assert_eq!(h100.profile(9).unwrap().compute, [0, 1, 2]);
    assert_eq!(
        h100.compute_profiles.iter().map(|kind| (kind.profile, kind.slices)).collect::<Vec<_>>(),
        [(0, 1), (1, 2), (2, 3)]
    );
    assert!(dumped["nvidia-h100-80gb-hbm3"].derived.iter().any(|text| text.contains("not asked")));
}

/// A model without its origin, and without what NVML tells of instances only.
fn numbers(mut model: Value) -> Value {
    let model_map = model.as_object_mut().unwrap();
    model_map.retain(|key, _| key != "sources" && key != "derived");
    if let Some(mig) = model_map["mig"].as_object_mut() {
        mig.remove("compute_profiles");
        let profiles = mig["profiles"].as_array_mut().unwrap();
        profiles.sort_by_key(|profile| profile["id"].as_u64());
        for profile in profiles {
            profile.as_object_mut().unwrap().retain(|key, _| key != "compute" && key != "instance_ids");
        }
    }
    model
}

/// What an API server answers.
#[derive(Clone, Copy)]
struct ApiServer {
    minor: &'static str,
    /// The resource that kerf may not touch.
    forbidden: &'static str,
    /// The field of a slice's devices that is dropped.
    dropped: &'static str,
    /// The class that a pod's claim waits for.
    wanted: &'static str,
}

const HEALTHY: ApiServer =
    ApiServer { minor: "37", forbidden: "", dropped: "", wanted: "mig-1g.10gb.nvidia.com" };

impl ApiServer {
    /// Serves on a port of the loopback address as long as the test runs.
    fn serve(self, node: &Node) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let kubeconfig = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": format!("http://{address}")}}],
            "users": [{"name": "c", "user": {}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c"}}],
        });
        node.put("kubeconfig", kubeconfig.to_string());
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                // A client that ends early is no matter of this test.
                let _ = self.answer(&mut stream.unwrap());
            }
        });
    }

    fn answer(self, stream: &mut TcpStream) -> std::io::Result<()> {
        let mut reader = BufReader::new(stream.try_clone()?);
        loop {
            let (mut head, mut length) = (String::new(), 0);
            loop {
                let mut line = String::new();
                if reader.read_line(&mut line)? == 0 {
                    return Ok(());
                }
                if let Some(value) = line.to_lowercase().strip_prefix("content-length:") {
                    length = value.trim().parse().unwrap();
                }
                if line.trim().is_empty() {
                    break;
                }
                head += &line;
            }
            let mut body = vec![0; length];
            reader.read_exact(&mut body)?;
            let mut object: Value = serde_json::from_slice(&body).unwrap_or_default();
            let path = head.split(' ').nth(1).unwrap();
            if path == "/version" {
                object = json!({
                    "major": "1", "minor": self.minor, "gitVersion": format!("v1.{}.0", self.minor),
                    "gitCommit": "", "gitTreeState": "", "buildDate": "", "goVersion": "", "compiler": "",
                    "platform": "",
                });
            } else if path.contains("selfsubjectaccessreviews") {
                let resource = &object["spec"]["resourceAttributes"]["resource"];
                object["status"] = json!({"allowed": resource != self.forbidden});
            } else if path.contains("fieldSelector=spec.driver") {
                object = json!({"metadata": {"resourceVersion": "1"}, "items": [a_free_gpu()]});
            } else if path.contains("/resourceclaims?") {
                let claim = waiting_for(self.wanted);
                object = json!({"metadata": {"resourceVersion": "1"}, "items": [claim]});
            } else {
                assert!(
                    path.starts_with("/apis/resource.k8s.io/v1/resourceslices?")
                        && path.contains("dryRun=All")
                );
                object["spec"]["devices"][0].as_object_mut().unwrap().remove(self.dropped);
            }
            let body = object.to_string();
            let head = "HTTP/1.1 201 Created\r\ncontent-type: application/json\r\ncontent-length";
            write!(stream, "{head}: {}\r\n\r\n{body}", body.len())?;
        }
    }
}

fn a_free_gpu() -> Value {
    json!({
        "metadata": {"name": "00000-a"},
        "spec": {
            "driver": "gpu.nvidia.com",
            "nodeName": "node-1",
            "pool": {"name": "node-1/gpu", "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": "gpu-0000-17-00-0", "attributes": {"type": {"string": "gpu"}}}],
        },
    })
}

/// A claim of a pod, of a time long ago.
fn waiting_for(class: &str) -> Value {
    json!({
        "metadata": {
            "namespace": "team", "name": "train-gpu-x", "uid": "uid-1", "creationTimestamp": "2026-11-30T10:00:00Z",
            "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "train", "uid": "uid-2"}],
        },
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": class, "count": 1}}]}},
    })
}

#[test]
fn an_api_server_that_does_not_do_what_kerf_needs_is_told() {
    on_node(|node| {
        HEALTHY.serve(node);
        let output = node.command().arg("--json").output().unwrap();
        let report: Value =
            serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"));
        assert_eq!(report, json!({"findings": [], "skipped": []}));
        ApiServer { minor: "33+", ..HEALTHY }.serve(node);
        node.finds("api-server-too-old", "v1.33+.0");
        ApiServer { forbidden: "resourceclaims", ..HEALTHY }.serve(node);
        node.finds("permission-missing", "list resourceclaims.resource.k8s.io");
        ApiServer { dropped: "taints", ..HEALTHY }.serve(node);
        node.finds("api-server-drops-fields", "DRADeviceTaints");
        ApiServer { dropped: "consumesCounters", ..HEALTHY }.serve(node);
        node.finds("api-server-drops-fields", "DRAPartitionableDevices");
        ApiServer { wanted: "gpu.nvidia.com", ..HEALTHY }.serve(node);
        node.finds("claims-wait-beside-free-devices", "team/train-gpu-x");
        // Nobody listens on this port any more.
        let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let text = fs::read_to_string(node.path("kubeconfig")).unwrap();
        let server = text.split('"').find(|part| part.starts_with("http://")).unwrap().to_owned();
        node.put("kubeconfig", text.replace(&server, &format!("http://{free}")));
        node.finds("api-server-unreachable", "");
    });
}
