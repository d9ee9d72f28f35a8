//! Feature gates that are off in one component: what cannot be kept apart
//! there is given out to nobody.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::resource::v1::Device;
use kerf_e2e::{Case, LIMIT, Needs, Scene, wait_until};

use crate::ground::{self, Machine};
use crate::publishing;
use crate::watch::{Stored, Watch};
use crate::workload::{self, Workload, on_gpu};

/// The cases of this file.
pub(crate) const CASES: &[Case] = &[
    Case {
        name: "where the API server keeps no counters, nothing held is free for an instant, before and after",
        needs: Needs::Driver,
        seconds: 90,
        run: dropped_by_the_api_server,
    },
    Case {
        name: "a scheduler that knows no counters gives nothing out that needs them",
        needs: Needs::Driver,
        seconds: 30,
        run: unknown_to_the_scheduler,
    },
];

/// Counters are this gate's.
const COUNTERS: &str = "DRAPartitionableDevices=false";

/// Runs a case that sets gates and puts them back. Where it does not come to
/// that they are put back before kerf is started anew: what it once found
/// missing it does not hope for.
fn with_gates(scene: &Scene<'_>, case: impl FnOnce() -> Result<()>) -> Result<()> {
    ground::clean(scene, || {
        let outcome = case();
        if outcome.is_err()
            && let Err(error) = scene.set_feature_gates("")
        {
            eprintln!("cannot put the gates back: {error:#}");
        }
        outcome
    })
}

/// A GPU of which a partition is held and one that is held whole, and for each
/// a pod that must wait as long as it is.
struct Held {
    /// The devices of the two claims.
    devices: BTreeSet<String>,
    /// How the names of all devices of the two GPUs begin.
    gpus: [String; 2],
    seen: Vec<Vec<String>>,
}

const HOLDERS: [&str; 2] = ["partition", "whole"];
const WAITERS: [&str; 2] = ["wants-whole", "wants-partition"];

impl Held {
    fn new(scene: &Scene<'_>) -> Result<Self> {
        let machine = Machine::of(scene)?;
        let (small, whole) = ("mig-1g.10gb.nvidia.com", "gpu.nvidia.com");
        for (gpu, [held, wanted]) in [(0, [small, whole]), (1, [whole, small])] {
            let here = on_gpu(&machine.gpu(gpu)?.pci);
            Workload::new(HOLDERS[gpu], held).choosing(&here).run(scene)?;
            Workload::new(WAITERS[gpu], wanted).choosing(&here).apply(scene)?;
        }
        for waiter in WAITERS {
            workload::await_refused(scene, waiter)?;
        }
        let device = |pod: &&str| workload::device_of(scene, pod);
        Ok(Self {
            devices: HOLDERS.iter().map(device).collect::<Result<_>>()?,
            gpus: [machine.gpu(0)?.device(), machine.gpu(1)?.device()],
            seen: HOLDERS.iter().map(|pod| workload::seen(scene, pod)).collect::<Result<_>>()?,
        })
    }

    /// Whether a device could be given out though its GPU is held: nothing
    /// says so, neither a taint nor a counter.
    fn is_free(&self, device: &Device) -> bool {
        self.gpus.iter().any(|gpu| device.name.starts_with(gpu))
            && !self.devices.contains(&device.name)
            && ground::taints(device).is_empty()
            && device.consumes_counters.as_ref().is_none_or(Vec::is_empty)
    }

    /// Fails if a device of a held GPU was free in any version of a slice, or a
    /// held one without a reason for nobody else to get it.
    fn was_never_free(&self, stored: &[Stored]) -> Result<()> {
        ensure!(!stored.is_empty(), "no version of a slice was seen");
        let devices = stored.iter().flat_map(|stored| stored.slice.spec.devices.iter().flatten());
        let free: BTreeSet<&str> =
            devices.filter(|device| self.is_free(device)).map(|device| device.name.as_str()).collect();
        ensure!(free.is_empty(), "these could be given out: {free:?}");
        Ok(())
    }

    fn is_still_held(&self, scene: &Scene<'_>) -> Result<()> {
        for (pod, seen) in HOLDERS.iter().zip(&self.seen) {
            ensure!(workload::seen(scene, pod)? == *seen, "{pod} sees other devices than before");
        }
        for waiter in WAITERS {
            ensure!(workload::is_refused(scene, waiter)?, "{waiter} got a device of a GPU that is held");
        }
        ground::agree(scene, &[])
    }

    /// The holders end, and who waited gets what was theirs.
    fn release(self, scene: &Scene<'_>) -> Result<()> {
        for holder in HOLDERS {
            workload::end(scene, holder)?;
        }
        for (waiter, gpu) in WAITERS.iter().zip(&self.gpus) {
            scene.await_running(waiter)?;
            let device = workload::device_of(scene, waiter)?;
            ensure!(device.starts_with(gpu), "{waiter} has {device}");
            workload::end(scene, waiter)?;
        }
        ground::await_nothing_left(scene, &[])
    }
}

fn dropped_by_the_api_server(scene: &Scene<'_>) -> Result<()> {
    with_gates(scene, || {
        let held = Held::new(scene)?;
        scene.set_feature_gates(&format!("kube-apiserver:{COUNTERS}"))?;
        let watch = Watch::begin(scene)?;
        // As a kubelet does that starts. What is stored already keeps its
        // counters: only what is made anew is made without.
        scene.kubectl(&["delete", "resourceslices", "--all"])?;
        wait_until("what needs no counters is published, and what is held", LIMIT, || {
            let devices = ground::devices(scene)?;
            let names: BTreeSet<String> = devices.keys().cloned().collect();
            ensure!(names == held.devices, "published are {names:?}");
            Ok((ground::metric(scene, "kerf_ready")? > 0.5).then_some(()))
        })?;
        let partition = workload::device_of(scene, HOLDERS[0])?;
        ground::await_taints(scene, &partition, &["withheld"])?;
        // The scheduler is asked once more.
        Workload::new("late", "gpu.nvidia.com").apply(scene)?;
        workload::await_refused(scene, "late")?;
        workload::end(scene, "late")?;
        held.is_still_held(scene)?;
        ensure!(ground::metric(scene, "kerf_dropped_features")? > 0.5, "no metric tells of it");
        held.was_never_free(&watch.end()?)?;

        scene.set_feature_gates("")?;
        let watch = Watch::begin(scene)?;
        ground::renew_driver(scene)?;
        wait_until("the held partition has its counters again, and no taint", LIMIT, || {
            let device = ground::devices(scene)?.remove(&partition).context("it is not published")?;
            Ok((ground::taints(&device).is_empty() && device.consumes_counters.is_some()).then_some(()))
        })?;
        held.is_still_held(scene)?;
        held.was_never_free(&watch.end()?)?;
        held.release(scene)
    })
}

fn unknown_to_the_scheduler(scene: &Scene<'_>) -> Result<()> {
    with_gates(scene, || {
        let held = Held::new(scene)?;
        scene.set_feature_gates(&format!("kube-scheduler:{COUNTERS}"))?;
        // There is room for it on every other GPU.
        Workload::new("late", "mig.nvidia.com").apply(scene)?;
        workload::await_refused(scene, "late")?;
        held.is_still_held(scene)?;
        wait_until("kerf doctor tells that something is wrong", LIMIT, || {
            let report = publishing::ask(scene, &["doctor", "--json"])?;
            Ok(report.contains("claims-wait-beside-free-devices").then_some(()))
        })?;
        scene.set_feature_gates("")?;
        scene.await_running("late")?;
        workload::end(scene, "late")?;
        held.is_still_held(scene)?;
        held.release(scene)
    })
}
