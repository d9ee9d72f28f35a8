//! The stand-in `nvidia-smi`.

use std::process::Command;

use crate::support::{Lab, text};

#[test]
fn the_list_has_the_known_form() {
    let lab = Lab::new(&["h100-80:mig=on", "l4"]);
    let created = lab.control(&["mig", "create", "--gpu", "0", "--profile", "1g.10gb", "--start", "4"]);
    let mig = created.split_once(' ').unwrap().1;
    let uuids: Vec<String> = lab.machine().state().unwrap().gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
    let output = Command::new(lab.path("driver/usr/bin/nvidia-smi")).arg("-L").output().unwrap();
    let expected = format!(
        "GPU 0: NVIDIA H100 80GB HBM3 (UUID: {})\n  MIG 1g.10gb     Device  0: (UUID: {mig})\nGPU 1: NVIDIA L4 (UUID: {})\n",
        uuids[0], uuids[1]
    );
    assert_eq!(text(&output), expected);
    let table = Command::new(lab.path("driver/usr/bin/nvidia-smi")).output().unwrap();
    let widths: std::collections::BTreeSet<usize> =
        text(&table).lines().map(str::len).filter(|width| *width > 0).collect();
    assert_eq!(widths.len(), 1, "every line of the table is as wide as the others:\n{}", text(&table));
}

#[test]
fn without_a_driver_or_a_device_it_ends_as_the_real_one() {
    let lab = Lab::new(&["l4"]);
    let smi = |root: &std::path::Path| {
        let mut command = Command::new(lab.path("driver/usr/bin/nvidia-smi"));
        command.env("NVIDIA_EMULATOR_ROOT", root).output().unwrap()
    };
    assert_eq!(smi(&lab.path("nowhere")).status.code(), Some(9));
    let empty = tempfile::tempdir().unwrap();
    std::fs::write(empty.path().join("nvidiactl"), "").unwrap();
    // Moved out of the machine's tree, the library is a container's.
    let library = empty.path().join("libnvidia-ml.so.1");
    std::fs::copy(lab.library(), &library).unwrap();
    let none = Command::new(lab.path("driver/usr/bin/nvidia-smi"))
        .env("LD_LIBRARY_PATH", empty.path())
        .env("NVIDIA_EMULATOR_STATE", lab.path("state"))
        .env("NVIDIA_EMULATOR_DEV", empty.path())
        .output()
        .unwrap();
    assert_eq!((none.status.code(), text(&none).as_str()), (Some(6), "No devices were found\n"));
}
