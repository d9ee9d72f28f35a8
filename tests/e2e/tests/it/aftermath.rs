//! What must hold after whatever was done to kerf or its node: no device was
//! withdrawn meanwhile, and all that looks free can be had at once.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use kerf_e2e::Scene;
use serde_json::{Value, json};

use crate::ground;
use crate::machine::{self, Seen};
use crate::manifest::{self, Pod, SMALL, WHOLE, requests};
use crate::watch::{self, Watch};

/// [`ground::clean`], for a case that gives nobody a reason to withdraw a
/// device, and then [`all_is_given_out`].
pub(crate) fn clean(scene: &Scene<'_>, case: impl FnOnce() -> Result<()>) -> Result<()> {
    let watch = Watch::begin(scene)?;
    ground::clean(scene, case)?;
    watch::nothing_was_withdrawn(&watch.end()?)?;
    all_is_given_out(scene)
}

/// A pod for each GPU: one has an H100, the others a claim each with all the
/// smallest partitions of theirs. The scheduler goes by what is published.
const ALL: [(&str, &str, usize); 4] = [
    ("all-whole", WHOLE, 1),
    ("all-h100", SMALL, 7),
    ("all-a100", "mig-1g.5gb.nvidia.com", 7),
    ("all-a30", "mig-1g.6gb.nvidia.com", 4),
];

/// Where nothing is held, runs pods with everything, no two with the same, and
/// gives it back.
pub(crate) fn all_is_given_out(scene: &Scene<'_>) -> Result<()> {
    ground::ready(scene)?;
    scene.apply(&manifest::list(&ALL.map(objects).concat()))?;
    let mut seen: BTreeSet<Seen> = BTreeSet::new();
    for (pod, _, count) in ALL {
        scene.await_running(pod).context("not all that looks free is free")?;
        let held = machine::sees_what_it_holds(scene, pod)?;
        ensure!(held.len() == count, "{pod} holds {held:?}");
        let its = machine::on_hardware(scene, &held)?;
        ensure!(its.is_disjoint(&seen), "{pod} has {its:?}, others have {seen:?}");
        seen.extend(its);
    }
    let whole = |seen: &Seen| match seen {
        Seen::Whole(uuid) => Some(uuid.clone()),
        Seen::Partition { .. } => None,
    };
    let wholes: BTreeSet<String> = seen.iter().filter_map(whole).collect();
    let both = |seen: &&Seen| matches!(seen, Seen::Partition { parent, .. } if wholes.contains(parent));
    ensure!(!seen.iter().any(|seen| both(&seen)), "a GPU is held and divided: {seen:?}");
    ground::agree(scene, &[])?;
    for (pod, ..) in ALL {
        scene.delete(&format!("pod/{pod}"))?;
        scene.delete(&format!("resourceclaimtemplate/{pod}"))?;
    }
    ground::await_nothing_left(scene, &[])
}

fn objects((name, class, count): (&str, &str, usize)) -> [Value; 2] {
    let request = json!({ "name": "all", "exactly": { "deviceClassName": class, "count": count } });
    let pod = Pod::new(name).with_template("claim", name).container("main", &["claim"]);
    [manifest::template(name, &requests(&[request])), pod.json()]
}
