//! The API server is away while pods end on the node, and kerf dies meanwhile.

use std::collections::BTreeSet;
use std::process::Command;

use anyhow::{Result, ensure};
use kerf_e2e::{Case, LIMIT, Needs, Scene, wait_until};
use xtask::cluster::Component;
use xtask::exec;

use crate::aftermath;
use crate::ground;
use crate::machine::{self, Seen};
use crate::manifest::{self, Pod, SMALL, WHOLE, request, requests};
use crate::slices;
use crate::workload::{self, Workload};

/// The cases of this file.
pub(crate) const CASES: &[Case] = &[Case {
    name: "while the API server is away, ended pods give their devices back, also to a kerf that starts then",
    needs: Needs::Driver,
    seconds: 45,
    run: api_away,
}];

/// A pod that ends when its only process does.
struct Ending {
    pod: &'static str,
    process: u32,
    uid: String,
    seen: BTreeSet<Seen>,
}

impl Ending {
    fn run(scene: &Scene<'_>, pod: &'static str, class: &str) -> Result<Self> {
        let claim = manifest::claim(pod, &requests(&[request("device", class)]));
        let once = Pod::new(pod).with_claim("claim", pod).container("main", &["claim"]).once();
        scene.apply(&manifest::list(&[claim, once.json()]))?;
        scene.await_running(pod)?;
        Ok(Self {
            pod,
            process: machine::process_of(scene, pod, "main")?,
            uid: machine::uid_of(scene, pod)?,
            seen: machine::seen_in(scene, pod, "main")?,
        })
    }

    fn end(&self, scene: &Scene<'_>) -> Result<()> {
        exec::output(Command::new("kill").args(["-KILL", &self.process.to_string()]))?;
        wait_until(&format!("nothing is left of {}", self.pod), LIMIT, || {
            let left = machine::traces(scene, &self.uid, &self.seen)?;
            ensure!(left.is_empty(), "there is still {left:?}");
            Ok(Some(()))
        })
    }
}

fn api_away(scene: &Scene<'_>) -> Result<()> {
    ground::clean(scene, || {
        Workload::new("lasting", "mig-1g.5gb.nvidia.com").run(scene)?;
        let lasting = workload::identity(scene, "lasting")?;
        let pods = [
            Ending::run(scene, "first", SMALL)?,
            Ending::run(scene, "second", WHOLE)?,
            Ending::run(scene, "third", SMALL)?,
        ];
        let [first, second, third] = &pods;
        let slices = slices::revisions(scene)?;

        scene.cluster.kill(Component::ApiServer)?;
        first.end(scene)?;
        ground::kill_driver(scene)?;
        second.end(scene)?;
        third.end(scene)?;
        scene.cluster.start(Component::ApiServer)?;

        ground::driver_serves(scene)?;
        Workload::new("new", SMALL).run(scene)?;
        workload::end(scene, "new")?;
        ensure!(workload::identity(scene, "lasting")? == lasting, "the pod that ran all the time noticed");
        ground::agree(scene, &[])?;
        let now = slices::revisions(scene)?;
        ensure!(now == slices, "slices were {slices:?} and are {now:?}");
        aftermath::all_is_given_out(scene, &["lasting"])?;
        for Ending { pod, .. } in &pods {
            scene.delete(&format!("pod/{pod}"))?;
            scene.delete(&format!("resourceclaim/{pod}"))?;
        }
        workload::end(scene, "lasting")?;
        ground::await_nothing_left(scene, &[])
    })
}
