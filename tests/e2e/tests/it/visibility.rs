//! What each container sees: exactly what its requests were given.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use kerf_e2e::Scene;

use crate::machine::{self, Held};
use crate::manifest::{self, Pod, SMALL, WHOLE, request, requests};

pub(crate) fn only_its_requests(scene: &Scene<'_>) -> Result<()> {
    let one = requests(&[
        request("gpu", WHOLE),
        request("small", SMALL),
        request("large", "mig-3g.40gb.nvidia.com"),
    ]);
    let two = requests(&[request("slice", SMALL)]);
    let containers: [(&str, &[&str]); 6] = [
        ("gpu", &["one/gpu"]),
        ("small", &["one/small"]),
        ("mixed", &["one/large", "two"]),
        ("all", &["one"]),
        ("second", &["two/slice"]),
        ("none", &[]),
    ];
    let mut pod = Pod::new("pod").with_template("one", "one").with_template("two", "two");
    pod = pod.init_container("first-large", &["one/large"]).init_container("first-gpu", &["one/gpu", "two"]);
    for (name, uses) in containers {
        pod = pod.container(name, uses);
    }
    let neighbour = manifest::lone("neighbour", &requests(&[request("slice", SMALL)]));
    scene.apply(&neighbour)?;
    scene.await_running("neighbour")?;
    scene.apply(&manifest::list(&[
        manifest::template("one", &one),
        manifest::template("two", &two),
        pod.json(),
    ]))?;
    scene.await_running("pod")?;

    let held = machine::held_by(scene, "pod")?;
    let of = |requests: &[&str]| -> Vec<Held> {
        held.iter().filter(|held| requests.contains(&held.request.as_str())).cloned().collect()
    };
    for (container, requests) in [
        ("gpu", ["gpu"].as_slice()),
        ("small", &["small"]),
        ("mixed", &["large", "slice"]),
        ("all", &["gpu", "small", "large"]),
        ("second", &["slice"]),
    ] {
        let held = of(requests);
        ensure!(held.len() == requests.len(), "for {requests:?} the pod holds {held:?}");
        let (real, seen) = (machine::on_hardware(scene, &held)?, machine::seen_in(scene, "pod", container)?);
        ensure!(seen == real, "{container} sees {seen:?}, its requests were given {real:?}");
        has_nodes_of(scene, container, &held)?;
    }
    for (container, requests) in [("first-large", ["large"].as_slice()), ("first-gpu", &["gpu", "slice"])] {
        let real = machine::on_hardware(scene, &of(requests))?;
        let seen = machine::listed(&scene.logs("pod", Some(container))?)?;
        ensure!(seen == real, "{container} saw {seen:?}, its requests were given {real:?}");
    }
    let nodes = nodes_in(scene, "none")?;
    ensure!(nodes.is_empty(), "a container without a device has {nodes:?}");
    ensure!(machine::seen_in(scene, "pod", "none").is_err(), "a container without a device has nvidia-smi");
    machine::sees_what_it_holds(scene, "neighbour").map(drop)
}

/// Makes sure that of GPUs and partitions a container has the nodes of its own
/// alone: what a program may open does not depend on what NVML tells it.
fn has_nodes_of(scene: &Scene<'_>, container: &str, held: &[Held]) -> Result<()> {
    let nodes = nodes_in(scene, container)?;
    let gpus = held.iter().map(Held::pci).collect::<Result<BTreeSet<_>>>()?;
    let whole = |node: &&String| node.strip_prefix("nvidia").is_some_and(|rest| rest.parse::<u32>().is_ok());
    let (found, expected) = (nodes.iter().filter(whole).count(), gpus.len());
    ensure!(found == expected, "{container} has {nodes:?} for {held:?}");
    let partitions = held.iter().filter(|held| held.partition().is_some()).count();
    let capabilities = nodes.iter().filter(|node| node.starts_with("nvidia-cap")).count();
    // One for the GPU instance, one for the compute instance in it.
    ensure!(capabilities == 2 * partitions, "{container} has {nodes:?} for {held:?}");
    Ok(())
}

/// The NVIDIA device nodes in a container, by file name.
fn nodes_in(scene: &Scene<'_>, container: &str) -> Result<Vec<String>> {
    let listing = scene.exec("pod", Some(container), &["find", "/dev", "-type", "c", "-name", "nvidia*"])?;
    let name = |path: &str| path.rsplit('/').next().map(str::to_owned).context("an empty path");
    listing.lines().map(name).collect()
}
