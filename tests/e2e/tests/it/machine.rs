//! What is really there: the emulated hardware, kerf's files and the devices
//! that claims hold, each read past kerf, and what a container sees of it.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, bail, ensure};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kerf_e2e::{LIMIT, Scene, wait_until};
use serde::Deserialize;
use serde_json::Value;
use xtask::exec;

use crate::manifest;

/// The driver name, which is the folder's name too.
const DRIVER: &str = "gpu.nvidia.com";

/// A GPU of the emulated machine.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Gpu {
    pub(crate) model: String,
    pub(crate) pci: String,
    pub(crate) uuid: String,
    pub(crate) mig_current: bool,
    pub(crate) instances: Vec<Instance>,
}

/// A GPU instance.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Instance {
    pub(crate) start: u32,
    pub(crate) compute: Vec<ComputeInstance>,
}

/// A compute instance.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct ComputeInstance {
    pub(crate) uuid: String,
}

/// The GPUs in PCI order.
pub(crate) fn gpus(scene: &Scene<'_>) -> Result<Vec<Gpu>> {
    #[derive(Deserialize)]
    struct Machine {
        gpus: Vec<Gpu>,
    }
    let machine: Machine =
        serde_json::from_str(&scene.emulator(&["show"])?).context("cannot read the machine")?;
    Ok(machine.gpus)
}

/// The GPUs of a model, in PCI order.
pub(crate) fn gpus_of(scene: &Scene<'_>, model: &str) -> Result<Vec<Gpu>> {
    Ok(gpus(scene)?.into_iter().filter(|gpu| gpu.model == model).collect())
}

/// A device as a claim holds it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Held {
    pub(crate) request: String,
    pub(crate) pool: String,
    pub(crate) device: String,
}

impl Held {
    /// The PCI address that the device's name tells.
    pub(crate) fn pci(&self) -> Result<String> {
        let whole = self.device.split_once("-mig-").map_or(self.device.as_str(), |(whole, _)| whole);
        let parts: Vec<&str> = whole.split('-').collect();
        match parts.as_slice() {
            ["gpu", domain, bus, device, function] => Ok(format!("{domain}:{bus}:{device}.{function}")),
            _ => bail!("`{}` is not a device's name", self.device),
        }
    }

    /// Profile and first memory slice of a partition; none for a whole GPU.
    pub(crate) fn partition(&self) -> Option<(&str, u32)> {
        let (profile, start) = self.device.split_once("-mig-")?.1.rsplit_once('-')?;
        Some((profile, start.parse().ok()?))
    }
}

/// The devices of a claim; none while it is not allocated.
pub(crate) fn held(claim: &ResourceClaim) -> Vec<Held> {
    let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
    let results = allocation.and_then(|allocation| allocation.devices.as_ref()?.results.as_ref());
    let held = |result: &k8s_openapi::api::resource::v1::DeviceRequestAllocationResult| Held {
        request: result.request.clone(),
        pool: result.pool.clone(),
        device: result.device.clone(),
    };
    results.into_iter().flatten().map(held).collect()
}

/// A claim that must be there.
pub(crate) fn claim(scene: &Scene<'_>, name: &str) -> Result<ResourceClaim> {
    scene.get(name)?.with_context(|| format!("there is no claim {name}"))
}

/// A claim's UID.
pub(crate) fn uid_of(scene: &Scene<'_>, claim_name: &str) -> Result<String> {
    claim(scene, claim_name)?.metadata.uid.context("the claim has no UID")
}

/// The name of the claim object behind each of a pod's claims, those that the
/// scheduler made for its extended resources included.
pub(crate) fn claims_of(scene: &Scene<'_>, pod: &str) -> Result<Vec<String>> {
    let pod: Pod = scene.get(pod)?.context("the pod is not there")?;
    let (spec, status) = (pod.spec.unwrap_or_default(), pod.status.unwrap_or_default());
    let named = spec.resource_claims.into_iter().flatten().filter_map(|claim| claim.resource_claim_name);
    let made = status.resource_claim_statuses.into_iter().flatten();
    let made = made.filter_map(|claim| claim.resource_claim_name);
    let extended = status.extended_resource_claim_status.map(|claim| claim.resource_claim_name);
    Ok(named.chain(made).chain(extended).collect())
}

/// All devices of a pod.
pub(crate) fn held_by(scene: &Scene<'_>, pod: &str) -> Result<Vec<Held>> {
    let mut all = Vec::new();
    for name in claims_of(scene, pod)? {
        all.extend(held(&claim(scene, &name)?));
    }
    Ok(all)
}

/// A GPU or partition that an NVML client sees.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Seen {
    Whole(String),
    Partition { parent: String, profile: String, uuid: String },
}

/// What stands on the hardware for devices that claims hold.
pub(crate) fn on_hardware(scene: &Scene<'_>, devices: &[Held]) -> Result<BTreeSet<Seen>> {
    let gpus = gpus(scene)?;
    let seen = |held: &Held| {
        let pci = held.pci()?;
        let gpu = gpus.iter().find(|gpu| gpu.pci == pci).with_context(|| format!("there is no GPU {pci}"))?;
        let Some((profile, start)) = held.partition() else {
            ensure!(!gpu.mig_current, "GPU {pci} is held as a whole, but its MIG mode is on");
            ensure!(gpu.instances.is_empty(), "GPU {pci} is held as a whole, but has {:?}", gpu.instances);
            return Ok(Seen::Whole(gpu.uuid.clone()));
        };
        let instances: Vec<_> = gpu.instances.iter().filter(|instance| instance.start == start).collect();
        match instances.as_slice() {
            [Instance { compute, .. }] if compute.len() == 1 => Ok(Seen::Partition {
                parent: gpu.uuid.clone(),
                profile: profile.to_owned(),
                uuid: compute.iter().map(|compute| compute.uuid.clone()).collect(),
            }),
            _ => bail!("for {held:?} there is {instances:?} on GPU {pci}"),
        }
    };
    devices.iter().map(seen).collect()
}

/// Reads what `nvidia-smi -L` prints. A GPU is seen as a whole where no MIG
/// device follows it.
pub(crate) fn listed(text: &str) -> Result<BTreeSet<Seen>> {
    let mut seen = BTreeSet::new();
    // The GPU whose lines these are, and whether it had a MIG device.
    let mut gpu: Option<(String, bool)> = None;
    let whole =
        |gpu: Option<(String, bool)>| gpu.and_then(|(uuid, divided)| (!divided).then_some(Seen::Whole(uuid)));
    for line in text.lines() {
        let unknown = || format!("`nvidia-smi -L` prints {line:?}");
        let (name, uuid) = line.split_once("(UUID: ").with_context(unknown)?;
        let uuid = uuid.strip_suffix(')').with_context(unknown)?.to_owned();
        if name.starts_with("GPU ") {
            seen.extend(whole(gpu.replace((uuid, false))));
            continue;
        }
        let profile = name.trim_start().strip_prefix("MIG ").and_then(|name| name.split_whitespace().next());
        let profile = profile.with_context(unknown)?.replace(['.', '+'], "-");
        let (parent, divided) = gpu.as_mut().with_context(unknown)?;
        *divided = true;
        seen.insert(Seen::Partition { parent: parent.clone(), profile, uuid });
    }
    seen.extend(whole(gpu));
    Ok(seen)
}

/// What a running container sees.
pub(crate) fn seen_in(scene: &Scene<'_>, pod: &str, container: &str) -> Result<BTreeSet<Seen>> {
    listed(&scene.exec(pod, Some(container), &["nvidia-smi", "-L"])?)
}

/// Makes sure that a pod's only container sees exactly what the pod holds, and
/// returns that.
pub(crate) fn sees_what_it_holds(scene: &Scene<'_>, pod: &str) -> Result<Vec<Held>> {
    let held = held_by(scene, pod)?;
    ensure!(!held.is_empty(), "pod {pod} holds nothing");
    let (real, seen) = (on_hardware(scene, &held)?, seen_in(scene, pod, "main")?);
    ensure!(seen == real, "pod {pod} sees {seen:?}, but holds {real:?}");
    Ok(held)
}

/// Runs a pod whose only container has all that a claim asks for, and returns
/// what it holds and sees.
pub(crate) fn run_lone(scene: &Scene<'_>, pod: &str, devices: &Value) -> Result<Vec<Held>> {
    scene.apply(&manifest::lone(pod, devices))?;
    scene.await_running(pod)?;
    sees_what_it_holds(scene, pod)
}

/// Waits until no GPU has an instance.
pub(crate) fn await_no_instance(scene: &Scene<'_>) -> Result<()> {
    wait_until("no instance is there", LIMIT, || {
        Ok(gpus(scene)?.iter().all(|gpu| gpu.instances.is_empty()).then_some(()))
    })
}

/// What is left of a claim on the node, a word for each thing.
pub(crate) fn traces(scene: &Scene<'_>, uid: &str, partitions: &BTreeSet<Seen>) -> Result<Vec<String>> {
    let journal = scene.cluster.kubelet_root().join("plugins").join(DRIVER).join("state/claims");
    let mut traces = files_with(&journal, uid)?;
    traces.extend(files_with(&scene.cluster.cdi_dir(), uid)?);
    for gpu in gpus(scene)? {
        for instance in &gpu.instances {
            let ours = |compute: &ComputeInstance| {
                partitions
                    .iter()
                    .any(|seen| matches!(seen, Seen::Partition { uuid, .. } if *uuid == compute.uuid))
            };
            if instance.compute.is_empty() || instance.compute.iter().any(ours) {
                traces.push(format!("an instance at {} of {}", instance.start, gpu.pci));
            }
        }
    }
    Ok(traces)
}

fn files_with(folder: &Path, part: &str) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for file in fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))? {
        let name = file?.file_name().to_string_lossy().into_owned();
        if name.contains(part) {
            found.push(name);
        }
    }
    Ok(found)
}

/// A container's first process on the host.
pub(crate) fn process_of(scene: &Scene<'_>, pod: &str, container: &str) -> Result<u32> {
    let pod: Pod = scene.get(pod)?.context("the pod is not there")?;
    let statuses = pod.status.and_then(|status| status.container_statuses).unwrap_or_default();
    let id = statuses
        .iter()
        .find(|status| status.name == container)
        .and_then(|status| status.container_id.as_deref());
    let id = id.and_then(|id| id.strip_prefix("containerd://")).context("the container has no id")?;
    let answer = exec::output(scene.cluster.crictl().args(["inspect", id]))?;
    let answer: Value = serde_json::from_str(&answer)?;
    let pid = answer["info"]["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok());
    pid.context("containerd does not tell the container's process")
}

/// Waits until a process is gone.
pub(crate) fn await_end(pid: u32) -> Result<()> {
    let folder = format!("/proc/{pid}");
    wait_until(&format!("process {pid} ends"), LIMIT, || Ok((!Path::new(&folder).exists()).then_some(())))
}
