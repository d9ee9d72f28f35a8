//! Scripted faults and latency.

use std::time::{Duration, Instant};

use crate::support::{Lab, nvml, text};

#[test]
fn a_fault_after_a_create_answers_an_error_for_an_instance_that_exists() {
    let lab = Lab::new(&["h100-80:mig=on"]);
    lab.control(&[
        "fault",
        "add",
        "nvmlDeviceCreateGpuInstanceWithPlacement",
        "--when",
        "after",
        "--do",
        "return=GPU_IS_LOST",
    ]);
    let raw = lab.raw();
    assert_eq!(raw.create(raw.gpu(0), 19, 3, 1), Err(15));
    assert_eq!(lab.machine().state().unwrap().gpus[0].instances[0].start, 3);
    raw.create(raw.gpu(0), 19, 4, 1).unwrap();
}

#[test]
fn a_fault_before_a_create_leaves_nothing_and_its_version_does_not_matter() {
    let lab = Lab::new(&["h100-80:mig=on"]);
    let raw = lab.raw();
    lab.control(&["fault", "add", "nvmlDeviceGetCount_v2", "--do", "return=999", "--times", "2"]);
    let count = || {
        let mut count = 0;
        nvml!(raw, nvmlDeviceGetCount_v2(&raw mut count))
    };
    assert_eq!([count(), count(), count()], [Err(999), Err(999), Ok(())]);
    assert!(lab.refused(&["fault", "add", "nvmlNoSuchCall", "--do", "die"]).contains("no function"));
}

#[test]
fn processes_share_the_times_of_a_fault() {
    let lab = Lab::new(&["l4"]);
    lab.control(&["fault", "add", "nvmlInit", "--do", "return=9", "--times", "3", "--process", "nvidia-smi"]);
    let smi = lab.path("driver/usr/bin/nvidia-smi");
    let racers: Vec<_> =
        (0..6).map(|_| std::process::Command::new(&smi).arg("-L").spawn().unwrap()).collect();
    let failed = racers
        .into_iter()
        .filter_map(|mut racer| racer.wait().ok())
        .filter(|status| status.code() == Some(9));
    assert_eq!(failed.count(), 3);
    assert_eq!(lab.control(&["fault", "list"]), "[]");
}

#[test]
fn a_process_dies_at_a_call_and_only_the_named_one() {
    use std::os::unix::process::ExitStatusExt;
    let lab = Lab::new(&["l4"]);
    lab.control(&["fault", "add", "nvmlDeviceGetName", "--do", "die", "--process", "nvidia-smi"]);
    lab.nvml().device_by_index(0).unwrap().name().unwrap();
    let smi =
        || std::process::Command::new(lab.path("driver/usr/bin/nvidia-smi")).arg("-L").output().unwrap();
    assert_eq!(smi().status.signal(), Some(9));
    assert!(text(&smi()).starts_with("GPU 0: NVIDIA L4"));
}

#[test]
fn a_latency_and_a_hang_take_at_least_their_time() {
    let lab = Lab::new(&["l4"]);
    let nvml = lab.nvml();
    let took = |work: &dyn Fn()| {
        let start = Instant::now();
        work();
        start.elapsed()
    };
    lab.control(&["latency", "set", "nvmlDeviceGetCount_v2", "40"]);
    assert!(took(&|| drop(nvml.device_count())) >= Duration::from_millis(40));
    lab.control(&["latency", "set", "nvmlDeviceGetCount", "0"]);
    lab.control(&["fault", "add", "nvmlDeviceGetCount", "--do", "hang=60"]);
    assert!(took(&|| drop(nvml.device_count())) >= Duration::from_millis(60));
    println!("a call without either: {:?}", took(&|| drop(nvml.device_count())));
}
