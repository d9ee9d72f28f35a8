//! A new version of kerf replaces the old one while pods come and go.

use std::collections::VecDeque;
use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};
use kerf_e2e::{Case, LIMIT, Needs, Scene, wait_until};
use serde_json::json;
use xtask::driver::Values;

use crate::aftermath;
use crate::ground::{self, DRIVER};
use crate::manifest::{self, SMALL, WHOLE, request, requests};
use crate::slices;
use crate::workload;

/// The cases of this file.
pub(crate) const CASES: &[Case] = &[Case {
    name: "while kerf is rolled out again no pod fails and no slice is written",
    needs: Needs::Driver,
    seconds: 40,
    run: under_load,
}];

/// 50 pods a minute.
const PACE: Duration = Duration::from_millis(1200);
/// Pods that are there at a time.
const MOST: usize = 6;

fn under_load(scene: &Scene<'_>) -> Result<()> {
    ground::clean_values(scene, || {
        scene.apply(&manifest::lone("lasting", &requests(&[request("gpu", WHOLE)])))?;
        scene.await_running("lasting")?;
        let (before, lasting) = (slices::revisions(scene)?, workload::identity(scene, "lasting")?);
        let mut pods = Pods::default();
        // Twice: then the elder is one that was rolled out itself.
        for round in 0..2 {
            let values = Values::from_iter([("podLabels".to_owned(), json!({ "round": round.to_string() }))]);
            let cluster = scene.cluster;
            thread::scope(|scope| {
                let upgrade = scope.spawn(move || xtask::driver::install(cluster, values));
                while !upgrade.is_finished() {
                    pods.come_and_go(scene)?;
                }
                upgrade.join().map_err(|_| anyhow!("the upgrade panicked"))?
            })?;
        }
        // The former instance has ended by now, or is about to.
        for _ in 0..MOST {
            pods.come_and_go(scene)?;
        }
        ensure!(pods.made > 2 * MOST, "only {} pods came", pods.made);
        pods.end(scene)?;
        let now = slices::revisions(scene)?;
        ensure!(now == before, "slices were {before:?} and are {now:?}");
        ensure!(workload::identity(scene, "lasting")? == lasting, "the pod that ran all the time noticed");
        wait_until("only one instance has sockets", LIMIT, || {
            let registry = fs::read_dir(scene.cluster.kubelet_root().join("plugins_registry"))?;
            let names: Vec<_> =
                registry.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
            ensure!(names.iter().filter(|name| name.starts_with(DRIVER)).count() == 1, "there are {names:?}");
            Ok(Some(()))
        })?;
        scene.delete("pod/lasting")?;
        ground::await_nothing_left(scene, &[])
    })?;
    aftermath::all_is_given_out(scene, &[])
}

/// Pods with a partition each: when there are enough, the oldest goes.
#[derive(Default)]
struct Pods {
    made: usize,
    there: VecDeque<String>,
}

impl Pods {
    fn come_and_go(&mut self, scene: &Scene<'_>) -> Result<()> {
        let due = Instant::now() + PACE;
        if self.there.len() == MOST {
            self.oldest_goes(scene)?;
        }
        let name = format!("pod-{}", self.made);
        scene.apply(&manifest::lone(&name, &requests(&[request("slice", SMALL)])))?;
        self.made += 1;
        self.there.push_back(name);
        thread::sleep(due.saturating_duration_since(Instant::now()));
        Ok(())
    }

    /// It ran, and at the first attempt.
    fn oldest_goes(&mut self, scene: &Scene<'_>) -> Result<()> {
        let Some(name) = self.there.pop_front() else { return Ok(()) };
        scene.await_running(&name)?;
        let events = scene.events(&name)?;
        // The claim's controller may not have seen the template yet.
        let mut others = events.lines().filter(|event| !event.starts_with("FailedResourceClaimCreation:"));
        ensure!(!others.any(|event| event.contains("Failed")), "{name} had to be tried again:\n{events}");
        scene.delete(&format!("pod/{name}"))
    }

    fn end(&mut self, scene: &Scene<'_>) -> Result<()> {
        while !self.there.is_empty() {
            self.oldest_goes(scene)?;
        }
        Ok(())
    }
}
