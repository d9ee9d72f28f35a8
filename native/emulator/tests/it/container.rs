//! What a container sees: what its device nodes show.

use std::fs;
use std::process::Command;

use crate::support::{Lab, text};

/// Runs `nvidia-smi` as a container with these device nodes would.
fn smi_with(lab: &Lab, nodes: &[String]) -> String {
    let container = tempfile::tempdir().unwrap();
    let dev = container.path().join("dev");
    fs::create_dir_all(dev.join("nvidia-caps")).unwrap();
    for node in nodes {
        fs::write(dev.join(node), "").unwrap();
    }
    fs::write(dev.join("nvidiactl"), "").unwrap();
    fs::copy(lab.library(), container.path().join("libnvidia-ml.so.1")).unwrap();
    let output = Command::new(lab.path("driver/usr/bin/nvidia-smi"))
        .arg("-L")
        .env("LD_LIBRARY_PATH", container.path())
        .env("NVIDIA_EMULATOR_STATE", lab.path("state"))
        .env("NVIDIA_EMULATOR_DEV", &dev)
        .output()
        .unwrap();
    text(&output)
}

fn cap(lab: &Lab, path: &str) -> String {
    let access =
        fs::read_to_string(lab.path(&format!("proc/driver/nvidia/capabilities/{path}/access"))).unwrap();
    format!("nvidia-caps/nvidia-cap{}", access.lines().next().unwrap().rsplit(' ').next().unwrap())
}

#[test]
fn a_container_with_one_slice_sees_its_parent_with_exactly_that_slice() {
    let lab = Lab::new(&["l4", "h100-80:mig=on"]);
    lab.control(&["mig", "create", "--gpu", "1", "--profile", "1g.10gb"]);
    let second = lab.control(&["mig", "create", "--gpu", "1", "--profile", "3g.40gb", "--start", "4"]);
    let second = second.split_once(' ').unwrap().1;
    let parent = lab.machine().state().unwrap().gpus[1].uuid.clone();
    let nodes = ["nvidia1".to_owned(), cap(&lab, "gpu1/mig/gi1"), cap(&lab, "gpu1/mig/gi1/ci0")];
    assert_eq!(
        smi_with(&lab, &nodes),
        format!(
            "GPU 0: NVIDIA H100 80GB HBM3 (UUID: {parent})\n  MIG 3g.40gb     Device  0: (UUID: {second})\n"
        )
    );
    let without_caps = format!("GPU 0: NVIDIA H100 80GB HBM3 (UUID: {parent})\n");
    assert_eq!(smi_with(&lab, &nodes[..1]), without_caps);
    assert_eq!(smi_with(&lab, &nodes[..2]), without_caps, "one of two capabilities is none");
    assert!(smi_with(&lab, &nodes[1..]).contains("No devices"), "capabilities without the GPU show nothing");
}

#[test]
fn a_container_with_a_whole_gpu_sees_only_that_one_as_its_first() {
    let lab = Lab::new(&["l4", "l4", "l4"]);
    let uuid = lab.machine().state().unwrap().gpus[2].uuid.clone();
    assert_eq!(smi_with(&lab, &["nvidia2".to_owned()]), format!("GPU 0: NVIDIA L4 (UUID: {uuid})\n"));
}

#[test]
fn a_container_cannot_change_the_machine_but_can_hold_its_device() {
    use kerf_emulator::clients::Use;
    use kerf_emulator::code::Code;
    use kerf_emulator::machine::Machine;
    let lab = Lab::new(&["h100-80:mig=on"]);
    let uuid = lab
        .control(&["mig", "create", "--gpu", "0", "--profile", "1g.10gb"])
        .split_once(' ')
        .unwrap()
        .1
        .to_owned();
    let inside = Machine::container(&lab.path("state"), &lab.path("dev")).unwrap();
    assert_eq!(inside.create_gpu_instance(0, 19, None), Err(Code::NO_PERMISSION));
    let holding = inside.clients().hold(&uuid, Use::Compute).unwrap();
    assert!(lab.refused(&["mig", "destroy", "--gpu", "0", "--instance", "7"]).contains("IN_USE"));
    drop(holding);
    lab.control(&["mig", "destroy", "--gpu", "0", "--instance", "7"]);
    assert_eq!(inside.clients().hold(&uuid, Use::Compute).map(|_| ()), Err(Code::NOT_FOUND));
}
