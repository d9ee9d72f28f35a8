//! Everything around running pods is restarted; they notice nothing.

use std::fs;

use anyhow::{Result, ensure};
use kerf_e2e::{Case, LIMIT, Needs, Scene, wait_until};
use xtask::cluster::Component;
use xtask::exec;

use crate::aftermath;
use crate::ground;
use crate::workload::{self, Workload};

/// The cases of this file.
pub(crate) const CASES: &[Case] = &[
    Case {
        name: "running pods notice nothing when the kubelet, containerd or kerf is restarted",
        needs: Needs::Driver,
        seconds: 35,
        run: survive_restarts,
    },
    Case {
        name: "pods have their devices again after a reboot",
        needs: Needs::Driver,
        seconds: 20,
        run: machine,
    },
];

const PODS: [Workload<'_>; 3] = [
    Workload::new("whole", "gpu.nvidia.com"),
    Workload::new("made", "mig-1g.10gb.nvidia.com"),
    Workload::new("other", "mig-1g.6gb.nvidia.com"),
];

fn survive_restarts(scene: &Scene<'_>) -> Result<()> {
    let cluster = scene.cluster;
    let restarts: [(&str, &dyn Fn() -> Result<()>); 4] = [
        ("the kubelet was restarted", &|| cluster.restart_kubelet()),
        ("the kubelet was killed", &|| {
            cluster.kill(Component::Kubelet)?;
            cluster.restart_kubelet()
        }),
        ("containerd was restarted", &|| {
            cluster.stop(Component::Containerd)?;
            cluster.start(Component::Containerd)
        }),
        ("kerf has another pod", &|| ground::renew_driver(scene)),
    ];
    aftermath::watched(scene, || {
        for pod in PODS {
            pod.run(scene)?;
        }
        let identities =
            || PODS.iter().map(|pod| workload::identity(scene, pod.name)).collect::<Result<Vec<_>>>();
        let before = identities()?;
        let devices: Vec<String> = ground::devices(scene)?.into_keys().collect();
        for (what, restart) in restarts {
            restart()?;
            wait_until(&format!("every device is published after {what}"), LIMIT, || {
                Ok((ground::devices(scene)?.into_keys().collect::<Vec<_>>() == devices).then_some(()))
            })?;
            ground::driver_serves(scene)?;
            ground::agree(scene, &[])?;
            Workload::new("new", "mig-1g.10gb.nvidia.com").run(scene)?;
            workload::end(scene, "new")?;
            let now = identities()?;
            ensure!(now == before, "pods were {before:?} and are {now:?} after {what}");
        }
        aftermath::all_is_given_out(scene, &PODS.map(|pod| pod.name))?;
        for pod in PODS {
            workload::end(scene, pod.name)?;
        }
        ground::await_nothing_left(scene, &[])
    })
}

/// What a power cut and the next boot do to a node, as far as one machine can
/// do it to a part of itself: every container of the node is dead, GPU
/// instances are gone, the boot id is new, `/var/run/cdi` is empty. The
/// kubelet's own boot id stays, so it does not take the node for rebooted.
fn reboot(scene: &Scene<'_>) -> Result<()> {
    scene.cluster.kill(Component::Kubelet)?;
    let sandboxes = exec::output(scene.cluster.crictl().args(["pods", "--quiet"]))?;
    let containers = exec::output(scene.cluster.crictl().args(["ps", "--quiet"]))?;
    for container in containers.lines() {
        exec::output(scene.cluster.crictl().args(["stop", "--timeout=0", container]))?;
    }
    for sandbox in sandboxes.lines() {
        exec::output(scene.cluster.crictl().args(["stopp", sandbox]))?;
    }
    scene.emulator(&["reboot"])?;
    for file in ground::cdi_files(scene)? {
        fs::remove_file(file)?;
    }
    scene.cluster.restart_kubelet()
}

fn machine(scene: &Scene<'_>) -> Result<()> {
    aftermath::watched(scene, || {
        let mut before = Vec::new();
        for pod in PODS {
            before.push((pod.run(scene)?, workload::device_of(scene, pod.name)?));
        }
        reboot(scene)?;
        ground::driver_pod(scene)?;
        for (pod, before) in PODS.iter().zip(&before) {
            wait_until(&format!("{} runs again with its device", pod.name), LIMIT, || {
                scene.await_running(pod.name)?;
                let now = (workload::seen(scene, pod.name)?, workload::device_of(scene, pod.name)?);
                ensure!(now == *before, "it had {before:?} and has {now:?}");
                Ok(Some(()))
            })?;
        }
        wait_until("journal and hardware agree", LIMIT, || ground::agree(scene, &[]).map(Some))?;
        aftermath::all_is_given_out(scene, &PODS.map(|pod| pod.name))?;
        for pod in PODS {
            workload::end(scene, pod.name)?;
        }
        ground::await_nothing_left(scene, &[])
    })
}
