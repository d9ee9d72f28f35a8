//! What kerf tells the API server of the node.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::resource::v1::ResourceSlice;
use kerf_e2e::{GPUS, LIMIT, NAMESPACE, Scene, wait_until};
use serde_json::Value;

use crate::manifest::{self, Pod, WHOLE, request, requests};

pub(crate) fn every_gpu_is_published(scene: &Scene<'_>) -> Result<()> {
    wait_until("each GPU has devices in a slice", LIMIT, || {
        let slices: Vec<ResourceSlice> = scene.list_of_cluster()?;
        let gpus: BTreeSet<String> = slices
            .iter()
            .filter(|slice| slice.spec.node_name == Some(scene.cluster.node_name()))
            .flat_map(|slice| slice.spec.devices.iter().flatten())
            .flat_map(|device| device.consumes_counters.iter().flatten())
            .map(|counters| counters.counter_set.clone())
            .collect();
        Ok((gpus.len() == GPUS.len()).then_some(()))
    })
}

/// What `kerf` says in kerf's own pod. The exit code is passed over: it is 1
/// where `doctor` found an error.
pub(crate) fn ask(scene: &Scene<'_>, words: &[&str]) -> Result<String> {
    let mut command = scene.cluster.kubectl();
    command.args(["--namespace", NAMESPACE, "exec", "daemonset/kerf-node", "--", "kerf"]);
    let output = command.args(words).output()?;
    let said = || format!("kerf {}: {}", words.join(" "), String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).ok().filter(|text| !text.is_empty()).with_context(said)
}

/// In kerf's own pod, without a flag, as an operator asks.
pub(crate) fn the_node_tells_of_itself(scene: &Scene<'_>) -> Result<()> {
    let ask = |words: &[&str]| ask(scene, words);
    let picture = ask(&["status"])?;
    for product in ["H100", "A100", "A30"] {
        ensure!(picture.contains(product), "no {product} in the picture:\n{picture}");
    }
    let report: Value = serde_json::from_str(&ask(&["doctor", "--json"])?)?;
    let findings = report["findings"].as_array().context("a report has findings")?;
    // The emulated driver has no CUDA, and that is all that is wrong with it.
    let is_known =
        |finding: &Value| finding["detail"].as_str().is_some_and(|text| text.contains("libcuda.so"));
    let others: Vec<_> = findings.iter().filter(|finding| !is_known(finding)).collect();
    ensure!(findings.len() == 1 && others.is_empty(), "a healthy node has findings: {report:#}");
    let models: Value = serde_json::from_str(&ask(&["doctor", "--dump-nvml"])?)?;
    ensure!(models.to_string().contains("1g.10gb"), "no MIG profile among what NVML answers: {models}");
    Ok(())
}

/// From outside of the cluster, as whoever may list slices and claims asks.
pub(crate) fn the_cluster_is_told(scene: &Scene<'_>) -> Result<()> {
    scene.apply(&manifest::lone("holder", &requests(&[request("gpu", WHOLE)])))?;
    scene.await_running("holder")?;
    // A profile of none of the node's GPUs, in a claim that a pod names.
    let claim = manifest::claim("absent", &requests(&[request("slice", "mig-2g.48gb.nvidia.com")]));
    let pod = Pod::new("waiter").with_claim("claim", "absent").container("main", &["claim"]).json();
    scene.apply(&manifest::list(&[claim, pod]))?;
    let status = wait_until("the scheduler's reason is told", LIMIT, || {
        let status: Value = serde_json::from_str(&scene.kerf(&["status", "--cluster", "--json"])?)?;
        let said = status["waiting"].as_array().into_iter().flatten().any(|claim| {
            claim["claim"]["namespace"] == scene.namespace()
                && claim["scheduler"]["message"].as_str().is_some_and(|text| text.contains("cannot allocate"))
        });
        Ok(said.then_some(status))
    })?;
    let gpus: Vec<&Value> = status["nodes"]
        .as_array()
        .into_iter()
        .flatten()
        .filter(|node| node["node"] == scene.cluster.node_name())
        .flat_map(|node| node["gpus"].as_array().into_iter().flatten())
        .collect();
    ensure!(gpus.len() == GPUS.len(), "not every GPU is told: {status:#}");
    let mut held = gpus.iter().flat_map(|gpu| gpu["held"].as_array().into_iter().flatten());
    ensure!(
        held.any(|held| held["pods"][0] == "holder" && held["claim"]["namespace"] == scene.namespace()),
        "the pod `holder` holds nothing: {status:#}"
    );
    let picture = scene.kerf(&["status", "--cluster"])?;
    for said in
        ["whole GPU   ", "pod holder", "absent   for ", "pod waiter", "no node publishes such a device"]
    {
        ensure!(picture.contains(said), "`{said}` is not in the picture:\n{picture}");
    }
    Ok(())
}
