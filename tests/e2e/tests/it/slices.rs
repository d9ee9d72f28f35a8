//! ResourceSlices stay true whoever touches them, and nobody is bothered while
//! there is nothing to say.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use kerf_e2e::{Case, LIMIT, Needs, Scene, wait_until};
use serde_json::{Value, json};

use crate::ground;
use crate::watch::{self, Watch};
use crate::workload::{self, Workload};

/// The cases of this file.
pub(crate) const CASES: &[Case] = &[
    Case {
        name: "slices that are deleted, one or all, come back",
        needs: Needs::Driver,
        seconds: 5,
        run: deleted,
    },
    Case {
        name: "slices whose devices, counters or generation are edited become right again",
        needs: Needs::Driver,
        seconds: 5,
        run: edited,
    },
    Case {
        name: "taints that others add or remove become right again",
        needs: Needs::Driver,
        seconds: 5,
        run: tainted_by_others,
    },
    Case {
        name: "slices that a stranger makes under our name go, those of other drivers stay",
        needs: Needs::Driver,
        seconds: 10,
        run: strangers,
    },
    Case {
        name: "an idle node writes no slice, and neither does a claim",
        needs: Needs::Driver,
        seconds: 25,
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

/// Breaks slices and waits until they say again what they said. kerf is
/// started anew before: it undoes a few changes at once and then fewer and
/// fewer, so that somebody who edits for ever is not fought for ever.
fn become_right_again(
    scene: &Scene<'_>,
    breakages: impl FnOnce(&dyn Fn(&str) -> Result<()>) -> Result<()>,
) -> Result<()> {
    ground::clean(scene, || {
        // Takes a taint along, which can be taken out.
        ground::make_foreign(scene, 3, &["--profile", "1g.6gb", "--no-ci"])?;
        wait_until("the slices have a taint", LIMIT, || {
            let devices = ground::devices(scene)?;
            Ok(devices.values().any(|device| ground::taints(device) == ["foreign"]).then_some(()))
        })?;
        ground::renew_driver(scene)?;
        let right = said(scene)?;
        breakages(&|what| {
            wait_until(&format!("right again: {what}"), LIMIT, || Ok((said(scene)? == right).then_some(())))
        })
    })
}

fn deleted(scene: &Scene<'_>) -> Result<()> {
    become_right_again(scene, |right_again| {
        let slice = slice_with(scene, "/spec/devices")?;
        let name = slice.pointer("/metadata/name").and_then(Value::as_str).context("it has no name")?;
        scene.kubectl(&["delete", "resourceslice", name])?;
        right_again("one slice was deleted")?;
        // As the kubelet does when it starts.
        let fields = format!("fieldSelector=spec.nodeName={}", scene.cluster.node_name());
        let path = format!("--raw=/apis/resource.k8s.io/v1/resourceslices?{fields}");
        scene.kubectl(&["delete", &path])?;
        right_again("all were deleted at once")
    })
}

fn edited(scene: &Scene<'_>) -> Result<()> {
    type Edit = fn(&mut Value) -> Option<()>;
    let edits: [(&str, &str, Edit); 4] = [
        ("a device was removed", "/spec/devices/1", |slice| {
            slice.pointer_mut("/spec/devices")?.as_array_mut()?.remove(1);
            Some(())
        }),
        ("counters were changed", "/spec/sharedCounters/0", |slice| {
            *slice.pointer_mut("/spec/sharedCounters/0/counters/memory/value")? = json!("1Ti");
            Some(())
        }),
        ("an attribute was changed", "/spec/devices/0/attributes/type", |slice| {
            *slice.pointer_mut("/spec/devices/0/attributes/type/string")? = json!("toaster");
            Some(())
        }),
        ("the generation was raised", "/spec/pool", |slice| {
            let generation = slice.pointer_mut("/spec/pool/generation")?;
            *generation = json!(generation.as_i64()? + 100);
            Some(())
        }),
    ];
    become_right_again(scene, |right_again| {
        let watch = Watch::begin(scene)?;
        for (what, pointer, edit) in edits {
            let mut slice = slice_with(scene, pointer)?;
            edit(&mut slice).context(what)?;
            replace(scene, &slice)?;
            right_again(what)?;
        }
        // Other cases rely on its being noticed.
        let noticed = watch::nothing_was_withdrawn(&watch.end()?).is_err();
        ensure!(noticed, "nobody saw that a device was withdrawn for a moment");
        Ok(())
    })
}

fn tainted_by_others(scene: &Scene<'_>) -> Result<()> {
    become_right_again(scene, |right_again| {
        let mut slice = slice_with(scene, "/spec/devices/0")?;
        let taints = json!([{ "key": "example.com/mine", "effect": "NoSchedule" }]);
        at(&mut slice, "/spec/devices/0")?
            .as_object_mut()
            .context("a device is no object")?
            .insert("taints".to_owned(), taints);
        replace(scene, &slice)?;
        right_again("a taint was added")?;

        let mut found = false;
        for slice in ground::slices(scene)? {
            let mut slice = serde_json::to_value(slice)?;
            let devices = slice.pointer_mut("/spec/devices").and_then(Value::as_array_mut);
            let objects = devices.into_iter().flatten().filter_map(Value::as_object_mut);
            if objects.filter_map(|device| device.remove("taints")).count() > 0 {
                found = true;
                replace(scene, &slice)?;
                right_again("taints were removed")?;
            }
        }
        ensure!(found, "no slice has a taint");
        Ok(())
    })
}

/// Slices under our name, or beside it, that somebody else makes.
fn strangers(scene: &Scene<'_>) -> Result<()> {
    become_right_again(scene, |right_again| make_strangers(scene, right_again))
}

fn make_strangers(scene: &Scene<'_>, right_again: &dyn Fn(&str) -> Result<()>) -> Result<()> {
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

/// What changes when a slice is written.
pub(crate) fn revisions(scene: &Scene<'_>) -> Result<Vec<(Option<String>, Option<String>)>> {
    let slices = ground::slices(scene)?.into_iter();
    Ok(slices.map(|slice| (slice.metadata.name, slice.metadata.resource_version)).collect())
}

fn idle_is_silent(scene: &Scene<'_>) -> Result<()> {
    ground::clean(scene, || {
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
