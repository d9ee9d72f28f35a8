//! Pods with one device, and what they say of it.

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use kerf_e2e::{LIMIT, Scene, wait_until};
use serde_json::json;

use crate::ground::DRIVER;

/// A pod that asks for one device by a claim template of its own.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Workload<'a> {
    pub(crate) name: &'a str,
    pub(crate) class: &'a str,
    /// Which devices of the class it takes, as CEL.
    pub(crate) selector: Option<&'a str>,
}

impl<'a> Workload<'a> {
    pub(crate) const fn new(name: &'a str, class: &'a str) -> Self {
        Self { name, class, selector: None }
    }

    pub(crate) const fn choosing(self, selector: &'a str) -> Self {
        Self { selector: Some(selector), ..self }
    }

    /// Makes its claim template and the pod.
    pub(crate) fn apply(self, scene: &Scene<'_>) -> Result<()> {
        let Self { name, class, selector } = self;
        let selectors: Vec<_> =
            selector.iter().map(|expression| json!({ "cel": { "expression": expression } })).collect();
        let exactly = json!({ "deviceClassName": class, "selectors": selectors });
        let template = json!({
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaimTemplate",
            "metadata": { "name": name },
            "spec": { "spec": { "devices": { "requests": [{ "name": "gpu", "exactly": exactly }] } } },
        });
        let pod = json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": { "name": name },
            "spec": {
                // Not 0: then the API server would not wait for the kubelet.
                "terminationGracePeriodSeconds": 1,
                "resourceClaims": [{ "name": "gpu", "resourceClaimTemplateName": name }],
                "containers": [{
                    "name": "main",
                    "image": "localhost/cuda-stub:dev",
                    // Ends when it is asked to, as the first process of a container
                    // does only if it says so.
                    "command": ["sh", "-c", "trap 'exit 0' TERM; sleep infinity & wait"],
                    "resources": { "claims": [{ "name": "gpu" }] },
                }],
            },
        });
        scene.apply(&json!({ "apiVersion": "v1", "kind": "List", "items": [template, pod] }).to_string())
    }

    /// [`apply`](Self::apply), and waits until it runs; the UUIDs it sees.
    pub(crate) fn run(self, scene: &Scene<'_>) -> Result<Vec<String>> {
        self.apply(scene)?;
        scene.await_running(self.name)?;
        seen(scene, self.name)
    }
}

/// CEL for the devices of one GPU.
pub(crate) fn on_gpu(pci: &str) -> String {
    format!("device.attributes[\"resource.kubernetes.io\"].pciBusID == \"{}\"", pci.to_lowercase())
}

/// CEL for one device by its UUID.
pub(crate) fn with_uuid(uuid: &str) -> String {
    let domain = format!("device.attributes[\"{DRIVER}\"]");
    format!("\"uuid\" in {domain} && {domain}.uuid == \"{uuid}\"")
}

/// The UUIDs that `nvidia-smi` lists in a pod: of MIG devices where it has
/// any, otherwise of GPUs.
pub(crate) fn seen(scene: &Scene<'_>, pod: &str) -> Result<Vec<String>> {
    let listed = scene.exec(pod, None, &["nvidia-smi", "-L"])?;
    let uuids: Vec<String> =
        listed.split("(UUID: ").skip(1).filter_map(|rest| Some(rest.split(')').next()?.to_owned())).collect();
    let partitions: Vec<String> = uuids.iter().filter(|uuid| uuid.starts_with("MIG-")).cloned().collect();
    Ok(if partitions.is_empty() { uuids } else { partitions })
}

/// The device that a pod's claim has.
pub(crate) fn device_of(scene: &Scene<'_>, pod: &str) -> Result<String> {
    let name = claim_of(scene, pod)?;
    let claim = scene.kubectl(&[
        "get",
        "resourceclaim",
        &name,
        "--output=jsonpath={.status.allocation.devices.results[0].device}",
    ])?;
    ensure!(!claim.is_empty(), "the claim {name} has no device");
    Ok(claim)
}

/// The name of the claim that was made for a pod.
pub(crate) fn claim_of(scene: &Scene<'_>, pod: &str) -> Result<String> {
    let path = "--output=jsonpath={.status.resourceClaimStatuses[0].resourceClaimName}";
    let name = scene.kubectl(&["get", "pod", pod, path])?;
    ensure!(!name.is_empty(), "the pod {pod} has no claim");
    Ok(name)
}

/// Waits until the scheduler has found no device for a pod.
pub(crate) fn await_refused(scene: &Scene<'_>, pod: &str) -> Result<()> {
    wait_until(&format!("the scheduler finds nothing for {pod}"), LIMIT, || {
        Ok(is_refused(scene, pod)?.then_some(()))
    })
}

/// Whether a pod waits because the scheduler found no device for it.
pub(crate) fn is_refused(scene: &Scene<'_>, pod: &str) -> Result<bool> {
    let pod: Pod = scene.get(pod)?.context("the pod is gone")?;
    let status = pod.status.context("the pod has no status")?;
    Ok(status.conditions.iter().flatten().any(|condition| {
        condition.type_ == "PodScheduled" && condition.reason.as_deref() == Some("Unschedulable")
    }))
}

/// Waits until the status of a pod says so of its device, with some words of the
/// message, or none.
pub(crate) fn await_health(scene: &Scene<'_>, pod: &str, health: &str, words: &str) -> Result<()> {
    wait_until(&format!("the device of {pod} is {health}"), LIMIT, || {
        let found: Pod = scene.get(pod)?.context("the pod is gone")?;
        let containers = found.status.and_then(|status| status.container_statuses).unwrap_or_default();
        let claims = containers.into_iter().filter_map(|container| container.allocated_resources_status);
        let devices: Vec<(String, String)> = claims
            .flatten()
            .flat_map(|claim| claim.resources.unwrap_or_default())
            .map(|device| (device.health.unwrap_or_default(), device.message.unwrap_or_default()))
            .collect();
        let is_so = matches!(&devices[..], [(said, message)] if said == health
            && message.contains(words) && message.is_empty() == words.is_empty());
        ensure!(is_so, "it says {devices:?}");
        Ok(Some(()))
    })
}

/// Deletes a pod with its template and waits until it is gone.
pub(crate) fn end(scene: &Scene<'_>, pod: &str) -> Result<()> {
    scene.delete(&format!("pod/{pod}"))?;
    scene.await_gone(pod)?;
    scene.delete(&format!("resourceclaimtemplate/{pod}"))
}

/// What must not change while a pod runs: its containers and what they see.
pub(crate) fn identity(scene: &Scene<'_>, pod: &str) -> Result<(Vec<String>, Vec<String>)> {
    let found: Pod = scene.get(pod)?.context("the pod is gone")?;
    let statuses = found.status.and_then(|status| status.container_statuses).unwrap_or_default();
    let containers = statuses
        .into_iter()
        .map(|container| format!("{:?} {}", container.container_id, container.restart_count))
        .collect();
    Ok((containers, seen(scene, pod)?))
}
