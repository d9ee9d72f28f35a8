//! A writer killed at any point leaves a machine that can be read and mended.

use std::collections::BTreeSet;
use std::fs;
use std::process::Stdio;
use std::time::Duration;

use crate::support::Lab;

/// The instances that capability files show, and the nodes they name.
fn shown(lab: &Lab) -> (BTreeSet<String>, BTreeSet<String>) {
    let (mut paths, mut nodes) = (BTreeSet::new(), BTreeSet::new());
    let folder = lab.path("proc/driver/nvidia/capabilities/gpu0/mig");
    for instance in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        for folder in [instance.clone()].into_iter().chain(
            fs::read_dir(&instance).unwrap().map(|entry| entry.unwrap().path()).filter(|path| path.is_dir()),
        ) {
            let access = fs::read_to_string(folder.join("access")).unwrap();
            let number = access.lines().next().unwrap().rsplit(' ').next().unwrap().to_owned();
            nodes.insert(format!("nvidia-cap{number}"));
            paths.insert(
                folder
                    .strip_prefix(lab.path("proc/driver/nvidia/capabilities/gpu0/mig"))
                    .unwrap()
                    .to_str()
                    .unwrap()
                    .to_owned(),
            );
        }
    }
    (paths, nodes)
}

#[test]
fn kill_9_at_any_point_leaves_a_state_that_reads_and_files_that_follow_it() {
    let lab = Lab::new(&["h100-80:mig=on"]);
    let mut instance = None;
    for round in 0..60_u64 {
        let id = instance.map(|id: u32| id.to_string()).unwrap_or_default();
        let arguments: Vec<&str> = match instance {
            None => vec!["mig", "create", "--gpu", "0", "--profile", "1g.10gb"],
            Some(_) => vec!["mig", "destroy", "--gpu", "0", "--instance", &id],
        };
        let mut child = lab.command(&arguments).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(Duration::from_micros(500 + round * 150));
        child.kill().unwrap();
        child.wait().unwrap();
        let state = lab.machine().state().unwrap();
        let expected: BTreeSet<String> = state.gpus[0]
            .instances
            .iter()
            .flat_map(|found| {
                let inner =
                    found.compute.iter().map(move |compute| format!("gi{}/ci{}", found.id, compute.id));
                std::iter::once(format!("gi{}", found.id)).chain(inner)
            })
            .collect();
        let (paths, mut nodes) = shown(&lab);
        assert_eq!(paths, expected, "round {round}");
        nodes.extend(["nvidia-cap1".to_owned(), "nvidia-cap2".to_owned()]);
        let present: BTreeSet<String> = fs::read_dir(lab.path("dev/nvidia-caps"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        assert_eq!(present, nodes, "round {round}");
        instance = state.gpus[0].instances.first().map(|found| found.id);
    }
}
