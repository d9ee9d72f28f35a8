//! MIG through the C functions.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};

use nvml_wrapper::enum_wrappers::device::Brand;
use nvml_wrapper_sys::bindings::*;

use crate::support::{Lab, nvml};

const NOT_SUPPORTED: u32 = 3;
const NOT_FOUND: u32 = 6;
const INSUFFICIENT_SIZE: u32 = 7;
const RESET_REQUIRED: u32 = 16;
const IN_USE: u32 = 19;
const INSUFFICIENT_RESOURCES: u32 = 23;
const VERSION_MISMATCH: u32 = 25;

#[test]
fn the_safe_wrapper_reads_every_gpu_of_a_machine() {
    let lab = Lab::new(&["h100-80", "a100-40:mig=on", "a30", "l4"]);
    let nvml = lab.nvml();
    assert_eq!(nvml.device_count().unwrap(), 4);
    assert_eq!(nvml.sys_driver_version().unwrap(), "580.95.05");
    let names: Vec<String> =
        (0..4).map(|index| nvml.device_by_index(index).unwrap().name().unwrap()).collect();
    assert_eq!(names, ["NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB", "NVIDIA A30", "NVIDIA L4"]);
    let gpu = nvml.device_by_index(0).unwrap();
    assert_eq!(gpu.brand().unwrap(), Brand::Nvidia);
    assert_eq!(gpu.memory_info().unwrap().total, 81559 << 20);
    let pci = gpu.pci_info().unwrap();
    assert_eq!((pci.bus_id.as_str(), pci.pci_device_id), ("00000000:17:00.0", 0x2330_10de));
    let uuid = gpu.uuid().unwrap();
    assert_eq!(nvml.device_by_uuid(uuid.as_str()).unwrap().index().unwrap(), 0);
    assert_eq!(nvml.device_by_pci_bus_id("0000:1a:00.0").unwrap().index().unwrap(), 1);
    assert_eq!(nvml.device_by_pci_bus_id(pci.bus_id.as_str()).unwrap().index().unwrap(), 0);
    let a100 = nvml.device_by_index(1).unwrap().mig_mode().unwrap();
    assert_eq!((a100.current, a100.pending), (1, 1));
    assert!(nvml.device_by_index(3).unwrap().mig_mode().is_err());
}

#[test]
fn a_partition_is_created_listed_and_destroyed_and_its_files_follow() {
    let lab = Lab::new(&["h100-80:mig=on"]);
    let raw = lab.raw();
    let gpu = raw.gpu(0);
    assert_eq!(raw.mig_uuid(gpu, 0), Err(NOT_FOUND));
    let instance = raw.create(gpu, 9, 4, 4).unwrap();
    assert_eq!(raw.mig_uuid(gpu, 0), Err(NOT_FOUND), "a MIG device needs a compute instance");
    let compute = raw.create_compute(instance, 2).unwrap();
    let uuid = raw.mig_uuid(gpu, 0).unwrap();
    assert!(uuid.starts_with("MIG-"), "{uuid}");
    for access in ["gi1/access", "gi1/ci0/access"] {
        let text =
            fs::read_to_string(lab.path(&format!("proc/driver/nvidia/capabilities/gpu0/mig/{access}")))
                .unwrap();
        let minor: u64 =
            text.lines().next().unwrap().strip_prefix("DeviceFileMinor: ").unwrap().parse().unwrap();
        let node = fs::metadata(lab.path(&format!("dev/nvidia-caps/nvidia-cap{minor}"))).unwrap();
        if node.file_type().is_char_device() {
            assert_eq!(node.rdev(), rustix::fs::makedev(511, u32::try_from(minor).unwrap()));
        } else {
            println!("this user may not make device nodes: {text:?} is an ordinary file");
        }
    }
    assert_eq!(nvml!(raw, nvmlGpuInstanceDestroy(instance)), Err(IN_USE));
    let holder = lab.hold(&uuid);
    assert_eq!(nvml!(raw, nvmlComputeInstanceDestroy(compute)), Err(IN_USE));
    let processes = lab.nvml().device_by_index(0).unwrap().running_compute_processes().unwrap();
    let seen: Vec<_> = processes.iter().map(|one| (one.pid, one.gpu_instance_id)).collect();
    assert_eq!(seen, [(holder.0.id(), Some(1))]);
    drop(holder);
    nvml!(raw, nvmlComputeInstanceDestroy(compute)).unwrap();
    nvml!(raw, nvmlGpuInstanceDestroy(instance)).unwrap();
    assert_eq!(nvml!(raw, nvmlGpuInstanceDestroy(instance)), Err(NOT_FOUND));
    assert!(!lab.path("proc/driver/nvidia/capabilities/gpu0/mig/gi1").exists());
    assert_eq!(fs::read_dir(lab.path("dev/nvidia-caps")).unwrap().count(), 2);
    assert_eq!(fs::read_dir(lab.path("state/clients")).unwrap().count(), 16, "only the GPU's own");
}

#[test]
fn an_occupied_placement_is_refused_and_a_stale_handle_never_hits_its_successor() {
    let lab = Lab::new(&["a100-40:mig=on"]);
    let raw = lab.raw();
    let gpu = raw.gpu(0);
    let first = raw.create(gpu, 19, 0, 1).unwrap();
    assert_eq!(raw.create(gpu, 9, 0, 4), Err(INSUFFICIENT_RESOURCES));
    assert_eq!(raw.create(gpu, 0, 0, 8), Err(INSUFFICIENT_RESOURCES));
    assert_eq!(raw.create(gpu, 19, 7, 1), Err(2), "there is no such placement");
    nvml!(raw, nvmlGpuInstanceDestroy(first)).unwrap();
    let second = raw.create(gpu, 19, 0, 1).unwrap();
    assert_ne!(first, second);
    assert_eq!(nvml!(raw, nvmlGpuInstanceDestroy(first)), Err(NOT_FOUND));
    let mut count = 0;
    let mut list = [std::ptr::null_mut(); 7];
    nvml!(raw, nvmlDeviceGetGpuInstances(gpu, 19, list.as_mut_ptr(), &raw mut count)).unwrap();
    assert_eq!((count, list[0]), (1, second));
    let mut left = 0;
    nvml!(raw, nvmlDeviceGetGpuInstanceRemainingCapacity(gpu, 19, &raw mut left)).unwrap();
    assert_eq!(left, 6);
}

#[test]
fn ampere_waits_for_a_reset_and_hopper_changes_at_once_and_forgets() {
    let lab = Lab::new(&["a100-40", "h100-80"]);
    let raw = lab.raw();
    let mode = |index: u32| {
        let (mut current, mut pending) = (9, 9);
        let gpu = raw.gpu(index);
        nvml!(raw, nvmlDeviceGetMigMode(gpu, &raw mut current, &raw mut pending)).unwrap();
        (current, pending)
    };
    let set = |index: u32, mode: u32| {
        let mut activation = 99;
        let gpu = raw.gpu(index);
        nvml!(raw, nvmlDeviceSetMigMode(gpu, mode, &raw mut activation)).map(|()| activation)
    };
    assert_eq!(raw.create(raw.gpu(1), 19, 0, 1), Err(NOT_SUPPORTED), "the mode is off");
    assert_eq!((set(0, 1), mode(0)), (Ok(RESET_REQUIRED), (0, 1)));
    assert_eq!((set(1, 1), mode(1)), (Ok(0), (1, 1)));
    raw.create(raw.gpu(1), 19, 0, 1).unwrap();
    assert_eq!(set(1, 0), Err(IN_USE), "instances exist");
    let boot = fs::read_to_string(lab.path("proc/sys/kernel/random/boot_id")).unwrap();
    lab.control(&["reboot"]);
    assert_ne!(boot, fs::read_to_string(lab.path("proc/sys/kernel/random/boot_id")).unwrap());
    assert_eq!((mode(0), mode(1)), ((1, 1), (0, 0)));
    assert!(!lab.path("proc/driver/nvidia/capabilities/gpu1/mig/gi7").exists());
    let uuid = lab.nvml().device_by_index(1).unwrap().uuid().unwrap();
    let holder = lab.hold(&uuid);
    assert_eq!((set(1, 1), mode(1)), (Ok(IN_USE), (0, 1)), "a process holds the GPU: pending, not active");
    drop(holder);
    assert_eq!((set(1, 1), mode(1)), (Ok(0), (1, 1)));
}

#[test]
fn profiles_and_placements_are_answered_in_every_version_whatever_the_mode() {
    let lab = Lab::new(&["h100-80"]);
    let raw = lab.raw();
    let gpu = raw.gpu(0);
    // SAFETY: plain C structs.
    let mut v3: nvmlGpuInstanceProfileInfo_v3_t = unsafe { std::mem::zeroed() };
    let ask = |info: &mut nvmlGpuInstanceProfileInfo_v3_t, profile: u32, version: u32| {
        info.version = version;
        let pointer = std::ptr::from_mut(info).cast();
        nvml!(raw, nvmlDeviceGetGpuInstanceProfileInfoV(gpu, profile, pointer))
    };
    let version = |size: usize, number: u32| u32::try_from(size).unwrap() | number << 24;
    let third = version(size_of::<nvmlGpuInstanceProfileInfo_v3_t>(), 3);
    ask(&mut v3, NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV2, third).unwrap();
    let name: String =
        v3.name.iter().take_while(|byte| **byte != 0).map(|byte| char::from(byte.cast_unsigned())).collect();
    assert_eq!((v3.id, v3.sliceCount, v3.multiprocessorCount, v3.memorySizeMB), (15, 1, 26, 20096));
    assert_eq!(name, "MIG 1g.20gb");
    ask(&mut v3, 0, version(size_of::<nvmlGpuInstanceProfileInfo_v2_t>(), 2)).unwrap();
    for wrong in [0, third + 1, third - 1, version(size_of::<nvmlGpuInstanceProfileInfo_v3_t>(), 4)] {
        assert_eq!(ask(&mut v3, 0, wrong), Err(VERSION_MISMATCH), "{wrong:#x}");
    }
    assert_eq!(ask(&mut v3, NVML_GPU_INSTANCE_PROFILE_8_SLICE, third), Err(NOT_SUPPORTED));
    assert_eq!(ask(&mut v3, 99, third), Err(2));
    let mut count = 0;
    let mut places = [nvmlGpuInstancePlacement_t { start: 0, size: 0 }; 8];
    let mut placements = |room: u32, out: *mut nvmlGpuInstancePlacement_t| {
        count = room;
        let answer = nvml!(raw, nvmlDeviceGetGpuInstancePossiblePlacements_v2(gpu, 14, out, &raw mut count));
        (answer, count)
    };
    assert_eq!(placements(0, std::ptr::null_mut()), (Ok(()), 3));
    assert_eq!(placements(2, places.as_mut_ptr()), (Err(INSUFFICIENT_SIZE), 3));
    assert_eq!(placements(8, places.as_mut_ptr()), (Ok(()), 3));
    let starts: Vec<_> = places.iter().take(3).map(|place| (place.start, place.size)).collect();
    assert_eq!(starts, [(0, 2), (2, 2), (4, 2)]);
}

#[test]
fn two_processes_never_create_at_one_place() {
    let lab = Lab::new(&["h100-80:mig=on"]);
    for start in 0..7 {
        let start = start.to_string();
        let create = ["mig", "create", "--gpu", "0", "--profile", "1g.10gb", "--start", &start];
        let mut racers: Vec<_> = (0..2)
            .map(|_| lab.command(&create).stderr(std::process::Stdio::null()).spawn().unwrap())
            .collect();
        let won = racers
            .iter_mut()
            .filter_map(|racer| racer.wait().ok())
            .filter(std::process::ExitStatus::success)
            .count();
        assert_eq!(won, 1, "at {start}");
    }
    assert_eq!(lab.machine().state().unwrap().gpus[0].instances.len(), 7);
}

#[test]
fn a_lost_gpu_answers_so_until_it_returns_and_the_others_go_on() {
    let lab = Lab::new(&["h100-80", "h100-80"]);
    let raw = lab.raw();
    let gpu = raw.gpu(0);
    lab.control(&["lose", "--gpu", "0000:17:00.0"]);
    let mut minor = 0;
    assert_eq!(nvml!(raw, nvmlDeviceGetMinorNumber(gpu, &raw mut minor)), Err(15));
    let other = raw.gpu(1);
    nvml!(raw, nvmlDeviceGetMinorNumber(other, &raw mut minor)).unwrap();
    lab.control(&["return", "--gpu", "0000:17:00.0"]);
    nvml!(raw, nvmlDeviceGetMinorNumber(gpu, &raw mut minor)).unwrap();
}

#[test]
fn sixty_four_gpus_have_distinct_addresses_minors_and_uuids_and_a_second_init_is_refused() {
    let gpus = ["h100-80"; 64];
    let lab = Lab::new(&gpus);
    let state = lab.machine().state().unwrap();
    let values: [fn(&kerf_emulator::state::Gpu) -> String; 3] =
        [|gpu| gpu.pci.clone(), |gpu| gpu.uuid.clone(), |gpu| gpu.minor.to_string()];
    for value in values {
        assert_eq!(state.gpus.iter().map(value).collect::<std::collections::BTreeSet<_>>().len(), 64);
    }
    assert_eq!(lab.nvml().device_count().unwrap(), 64);
    assert!(lab.refused(&["init", "--gpu", "l4"]).contains("--force"));
    for gpu in &state.gpus {
        let numa =
            fs::read_to_string(lab.path(&format!("sys/bus/pci/devices/{}/numa_node", gpu.pci))).unwrap();
        assert_eq!(numa, "0\n");
    }
}

#[test]
fn every_function_of_the_header_is_there() {
    let lab = Lab::new(&["l4"]);
    // SAFETY: the library is the one under test.
    let library = unsafe { libloading::Library::new(lab.library()) }.unwrap();
    for name in kerf_emulator::calls() {
        // SAFETY: only the address is taken.
        assert!(unsafe { library.get::<unsafe extern "C" fn()>(name.as_bytes()) }.is_ok(), "{name}");
    }
    assert!(kerf_emulator::calls().count() > 390);
}

#[test]
fn a_model_is_data() {
    let lab = Lab::new(&["l4"]);
    let mut models = kerf_emulator::model::built_in().unwrap();
    let mut model = models["h100-80"].clone();
    model.name = "NVIDIA H900".to_owned();
    model.mig.as_mut().unwrap().profiles.retain(|profile| profile.id == 9);
    models.insert("h900".to_owned(), model);
    let file = lab.path("models.json");
    fs::write(&file, serde_json::to_vec(&models).unwrap()).unwrap();
    lab.control(&[
        "init",
        "--force",
        "--models",
        file.to_str().unwrap(),
        "--gpu",
        "h900:mig=on,pci=0000:65:00.0,minor=3",
    ]);
    let nvml = lab.nvml();
    let gpu = nvml.device_by_pci_bus_id("00000000:65:00.0").unwrap();
    assert_eq!((gpu.name().unwrap().as_str(), gpu.minor_number().unwrap()), ("NVIDIA H900", 3));
    assert!(lab.refused(&["mig", "create", "--gpu", "0", "--profile", "1g.10gb"]).contains("no profile"));
    lab.control(&["mig", "create", "--gpu", "0", "--profile", "3g.40gb", "--start", "4"]);
    assert!(lab.path("proc/driver/nvidia/capabilities/gpu3/mig/gi1/ci0/access").exists());
}

#[test]
fn a_reboot_forgets_who_held_a_gpu() {
    let lab = Lab::new(&["h100-80"]);
    let uuid = lab.machine().state().unwrap().gpus[0].uuid.clone();
    let _holder = lab.hold(&uuid);
    assert_eq!(lab.control(&["mig", "mode", "--gpu", "0", "on"]), "pending: IN_USE");
    lab.control(&["reboot"]);
    assert_eq!(lab.control(&["mig", "mode", "--gpu", "0", "on"]), "active");
}
