//! ResourceSlices stay true whoever touches them, and nobody is bothered while
//! there is nothing to say.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use kerf_e2e::{Case, LIMIT, Needs, Scene, wait_until};
use serde_json::{Value, json};

use crate::ground;
use crate::workload::{self, Workload};

/// The cases of this file.
pub(crate) const CASES: &[Case] = &[
    Case {
        name: "slices that somebody deletes or edits become right again",
        needs: Needs::Driver,
        run: become_right_again,
    },
    Case {
        name: "an idle node writes no slice, and neither does a claim",
        needs: Needs::Driver,
        run: idle_is_silent,
    },
];

/// How long an idle node is watched.
const IDLE: Duration = Duration::from_secs(20);

/// What the slices say, without what changes when they are written anew.
fn said(scene: &Scene<'_>) -> Result<Vec<Value>> {
    let mut said = Vec::new();
    let mut generations = Vec::new();
    for slice in ground::slices(scene)? {
        let mut spec = serde_json::to_value(&slice.spec)?;
        generations.push(spec.pointer("/pool/generation").cloned());
        if let Some(pool) = spec.pointer_mut("/pool").and_then(Value::as_object_mut) {
            pool.remove("generation");
        }
        for device in spec.pointer_mut("/devices").and_then(Value::as_array_mut).into_iter().flatten() {
            for taint in device.pointer_mut("/taints").and_then(Value::as_array_mut).into_iter().flatten() {
                taint.as_object_mut().map(|taint| taint.remove("timeAdded"));
            }
        }
        said.push(spec);
    }
    generations.dedup();
    ensure!(generations.len() <= 1, "the pool has slices of several generations");
    said.sort_by_key(Value::to_string);
    Ok(said)
}

/// One slice whose specification has `pointer`, as JSON that can be edited.
fn slice_with(scene: &Scene<'_>, pointer: &str) -> Result<Value> {
    let slices = ground::slices(scene)?.into_iter().map(|slice| serde_json::to_value(&slice));
    let slices = slices.collect::<Result<Vec<_>, _>>()?;
    slices
        .into_iter()
        .find(|slice| slice.pointer(pointer).is_some())
        .with_context(|| format!("no slice has {pointer}"))
}

fn replace(scene: &Scene<'_>, slice: &Value) -> Result<()> {
    let full = json!({ "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice" });
    let mut object = slice.clone();
    if let (Some(object), Some(full)) = (object.as_object_mut(), full.as_object()) {
        object.extend(full.clone());
    }
    scene.kubectl_with_input(&["replace", "--filename=-"], &object.to_string()).map(drop)
}

fn at<'a>(slice: &'a mut Value, pointer: &str) -> Result<&'a mut Value> {
    slice.pointer_mut(pointer).with_context(|| format!("the slice has no {pointer}"))
}

fn become_right_again(scene: &Scene<'_>) -> Result<()> {
    ground::clean(scene, || {
        ground::driver_pod(scene)?;
        // A foreign instance gives the slices a taint that can be taken out.
        let machine = ground::Machine::of(scene)?;
        let a30 = machine.gpu(3)?.device();
        ground::make_foreign(scene, 3, &["--profile", "1g.6gb", "--no-ci"])?;
        wait_until("the slices have a taint", LIMIT, || {
            let tainted = ground::devices(scene)?;
            let tainted = tainted
                .iter()
                .filter(|(name, device)| name.starts_with(&a30) && ground::taints(device) == ["foreign"]);
            Ok((tainted.count() > 0).then_some(()))
        })?;
        let right = settled(scene)?;
        let right_again = |what: &str| {
            wait_until(&format!("right again: {what}"), LIMIT, || Ok((said(scene)? == right).then_some(())))
        };

        let name =
            at(&mut slice_with(scene, "/spec/devices")?, "/metadata/name")?.as_str().map(str::to_owned);
        scene.kubectl(&["delete", "resourceslice", &name.context("it has no name")?])?;
        right_again("one slice was deleted")?;

        // As the kubelet does when it starts.
        let fields = format!("fieldSelector=spec.nodeName={}", scene.cluster.node_name());
        let path = format!("--raw=/apis/resource.k8s.io/v1/resourceslices?{fields}");
        scene.kubectl(&["delete", &path])?;
        right_again("all were deleted at once")?;

        let edits: [(&str, &str, fn(&mut Value)); 5] = [
            ("a device was removed", "/spec/devices/1", |devices| {
                if let Some(devices) = devices.pointer_mut("/spec/devices").and_then(Value::as_array_mut) {
                    devices.remove(1);
                }
            }),
            ("counters were changed", "/spec/sharedCounters/0", |slice| {
                if let Some(memory) = slice.pointer_mut("/spec/sharedCounters/0/counters/memory/value") {
                    *memory = json!("1Ti");
                }
            }),
            ("an attribute was changed", "/spec/devices/0/attributes", |slice| {
                if let Some(kind) = slice.pointer_mut("/spec/devices/0/attributes/type/string") {
                    *kind = json!("toaster");
                }
            }),
            ("a taint was added", "/spec/devices/0", |slice| {
                if let Some(device) = slice.pointer_mut("/spec/devices/0").and_then(Value::as_object_mut) {
                    device.insert(
                        "taints".to_owned(),
                        json!([{ "key": "example.com/mine", "effect": "NoSchedule" }]),
                    );
                }
            }),
            ("the generation was raised", "/spec/pool", |slice| {
                if let Some(generation) = slice.pointer_mut("/spec/pool/generation") {
                    *generation = json!(generation.as_i64().unwrap_or(0) + 100);
                }
            }),
        ];
        for (what, pointer, edit) in edits {
            let slice = slice_with(scene, pointer)?;
            let mut edited = slice.clone();
            edit(&mut edited);
            ensure!(edited != slice, "nothing was edited where {what}");
            replace(scene, &edited)?;
            right_again(what)?;
        }

        let untainted = |slice: &mut Value| {
            let mut removed = 0;
            for device in
                slice.pointer_mut("/spec/devices").and_then(Value::as_array_mut).into_iter().flatten()
            {
                removed += usize::from(
                    device.as_object_mut().is_some_and(|device| device.remove("taints").is_some()),
                );
            }
            removed
        };
        let mut slices =
            ground::slices(scene)?.into_iter().map(serde_json::to_value).collect::<Result<Vec<_>, _>>()?;
        let tainted = slices
            .iter_mut()
            .find_map(|slice| (untainted(slice) > 0).then_some(slice))
            .context("no slice has a taint")?;
        replace(scene, tainted)?;
        right_again("taints were removed")?;

        strangers(scene, &right_again)
    })
}

/// Slices under our name, or beside it, that somebody else makes.
fn strangers(scene: &Scene<'_>, right_again: &dyn Fn(&str) -> Result<()>) -> Result<()> {
    let node = scene.cluster.node_name();
    let stranger = |name: &str, driver: &str, pool: &str| {
        json!({
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceSlice",
            "metadata": { "name": name },
            "spec": {
                "driver": driver,
                "nodeName": node,
                "pool": { "name": pool, "generation": 1, "resourceSliceCount": 1 },
                "devices": [{ "name": "toaster" }],
            },
        })
        .to_string()
    };
    scene.apply(&stranger("e2e-other-driver", "example.com", &node))?;
    scene.apply(&stranger("e2e-our-pool", ground::DRIVER, &format!("{node}/gpu")))?;
    right_again("a stranger's slice stood in our pool")?;
    scene.apply(&stranger("e2e-former-pool", ground::DRIVER, &node))?;
    right_again("a stranger's slice stood under our name in another pool")?;
    let other = scene.kubectl(&["get", "resourceslice", "e2e-other-driver", "--ignore-not-found"])?;
    ensure!(!other.is_empty(), "the slice of another driver was deleted");
    scene.kubectl(&["delete", "resourceslice", "e2e-other-driver"]).map(drop)
}

/// What the slices say once it has stopped changing: withdrawals take a while.
fn settled(scene: &Scene<'_>) -> Result<Vec<Value>> {
    let mut last = (said(scene)?, Instant::now());
    wait_until("the slices have not changed for 5 s", LIMIT, || {
        let now = said(scene)?;
        if now != last.0 {
            last = (now, Instant::now());
        }
        let leaving = |slice: &Value| slice.to_string().contains("withheld");
        let over = last.1.elapsed() > Duration::from_secs(5) && !last.0.iter().any(leaving);
        Ok(over.then(|| last.0.clone()))
    })
}

fn revisions(scene: &Scene<'_>) -> Result<Vec<(Option<String>, Option<String>)>> {
    let slices = ground::slices(scene)?.into_iter();
    Ok(slices.map(|slice| (slice.metadata.name, slice.metadata.resource_version)).collect())
}

fn idle_is_silent(scene: &Scene<'_>) -> Result<()> {
    ground::clean(scene, || {
        settled(scene)?;
        let before = (revisions(scene)?, ground::metric(scene, "kerf_slice_writes_total")?);
        let unchanged = |when: &str| -> Result<()> {
            let now = (revisions(scene)?, ground::metric(scene, "kerf_slice_writes_total")?);
            ensure!(now == before, "slices were written {when}: {before:?}, then {now:?}");
            Ok(())
        };
        let watched = Instant::now();
        wait_until("an idle node was watched for a while", LIMIT, || {
            unchanged("on an idle node")?;
            Ok((watched.elapsed() > IDLE).then_some(()))
        })?;
        unchanged("on an idle node")?;
        Workload::new("whole", "gpu.nvidia.com").run(scene)?;
        Workload::new("partition", "mig-1g.10gb.nvidia.com").run(scene)?;
        unchanged("when claims were prepared")?;
        workload::end(scene, "whole")?;
        workload::end(scene, "partition")?;
        ground::await_nothing_left(scene, &[])?;
        unchanged("when claims were unprepared")
    })
}
