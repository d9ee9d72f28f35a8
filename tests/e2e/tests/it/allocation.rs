//! What pods ask for, and that they get it: from templates, by named claims, by
//! plain limits; and that nothing is left when they are gone.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use kerf_e2e::{LIMIT, Scene, wait_until};
use serde_json::{Value, json};

use crate::machine::{self, Held, Seen};
use crate::manifest::{self, ANY_PARTITION, Pod, SMALL, WHOLE, request, request_where, requests};
use crate::workload;

pub(crate) fn a_whole_gpu(scene: &Scene<'_>) -> Result<()> {
    for pod in ["first", "second"] {
        scene.apply(&manifest::lone(pod, &requests(&[request("gpu", WHOLE)])))?;
    }
    let mut gpus = BTreeSet::new();
    for pod in ["first", "second"] {
        scene.await_running(pod)?;
        for held in machine::sees_what_it_holds(scene, pod)? {
            ensure!(held.partition().is_none(), "{pod} holds {held:?}");
            gpus.insert(held.device);
        }
        workload::await_health(scene, pod, "Healthy", "")?;
    }
    ensure!(gpus.len() == 2, "two pods hold {gpus:?}");
    Ok(())
}

pub(crate) fn a_partition_by_profile(scene: &Scene<'_>) -> Result<()> {
    let profile = "device.attributes[\"gpu.nvidia.com\"].profile == \"2g.20gb\"";
    let partition = only_device(scene, &requests(&[request_where("slice", ANY_PARTITION, profile)]))?;
    ensure!(partition.partition().is_some_and(|(profile, _)| profile == "2g-20gb"), "it holds {partition:?}");
    workload::await_health(scene, "pod", "Healthy", "")
}

pub(crate) fn the_smallest_partition_that_serves(scene: &Scene<'_>) -> Result<()> {
    let memory = "device.capacity[\"gpu.nvidia.com\"].memory.compareTo(quantity(\"15Gi\")) >= 0";
    let partition = only_device(scene, &requests(&[request_where("slice", ANY_PARTITION, memory)]))?;
    ensure!(partition.partition().is_some_and(|(profile, _)| profile == "1g-20gb"), "it holds {partition:?}");
    Ok(())
}

/// Runs a pod for a claim of one device.
fn only_device(scene: &Scene<'_>, devices: &Value) -> Result<Held> {
    let held = machine::run_lone(scene, "pod", devices)?;
    ensure!(held.len() == 1, "the pod holds {held:?}");
    held.into_iter().next().context("the pod holds nothing")
}

pub(crate) fn slices_of_one_parent(scene: &Scene<'_>) -> Result<()> {
    // Of the first GPU so much is taken that one of the two would fit there, not
    // both.
    let first = machine::gpus_of(scene, "h100-80")?.into_iter().next().context("there is no H100")?;
    let mut taken = request_where("taken", SMALL, &manifest::on_gpu(&first.pci));
    taken["exactly"]["count"] = json!(4);
    scene.apply(&manifest::lone("before", &requests(&[taken])))?;
    scene.await_running("before")?;
    let class = "mig-2g.20gb.nvidia.com";
    let mut devices = requests(&[request("left", class), request("right", class)]);
    devices["constraints"] =
        json!([{ "requests": ["left", "right"], "matchAttribute": "gpu.nvidia.com/parentUUID" }]);
    let held = machine::run_lone(scene, "pair", &devices)?;
    let parents = held.iter().map(Held::pci).collect::<Result<BTreeSet<_>>>()?;
    ensure!(held.len() == 2 && parents.len() == 1, "the pair holds {held:?}");
    ensure!(!parents.contains(&first.pci), "the pair is on {parents:?}, where only one of it has room");
    Ok(())
}

pub(crate) fn one_claim_for_two_pods(scene: &Scene<'_>) -> Result<()> {
    let pod = |name| Pod::new(name).with_claim("claim", "shared").container("main", &["claim"]).json();
    let shared = manifest::claim("shared", &requests(&[request("slice", SMALL)]));
    scene.apply(&manifest::list(&[shared, pod("one"), pod("other")]))?;
    scene.await_running("one")?;
    scene.await_running("other")?;
    let held = machine::sees_what_it_holds(scene, "one")?;
    ensure!(held == machine::sees_what_it_holds(scene, "other")?, "the pods hold different devices");
    let uid = machine::uid_of(scene, "shared")?;
    let partitions = machine::on_hardware(scene, &held)?;
    let other = machine::process_of(scene, "other", "main")?;

    scene.delete("pod/one")?;
    scene.await_gone("one")?;
    ensure!(machine::on_hardware(scene, &held)? == partitions, "the partition is not what it was");
    ensure!(machine::sees_what_it_holds(scene, "other")? == held, "the other pod sees something else");

    scene.delete("pod/other")?;
    machine::await_end(other)?;
    nothing_is_left(scene, &uid, &partitions)
}

pub(crate) fn another_device_for_the_next_pod(scene: &Scene<'_>) -> Result<()> {
    for (round, class) in [("whole", WHOLE), ("slice", SMALL)] {
        let name = |part: &str| format!("{round}-{part}");
        let (claim, before, between, after) = (name("claim"), name("before"), name("between"), name("after"));
        let user = |pod: &str| {
            let pod = Pod::new(pod).with_claim("claim", &claim).container("main", &["claim"]);
            pod.json().to_string()
        };
        let devices = requests(&[request("device", class)]);
        scene.apply(&manifest::claim(&claim, &devices).to_string())?;
        let uid = machine::uid_of(scene, &claim)?;
        scene.apply(&user(&before))?;
        scene.await_running(&before)?;
        let first = machine::sees_what_it_holds(scene, &before)?;

        scene.delete(&format!("pod/{before}"))?;
        wait_until(&format!("{claim} holds nothing"), LIMIT, || {
            Ok(machine::held(&machine::claim(scene, &claim)?).is_empty().then_some(()))
        })?;
        scene.apply(&manifest::lone(&between, &devices))?;
        scene.await_running(&between)?;
        let devices_of = |held: &[Held]| held.iter().map(|held| held.device.clone()).collect::<Vec<_>>();
        let taken = machine::sees_what_it_holds(scene, &between)?;
        ensure!(devices_of(&taken) == devices_of(&first), "{between} holds {taken:?}, not {first:?}");

        scene.apply(&user(&after))?;
        scene.await_running(&after)?;
        let second = machine::sees_what_it_holds(scene, &after)?;
        ensure!(devices_of(&second) != devices_of(&first), "two pods hold {first:?}");
        ensure!(uid == machine::uid_of(scene, &claim)?, "the claim is another one");
        machine::sees_what_it_holds(scene, &between)?;
    }
    Ok(())
}

pub(crate) fn plain_limits(scene: &Scene<'_>) -> Result<()> {
    let gpu = json!({ "nvidia.com/gpu": 1 });
    let slice = json!({ "nvidia.com/mig-1g.10gb": 1 });
    let pod = Pod::new("both").container_with_limits("gpu", &gpu).container_with_limits("slice", &slice);
    scene.apply(&pod.json().to_string())?;
    scene.await_running("both")?;
    let held = machine::held_by(scene, "both")?;
    let (whole, part): (Vec<Held>, Vec<Held>) = held.into_iter().partition(|held| held.partition().is_none());
    for (container, held) in [("gpu", whole), ("slice", part)] {
        let (real, seen) = (machine::on_hardware(scene, &held)?, machine::seen_in(scene, "both", container)?);
        ensure!(held.len() == 1 && seen == real, "{container} sees {seen:?}, its pod holds {real:?} for it");
    }
    scene.delete("pod/both")?;
    scene.await_gone("both")
}

pub(crate) fn a_deployment_by_limits(scene: &Scene<'_>) -> Result<()> {
    let slice = json!({ "nvidia.com/mig-1g.10gb": 1 });
    let labels = json!({ "app": "limits" });
    let pod = Pod::new("unused").container_with_limits("main", &slice);
    let deployment = json!({
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": { "name": "limits" },
        "spec": {
            "replicas": 3,
            "selector": { "matchLabels": labels },
            "template": { "metadata": { "labels": labels }, "spec": pod.spec() },
        },
    });
    scene.apply(&deployment.to_string())?;
    await_rollout(scene, 3)?;
    scene.kubectl(&["rollout", "restart", "deployment/limits"])?;
    let pods = await_rollout(scene, 3)?;
    let mut devices = BTreeSet::new();
    for pod in &pods {
        devices.extend(machine::sees_what_it_holds(scene, pod)?.into_iter().map(|held| held.device));
    }
    ensure!(devices.len() == 3, "three pods hold {devices:?}");
    scene.kubectl(&["scale", "deployment/limits", "--replicas=0"])?;
    for pod in &pods {
        scene.await_gone(pod)?;
    }
    machine::await_no_instance(scene)
}

/// The names of a deployment's pods once all of them, and no others, run.
fn await_rollout(scene: &Scene<'_>, replicas: usize) -> Result<Vec<String>> {
    let limit = format!("--timeout={}s", LIMIT.as_secs());
    scene.kubectl(&["rollout", "status", "deployment/limits", &limit])?;
    wait_until("the deployment has its pods, and no others", LIMIT, || {
        let pods = scene.list::<k8s_openapi::api::core::v1::Pod>()?;
        let names: Vec<String> = pods.into_iter().filter_map(|pod| pod.metadata.name).collect();
        Ok((names.len() == replicas).then_some(names))
    })
}

pub(crate) fn nothing_is_left_of_a_pod(scene: &Scene<'_>) -> Result<()> {
    let devices =
        requests(&[request("gpu", WHOLE), request("one", SMALL), request("two", "mig-2g.20gb.nvidia.com")]);
    let template = manifest::template("all", &devices);
    let pod = Pod::new("pod").with_template("claim", "all");
    let pod = pod.container("main", &["claim"]).container("beside", &["claim/two"]);
    scene.apply(&manifest::list(&[template, pod.json()]))?;
    scene.await_running("pod")?;
    let partitions = machine::on_hardware(scene, &machine::sees_what_it_holds(scene, "pod")?)?;
    let claims = machine::claims_of(scene, "pod")?;
    let uid = machine::uid_of(scene, claims.first().context("the pod has no claim")?)?;
    let before = machine::traces(scene, &uid, &partitions)?;
    ensure!(before.len() == 4, "of two instances, a journal entry and a CDI file there is {before:?}");
    let processes =
        [machine::process_of(scene, "pod", "main")?, machine::process_of(scene, "pod", "beside")?];

    scene.delete("pod/pod")?;
    for process in processes {
        machine::await_end(process)?;
    }
    nothing_is_left(scene, &uid, &partitions)?;
    scene.await_gone("pod")
}

fn nothing_is_left(scene: &Scene<'_>, uid: &str, partitions: &BTreeSet<Seen>) -> Result<()> {
    wait_until("nothing is left after the last container's end", LIMIT, || {
        let traces = machine::traces(scene, uid, partitions)?;
        ensure!(traces.is_empty(), "there is {traces:?}");
        Ok(Some(()))
    })
}
