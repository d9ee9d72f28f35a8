//! Input that is wrong: it fails its own claim with a sentence that its user
//! can read, or is ignored where the API says so; kerf goes on.

use anyhow::{Context as _, Result, ensure};
use kerf_e2e::{LIMIT, NAMESPACE, Scene, wait_until};
use serde_json::{Value, json};

use crate::exclusion::bind_by_hand;
use crate::machine;
use crate::manifest::{self, ANY_PARTITION, SMALL, WHOLE, request, requests};

const DRIVER: &str = "gpu.nvidia.com";
const VERSION: &str = "resource.nvidia.com/v1beta1";

/// A config, and what its pod's events say of it; nothing where the pod runs.
struct Input {
    name: &'static str,
    config: Value,
    says: &'static [&'static str],
}

pub(crate) fn in_claims(scene: &Scene<'_>) -> Result<()> {
    let sharing = |content: Value| nvidia("MigDeviceConfig", &json!({ "sharing": content }));
    let inputs = [
        fails("unknown-kind", nvidia("MigDeviceConfg", &json!({})), &["kind `MigDeviceConfg`", "known are"]),
        fails(
            "unknown-version",
            opaque(DRIVER, &json!({ "apiVersion": "resource.nvidia.com/v9", "kind": "GpuConfig" })),
            &["resource.nvidia.com/v9", "known are"],
        ),
        fails("no-kind", opaque(DRIVER, &json!({})), &["apiVersion `` and kind ``"]),
        fails(
            "kind-is-a-number",
            opaque(DRIVER, &json!({ "apiVersion": VERSION, "kind": 7 })),
            &["kind ``", "known are"],
        ),
        fails(
            "unknown-field",
            nvidia("MigDeviceConfig", &json!({ "memory": "1Gi" })),
            &["MigDeviceConfig", "unknown field `memory`"],
        ),
        fails(
            "bad-quantity",
            sharing(json!({ "strategy": "MPS", "mpsConfig": { "defaultPinnedDeviceMemoryLimit": "ten" } })),
            &["MigDeviceConfig", "`ten` is not a quantity"],
        ),
        fails(
            "huge-quantity",
            sharing(json!({
                "strategy": "MPS",
                "mpsConfig": { "defaultPinnedDeviceMemoryLimit": format!("1{}", "0".repeat(200)) },
            })),
            &["MigDeviceConfig", "quantity", "out of range"],
        ),
        fails("garbage", opaque(DRIVER, &garbage()), &["apiVersion `` and kind ``"]),
        fails("deep", opaque(DRIVER, &nested(1_000)), &["cannot be decoded", "recursion limit"]),
        fails(
            "empty-time-slicing",
            nvidia("GpuConfig", &json!({ "sharing": { "timeSlicingConfig": {} } })),
            &["GpuConfig", "`sharing` is not yet supported"],
        ),
        fails(
            "sharing",
            sharing(json!({ "strategy": "MPS", "mpsConfig": { "defaultActiveThreadPercentage": 50 } })),
            &["MigDeviceConfig", "`sharing` is not yet supported", "remove `sharing`"],
        ),
        fails(
            "wrong-kind",
            for_request(nvidia("GpuConfig", &json!({}))),
            &["GpuConfig is for whole GPUs", "request `slice` got a MIG partition"],
        ),
        runs("of-another-driver", opaque("gpu.example.com", &garbage())),
        runs("of-another-type", nvidia("GpuConfig", &json!({}))),
        runs("good", for_request(nvidia("MigDeviceConfig", &json!({})))),
    ];
    survives(scene, || {
        for Input { name, config, .. } in &inputs {
            // The scheduler leaves out the names of a config for all requests,
            // and such a config is for the devices of its type alone.
            let beside = config.get("requests").map(|_| request("plain", ANY_PARTITION));
            let all: Vec<Value> = [request("slice", SMALL)].into_iter().chain(beside).collect();
            let mut devices = requests(&all);
            devices["config"] = json!([config]);
            scene.apply(&manifest::lone(name, &devices))?;
        }
        inputs.iter().try_for_each(|input| holds(scene, input))
    })
}

pub(crate) fn in_classes(scene: &Scene<'_>) -> Result<()> {
    let inputs = [
        fails("class-unknown-kind", nvidia("GpuConfg", &json!({})), &["kind `GpuConfg`"]),
        fails(
            "class-sharing",
            nvidia("MigDeviceConfig", &json!({ "sharing": { "strategy": "TimeSlicing" } })),
            &["MigDeviceConfig", "`sharing` is not yet supported"],
        ),
        runs("class-of-another-type", nvidia("GpuConfig", &json!({}))),
        runs("class-of-another-driver", opaque("gpu.example.com", &garbage())),
        runs("class-good", nvidia("MigDeviceConfig", &json!({}))),
    ];
    let class = |name: &str| format!("{}-{name}", scene.namespace());
    let outcome = survives(scene, || {
        for Input { name, config, .. } in &inputs {
            scene.apply(&partitions_with(&class(name), config).to_string())?;
            scene.apply(&manifest::lone(name, &requests(&[request("slice", &class(name))])))?;
        }
        inputs.iter().try_for_each(|input| holds(scene, input))
    });
    for Input { name, .. } in &inputs {
        scene.delete(&format!("deviceclass/{}", class(name)))?;
    }
    outcome
}

pub(crate) fn in_allocations(scene: &Scene<'_>) -> Result<()> {
    // The node's pool, from a claim that has a device of it.
    scene.apply(&manifest::lone("before", &requests(&[request("slice", SMALL)])))?;
    scene.await_running("before")?;
    let held = machine::held_by(scene, "before")?.into_iter().next().context("the pod holds nothing")?;
    let h100 = held.device.split_once("-mig-").map(|(whole, _)| whole).context("not a partition")?;
    let a30 = machine::gpus_of(scene, "a30")?.into_iter().next().context("there is no A30")?;
    let kept = format!("gpu-{}", a30.pci.replace([':', '.'], "-"));
    let unknown_profile = format!("{h100}-mig-9g-90gb-0");
    let unknown_place = format!("{h100}-mig-3g-40gb-1");
    let allocations = [
        ("not-a-device", held.pool.as_str(), "gpu-x", "is none that this driver publishes"),
        ("not-a-gpu", &held.pool, "gpu-0000-ff-00-0", "is not there"),
        ("not-a-profile", &held.pool, &unknown_profile, "has no such device"),
        ("not-a-place", &held.pool, &unknown_place, "has no such device"),
        ("of-the-other-mode", &held.pool, &kept, "its mode is kept"),
        ("of-another-pool", "elsewhere", &held.device, "not this node's"),
    ];
    survives(scene, || {
        for (name, pool, device, _) in allocations {
            bind_by_hand(scene, name, pool, device)?;
        }
        for (name, _, device, says) in allocations {
            is_told(scene, name, &[device, says])?;
        }
        machine::sees_what_it_holds(scene, "before").map(drop)
    })
}

/// Makes sure that kerf is the same process before and after, and still works.
fn survives(scene: &Scene<'_>, input: impl FnOnce() -> Result<()>) -> Result<()> {
    let before = driver_processes(scene)?;
    input()?;
    let after = driver_processes(scene)?;
    ensure!(before == after, "kerf was restarted: {before} before, {after} after");
    scene.apply(&manifest::lone("afterwards", &requests(&[request("gpu", WHOLE)])))?;
    // Whole GPUs may be full of the partitions that failing claims hold.
    scene.kubectl(&["delete", "pods", "--field-selector=metadata.name!=afterwards", "--wait=false"])?;
    scene.await_running("afterwards")?;
    machine::sees_what_it_holds(scene, "afterwards").map(drop)
}

/// Which pods of kerf there are, and which containers they run.
fn driver_processes(scene: &Scene<'_>) -> Result<String> {
    let columns = "jsonpath={range .items[*]}{.metadata.name} \
                   {.status.containerStatuses[*].restartCount} {.status.containerStatuses[*].containerID}{end}";
    let processes = scene.kubectl(&["get", "pods", "--namespace", NAMESPACE, "--output", columns])?;
    ensure!(processes.contains("containerd://"), "kerf does not run: {processes:?}");
    Ok(processes)
}

/// Makes sure that a pod runs, or fails with what is said of its config and
/// without a trace.
fn holds(scene: &Scene<'_>, input: &Input) -> Result<()> {
    if input.says.is_empty() {
        scene.await_running(input.name)?;
        return machine::sees_what_it_holds(scene, input.name).map(drop);
    }
    is_told(scene, input.name, input.says)
}

fn is_told(scene: &Scene<'_>, pod: &str, says: &[&str]) -> Result<()> {
    wait_until(&format!("{pod} is told why"), LIMIT, || {
        let events = scene.events(pod)?;
        let told = events.lines().find(|event| event.starts_with("FailedPrepareDynamicResources"));
        let told = told.with_context(|| format!("its events say {events:?}"))?;
        ensure!(says.iter().all(|part| told.contains(part)), "it is told {told:?}, not {says:?}");
        ensure!(told.len() < 1024, "it is told {} bytes", told.len());
        Ok(Some(()))
    })?;
    for name in machine::claims_of(scene, pod)? {
        // Of the claim alone: not every config can be read here either.
        let uid = scene.kubectl(&["get", "resourceclaim", &name, "--output=jsonpath={.metadata.uid}"])?;
        let traces = machine::traces(scene, &uid, &[].into())?;
        ensure!(traces.is_empty(), "of a claim that failed there is {traces:?}");
    }
    Ok(())
}

fn fails(name: &'static str, config: Value, says: &'static [&'static str]) -> Input {
    Input { name, config, says }
}

fn runs(name: &'static str, config: Value) -> Input {
    Input { name, config, says: &[] }
}

fn opaque(driver: &str, parameters: &Value) -> Value {
    json!({ "opaque": { "driver": driver, "parameters": parameters } })
}

/// A config of NVIDIA's API.
fn nvidia(kind: &str, fields: &Value) -> Value {
    let mut parameters = json!({ "apiVersion": VERSION, "kind": kind });
    if let (Some(parameters), Some(fields)) = (parameters.as_object_mut(), fields.as_object()) {
        parameters.extend(fields.clone());
    }
    opaque(DRIVER, &parameters)
}

/// The same config, for the claim's request alone.
fn for_request(mut config: Value) -> Value {
    config["requests"] = json!(["slice"]);
    config
}

/// A class of partitions with a config.
fn partitions_with(name: &str, config: &Value) -> Value {
    let expression = "device.driver == \"gpu.nvidia.com\" && \
                      device.attributes[\"gpu.nvidia.com\"].type == \"mig\"";
    json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": { "name": name },
        "spec": { "selectors": [{ "cel": { "expression": expression } }], "config": [config] },
    })
}

/// As much as the API server lets through.
fn garbage() -> Value {
    json!({ "\u{1F4A5}\n\u{7f}\"": "\u{fffd}\\".repeat(10 * 1024 / 5 - 20) })
}

/// Objects in objects.
fn nested(depth: usize) -> Value {
    (0..depth).fold(json!({}), |inner, _| json!({ "a": inner }))
}
