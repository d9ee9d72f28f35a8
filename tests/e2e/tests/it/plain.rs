//! The stock cluster itself, without kerf: what every other case relies on.

use anyhow::{Result, ensure};
use kerf_e2e::{LIMIT, Scene, wait_until};

const POD: &str = "
apiVersion: v1
kind: Pod
metadata: { name: plain }
spec:
  terminationGracePeriodSeconds: 0
  containers:
  - name: main
    image: localhost/cuda-stub:dev
    command: [sh, -c, 'echo started; exec sleep infinity']
";

pub(crate) fn a_pod_runs(scene: &Scene<'_>) -> Result<()> {
    scene.apply(POD)?;
    scene.await_running("plain")?;
    wait_until("its log is there", LIMIT, || Ok((scene.logs("plain", None)? == "started\n").then_some(())))?;
    let entered = scene.exec("plain", Some("main"), &["cat", "/proc/1/cmdline"])?;
    ensure!(entered.starts_with("sleep\0"), "process 1 is {entered:?}");
    let events = scene.events("plain")?;
    ensure!(events.contains("Started"), "its events are {events:?}");
    scene.delete("pod/plain")?;
    scene.await_gone("plain")
}
