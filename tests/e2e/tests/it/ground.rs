//! What is really there, on the machine and in the API: emulated instances,
//! journal, CDI files, slices, kerf's process. Cases compare these with each
//! other; nothing here asks kerf itself.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{Device, ResourceSlice};
use kerf_e2e::{LIMIT, NAMESPACE, Scene, Values, wait_until};
use serde::Deserialize;
use serde_json::Value;
use xtask::exec;

/// The driver as it is installed.
pub(crate) const DRIVER: &str = "gpu.nvidia.com";

/// The emulated machine, as `nvidia-emulator show` prints it.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Machine {
    pub(crate) gpus: Vec<Gpu>,
    pub(crate) faults: Vec<Value>,
}

/// One of its GPUs.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Gpu {
    pub(crate) pci: String,
    pub(crate) lost: bool,
    pub(crate) instances: Vec<Instance>,
}

/// A GPU instance. Its serial number is never used again, so it tells whether
/// it is still the same one.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
pub(crate) struct Instance {
    pub(crate) id: u32,
    pub(crate) serial: u32,
    pub(crate) start: u32,
    pub(crate) size: u32,
    pub(crate) compute: Vec<Compute>,
}

/// A compute instance.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
pub(crate) struct Compute {
    pub(crate) serial: u32,
    pub(crate) uuid: String,
}

impl Machine {
    pub(crate) fn of(scene: &Scene<'_>) -> Result<Self> {
        serde_json::from_str(&scene.emulator(&["show"])?).context("cannot read the machine's state")
    }

    pub(crate) fn gpu(&self, index: usize) -> Result<&Gpu> {
        self.gpus.get(index).with_context(|| format!("there is no GPU {index}"))
    }
}

impl Gpu {
    /// The name of the whole GPU's device.
    pub(crate) fn device(&self) -> String {
        format!("gpu-{}", self.pci.to_lowercase().replace([':', '.'], "-"))
    }
}

/// A GPU instance that somebody else makes: `nvidia-emulator mig create`.
pub(crate) fn make_foreign(scene: &Scene<'_>, gpu: usize, arguments: &[&str]) -> Result<Instance> {
    let index = gpu.to_string();
    let made = scene.emulator(&[&["mig", "create", "--gpu", &index], arguments].concat())?;
    let id = made.split_whitespace().next().context("the emulator names no instance")?;
    let machine = Machine::of(scene)?;
    let instance = machine.gpu(gpu)?.instances.iter().find(|instance| instance.id.to_string() == id);
    instance.cloned().with_context(|| format!("the instance {id} is not there"))
}

/// Takes a foreign instance away, as who made it would.
pub(crate) fn destroy(scene: &Scene<'_>, gpu: usize, instance: &Instance) -> Result<()> {
    let (gpu, id) = (gpu.to_string(), instance.id.to_string());
    scene.emulator(&["mig", "destroy", "--gpu", &gpu, "--instance", &id]).map(drop)
}

/// The journal's entries, by claim UID.
pub(crate) fn journal(scene: &Scene<'_>) -> Result<BTreeMap<String, Value>> {
    let folder = scene.cluster.kubelet_root().join("plugins").join(DRIVER).join("state/claims");
    let mut entries = BTreeMap::new();
    for file in fs::read_dir(&folder).with_context(|| format!("cannot list {}", folder.display()))? {
        // Between listing and reading it may be replaced or removed.
        let Ok(content) = fs::read(file?.path()) else { continue };
        let Ok(mut file) = serde_json::from_slice::<Value>(&content) else { continue };
        let entry = file.get_mut("entry").map(Value::take).context("a journal file has no entry")?;
        let uid = entry.get("uid").and_then(Value::as_str).context("an entry has no UID")?;
        entries.insert(uid.to_owned(), entry);
    }
    Ok(entries)
}

/// kerf's CDI files.
pub(crate) fn cdi_files(scene: &Scene<'_>) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for file in fs::read_dir(scene.cluster.cdi_dir())? {
        let path = file?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if name.starts_with(&format!("k8s.{DRIVER}-")) {
            files.push(path);
        }
    }
    Ok(files)
}

/// Says what of a claim is still there beside the foreign instances, each with
/// its GPU's index; an error while there is anything.
pub(crate) fn nothing_left(scene: &Scene<'_>, foreign: &[(usize, Instance)]) -> Result<()> {
    let machine = Machine::of(scene)?;
    for (index, gpu) in machine.gpus.iter().enumerate() {
        for instance in &gpu.instances {
            let known = foreign.iter().any(|(on, known)| *on == index && known == instance);
            ensure!(known, "GPU {index} has the instance {instance:?}");
        }
    }
    untouched(&machine, foreign)?;
    let entries = journal(scene)?;
    ensure!(entries.is_empty(), "the journal has {entries:?}");
    let files = cdi_files(scene)?;
    ensure!(files.is_empty(), "there are the CDI files {files:?}");
    Ok(())
}

/// Fails unless all these foreign instances are the very ones they were.
pub(crate) fn untouched(machine: &Machine, foreign: &[(usize, Instance)]) -> Result<()> {
    for (index, instance) in foreign {
        ensure!(
            machine.gpu(*index)?.instances.contains(instance),
            "the foreign instance {instance:?} of GPU {index} was touched: {:?}",
            machine.gpu(*index)?.instances
        );
    }
    Ok(())
}

/// Waits until [`nothing_left`].
pub(crate) fn await_nothing_left(scene: &Scene<'_>, foreign: &[(usize, Instance)]) -> Result<()> {
    wait_until("instances, journal and CDI files are gone", LIMIT, || nothing_left(scene, foreign).map(Some))
}

/// Fails unless journal, hardware and CDI folder say the same: each instance
/// is one of `foreign` or that of a completed entry, and each entry has its
/// instances and its CDI file.
pub(crate) fn agree(scene: &Scene<'_>, foreign: &[(usize, Instance)]) -> Result<()> {
    let machine = Machine::of(scene)?;
    untouched(&machine, foreign)?;
    let entries = journal(scene)?;
    let mut uuids: Vec<String> = Vec::new();
    for (uid, entry) in &entries {
        ensure!(entry.get("phase").and_then(Value::as_str) == Some("completed"), "{uid} is {entry}");
        for step in entry.get("steps").and_then(Value::as_array).into_iter().flatten() {
            let uuid = step.pointer("/progress/uuid").and_then(Value::as_str);
            uuids.push(uuid.with_context(|| format!("the step {step} is not done"))?.to_owned());
        }
        let spec = scene.cluster.cdi_dir().join(format!("k8s.{DRIVER}-claim_{uid}.json"));
        ensure!(spec.is_file(), "there is no {}", spec.display());
    }
    ensure!(cdi_files(scene)?.len() == entries.len(), "there are more CDI files than entries");
    for (index, gpu) in machine.gpus.iter().enumerate() {
        for instance in &gpu.instances {
            let ours = instance.compute.iter().position(|compute| uuids.contains(&compute.uuid));
            match ours.and_then(|at| uuids.iter().position(|uuid| *uuid == instance.compute[at].uuid)) {
                Some(at) => drop(uuids.swap_remove(at)),
                None => ensure!(
                    foreign.iter().any(|(on, known)| *on == index && known == instance),
                    "GPU {index} has the orphan {instance:?}"
                ),
            }
        }
    }
    ensure!(uuids.is_empty(), "the journal has partitions that are not there: {uuids:?}");
    Ok(())
}

/// The slices under kerf's name.
pub(crate) fn slices(scene: &Scene<'_>) -> Result<Vec<ResourceSlice>> {
    let mut slices: Vec<ResourceSlice> = scene.list_of_cluster()?;
    slices.retain(|slice| slice.spec.driver == DRIVER);
    Ok(slices)
}

/// The published devices, by name.
pub(crate) fn devices(scene: &Scene<'_>) -> Result<BTreeMap<String, Device>> {
    let devices = slices(scene)?.into_iter().filter_map(|slice| slice.spec.devices).flatten();
    Ok(devices.map(|device| (device.name.clone(), device)).collect())
}

/// The conditions by which a device is tainted: `foreign`, `lost`, …
pub(crate) fn taints(device: &Device) -> Vec<String> {
    let taints = device.taints.iter().flatten().filter(|taint| taint.effect == "NoSchedule");
    taints.filter_map(|taint| Some(taint.key.strip_prefix(DRIVER)?.trim_matches('/').to_owned())).collect()
}

/// Waits until a device is published with exactly these taints.
pub(crate) fn await_taints(scene: &Scene<'_>, device: &str, expected: &[&str]) -> Result<Device> {
    wait_until(&format!("{device} has the taints {expected:?}"), LIMIT, || {
        let device = devices(scene)?.remove(device).context("it is not published")?;
        let found = taints(&device);
        ensure!(found == expected, "its taints are {found:?}");
        Ok(Some(device))
    })
}

/// kerf's pod on the node, when it is ready.
pub(crate) fn driver_pod(scene: &Scene<'_>) -> Result<Pod> {
    wait_until("kerf is ready", LIMIT, || {
        let pods = scene.list_of_driver::<Pod>()?;
        let ready = |pod: &Pod| {
            pod.metadata.deletion_timestamp.is_none()
                && pod
                    .status
                    .iter()
                    .flat_map(|status| status.conditions.iter().flatten())
                    .any(|condition| condition.type_ == "Ready" && condition.status == "True")
        };
        Ok(pods.into_iter().find(ready))
    })
}

/// Waits until the process that runs now is registered and has published. The
/// pod's condition may still be that of the process before.
pub(crate) fn driver_serves(scene: &Scene<'_>) -> Result<()> {
    wait_until("kerf serves", LIMIT, || Ok((metric(scene, "kerf_ready")? > 0.5).then_some(())))
}

/// How often kerf's container was started again in its pod.
pub(crate) fn driver_restarts(scene: &Scene<'_>) -> Result<i32> {
    let pods = scene.list_of_driver::<Pod>()?;
    let statuses = pods.iter().flat_map(|pod| pod.status.iter()).flat_map(|status| {
        status.container_statuses.iter().flatten().map(|container| container.restart_count)
    });
    Ok(statuses.sum())
}

/// Replaces kerf's pod.
pub(crate) fn renew_driver(scene: &Scene<'_>) -> Result<()> {
    let pod = driver_pod(scene)?;
    let name = pod.metadata.name.context("the pod has no name")?;
    scene.kubectl(&["delete", "pod", &name, "--namespace", NAMESPACE, "--grace-period=5"])?;
    let uid = pod.metadata.uid;
    wait_until("kerf has another pod", LIMIT, || {
        let pods = scene.list_of_driver::<Pod>()?;
        Ok((!pods.is_empty() && pods.iter().all(|pod| pod.metadata.uid != uid)).then_some(()))
    })?;
    driver_pod(scene)?;
    driver_serves(scene)
}

/// Kills kerf's process as the kernel would for memory.
pub(crate) fn kill_driver(scene: &Scene<'_>) -> Result<()> {
    let mut crictl = scene.cluster.crictl();
    let id = exec::output(crictl.args(["ps", "--quiet", "--name", "^kerf$", "--state", "running"]))?;
    let id = id.lines().next().context("kerf does not run")?.to_owned();
    let mut crictl = scene.cluster.crictl();
    crictl.args(["inspect", "--output", "go-template", "--template", "{{.info.pid}}", &id]);
    let pid = exec::output(&mut crictl)?.trim().to_owned();
    let name = fs::read_to_string(format!("/proc/{pid}/comm"))?;
    ensure!(name.trim() == "kerf", "the process {pid} of kerf's container is {name}");
    exec::output(Command::new("kill").args(["-KILL", &pid])).map(drop)
}

/// A number of kerf's `/metrics`.
pub(crate) fn metric(scene: &Scene<'_>, name: &str) -> Result<f64> {
    let pod =
        scene.list_of_driver::<Pod>()?.pop().and_then(|pod| pod.metadata.name).context("kerf has no pod")?;
    let text = scene.text(&format!("/api/v1/namespaces/{NAMESPACE}/pods/{pod}:9402/proxy/metrics"))?;
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.with_context(|| format!("there is no metric {name}"))?.parse().context("it is no number")
}

/// Leaves a machine without faults, foreign instances or lost GPUs, and waits
/// until kerf serves and has forgotten them.
pub(crate) fn ready(scene: &Scene<'_>) -> Result<()> {
    restore(scene)?;
    driver_serves(scene)?;
    wait_until("no device has a taint", LIMIT, || {
        let devices = devices(scene)?;
        let tainted = devices.iter().filter(|(_, device)| !taints(device).is_empty());
        let tainted: Vec<_> = tainted.map(|(name, device)| (name, taints(device))).collect();
        ensure!(tainted.is_empty(), "{tainted:?}");
        Ok((!devices.is_empty()).then_some(()))
    })
}

/// Runs a case that breaks things, and mends the machine however it ends.
pub(crate) fn clean(scene: &Scene<'_>, case: impl FnOnce() -> Result<()>) -> Result<()> {
    let outcome = case();
    if outcome.is_err() {
        // Before anything is mended: what was seen when it failed.
        let journal = journal(scene).unwrap_or_default();
        let machine = scene.emulator(&["show"]).unwrap_or_default();
        eprintln!("--- the journal\n{journal:#?}\n--- the machine\n{machine}");
        // A call that was made to hang would hang for the next case too.
        if let Err(error) = kill_driver(scene) {
            eprintln!("cannot kill kerf: {error:#}");
        }
    }
    outcome.and(restore(scene))
}

/// [`clean`], with the chart's values put back too.
pub(crate) fn clean_values(scene: &Scene<'_>, case: impl FnOnce() -> Result<()>) -> Result<()> {
    let outcome = clean(scene, case);
    outcome.and(scene.configure_driver(Values::new()))
}

fn restore(scene: &Scene<'_>) -> Result<()> {
    scene.emulator(&["fault", "clear"])?;
    let machine = Machine::of(scene)?;
    let entries = journal(scene)?.values().map(Value::to_string).collect::<String>();
    for (index, gpu) in machine.gpus.iter().enumerate() {
        if gpu.lost {
            scene.emulator(&["return", "--gpu", &index.to_string()])?;
        }
        // What a failed case left in the journal goes with its pods.
        for instance in gpu.instances.iter().filter(|_| !entries.contains(&gpu.pci.to_lowercase())) {
            destroy(scene, index, instance)?;
        }
    }
    Ok(())
}

/// Fails where a fault that a case has scripted never came about.
pub(crate) fn all_faults_met(scene: &Scene<'_>) -> Result<()> {
    let left = Machine::of(scene)?.faults;
    if !left.is_empty() {
        bail!("these faults never happened: {left:?}");
    }
    Ok(())
}
