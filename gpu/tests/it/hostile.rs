//! Libraries that answer what cannot be: nothing of it may end the process,
//! and nothing of it may be taken for the truth.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use kerf_dra_driver::hardware::{Hardware, HardwareError, HardwareErrorKind, HardwareEventKind};
use kerf_dra_driver::inventory::{
    Architecture, BoardFacts, Bytes, ComputeInstanceId, GpuInstanceId, MigMode, Placement, ProfileId, Told,
};
use kerf_dra_driver::names::PciAddress;
use kerf_gpu::{NvmlHardware, Roots};

const HONEST: u32 = 0;
const ONLY_INIT: u32 = 1;
const ALWAYS_999: u32 = 2;
const MANY_GPUS: u32 = 3;
const ODD_ADDRESS: u32 = 4;
const ODD_MODE: u32 = 5;
const MANY_PLACEMENTS: u32 = 6;
const FAR_PLACEMENT: u32 = 7;
const MANY_INSTANCES: u32 = 8;
const NULL_INSTANCES: u32 = 9;
const ENDLESS_TEXTS: u32 = 10;
const MANY_PROCESSES: u32 = 11;
const ELSEWHERE: u32 = 12;
const LEFTOVER: u32 = 13;
const NO_UUID: u32 = 14;
const OVERFULL_PLACEMENTS: u32 = 15;
const ODD_NUMBERS: u32 = 16;
const ONE_BAD_GPU: u32 = 17;
const DRIVER_GONE: u32 = 18;

const UNKNOWN: HardwareErrorKind = HardwareErrorKind::Other(999);
const WHERE: Placement = Placement { start: 4, size: 1 };

fn gpu() -> PciAddress {
    "0000:65:00.0".parse().expect("an address")
}

/// Runs a test against the library of a mode. Without a C compiler it cannot
/// run, and says so.
fn against(mode: u32, test: impl FnOnce(&NvmlHardware)) {
    let root = tempfile::tempdir().expect("a folder");
    if compile(root.path(), mode) {
        test(&NvmlHardware::new(roots(root.path())));
    }
}

fn roots(root: &Path) -> Roots {
    Roots {
        driver: root.to_owned(),
        host_driver: root.to_owned(),
        dev: root.join("dev"),
        host_dev: root.join("dev"),
        proc: root.join("proc"),
        sys: root.join("sys"),
    }
}

fn compile(root: &Path, mode: u32) -> bool {
    let folder = root.join("usr/lib64");
    std::fs::create_dir_all(&folder).expect("a folder");
    let draft = folder.join("draft");
    let compiled = Command::new("cc")
        .args(["-shared", "-fPIC", "-w", "-x", "c"])
        .arg(format!("-DMODE={mode}"))
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/hostile.c"))
        .arg("-o")
        .arg(&draft)
        .output();
    match compiled {
        Ok(output) => {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            std::fs::rename(draft, folder.join("libnvidia-ml.so.1")).expect("the library in its place");
            true
        }
        Err(error) => {
            eprintln!("skipped: no C compiler `cc` ({error})");
            false
        }
    }
}

fn kind<T: std::fmt::Debug>(answer: Result<T, HardwareError>) -> HardwareErrorKind {
    answer.expect_err("an error").kind
}

/// The one sentence about the one GPU that could not be read.
fn unreadable(hardware: &NvmlHardware) -> String {
    let inventory = hardware.inventory().expect("an inventory");
    assert_eq!(inventory.gpus, [], "{inventory:?}");
    let [unreadable] = inventory.unreadable.as_slice() else { panic!("{inventory:?}") };
    println!("note: {}", unreadable.error);
    unreadable.error.clone()
}

#[test]
fn the_library_of_these_tests_is_otherwise_believed() {
    against(HONEST, |hardware| {
        let inventory = hardware.inventory().expect("an inventory");
        let mig = inventory.gpus[0].mig.as_ref().expect("MIG");
        assert_eq!(mig.profiles[0].name.as_str(), "1g.10gb");
        let board = BoardFacts {
            serial: Told::Known("1322".to_owned()),
            ecc: Told::Known(true),
            nvlinks: Told::Known(4),
            nvlink_clique: Told::Known("ffffffff-ffff-ffff-ffff-ffffffffffff.4294967295".to_owned()),
        };
        assert_eq!(inventory.gpus[0].facts, board);
        assert_eq!(mig.instances[0].compute_instances[0].uuid, "MIG-1");
        assert_eq!(hardware.create_gpu_instance(gpu(), ProfileId(19), WHERE), Ok(GpuInstanceId(7)));
        let event = hardware.wait_for_event(Duration::from_millis(10)).expect("a wait").expect("an event");
        assert_eq!((event.gpu, event.kind), (None, HardwareEventKind::Xid(79)));
    });
}

#[test]
fn no_answer_of_any_call_ends_the_process() {
    for mode in HONEST..=DRIVER_GONE {
        against(mode, |hardware| {
            let (instance, compute) = (GpuInstanceId(7), ComputeInstanceId(0));
            let _ = hardware.inventory();
            let _ = hardware.mig_mode(gpu());
            let _ = hardware.set_mig_mode(gpu(), MigMode::Disabled);
            let _ = hardware.gpu_instances(gpu());
            let _ = hardware.create_gpu_instance(gpu(), ProfileId(19), WHERE);
            let _ = hardware.create_compute_instance(gpu(), instance);
            let _ = hardware.destroy_compute_instance(gpu(), instance, compute);
            let _ = hardware.destroy_gpu_instance(gpu(), instance);
            let _ = hardware.holders(gpu());
            let _ = hardware.device_nodes(gpu(), Some((instance, compute)));
            let _ = hardware.driver_files();
            let _ = hardware.wait_for_event(Duration::from_millis(1));
            let _ = hardware.inventory();
        });
    }
}

#[test]
fn a_library_that_can_only_be_opened_supports_nothing() {
    against(ONLY_INIT, |hardware| {
        assert_eq!(kind(hardware.inventory()), HardwareErrorKind::NotSupported);
        assert_eq!(kind(hardware.mig_mode(gpu())), HardwareErrorKind::NotSupported);
        assert_eq!(kind(hardware.wait_for_event(Duration::from_mins(1))), HardwareErrorKind::NotSupported);
    });
}

#[test]
fn what_is_no_library_is_no_driver() {
    let root = tempfile::tempdir().expect("a folder");
    let hardware = NvmlHardware::new(roots(root.path()));
    assert_eq!(kind(hardware.inventory()), HardwareErrorKind::NoDriver);
    std::fs::create_dir_all(root.path().join("usr/lib64")).expect("a folder");
    std::fs::write(root.path().join("usr/lib64/libnvidia-ml.so.1"), "no library").expect("a file");
    let error = hardware.inventory().expect_err("no library");
    assert_eq!(error.kind, HardwareErrorKind::NoDriver);
    assert!(error.to_string().contains("libnvidia-ml.so.1"), "{error}");
}

#[test]
fn a_library_that_comes_later_is_used_at_the_next_call() {
    let root = tempfile::tempdir().expect("a folder");
    let hardware = NvmlHardware::new(roots(root.path()));
    assert_eq!(kind(hardware.mig_mode(gpu())), HardwareErrorKind::NoDriver);
    if compile(root.path(), HONEST) {
        assert_eq!(hardware.mig_mode(gpu()), Ok((MigMode::Enabled, MigMode::Enabled)));
    }
}

#[test]
fn a_library_put_in_the_place_of_another_is_noticed() {
    let root = tempfile::tempdir().expect("a folder");
    let hardware = NvmlHardware::new(roots(root.path()));
    if compile(root.path(), HONEST) {
        assert_eq!(hardware.inventory().map(|inventory| inventory.gpus.len()), Ok(1));
        compile(root.path(), ONE_BAD_GPU);
        assert_eq!(hardware.inventory().map(|inventory| inventory.gpus.len()), Ok(2));
    }
}

#[test]
fn a_driver_that_is_unloaded_is_no_driver_and_opened_anew() {
    let root = tempfile::tempdir().expect("a folder");
    let hardware = NvmlHardware::new(roots(root.path()));
    if compile(root.path(), DRIVER_GONE) {
        assert_eq!(kind(hardware.mig_mode(gpu())), HardwareErrorKind::NoDriver);
        compile(root.path(), HONEST);
        assert_eq!(hardware.mig_mode(gpu()), Ok((MigMode::Enabled, MigMode::Enabled)));
    }
}

#[test]
fn a_bad_gpu_hides_no_other() {
    against(ONE_BAD_GPU, |hardware| {
        let inventory = hardware.inventory().expect("an inventory");
        let read: Vec<String> = inventory.gpus.iter().map(|gpu| gpu.pci.to_string()).collect();
        assert_eq!(read, ["0000:65:00.0", "0000:67:00.0"]);
        let bad = &inventory.unreadable[0];
        assert_eq!(bad.pci.map(|pci| pci.to_string()).as_deref(), Some("0000:66:00.0"));
        assert_eq!(
            bad.error,
            "the GPU at 0000:66:00.0 could not be read: nvmlDeviceGetMemoryInfo_v2 answered GPU_IS_LOST"
        );
    });
}

#[test]
fn a_failure_of_everything_is_told_with_its_number() {
    against(ALWAYS_999, |hardware| {
        assert_eq!(kind(hardware.inventory()), UNKNOWN);
        assert_eq!(kind(hardware.destroy_gpu_instance(gpu(), GpuInstanceId(1))), UNKNOWN);
        assert_eq!(kind(hardware.wait_for_event(Duration::from_mins(1))), UNKNOWN);
    });
}

#[test]
fn counts_that_no_machine_has_are_not_believed() {
    against(MANY_GPUS, |hardware| {
        let error = hardware.inventory().expect_err("no inventory");
        assert!(error.to_string().contains("4000000000 GPUs"), "{error}");
    });
    against(MANY_PLACEMENTS, |hardware| assert!(unreadable(hardware).contains("4000000000 placements")));
    against(MANY_INSTANCES, |hardware| assert!(unreadable(hardware).contains("4000000000 instances")));
    against(OVERFULL_PLACEMENTS, |hardware| {
        assert!(unreadable(hardware).contains("90 placements in room for 1"));
    });
    against(MANY_PROCESSES, |hardware| assert_eq!(kind(hardware.holders(gpu())), UNKNOWN));
}

#[test]
fn values_that_no_gpu_has_are_not_believed() {
    against(ODD_ADDRESS, |hardware| assert!(unreadable(hardware).contains("the address `7777")));
    against(ODD_MODE, |hardware| {
        assert!(unreadable(hardware).contains("the mode 77"));
        assert_eq!(kind(hardware.mig_mode(gpu())), UNKNOWN);
    });
    against(FAR_PLACEMENT, |hardware| assert!(unreadable(hardware).contains("9 slices at 4294967294")));
    against(NULL_INSTANCES, |hardware| {
        assert!(unreadable(hardware).contains("a null handle"));
        assert_eq!(kind(hardware.create_gpu_instance(gpu(), ProfileId(19), WHERE)), UNKNOWN);
        assert_eq!(kind(hardware.destroy_gpu_instance(gpu(), GpuInstanceId(7))), UNKNOWN);
    });
}

#[test]
fn unknown_numbers_stay_numbers() {
    against(ODD_NUMBERS, |hardware| {
        let inventory = hardware.inventory().expect("an inventory");
        let found = &inventory.gpus[0];
        assert_eq!(found.architecture, Architecture::Newer(4711));
        assert_eq!(found.brand, Told::Known("Unknown".to_owned()));
        assert_eq!(found.memory, Bytes(u64::MAX));
        assert!(!found.vgpu_guest);
        let serial = Told::Known("1322".to_owned());
        let (ecc, nvlinks, nvlink_clique) = (Told::NotNow, Told::NotNow, Told::NotNow);
        assert_eq!(found.facts, BoardFacts { serial, ecc, nvlinks, nvlink_clique });
        let event = hardware.wait_for_event(Duration::from_millis(10)).expect("a wait").expect("an event");
        assert_eq!((event.gpu, event.kind), (None, HardwareEventKind::Xid(u64::MAX)));
    });
}

#[test]
fn texts_without_an_end_are_cut_at_their_buffer() {
    against(ENDLESS_TEXTS, |hardware| {
        let inventory = hardware.inventory().expect("an inventory");
        let found = &inventory.gpus[0];
        assert_eq!(found.product, "x".repeat(96));
        assert_eq!(found.uuid, "x".repeat(96));
        assert_eq!(found.facts.serial, Told::Known("x".repeat(30)));
        let mig = found.mig.as_ref().expect("MIG");
        assert_eq!(mig.profiles[0].name.as_str(), "1g.16gb", "computed: the name given is none");
    });
}

#[test]
fn an_instance_that_is_not_what_was_asked_for_is_destroyed_again() {
    against(ELSEWHERE, |hardware| {
        let error = hardware.create_gpu_instance(gpu(), ProfileId(19), WHERE).expect_err("elsewhere");
        assert_eq!(error.kind, UNKNOWN);
        assert!(error.to_string().contains("profile 19 at 3 instead of 19 at 4"), "{error}");
        // The library counts what was destroyed into the ids.
        assert_eq!(hardware.gpu_instances(gpu()).expect("instances")[0].id, GpuInstanceId(8));
    });
    against(NO_UUID, |hardware| {
        assert_eq!(kind(hardware.create_compute_instance(gpu(), GpuInstanceId(7))), UNKNOWN);
    });
}

#[test]
fn an_instance_that_could_not_be_taken_back_is_told_as_one_that_may_exist() {
    against(LEFTOVER, |hardware| {
        let error = hardware.create_gpu_instance(gpu(), ProfileId(19), WHERE).expect_err("a leftover");
        assert_eq!(error.kind, HardwareErrorKind::Timeout);
        assert!(error.to_string().contains("may still be there"), "{error}");
    });
}

#[test]
fn an_activation_status_without_a_name_is_an_error_with_its_number() {
    against(HONEST, |hardware| {
        assert_eq!(kind(hardware.set_mig_mode(gpu(), MigMode::Disabled)), HardwareErrorKind::Other(4242));
    });
}
