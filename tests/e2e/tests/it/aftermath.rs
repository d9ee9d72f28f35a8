//! What must hold after whatever was done to kerf or its node: no device was
//! withdrawn meanwhile, and all that looks free can be had at once.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, bail, ensure};
use kerf_e2e::{LIMIT, Scene, wait_until};
use serde_json::{Value, json};

use crate::ground;
use crate::machine::{self, Held, Seen};
use crate::manifest::{self, Pod, SMALL, WHOLE, on_gpu, request_where, requests};
use crate::watch::{self, Watch};

/// [`ground::clean`], for a case that gives nobody a reason to withdraw a device.
pub(crate) fn watched(scene: &Scene<'_>, case: impl FnOnce() -> Result<()>) -> Result<()> {
    let watch = Watch::begin(scene)?;
    ground::clean(scene, case)?;
    watch::nothing_was_withdrawn(&watch.end()?)
}

/// [`watched`], and in the end [`all_is_given_out`].
pub(crate) fn clean(scene: &Scene<'_>, case: impl FnOnce() -> Result<()>) -> Result<()> {
    watched(scene, case)?;
    all_is_given_out(scene, &[])
}

/// A pod that takes what of a GPU looks free.
struct Taker {
    pod: String,
    class: &'static str,
    pci: String,
    count: usize,
}

impl Taker {
    /// One for each GPU of which these devices, whole GPUs and smallest
    /// partitions, leave something: the first free H100 is taken whole, of any
    /// other GPU all the smallest partitions that there is room for.
    fn beside(scene: &Scene<'_>, held: &[Held]) -> Result<Vec<Self>> {
        let mut takers: Vec<Self> = Vec::new();
        for (index, gpu) in machine::gpus(scene)?.into_iter().enumerate() {
            let mut its = Vec::new();
            for device in held {
                if device.pci()? == gpu.pci {
                    its.push(device);
                }
            }
            let (class, places) = match gpu.model.as_str() {
                "h100-80" => (SMALL, 7),
                "a100-40" => ("mig-1g.5gb.nvidia.com", 7),
                "a30" => ("mig-1g.6gb.nvidia.com", 4),
                other => bail!("what is all of a {other}?"),
            };
            let is_whole = its.iter().any(|device| device.partition().is_none());
            let whole_is_due = class == SMALL && takers.iter().all(|taker| taker.class != WHOLE);
            let (class, count) = match its.len() {
                0 if whole_is_due => (WHOLE, 1),
                _ if is_whole => continue,
                held => (class, places - held),
            };
            takers.push(Self { pod: format!("taker-{index}"), class, pci: gpu.pci, count });
        }
        Ok(takers)
    }

    fn objects(&self) -> [Value; 2] {
        let Self { pod: name, class, pci, count } = self;
        let mut request = request_where("all", class, &on_gpu(pci));
        request["exactly"]["count"] = json!(count);
        let pod = Pod::new(name).with_template("claim", name).container("main", &["claim"]);
        [manifest::template(name, &requests(&[request])), pod.json()]
    }
}

/// Runs pods with everything that looks free beside what these pods hold, no
/// two with the same, and gives it back. The scheduler goes by what is published.
pub(crate) fn all_is_given_out(scene: &Scene<'_>, holders: &[&str]) -> Result<()> {
    ground::ready(scene)?;
    let mut all = Vec::new();
    for pod in holders {
        all.extend(machine::sees_what_it_holds(scene, pod)?);
    }
    let before = ground::journal(scene)?;
    let takers = Taker::beside(scene, &all)?;
    let objects: Vec<Value> = takers.iter().flat_map(Taker::objects).collect();
    scene.apply(&manifest::list(&objects))?;
    for Taker { pod, count, .. } in &takers {
        scene.await_running(pod).context("not all that looks free is free")?;
        let held = machine::sees_what_it_holds(scene, pod)?;
        ensure!(held.len() == *count, "{pod} holds {held:?}");
        all.extend(held);
    }
    // Each pod sees what is there for it; nothing may be there for two.
    let seen: BTreeSet<Seen> = machine::on_hardware(scene, &all)?;
    ensure!(seen.len() == all.len(), "for {all:?} there is only {seen:?}");
    ground::agree(scene, &[])?;
    for Taker { pod, .. } in &takers {
        scene.delete(&format!("pod/{pod}"))?;
        scene.delete(&format!("resourceclaimtemplate/{pod}"))?;
    }
    wait_until("all of it is given back", LIMIT, || {
        let now = ground::journal(scene)?;
        ensure!(now == before, "the journal has {now:?}");
        ground::agree(scene, &[]).map(Some)
    })
}
