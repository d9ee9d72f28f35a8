//! Everything around running pods is restarted; they notice nothing.

use std::fs;

use anyhow::{Result, ensure};
use kerf_e2e::{Case, LIMIT, Needs, Scene, wait_until};
use xtask::cluster::Component;
use xtask::exec;

use crate::ground;
use crate::workload::{self, Workload};

/// The cases of this file.
pub(crate) const CASES: &[Case] = &[
    Case {
        name: "running pods notice nothing of a restart of the kubelet",
        needs: Needs::Driver,
        run: kubelet,
    },
    Case {
        name: "running pods notice nothing of a crash of the kubelet",
        needs: Needs::Driver,
        run: killed_kubelet,
    },
    Case {
        name: "running pods notice nothing of a restart of containerd",
        needs: Needs::Driver,
        run: containerd,
    },
    Case { name: "running pods notice nothing of another pod of kerf", needs: Needs::Driver, run: driver },
    Case { name: "pods have their devices again after a reboot", needs: Needs::Driver, run: machine },
];

const PODS: [Workload<'_>; 3] = [
    Workload::new("whole", "gpu.nvidia.com"),
    Workload::new("made", "mig-1g.10gb.nvidia.com"),
    Workload::new("other", "mig-1g.6gb.nvidia.com"),
];

/// Starts pods, restarts something, and compares.
fn survives(scene: &Scene<'_>, restart: impl FnOnce() -> Result<()>) -> Result<()> {
    ground::clean(scene, || {
        let mut before = Vec::new();
        for pod in PODS {
            pod.run(scene)?;
        }
        for pod in PODS {
            before.push(workload::identity(scene, pod.name)?);
        }
        let devices: Vec<String> = ground::devices(scene)?.into_keys().collect();
        restart()?;
        wait_until("every device is published", LIMIT, || {
            Ok((ground::devices(scene)?.into_keys().collect::<Vec<_>>() == devices).then_some(()))
        })?;
        ground::driver_pod(scene)?;
        ground::agree(scene, &[])?;
        let same = |when: &str| -> Result<()> {
            for (pod, before) in PODS.iter().zip(&before) {
                let now = workload::identity(scene, pod.name)?;
                ensure!(now == *before, "{} was {before:?} and is {now:?} {when}", pod.name);
            }
            Ok(())
        };
        same("after the restart")?;
        Workload::new("new", "mig-1g.10gb.nvidia.com").run(scene)?;
        workload::end(scene, "new")?;
        same("after a new pod")?;
        for pod in PODS {
            workload::end(scene, pod.name)?;
        }
        ground::await_nothing_left(scene, &[])
    })
}

fn kubelet(scene: &Scene<'_>) -> Result<()> {
    survives(scene, || scene.cluster.restart_kubelet())
}

fn killed_kubelet(scene: &Scene<'_>) -> Result<()> {
    survives(scene, || {
        scene.cluster.kill(Component::Kubelet)?;
        scene.cluster.restart_kubelet()
    })
}

fn containerd(scene: &Scene<'_>) -> Result<()> {
    survives(scene, || {
        scene.cluster.stop(Component::Containerd)?;
        scene.cluster.start(Component::Containerd)
    })
}

fn driver(scene: &Scene<'_>) -> Result<()> {
    survives(scene, || ground::renew_driver(scene))
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
    ground::clean(scene, || {
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
        for pod in PODS {
            workload::end(scene, pod.name)?;
        }
        ground::await_nothing_left(scene, &[])
    })
}
