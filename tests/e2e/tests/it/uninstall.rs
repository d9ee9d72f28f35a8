//! What a user sees who removes kerf, in the order that is told and in the
//! wrong one.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};
use k8s_openapi::api::core::v1::Pod as PodObject;
use kerf_e2e::{Case, LIMIT, Needs, Scene, Values, wait_until};
use xtask::{driver, exec};

use crate::aftermath;
use crate::ground::{self, DRIVER};
use crate::machine;
use crate::manifest::SMALL;
use crate::workload::{self, Workload};

/// The cases of this file.
pub(crate) const CASES: &[Case] = &[Case {
    name: "of a removed kerf only its state stays; a pod runs on without it, and ends when it is there again",
    needs: Needs::Driver,
    seconds: 65,
    run: removed,
}];

fn removed(scene: &Scene<'_>) -> Result<()> {
    ground::clean_values(scene, || {
        Workload::new("lasting", SMALL).run(scene)?;
        let lasting = workload::identity(scene, "lasting")?;
        remove(scene)?;
        ensure!(workload::identity(scene, "lasting")? == lasting, "the running pod noticed");
        // The runtime still finds the CDI spec and the hook's program.
        let process = machine::process_of(scene, "lasting", "main")?;
        exec::output(Command::new("kill").args(["-KILL", &process.to_string()]))?;
        wait_until("its container runs again with the same device", LIMIT, || {
            let (containers, seen) = workload::identity(scene, "lasting")?;
            Ok((containers != lasting.0 && seen == lasting.1).then_some(()))
        })?;
        scene.delete("pod/lasting")?;
        wait_until("the kubelet has removed the slices", LIMIT, || {
            Ok(ground::slices(scene)?.is_empty().then_some(()))
        })?;
        ensure!(scene.get::<PodObject>("lasting")?.is_some(), "the pod ended without kerf");
        ensure!(ground::journal(scene)?.len() == 1, "the pod's claim was forgotten");
        scene.configure_driver(Values::new())?;
        workload::end(scene, "lasting")?;
        ground::await_nothing_left(scene, &[])?;

        remove(scene)?;
        ground::nothing_left(scene, &[])?;
        let plugin = names(&scene.cluster.kubelet_root().join("plugins").join(DRIVER))?;
        let hooks = names(scene.cluster.hook_root())?;
        ensure!(plugin == ["state"] && hooks == [DRIVER], "there are {plugin:?} and {hooks:?}");
        let classes = scene.kubectl(&["get", "deviceclasses", "--output=name"])?;
        ensure!(!classes.contains("nvidia.com"), "there are the classes {classes}");
        Ok(())
    })?;
    aftermath::all_is_given_out(scene, &[])
}

fn remove(scene: &Scene<'_>) -> Result<()> {
    driver::uninstall(scene.cluster)?;
    wait_until("kerf's pod and its sockets are gone", LIMIT, || {
        ensure!(scene.list_of_driver::<PodObject>()?.is_empty(), "its pod is there");
        let root = scene.cluster.kubelet_root();
        let mut sockets = names(&root.join("plugins_registry"))?;
        sockets.extend(names(&root.join("plugins").join(DRIVER))?);
        sockets.retain(|name| Path::new(name).extension().is_some_and(|kind| kind == "sock"));
        ensure!(sockets.is_empty(), "there are {sockets:?}");
        Ok(Some(()))
    })
}

fn names(folder: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder)? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    Ok(names)
}
