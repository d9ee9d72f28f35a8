//! The scripts of `demo/kind`, as far as they can be tried without Docker:
//! stand-ins for its programs write down what they are asked for.

#![expect(clippy::expect_used, reason = "a test fails by panicking")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

use xtask::paths;

const TOOLS: [&str; 5] = ["docker", "kind", "kubectl", "helm", "cargo"];

fn script(name: &str) -> std::path::PathBuf {
    paths::root().join("demo/kind").join(name)
}

/// Runs `up.sh` with stand-ins, `without` one of them, on a machine that has
/// clusters; what it said and what it called.
fn up(arguments: &[&str], without: &str, clusters: &str) -> (Output, Vec<String>) {
    let folder = tempfile::tempdir().expect("a folder");
    for tool in TOOLS.iter().filter(|tool| **tool != without) {
        let path = folder.path().join(tool);
        let answer = format!("if [ \"$1 $2\" = 'get clusters' ]; then echo '{clusters}'; fi");
        let text = format!("#!/bin/sh\necho {tool} \"$@\" >> \"$CALLS\"\n{answer}\n");
        fs::write(&path, text).expect("a file");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("a mode");
    }
    // The shell's own tools, and not this machine's docker.
    for tool in ["bash", "dirname", "grep", "cat", "sh"] {
        let found = ["/usr/bin", "/bin"].map(|place| Path::new(place).join(tool));
        let found = found.iter().find(|path| path.exists()).expect("a tool of every system");
        std::os::unix::fs::symlink(found, folder.path().join(tool)).expect("a link");
    }
    let calls = folder.path().join("calls");
    let output = Command::new(folder.path().join("bash"))
        .arg(script("up.sh"))
        .args(arguments)
        .env_clear()
        .env("PATH", folder.path())
        .env("CALLS", &calls)
        .output()
        .expect("bash runs");
    let calls = fs::read_to_string(calls).unwrap_or_default();
    (output, calls.lines().map(str::to_owned).collect())
}

#[test]
fn up_makes_a_cluster_with_emulated_gpus_and_installs_the_chart() {
    let (output, calls) = up(&["l4", "a30:mig=on"], "", "other");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let at = |part: &str| {
        calls.iter().position(|call| call.contains(part)).unwrap_or_else(|| panic!("{part}: {calls:#?}"))
    };
    let order = [
        at("cargo xtask image"),
        at("kind create cluster --config demo/kind/kind.yaml"),
        at("docker cp target/release/libkerf_emulator.so kerf-control-plane:"),
        at("init --root /var/lib/nvidia-emulator --gpu l4 --gpu a30:mig=on"),
        at("kind load image-archive --name kerf target/images/kerf.tar"),
        at("helm upgrade --install kerf charts/kerf"),
    ];
    assert!(order.is_sorted(), "{calls:#?}");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("kubectl --context kind-kerf apply"), "{said}");
}

#[test]
fn up_says_what_is_missing_or_in_the_way() {
    for tool in TOOLS {
        let (output, calls) = up(&[], tool, "");
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && error.contains(&format!("no `{tool}` on the PATH")), "{error}");
        assert!(calls.is_empty(), "{calls:?}");
    }
    let (output, calls) = up(&[], "", "kerf");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && error.contains("is there already"), "{error}");
    assert_eq!(calls, ["kind get clusters"]);
}

#[test]
fn the_scripts_are_clean() {
    for name in ["up.sh", "down.sh"] {
        let checked = Command::new("bash").arg("-n").arg(script(name)).status().expect("bash runs");
        assert!(checked.success(), "{name}");
        match Command::new("shellcheck").arg(script(name)).output() {
            Ok(output) => {
                assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
            }
            Err(error) => eprintln!("{name} is not checked by shellcheck: {error}"),
        }
    }
}

#[test]
fn the_values_are_the_charts_and_the_images_are_those_that_are_built() {
    let read = |path: &str| fs::read_to_string(paths::root().join(path)).expect("a file");
    let values: serde_json::Value = serde_saphyr::from_str(&read("demo/kind/values.yaml")).expect("YAML");
    let schema: serde_json::Value =
        serde_json::from_str(&read("charts/kerf/values.schema.json")).expect("JSON");
    let values = values.as_object().expect("values");
    for (key, value) in values {
        assert!(schema["properties"].get(key).is_some(), "the chart has no value {key}");
        if let Some(root) = value.as_str() {
            assert!(root.starts_with("/var/lib/nvidia-emulator/"), "{key} is {root}");
        }
    }
    let (repository, tag) = xtask::image::KERF.split_once(':').expect("a tag");
    assert_eq!(
        (values["image"]["repository"].as_str(), values["image"]["tag"].as_str()),
        (Some(repository), Some(tag))
    );
}
