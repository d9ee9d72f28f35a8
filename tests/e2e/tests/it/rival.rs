//! Somebody else on the node hands out the same GPUs.

use std::fs;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;

use anyhow::{Result, ensure};
use kerf_e2e::{Case, LIMIT, Needs, Scene, wait_until};

use crate::ground;
use crate::workload::{self, Workload};

/// The cases of this file.
pub(crate) const CASES: &[Case] = &[Case {
    name: "while a device plugin for the same GPUs answers no pod gets one, and everybody is told",
    needs: Needs::Driver,
    seconds: 20,
    run: a_device_plugin,
}];

/// A socket on which somebody listens, removed with this value.
struct Rival(PathBuf, Option<UnixListener>);

impl Drop for Rival {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

fn a_device_plugin(scene: &Scene<'_>) -> Result<()> {
    ground::clean(scene, || {
        Workload::new("before", "mig-1g.10gb.nvidia.com").run(scene)?;
        let before = workload::identity(scene, "before")?;
        let path = scene.cluster.kubelet_root().join("device-plugins/nvidia-gpu.sock");
        let mut rival = Rival(path.clone(), Some(UnixListener::bind(&path)?));
        wait_until("every device is tainted", LIMIT, || {
            let devices = ground::devices(scene)?;
            ensure!(!devices.is_empty(), "nothing is published");
            Ok(devices.values().all(|device| ground::taints(device) == ["rival"]).then_some(()))
        })?;
        Workload::new("waiting", "mig-1g.10gb.nvidia.com").apply(scene)?;
        workload::await_refused(scene, "waiting")?;
        wait_until("readiness and an event on the Node tell why", LIMIT, || {
            let ready = ground::metric(scene, "kerf_ready")? > 0.5;
            let events = scene.kubectl(&[
                "get",
                "events",
                "--namespace=default",
                "--output=jsonpath={.items[*].message}",
            ])?;
            let told = events.contains("NVIDIA's device plugin hands out this node's GPUs too");
            Ok((told && !ready).then_some(()))
        })?;
        ensure!(workload::identity(scene, "before")? == before, "the pod that ran before noticed");
        workload::end(scene, "before")?;
        // As when it is killed: its file stays, and nobody answers.
        rival.1 = None;
        scene.await_running("waiting")?;
        ground::driver_serves(scene)?;
        workload::end(scene, "waiting")?;
        ground::await_nothing_left(scene, &[])
    })
}
