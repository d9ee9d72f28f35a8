//! One GPU is never a whole and in parts at once: the scheduler keeps them
//! apart by counters, and the node refuses what was written past it.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, Result, bail, ensure};
use k8s_openapi::api::core::v1::Pod as ApiPod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kerf_e2e::{LIMIT, Scene, wait_until};
use serde_json::{Value, json};

use crate::machine::{self, Held};
use crate::manifest::{self, Pod, SMALL, WHOLE, on_gpu, request, request_where, requests};

pub(crate) fn a_whole_gpu_waits_for_partitions(scene: &Scene<'_>) -> Result<()> {
    let gpus = h100s(scene)?;
    for leaving in &gpus {
        for gpu in &gpus {
            let slice = requests(&[request_where("slice", SMALL, &on_gpu(gpu))]);
            scene.apply(&manifest::lone(&part_on(gpu), &slice))?;
        }
        for gpu in &gpus {
            scene.await_running(&part_on(gpu))?;
        }
        scene.apply(&manifest::lone("whole", &requests(&[request("gpu", WHOLE)])))?;
        await_waiting(scene, "whole")?;
        scene.delete(&format!("pod/{}", part_on(leaving)))?;
        runs_on(scene, "whole", leaving)?;
        clear(scene)?;
    }
    Ok(())
}

pub(crate) fn partitions_wait_for_whole_gpus(scene: &Scene<'_>) -> Result<()> {
    let gpus = h100s(scene)?;
    for leaving in &gpus {
        for gpu in &gpus {
            let whole = requests(&[request_where("gpu", WHOLE, &on_gpu(gpu))]);
            scene.apply(&manifest::lone(&whole_on(gpu), &whole))?;
        }
        for gpu in &gpus {
            scene.await_running(&whole_on(gpu))?;
        }
        // A profile that only an H100 has.
        let largest = requests(&[request("slice", "mig-7g.80gb.nvidia.com")]);
        scene.apply(&manifest::lone("part", &largest))?;
        await_waiting(scene, "part")?;
        scene.delete(&format!("pod/{}", whole_on(leaving)))?;
        runs_on(scene, "part", leaving)?;
        clear(scene)?;
    }
    Ok(())
}

pub(crate) fn whole_and_partition_wait_for_one_gpu(scene: &Scene<'_>) -> Result<()> {
    let gpus = h100s(scene)?;
    let (Some(kept), Some(contested)) = (gpus.first(), gpus.last()) else { bail!("there is no H100") };
    let whole = requests(&[request_where("gpu", WHOLE, &on_gpu(contested))]);
    let part = requests(&[request_where("slice", SMALL, &on_gpu(contested))]);
    let on_kept = requests(&[request_where("slice", SMALL, &on_gpu(kept))]);
    scene.apply(&manifest::lone("beside", &on_kept))?;
    scene.apply(&manifest::lone("holder", &whole))?;
    scene.await_running("beside")?;
    scene.await_running("holder")?;
    for waiting in ["whole", "part"] {
        scene.apply(&manifest::lone(waiting, if waiting == "whole" { &whole } else { &part }))?;
        await_waiting(scene, waiting)?;
    }
    scene.delete("pod/holder")?;
    let first = wait_until("one of the two runs", LIMIT, || {
        let running = |pod: &&str| scene.get::<ApiPod>(pod).is_ok_and(|pod| is_running(pod.as_ref()));
        Ok(["whole", "part"].into_iter().find(running))
    })?;
    let second = if first == "whole" { "part" } else { "whole" };
    runs_on(scene, first, contested)?;
    await_waiting(scene, second)?;
    scene.delete(&format!("pod/{first}"))?;
    runs_on(scene, second, contested)?;
    // What is on the other GPU took no notice.
    machine::sees_what_it_holds(scene, "beside").map(drop)
}

pub(crate) fn small_pods_fill_gpu_after_gpu(scene: &Scene<'_>) -> Result<()> {
    let gpus = h100s(scene)?;
    let (Some(first), Some(second)) = (gpus.first(), gpus.last()) else { bail!("there is no H100") };
    let small = requests(&[request("slice", SMALL)]);
    let pods: Vec<String> = (0..9).map(|number| format!("small-{number}")).collect();
    let (filling, rest) = pods.split_at(7);
    scene
        .apply(&filling.iter().map(|pod| manifest::lone(pod, &small)).collect::<Vec<_>>().join("\n---\n"))?;
    let places = places(scene, filling)?;
    let all = (0..7).map(|start| (first.clone(), start)).collect();
    ensure!(places == all, "seven small pods are at {places:?}, not at {all:?}");

    // So the other GPU can still be had as a whole.
    scene.apply(&manifest::lone("whole", &requests(&[request("gpu", WHOLE)])))?;
    runs_on(scene, "whole", second)?;
    scene.delete("pod/whole")?;
    scene.await_gone("whole")?;
    wait_until("the whole GPU's claim is gone", LIMIT, || {
        Ok((scene.list::<ResourceClaim>()?.len() == filling.len()).then_some(()))
    })?;

    scene.apply(&rest.iter().map(|pod| manifest::lone(pod, &small)).collect::<Vec<_>>().join("\n---\n"))?;
    let places = self::places(scene, rest)?;
    let top = BTreeSet::from([(second.clone(), 6), (second.clone(), 5)]);
    ensure!(places == top, "the next two are at {places:?}, not at {top:?}");

    // And there its lower half.
    scene.apply(&manifest::lone("half", &requests(&[request("slice", "mig-4g.40gb.nvidia.com")])))?;
    runs_on(scene, "half", second)
}

/// An overlap that no scheduler would write.
struct Overlap {
    name: &'static str,
    model: &'static str,
    holder: Value,
    /// The device that is written into the other claim, of the holder's GPU.
    stolen: fn(&Held) -> String,
}

pub(crate) fn prepare_refuses_what_is_held(scene: &Scene<'_>) -> Result<()> {
    let gpus = h100s(scene)?;
    let (Some(first), Some(second)) = (gpus.first(), gpus.last()) else { bail!("there is no H100") };
    let overlaps = [
        Overlap {
            name: "part-of-whole",
            model: "h100-80",
            holder: request_where("device", WHOLE, &on_gpu(second)),
            stolen: |held| format!("{}-mig-1g-10gb-3", held.device),
        },
        Overlap {
            name: "whole-of-part",
            model: "h100-80",
            holder: request_where("device", SMALL, &on_gpu(first)),
            stolen: |held| whole_of(&held.device),
        },
        Overlap {
            name: "same-device",
            model: "a100-40",
            holder: request("device", "mig-1g.5gb.nvidia.com"),
            stolen: |held| held.device.clone(),
        },
        Overlap {
            name: "other-profile",
            model: "a30",
            holder: request("device", "mig-1g.6gb.nvidia.com"),
            stolen: |held| format!("{}-mig-4g-24gb-0", whole_of(&held.device)),
        },
    ];
    for overlap in &overlaps {
        scene.apply(&manifest::lone(overlap.name, &requests(std::slice::from_ref(&overlap.holder))))?;
    }
    for Overlap { name, model, stolen, .. } in &overlaps {
        scene.await_running(name)?;
        let held = machine::sees_what_it_holds(scene, name)?;
        let held = held.first().context("the holder holds nothing")?;
        let pci = held.pci()?;
        ensure!(machine::gpus_of(scene, model)?.iter().any(|gpu| gpu.pci == pci), "{name} holds {held:?}");
        bind_by_hand(scene, &thief_of(name), &held.pool, &stolen(held))?;
    }
    for Overlap { name, .. } in &overlaps {
        let claims = machine::claims_of(scene, name)?;
        let holder = format!("{}/{}", scene.namespace(), claims.first().context("the holder has no claim")?);
        let thief = thief_of(name);
        wait_until(&format!("{thief} is told who holds its device"), LIMIT, || {
            let events = scene.events(&thief)?;
            ensure!(
                events.contains("FailedPrepareDynamicResources") && events.contains(&holder),
                "of {holder} its events say {events:?}"
            );
            Ok(Some(()))
        })?;
        let pod: ApiPod = scene.get(&thief)?.context("the pod is not there")?;
        ensure!(!is_running(Some(&pod)), "{thief} runs");
        machine::sees_what_it_holds(scene, name)?;
        let pod: ApiPod = scene.get(name)?.context("the holder is not there")?;
        ensure!(is_running(Some(&pod)) && restarts(&pod) == 0, "{name} was disturbed");
    }
    for Overlap { name, .. } in &overlaps {
        scene.delete(&format!("pod/{name}"))?;
    }
    for Overlap { name, .. } in &overlaps {
        scene.await_running(&thief_of(name))?;
        machine::sees_what_it_holds(scene, &thief_of(name))?;
    }
    Ok(())
}

fn thief_of(holder: &str) -> String {
    format!("{holder}-by-hand")
}

fn whole_of(device: &str) -> String {
    device.split_once("-mig-").map_or(device, |(whole, _)| whole).to_owned()
}

/// Gives a device to a pod as a scheduler would, without asking whether it is
/// free: the claim's status in one update, then the binding.
pub(crate) fn bind_by_hand(scene: &Scene<'_>, name: &str, pool: &str, device: &str) -> Result<()> {
    let claim = manifest::claim(name, &requests(&[request("device", WHOLE)]));
    let pod = Pod::new(name).with_claim("claim", name).container("main", &["claim"]).scheduler("by-hand");
    scene.apply(&manifest::list(&[claim, pod.json()]))?;
    let pod: ApiPod = scene.get(name)?.context("the pod is not there")?;
    let result = json!({ "request": "device", "driver": "gpu.nvidia.com", "pool": pool, "device": device });
    let status = json!({ "status": {
        "allocation": { "devices": { "results": [result] } },
        "reservedFor": [{ "resource": "pods", "name": name, "uid": pod.metadata.uid }],
    }});
    let (claim, status) = (format!("resourceclaim/{name}"), status.to_string());
    scene.kubectl(&["patch", &claim, "--subresource=status", "--type=merge", "--patch", &status])?;
    let binding = json!({
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": { "name": name },
        "target": { "apiVersion": "v1", "kind": "Node", "name": scene.cluster.node_name() },
    });
    let path = format!("/api/v1/namespaces/{}/pods/{name}/binding", scene.namespace());
    scene.kubectl_with_input(&["create", "--raw", &path, "--filename=-"], &binding.to_string()).map(drop)
}

/// The PCI addresses of the H100s, the only GPUs here that change their mode.
fn h100s(scene: &Scene<'_>) -> Result<Vec<String>> {
    Ok(machine::gpus_of(scene, "h100-80")?.into_iter().map(|gpu| gpu.pci).collect())
}

fn part_on(gpu: &str) -> String {
    format!("part-{}", gpu.replace([':', '.'], "-"))
}

fn whole_on(gpu: &str) -> String {
    format!("whole-{}", gpu.replace([':', '.'], "-"))
}

/// Waits until the scheduler has looked for a place and found none.
fn await_waiting(scene: &Scene<'_>, pod: &str) -> Result<()> {
    wait_until(&format!("{pod} waits"), LIMIT, || {
        let found: ApiPod = scene.get(pod)?.context("the pod is not there")?;
        let conditions = found.status.and_then(|status| status.conditions).unwrap_or_default();
        Ok(conditions
            .iter()
            .any(|condition| {
                condition.type_ == "PodScheduled" && condition.reason.as_deref() == Some("Unschedulable")
            })
            .then_some(()))
    })?;
    never_together(scene)
}

/// Waits until a pod runs, and makes sure that it does so on a GPU.
fn runs_on(scene: &Scene<'_>, pod: &str, gpu: &str) -> Result<()> {
    scene.await_running(pod)?;
    for held in machine::sees_what_it_holds(scene, pod)? {
        ensure!(held.pci()? == gpu, "{pod} holds {held:?}, not one of GPU {gpu}");
    }
    never_together(scene)
}

/// Makes sure that no GPU is held as a whole and in parts, or twice as a whole.
fn never_together(scene: &Scene<'_>) -> Result<()> {
    let mut holders: BTreeMap<String, Vec<Held>> = BTreeMap::new();
    for claim in scene.list::<ResourceClaim>()? {
        for held in machine::held(&claim) {
            holders.entry(held.pci()?).or_default().push(held);
        }
    }
    for (gpu, held) in holders {
        let whole = held.iter().any(|held| held.partition().is_none());
        ensure!(!whole || held.len() == 1, "GPU {gpu} is held as {held:?}");
    }
    Ok(())
}

/// Where the only devices of some pods are, once all of them run.
fn places(scene: &Scene<'_>, pods: &[String]) -> Result<BTreeSet<(String, u32)>> {
    let mut places = BTreeSet::new();
    for pod in pods {
        scene.await_running(pod)?;
        for held in machine::sees_what_it_holds(scene, pod)? {
            let (_, start) = held.partition().with_context(|| format!("{pod} holds {held:?}"))?;
            places.insert((held.pci()?, start));
        }
    }
    Ok(places)
}

/// Ends a round: the next one uses the same names.
fn clear(scene: &Scene<'_>) -> Result<()> {
    scene.kubectl(&["delete", "pods,resourceclaimtemplates", "--all", "--wait"])?;
    wait_until("no claim is left", LIMIT, || Ok(scene.list::<ResourceClaim>()?.is_empty().then_some(())))
}

fn is_running(pod: Option<&ApiPod>) -> bool {
    let phase = pod.and_then(|pod| pod.status.as_ref()?.phase.as_deref());
    phase == Some("Running")
}

fn restarts(pod: &ApiPod) -> i32 {
    let statuses = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
    statuses.map(|status| status.restart_count).sum()
}
