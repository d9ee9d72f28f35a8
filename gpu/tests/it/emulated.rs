//! What the back-end reads and does on an emulated machine.

use std::thread;
use std::time::{Duration, Instant};

use kerf_dra_driver::hardware::{DriverLink, Hardware, HardwareErrorKind, HardwareEvent, HardwareEventKind};
use kerf_dra_driver::inventory::{
    Architecture, Bytes, ComputeInstanceId, GpuInstanceId, MigMode, Placement, ProfileId, Told,
};
use kerf_emulator::clients::Use;
use kerf_emulator::state::{Action, EventKind, Fault, State, When};

use crate::machine::{on_machine, until};

const ONE_SLICE: ProfileId = ProfileId(19);
const THREE_SLICES: ProfileId = ProfileId(9);

fn at(start: u32, size: u32) -> Placement {
    Placement { start, size }
}

#[test]
fn the_inventory_describes_each_gpu() {
    on_machine(&["h100-80:pci=0000:65:00.0,numa=1", "l4:pci=0000:17:00.0,minor=5"], |machine| {
        let inventory = machine.hardware().inventory().expect("an inventory");
        assert_eq!(inventory.driver_version, "580.95.05");
        assert_eq!(inventory.cuda_version, (13, 0));
        assert_eq!(inventory.unreadable, []);
        let [l4, h100] = inventory.gpus.as_slice() else { panic!("{inventory:?}") };

        assert_eq!((l4.pci.to_string().as_str(), l4.minor), ("0000:17:00.0", 5));
        assert_eq!(l4.architecture, Architecture::Ada);
        assert_eq!(l4.mig, None);

        assert_eq!(h100.pci.to_string(), "0000:65:00.0");
        assert_eq!(h100.product, "NVIDIA H100 80GB HBM3");
        assert_eq!(h100.brand, Told::Known("Nvidia".to_owned()));
        assert_eq!(h100.architecture, Architecture::Hopper);
        assert_eq!(h100.compute_capability, (9, 0));
        assert_eq!(h100.memory, Bytes::from_mib(81_559));
        assert_eq!(h100.numa_node, Some(1));
        assert!(h100.pcie_root.as_deref().is_some_and(|root| root.starts_with("pci0000:")), "{h100:?}");
        assert!(h100.uuid.starts_with("GPU-"), "{h100:?}");
        assert!(!h100.vgpu_guest);
        let mig = h100.mig.as_ref().expect("MIG");
        assert_eq!((mig.current, mig.pending), (MigMode::Disabled, MigMode::Disabled));
        assert_eq!(mig.instances, []);
    });
}

#[test]
fn profiles_and_placements_are_read_with_mig_off_too() {
    on_machine(&["h100-80", "a30:mig=on"], |machine| {
        let inventory = machine.hardware().inventory().expect("an inventory");
        let profiles = |index: usize| -> Vec<(u32, String, usize)> {
            let mig = inventory.gpus[index].mig.as_ref().expect("MIG");
            let profile = |profile: &kerf_dra_driver::inventory::Profile| {
                (profile.id.0, profile.name.to_string(), profile.placements.len())
            };
            mig.profiles.iter().map(profile).collect()
        };
        let expected = [
            (0, "7g.80gb", 1),
            (5, "4g.40gb", 1),
            (9, "3g.40gb", 2),
            (14, "2g.20gb", 3),
            (15, "1g.20gb", 4),
            (19, "1g.10gb", 7),
            (20, "1g.10gb+me", 7),
        ];
        assert_eq!(profiles(0), expected.map(|(id, name, count)| (id, name.to_owned(), count)));
        let expected = [
            (0, "4g.24gb", 1),
            (5, "2g.12gb", 2),
            (6, "2g.12gb+me", 2),
            (14, "1g.6gb", 4),
            (21, "1g.6gb+me", 4),
        ];
        assert_eq!(profiles(1), expected.map(|(id, name, count)| (id, name.to_owned(), count)));

        let mig = inventory.gpus[0].mig.as_ref().expect("MIG");
        let three = mig.profile(THREE_SLICES).expect("3g");
        assert_eq!(three.placements, [at(0, 4), at(4, 4)]);
        assert_eq!((three.compute_slices, three.multiprocessors, three.copy_engines), (3, 60, 3));
        assert_eq!(three.max_instances, 2);
    });
}

#[test]
fn a_partition_is_made_exactly_where_asked_and_leaves_no_trace() {
    on_machine(&["h100-80:mig=on"], |machine| {
        let hardware = machine.hardware();
        let gpu = machine.addresses()[0];
        let instance = hardware.create_gpu_instance(gpu, THREE_SLICES, at(4, 4)).expect("an instance");

        // A GPU instance without a compute instance is seen.
        let listed = hardware.gpu_instances(gpu).expect("instances");
        assert_eq!(listed.len(), 1);
        assert_eq!(
            (listed[0].id, listed[0].profile, listed[0].placement),
            (instance, THREE_SLICES, at(4, 4))
        );
        assert_eq!(listed[0].compute_instances, []);

        let made = hardware.create_compute_instance(gpu, instance).expect("a compute instance");
        assert!(made.full && made.uuid.starts_with("MIG-"), "{made:?}");
        let listed = hardware.gpu_instances(gpu).expect("instances");
        assert_eq!(listed[0].compute_instances, std::slice::from_ref(&made));
        let inventory = hardware.inventory().expect("an inventory");
        assert_eq!(inventory.gpus[0].mig.as_ref().expect("MIG").instances, listed);

        let busy = hardware.destroy_gpu_instance(gpu, instance).expect_err("a compute instance lives");
        assert_eq!(busy.kind, HardwareErrorKind::InUse);
        hardware.destroy_compute_instance(gpu, instance, made.id).expect("destroyed");
        hardware.destroy_gpu_instance(gpu, instance).expect("destroyed");
        assert_eq!(hardware.gpu_instances(gpu), Ok(Vec::new()));
    });
}

#[test]
fn an_occupied_placement_is_insufficient_resources() {
    on_machine(&["h100-80:mig=on"], |machine| {
        let hardware = machine.hardware();
        let gpu = machine.addresses()[0];
        hardware.create_gpu_instance(gpu, THREE_SLICES, at(4, 4)).expect("an instance");
        let error = hardware.create_gpu_instance(gpu, ONE_SLICE, at(5, 1)).expect_err("occupied");
        assert_eq!(error.kind, HardwareErrorKind::InsufficientResources);
        assert_eq!(
            error.to_string(),
            format!(
                "create a GPU instance of profile 19 on 1 memory slices from 5 of {gpu} failed: insufficient \
                 resources: the placement is occupied or the GPU is full \
                 (nvmlDeviceCreateGpuInstanceWithPlacement answered INSUFFICIENT_RESOURCES)"
            )
        );
        hardware.create_gpu_instance(gpu, ONE_SLICE, at(2, 1)).expect("free");
    });
}

#[test]
fn what_is_gone_is_not_found() {
    on_machine(&["h100-80:mig=on", "h100-80", "l4"], |machine| {
        let hardware = machine.hardware();
        let gpus = machine.addresses();
        let instance = GpuInstanceId(9);
        let kind =
            |answer: Result<(), kerf_dra_driver::hardware::HardwareError>| answer.expect_err("gone").kind;
        assert_eq!(kind(hardware.destroy_gpu_instance(gpus[0], instance)), HardwareErrorKind::NotFound);
        let made = hardware.create_gpu_instance(gpus[0], ONE_SLICE, at(0, 1)).expect("an instance");
        let compute = ComputeInstanceId(0);
        assert_eq!(
            kind(hardware.destroy_compute_instance(gpus[0], made, compute)),
            HardwareErrorKind::NotFound
        );
        // MIG is off: there can be no instance.
        assert_eq!(kind(hardware.destroy_gpu_instance(gpus[1], instance)), HardwareErrorKind::NotFound);
        assert_eq!(hardware.gpu_instances(gpus[1]), Ok(Vec::new()));
        // No MIG at all.
        assert_eq!(hardware.gpu_instances(gpus[2]), Ok(Vec::new()));
        let nowhere = "0000:fe:00.0".parse().expect("an address");
        assert_eq!(hardware.mig_mode(nowhere).expect_err("no GPU").kind, HardwareErrorKind::NotFound);
    });
}

#[test]
fn every_profile_gets_a_compute_instance_that_spans_it() {
    on_machine(&["a100-40:mig=on", "h100-80:mig=on", "a30:mig=on"], |machine| {
        let hardware = machine.hardware();
        let inventory = hardware.inventory().expect("an inventory");
        for gpu in &inventory.gpus {
            for profile in &gpu.mig.as_ref().expect("MIG").profiles {
                for placement in &profile.placements {
                    let what = format!("{} {} at {}", gpu.product, profile.name, placement.start);
                    let instance =
                        hardware.create_gpu_instance(gpu.pci, profile.id, *placement).expect(&what);
                    let compute = hardware.create_compute_instance(gpu.pci, instance).expect(&what);
                    let listed = hardware.gpu_instances(gpu.pci).expect(&what);
                    assert_eq!(listed[0].compute_instances, std::slice::from_ref(&compute), "{what}");
                    assert!(compute.full, "{what}");
                    hardware.destroy_compute_instance(gpu.pci, instance, compute.id).expect(&what);
                    hardware.destroy_gpu_instance(gpu.pci, instance).expect(&what);
                }
            }
        }
    });
}

#[test]
fn a_mode_change_needs_a_reset_on_ampere_and_none_on_hopper() {
    on_machine(&["a100-40:pci=0000:17:00.0", "h100-80:pci=0000:65:00.0", "l4:pci=0000:81:00.0"], |machine| {
        let hardware = machine.hardware();
        let gpus = machine.addresses();
        let error = hardware.set_mig_mode(gpus[0], MigMode::Enabled).expect_err("pending");
        assert_eq!(error.kind, HardwareErrorKind::NeedsReset);
        assert_eq!(hardware.mig_mode(gpus[0]), Ok((MigMode::Disabled, MigMode::Enabled)));

        hardware.set_mig_mode(gpus[1], MigMode::Enabled).expect("at once");
        assert_eq!(hardware.mig_mode(gpus[1]), Ok((MigMode::Enabled, MigMode::Enabled)));
        hardware.set_mig_mode(gpus[1], MigMode::Enabled).expect("nothing to do");
        hardware.set_mig_mode(gpus[1], MigMode::Disabled).expect("at once");

        let error = hardware.set_mig_mode(gpus[2], MigMode::Enabled).expect_err("no MIG");
        assert_eq!(error.kind, HardwareErrorKind::NotSupported);
    });
}

#[test]
fn the_own_event_set_is_closed_for_a_mode_change_and_open_again_after() {
    on_machine(&["h100-80", "h100-80"], |machine| {
        let hardware = machine.hardware();
        let gpus = machine.addresses();
        let control = machine.control();
        let uuid = control.state().expect("a state").gpus[0].uuid.clone();
        let is_listened_to = || !control.clients().pids(&uuid, Use::Events).expect("clients").is_empty();
        thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                let mut kinds = Vec::new();
                until("an XID of the other GPU was heard", || {
                    let event = hardware.wait_for_event(Duration::from_secs(1)).expect("a wait")?;
                    kinds.push(event.kind.clone());
                    let xid = HardwareEvent { gpu: Some(gpus[1]), kind: HardwareEventKind::Xid(63) };
                    (event == xid).then_some(())
                });
                kinds
            });
            for mode in [MigMode::Enabled, MigMode::Disabled, MigMode::Enabled, MigMode::Disabled] {
                until("a listener was in the way", || is_listened_to().then_some(()));
                hardware.set_mig_mode(gpus[0], mode).expect("the mode changes");
            }
            until("a listener was there again", || is_listened_to().then_some(()));
            until("the waiting thread ended", || {
                let note = |state: &mut State| {
                    let gpu = state.gpus[1].uuid.clone();
                    state.note(&gpu, EventKind::Xid, 63, None);
                    Ok(())
                };
                control.change(note).expect("an XID");
                waiter.is_finished().then_some(())
            });
            let kinds = waiter.join().expect("no panic");
            let changed = HardwareEventKind::MigConfigurationChanged;
            assert!(kinds.contains(&changed), "what was missed is told: {kinds:?}");
        });
    });
}

#[test]
fn a_partition_made_by_another_process_is_heard_of() {
    on_machine(&["h100-80:mig=on"], |machine| {
        let hardware = machine.hardware();
        let gpu = machine.addresses()[0];
        thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                until("a change was heard of", || {
                    hardware.wait_for_event(Duration::from_secs(1)).expect("a wait")
                })
            });
            until("the waiting thread ended", || {
                let (instance, serial) =
                    machine.control().create_gpu_instance(0, 19, Some((0, 1))).expect("an instance");
                machine.control().destroy_gpu_instance(0, instance, serial).expect("destroyed");
                waiter.is_finished().then_some(())
            });
            let event = waiter.join().expect("no panic");
            let expected = HardwareEvent { gpu: Some(gpu), kind: HardwareEventKind::MigConfigurationChanged };
            assert_eq!(event, expected);
        });
    });
}

#[test]
fn an_event_wait_ends_with_its_time() {
    on_machine(&["h100-80"], |machine| {
        let hardware = machine.hardware();
        assert_eq!(hardware.wait_for_event(Duration::from_millis(20)), Ok(None));
        assert_eq!(hardware.wait_for_event(Duration::ZERO), Ok(None));
    });
}

#[test]
fn a_lost_gpu_hides_no_other() {
    on_machine(&["h100-80", "h100-80"], |machine| {
        let hardware = machine.hardware();
        let gpus = machine.addresses();
        let lose = |state: &mut kerf_emulator::state::State| {
            state.gpus[0].lost = true;
            Ok(())
        };
        machine.control().change(lose).expect("a change");
        let inventory = hardware.inventory().expect("an inventory");
        assert_eq!(inventory.gpus.len(), 1, "{inventory:?}");
        assert_eq!(inventory.gpus[0].pci, gpus[1]);
        assert_eq!(inventory.unreadable.len(), 1);
        assert!(inventory.unreadable[0].error.contains("GPU_IS_LOST"), "{:?}", inventory.unreadable);
        assert!(inventory.unreadable[0].lost);
        assert_eq!(hardware.mig_mode(gpus[0]).expect_err("lost").kind, HardwareErrorKind::Lost);
        hardware.mig_mode(gpus[1]).expect("the other one");
    });
}

#[test]
fn a_partition_has_the_nodes_of_its_gpu_and_of_its_two_capabilities() {
    on_machine(&["h100-80:mig=on,minor=3"], |machine| {
        let hardware = machine.hardware();
        let gpu = machine.addresses()[0];
        let instance = hardware.create_gpu_instance(gpu, ONE_SLICE, at(0, 1)).expect("an instance");
        let compute = hardware.create_compute_instance(gpu, instance).expect("a compute instance");
        let nodes = match hardware.device_nodes(gpu, Some((instance, compute.id))) {
            Err(error) if error.to_string().contains("not a character device") => {
                println!("note: skipped: this user may not make device nodes (CAP_MKNOD)");
                return;
            }
            nodes => nodes.expect("nodes"),
        };
        let found: Vec<(&str, u32)> = nodes.iter().map(|node| (node.path.as_str(), node.minor)).collect();
        let capability = 3 + 3 * 135 + instance.0 * 9;
        let capabilities =
            [capability, capability + 1].map(|minor| format!("/dev/nvidia-caps/nvidia-cap{minor}"));
        let expected = [
            ("/dev/nvidia3", 3),
            ("/dev/nvidiactl", 255),
            ("/dev/nvidia-uvm", 0),
            ("/dev/nvidia-uvm-tools", 1),
            ("/dev/nvidia-modeset", 254),
            (capabilities[0].as_str(), capability),
            (capabilities[1].as_str(), capability + 1),
        ];
        assert_eq!(found, expected);
        assert_eq!(nodes[0].host_path, "/host/dev/nvidia3");
        assert_eq!((nodes[0].major, nodes[2].major, nodes[5].major), (195, 510, 511));

        let whole = hardware.device_nodes(gpu, None).expect("nodes");
        assert_eq!(whole, nodes[..5]);
        hardware.destroy_compute_instance(gpu, instance, compute.id).expect("destroyed");
        let error = hardware.device_nodes(gpu, Some((instance, compute.id))).expect_err("gone");
        assert_eq!(error.kind, HardwareErrorKind::System);
    });
}

#[test]
fn the_driver_files_are_those_of_the_running_version() {
    on_machine(&["h100-80"], |machine| {
        let files = machine.hardware().driver_files().expect("files");
        assert_eq!(files.version, "580.95.05");
        let folder = format!("/usr/lib/{}-linux-gnu", std::env::consts::ARCH);
        let found: Vec<(String, String)> =
            files.mounts.into_iter().map(|file| (file.container_path, file.host_path)).collect();
        let mount = |path: &str| (path.to_owned(), format!("/host/driver{path}"));
        let expected = [mount(&format!("{folder}/libnvidia-ml.so.580.95.05")), mount("/usr/bin/nvidia-smi")];
        assert_eq!(found, expected);
        let soname = format!("{folder}/libnvidia-ml.so.1");
        let links = [DriverLink { path: soname.clone(), target: "libnvidia-ml.so.580.95.05".to_owned() }];
        assert_eq!(files.links, links);
        assert_eq!(files.libraries, [soname]);
    });
}

#[test]
fn no_container_gets_the_files_of_an_upgrade_that_has_not_ended() {
    on_machine(&["h100-80"], |machine| {
        let hardware = machine.hardware();
        let before = hardware.driver_files().expect("files");
        let folder = machine.roots().driver.join(format!("usr/lib/{}-linux-gnu", std::env::consts::ARCH));
        let other = folder.join("libcuda.so.590.10.01");
        std::fs::write(&other, "x").expect("a file");
        let error = hardware.driver_files().expect_err("two versions").to_string();
        assert!(
            error.contains("driver 580.95.05 is loaded") && error.contains("`libcuda.so.590.10.01`"),
            "{error}"
        );
        std::fs::remove_file(&other).expect("no file");
        assert_eq!(hardware.driver_files().expect("files"), before);
        std::fs::write(folder.join("libcuda.so.580.95.05"), "x").expect("a file");
        let files = hardware.driver_files().expect("files");
        assert_eq!(files.mounts.len(), before.mounts.len() + 1, "{files:?}");
    });
}

/// Printed for whoever looks; nothing is asserted of a time.
#[test]
fn files_that_have_not_changed_are_not_looked_for_again() {
    on_machine(&["h100-80"], |machine| {
        let hardware = machine.hardware();
        let start = Instant::now();
        let first = hardware.driver_files().expect("files");
        println!("note: found in {:?}", start.elapsed());
        let start = Instant::now();
        for _ in 0..1_000 {
            assert_eq!(hardware.driver_files().expect("files"), first);
        }
        println!("note: known in {:?}", start.elapsed() / 1_000);
    });
}

#[test]
fn a_gpu_that_hangs_keeps_no_other_waiting() {
    on_machine(&["h100-80:mig=on", "h100-80:mig=on"], |machine| {
        let hardware = machine.hardware();
        let gpus = machine.addresses();
        machine
            .control()
            .change(|state| {
                state.latency_ms.insert("nvmlDeviceCreateGpuInstanceWithPlacement".to_owned(), 3_000);
                Ok(())
            })
            .expect("a change");
        thread::scope(|scope| {
            let slow = scope.spawn(|| hardware.create_gpu_instance(gpus[0], ONE_SLICE, at(0, 1)));
            let mut answered = 0;
            while !slow.is_finished() {
                hardware.gpu_instances(gpus[1]).expect("instances");
                hardware.inventory().expect("an inventory");
                answered += 1;
            }
            println!("note: {answered} rounds of calls beside the one that hung");
            assert!(answered > 1, "the calls on the other GPU waited for it");
            slow.join().expect("no panic").expect("an instance");
        });
    });
}

#[test]
fn nothing_holds_an_idle_gpu() {
    on_machine(&["h100-80"], |machine| {
        let gpu = machine.addresses()[0];
        assert_eq!(machine.hardware().holders(gpu), Ok(Vec::new()));
    });
}

/// Printed for whoever looks; nothing is asserted of a time.
#[test]
fn the_calls_of_one_prepare() {
    on_machine(&["h100-80:mig=on"], |machine| {
        let hardware = machine.hardware();
        let gpu = machine.addresses()[0];
        let mut times = Vec::new();
        for _ in 0..20 {
            let start = Instant::now();
            hardware.mig_mode(gpu).expect("a mode");
            hardware.gpu_instances(gpu).expect("instances");
            let instance = hardware.create_gpu_instance(gpu, ONE_SLICE, at(0, 1)).expect("an instance");
            let compute = hardware.create_compute_instance(gpu, instance).expect("a compute instance");
            times.push(start.elapsed());
            hardware.destroy_compute_instance(gpu, instance, compute.id).expect("destroyed");
            hardware.destroy_gpu_instance(gpu, instance).expect("destroyed");
        }
        times.sort_unstable();
        println!("note: p50 {:?}, slowest {:?}", times[times.len() / 2], times[times.len() - 1]);
        assert_eq!(hardware.gpu_instances(gpu), Ok(Vec::new()));
    });
}

#[test]
fn a_gpu_that_hangs_hides_no_other_and_is_not_asked_again_meanwhile() {
    on_machine(&["l4", "l4"], |machine| {
        let hardware = machine.hardware();
        let hang = Fault {
            id: 1,
            call: "nvmlDeviceGetMemoryInfo".to_owned(),
            when: When::Before,
            action: Action::Hang(60_000),
            times: Some(1),
            process: None,
        };
        let add = |state: &mut State| {
            state.faults.push(hang.clone());
            Ok(())
        };
        machine.control().change(add).expect("a fault");
        for _ in 0..2 {
            let inventory = hardware.inventory().expect("an inventory");
            assert_eq!((inventory.gpus.len(), inventory.unreadable.len()), (1, 1), "{inventory:?}");
        }
    });
}

#[test]
fn two_readings_at_once_do_not_take_each_other_for_a_hang() {
    on_machine(&["l4", "l4"], |machine| {
        let slow = |state: &mut State| {
            state.latency_ms.insert("nvmlDeviceGetMemoryInfo".to_owned(), 300);
            Ok(())
        };
        machine.control().change(slow).expect("a latency");
        let hardware = machine.hardware();
        hardware.inventory().expect("an inventory");
        thread::scope(|scope| {
            let readings: Vec<_> = (0..3).map(|_| scope.spawn(|| hardware.inventory())).collect();
            for reading in readings {
                let inventory = reading.join().expect("no panic").expect("an inventory");
                assert_eq!((inventory.gpus.len(), inventory.unreadable.len()), (2, 0), "{inventory:?}");
            }
        });
    });
}
