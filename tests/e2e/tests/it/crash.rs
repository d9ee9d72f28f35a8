//! kerf dies at the worst instants; pods are withdrawn at the worst instants.
//! What it had begun is finished or undone, nothing else is touched, and in the
//! end all that looks free can be had.

use anyhow::{Context as _, Result, ensure};
use kerf_e2e::{Case, LIMIT, Needs, Scene, wait_until, watch_until};
use serde_json::Value;

use crate::aftermath;
use crate::ground::{self, Instance};
use crate::workload::{self, Workload};

/// The cases of this file.
pub(crate) const CASES: &[Case] = &[
    Case {
        name: "kerf dies before or after each call of prepare, and the pod runs",
        needs: Needs::Driver,
        seconds: 70,
        run: died_in_prepare,
    },
    Case {
        name: "kerf dies before or after each call of unprepare, and nothing is left",
        needs: Needs::Driver,
        seconds: 55,
        run: died_in_unprepare,
    },
    Case {
        name: "kerf is killed at each journal state of prepare, and the pod runs or is cleaned up",
        needs: Needs::Driver,
        seconds: 80,
        run: killed_in_prepare,
    },
    Case {
        name: "kerf is killed at each journal state of unprepare, and nothing is left",
        needs: Needs::Driver,
        seconds: 35,
        run: killed_in_unprepare,
    },
    Case {
        name: "kerf dies before or after a GPU changes its mode, and the pod runs",
        needs: Needs::Driver,
        seconds: 30,
        run: died_changing_mode,
    },
    Case {
        name: "pods deleted by force and claims deleted under pods leave nothing",
        needs: Needs::Driver,
        seconds: 25,
        run: withdrawn_pods,
    },
    Case {
        name: "a deleted namespace leaves nothing",
        needs: Needs::Driver,
        seconds: 10,
        run: namespace_deleted,
    },
];

/// The GPU whose partitions are made here; always in MIG mode.
const GPU: usize = 2;
const CLASS: &str = "mig-1g.5gb.nvidia.com";

const CREATE: &str = "nvmlDeviceCreateGpuInstanceWithPlacement";
const CREATE_COMPUTE: &str = "nvmlGpuInstanceCreateComputeInstance";
const DESTROY_COMPUTE: &str = "nvmlComputeInstanceDestroy";
const DESTROY: &str = "nvmlGpuInstanceDestroy";

/// Longer than anything waits for it.
const HANG: &str = "hang=600000";

fn fault(scene: &Scene<'_>, call: &str, when: &str, action: &str) -> Result<()> {
    let action = format!("--do={action}");
    scene.emulator(&["fault", "add", call, "--when", when, &action, "--process", "kerf"]).map(drop)
}

/// A neighbour on the same GPU that must survive everything. Without a compute
/// instance it is not published, so the next case need not wait until that is
/// withdrawn.
fn neighbour(scene: &Scene<'_>) -> Result<Vec<(usize, Instance)>> {
    Ok(vec![(GPU, ground::make_foreign(scene, GPU, &["--profile", "1g.5gb", "--start", "0", "--no-ci"])?)])
}

/// Waits until kerf's container was started once more.
fn await_restart(scene: &Scene<'_>, before: i32) -> Result<()> {
    wait_until("kerf was started again", LIMIT, || {
        Ok((ground::driver_restarts(scene)? > before).then_some(()))
    })?;
    ground::driver_serves(scene)
}

/// Runs pod `name` to its end on a kerf that died.
fn runs_and_ends(scene: &Scene<'_>, name: &str, foreign: &[(usize, Instance)]) -> Result<()> {
    scene.await_running(name)?;
    let uuids = workload::seen(scene, name)?;
    ensure!(uuids.len() == 1, "{name} sees {uuids:?}");
    ground::agree(scene, foreign)?;
    workload::end(scene, name)?;
    ground::await_nothing_left(scene, foreign)
}

fn died_in_prepare(scene: &Scene<'_>) -> Result<()> {
    aftermath::clean(scene, || {
        let foreign = neighbour(scene)?;
        for (call, when) in
            [(CREATE, "before"), (CREATE, "after"), (CREATE_COMPUTE, "before"), (CREATE_COMPUTE, "after")]
        {
            eprintln!("  dying {when} {call}");
            let restarts = ground::driver_restarts(scene)?;
            fault(scene, call, when, "die")?;
            Workload::new("victim", CLASS).apply(scene)?;
            await_restart(scene, restarts)?;
            runs_and_ends(scene, "victim", &foreign).with_context(|| format!("dying {when} {call}"))?;
            ground::all_faults_met(scene)?;
        }
        Ok(())
    })
}

fn died_in_unprepare(scene: &Scene<'_>) -> Result<()> {
    aftermath::clean(scene, || {
        let foreign = neighbour(scene)?;
        for (call, when) in
            [(DESTROY_COMPUTE, "before"), (DESTROY_COMPUTE, "after"), (DESTROY, "before"), (DESTROY, "after")]
        {
            eprintln!("  dying {when} {call}");
            let restarts = ground::driver_restarts(scene)?;
            Workload::new("victim", CLASS).run(scene)?;
            fault(scene, call, when, "die")?;
            scene.delete("pod/victim")?;
            await_restart(scene, restarts)?;
            workload::end(scene, "victim")?;
            ground::await_nothing_left(scene, &foreign).with_context(|| format!("dying {when} {call}"))?;
            ground::all_faults_met(scene)?;
            Workload::new("next", CLASS).apply(scene)?;
            runs_and_ends(scene, "next", &foreign)?;
        }
        Ok(())
    })
}

/// Where kerf is stopped by a call that hangs, and how the journal then is.
struct Stop {
    call: &'static str,
    when: &'static str,
    phase: &'static str,
    /// The partition's progress.
    state: &'static str,
}

const IN_PREPARE: [Stop; 4] = [
    Stop { call: CREATE, when: "before", phase: "started", state: "intent" },
    Stop { call: CREATE, when: "after", phase: "started", state: "intent" },
    Stop { call: CREATE_COMPUTE, when: "before", phase: "started", state: "intent" },
    Stop { call: CREATE_COMPUTE, when: "after", phase: "started", state: "intent" },
];

const IN_UNPREPARE: [Stop; 3] = [
    Stop { call: DESTROY_COMPUTE, when: "before", phase: "undoing", state: "ready" },
    Stop { call: DESTROY, when: "before", phase: "undoing", state: "ready" },
    Stop { call: DESTROY, when: "after", phase: "undoing", state: "ready" },
];

/// Waits until kerf hangs where it was told to, the journal being as said.
fn await_stop(scene: &Scene<'_>, stop: &Stop) -> Result<()> {
    let Stop { call, when, phase, state } = stop;
    wait_until(&format!("the journal says {phase}, {state} ({when} {call})"), LIMIT, || {
        ground::all_faults_met(scene)?;
        let entries = ground::journal(scene)?;
        let entry = entries.values().next().context("the journal has no entry")?;
        let progress = entry.pointer("/steps/0/progress/state").and_then(Value::as_str);
        let now = (entry.get("phase").and_then(Value::as_str), progress);
        ensure!(now == (Some(*phase), Some(*state)), "it is {now:?}");
        Ok(Some(()))
    })
}

fn killed_in_prepare(scene: &Scene<'_>) -> Result<()> {
    aftermath::clean(scene, || {
        let foreign = neighbour(scene)?;
        for stop in &IN_PREPARE {
            for deleted in [false, true] {
                fault(scene, stop.call, stop.when, HANG)?;
                Workload::new("victim", CLASS).apply(scene)?;
                await_stop(scene, stop)?;
                if deleted {
                    scene.delete("pod/victim")?;
                }
                let restarts = ground::driver_restarts(scene)?;
                ground::kill_driver(scene)?;
                await_restart(scene, restarts)?;
                let done = if deleted {
                    workload::end(scene, "victim").and_then(|()| ground::await_nothing_left(scene, &foreign))
                } else {
                    runs_and_ends(scene, "victim", &foreign)
                };
                done.with_context(|| format!("killed {} {}, deleted: {deleted}", stop.when, stop.call))?;
            }
        }
        Ok(())
    })
}

fn killed_in_unprepare(scene: &Scene<'_>) -> Result<()> {
    aftermath::clean(scene, || {
        let foreign = neighbour(scene)?;
        for stop in &IN_UNPREPARE {
            Workload::new("victim", CLASS).run(scene)?;
            fault(scene, stop.call, stop.when, HANG)?;
            scene.delete("pod/victim")?;
            await_stop(scene, stop)?;
            let restarts = ground::driver_restarts(scene)?;
            ground::kill_driver(scene)?;
            await_restart(scene, restarts)?;
            workload::end(scene, "victim")?;
            ground::await_nothing_left(scene, &foreign)
                .with_context(|| format!("killed {} {}", stop.when, stop.call))?;
        }
        Ok(())
    })
}

fn died_changing_mode(scene: &Scene<'_>) -> Result<()> {
    aftermath::clean(scene, || {
        for when in ["before", "after"] {
            eprintln!("  dying {when} the mode changes");
            // The first GPU is brought out of MIG mode by a claim of all of it.
            let pci = ground::Machine::of(scene)?.gpu(0)?.pci.clone();
            let here = workload::on_gpu(&pci);
            Workload::new("whole", "gpu.nvidia.com").choosing(&here).run(scene)?;
            workload::end(scene, "whole")?;
            let restarts = ground::driver_restarts(scene)?;
            fault(scene, "nvmlDeviceSetMigMode", when, "die")?;
            Workload::new("victim", "mig-1g.10gb.nvidia.com").choosing(&here).apply(scene)?;
            await_restart(scene, restarts)?;
            runs_and_ends(scene, "victim", &[]).with_context(|| format!("dying {when} the mode changes"))?;
            ground::all_faults_met(scene)?;
        }
        Ok(())
    })
}

fn withdrawn_pods(scene: &Scene<'_>) -> Result<()> {
    aftermath::clean(scene, || {
        let foreign = neighbour(scene)?;
        for (call, when) in [(CREATE, "before"), (CREATE, "after"), (CREATE_COMPUTE, "after")] {
            eprintln!("  deleted by force {when} {call}");
            fault(scene, call, when, "hang=4000")?;
            Workload::new("forced", CLASS).apply(scene)?;
            watch_until("the call hangs", LIMIT, || ground::all_faults_met(scene).map(Some))?;
            scene.kubectl(&["delete", "pod", "forced", "--force", "--grace-period=0", "--wait=false"])?;
            workload::end(scene, "forced")?;
            ground::await_nothing_left(scene, &foreign)?;
        }

        eprintln!("  the claim is deleted while its pod runs");
        let before = Workload::new("unclaimed", CLASS).run(scene)?;
        let claim = workload::claim_of(scene, "unclaimed")?;
        scene.delete(&format!("resourceclaim/{claim}"))?;
        let marked = scene.kubectl(&[
            "get",
            "resourceclaim",
            &claim,
            "--output=jsonpath={.metadata.deletionTimestamp}",
        ])?;
        ensure!(!marked.is_empty(), "the claim is not being deleted");
        ensure!(workload::seen(scene, "unclaimed")? == before, "the pod sees another device");
        ground::agree(scene, &foreign)?;
        workload::end(scene, "unclaimed")?;
        ground::await_nothing_left(scene, &foreign)?;
        wait_until("the claim is gone", LIMIT, || {
            let left = scene.kubectl(&["get", "resourceclaim", &claim, "--ignore-not-found"])?;
            Ok(left.is_empty().then_some(()))
        })
    })
}

fn namespace_deleted(scene: &Scene<'_>) -> Result<()> {
    ground::clean(scene, || {
        let names = ["a", "b", "c"];
        for name in names {
            Workload::new(name, CLASS).apply(scene)?;
        }
        for name in names {
            scene.await_running(name)?;
        }
        ground::agree(scene, &[])?;
        // One is still being prepared when the namespace goes.
        fault(scene, CREATE, "after", "hang=3000")?;
        Workload::new("d", CLASS).apply(scene)?;
        watch_until("the call hangs", LIMIT, || ground::all_faults_met(scene).map(Some))?;
        scene.kubectl(&["delete", "namespace", scene.namespace(), "--wait=false"])?;
        ground::await_nothing_left(scene, &[])?;
        wait_until("the namespace is gone", LIMIT, || {
            let left = scene.kubectl(&["get", "namespace", scene.namespace(), "--ignore-not-found"])?;
            Ok(left.is_empty().then_some(()))
        })?;
        // Whoever closes the scene finds a namespace.
        scene.kubectl(&["create", "namespace", scene.namespace()]).map(drop)
    })
}
