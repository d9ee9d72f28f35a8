//! kerf as a user installs it: the image, the chart, values.

use std::fs;
use std::path::Path;

use crate::cluster::Cluster;
use crate::{exec, image, paths};
use anyhow::{Context as _, Result};
use serde_json::{Map, Value, json};

/// Where the chart is installed.
pub const NAMESPACE: &str = "kerf";

/// The release's name, and the label by which its pods are found.
const RELEASE: &str = "kerf";

/// Where kerf's container has the emulated machine's root, all of it writable:
/// it is the emulated kernel that changes `/proc` there, while the chart gives
/// kerf its `/proc` to read only.
const EMULATOR: &str = "/nvidia-emulator";

/// The emulated GPUs of tests and stories. On Ampere kerf keeps the MIG mode it finds.
pub const GPUS: [&str; 4] = ["h100-80", "h100-80", "a100-40:mig=on", "a30:mig=on"];

/// Values of the chart, on top of those that the emulated driver needs.
pub type Values = Map<String, Value>;

/// Installs the chart, or changes it to `values`; returns when every object of
/// it is ready.
pub fn install(cluster: &Cluster, values: Values) -> Result<()> {
    let root = cluster.emulator_root().context("the cluster has no emulated GPUs")?;
    let path = |part: &str| root.join(part).display().to_string();
    let (repository, tag) = image::KERF.rsplit_once(':').context("the image has no tag")?;
    let mut all = json!({
        "image": { "repository": repository, "tag": tag },
        "driverRoot": path("driver"),
        "devRoot": path("dev"),
        "procRoot": path("proc"),
        "sysRoot": path("sys"),
        "kubeletRoot": cluster.kubelet_root(),
        "cdiRoot": cluster.cdi_dir(),
        "hookRoot": cluster.hook_root(),
        "extraMounts": [format!("{}:/run/nvidia-emulator", path("state"))],
        "extraEnv": [{ "name": "NVIDIA_EMULATOR_ROOT", "value": EMULATOR }],
        "extraVolumes": [{ "name": "emulator", "hostPath": { "path": root, "type": "Directory" } }],
        "extraVolumeMounts": [{ "name": "emulator", "mountPath": EMULATOR }],
        // The tag stays while the image changes; this makes the pods follow.
        "podAnnotations": { "gpu.kerf.dev/image": fingerprint(&paths::images().join("kerf.tar"))? },
    });
    if let Value::Object(all) = &mut all {
        all.extend(values);
    }
    let file = cluster_file(cluster, "values.json");
    fs::write(&file, serde_json::to_vec_pretty(&all)?)?;
    let mut helm = cluster.helm();
    helm.args(["upgrade", "--install", RELEASE]).arg(paths::root().join("charts/kerf"));
    helm.args(["--namespace", NAMESPACE, "--create-namespace", "--wait", "--timeout", "3m", "--values"]);
    exec::output(helm.arg(file)).context("cannot install the chart")?;
    Ok(())
}

/// Removes the chart; returns when its pods are gone.
pub fn uninstall(cluster: &Cluster) -> Result<()> {
    let mut helm = cluster.helm();
    // In the foreground: else the chart is gone long before the pods are.
    helm.args(["uninstall", RELEASE, "--namespace", NAMESPACE, "--cascade", "foreground"]);
    exec::output(helm.args(["--wait", "--timeout", "3m"])).context("cannot remove the chart")?;
    Ok(())
}

/// What kerf's pods have logged, those that were restarted included.
pub fn logs(cluster: &Cluster) -> String {
    let selector = format!("--selector=app.kubernetes.io/instance={RELEASE}");
    let mut text = String::new();
    for previous in ["--previous=true", "--previous=false"] {
        let mut kubectl = cluster.kubectl();
        kubectl.args(["logs", "--namespace", NAMESPACE, &selector, "--tail=200", previous]);
        text += &exec::output(&mut kubectl).unwrap_or_default();
    }
    text
}

/// Beside the cluster's own files, so that it goes with them.
fn cluster_file(cluster: &Cluster, name: &str) -> std::path::PathBuf {
    cluster.kubeconfig().with_file_name(name)
}

/// Tells one content of a file from another.
fn fingerprint(path: &Path) -> Result<String> {
    use std::hash::{DefaultHasher, Hash as _, Hasher as _};
    let mut hash = DefaultHasher::new();
    fs::read(path).with_context(|| format!("cannot read {}", path.display()))?.hash(&mut hash);
    Ok(format!("{:016x}", hash.finish()))
}
