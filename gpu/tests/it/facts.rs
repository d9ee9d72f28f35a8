//! What is read of a board beside what everything needs.

use kerf_dra_driver::hardware::Hardware;
use kerf_dra_driver::inventory::Told::{HasNone, Known, NotNow};
use kerf_dra_driver::inventory::{Architecture, Gpu, MigMode, Told};
use kerf_emulator::state::{Fault, State};

use crate::machine::{Machine, on_machine};

const CLUSTER: &str = "6f9619ff-8b86-d011-b42d-00cf4fc964ff";
const ZEROS: &str = "00000000-0000-0000-0000-000000000000";

fn gpus(machine: &Machine) -> Vec<Gpu> {
    let inventory = machine.hardware().inventory().expect("an inventory");
    assert_eq!(inventory.unreadable, []);
    inventory.gpus
}

/// From now on a call answers a code, as the only fault.
fn fail(machine: &Machine, call: &str, code: u32) {
    let fault = Fault::answer(call, code);
    let set = |state: &mut State| {
        state.faults = vec![fault.clone()];
        Ok(())
    };
    machine.control().change(set).expect("a fault");
}

#[test]
fn what_a_board_has_is_read_and_what_it_has_not_is_absent() {
    let linked = format!("gb200:clique={CLUSTER}.7");
    // HGX boards have a fabric that does not leave the node.
    let alone = format!("h200:clique={ZEROS}.1");
    let slots = ["t4", "rtx-pro-6000:ecc=off", "a30:nvlinks=0", &linked, &alone, "a100-40:mig=on", "h100-80"];
    on_machine(&slots, |machine| {
        let read: Vec<_> = gpus(machine)
            .into_iter()
            .map(|gpu| (gpu.facts.ecc, gpu.facts.nvlinks, gpu.facts.nvlink_clique))
            .collect();
        assert_eq!(
            read,
            [
                (Known(true), HasNone, HasNone),
                (Known(false), HasNone, HasNone),
                (Known(true), Known(0), HasNone),
                (Known(true), Known(18), Known(format!("{CLUSTER}.7"))),
                (Known(true), Known(18), HasNone),
                (Known(true), Known(0), HasNone),
                (Known(true), Known(18), HasNone),
            ]
        );
        let state = machine.control().state().expect("a state");
        for (read, known) in gpus(machine).iter().zip(&state.gpus) {
            assert_eq!(read.facts.serial, Known(known.serial.clone()));
        }
    });
}

#[test]
fn a_serial_number_of_zeros_is_none() {
    on_machine(&["l4"], |machine| {
        let blank = |state: &mut State| {
            state.gpus[0].serial = "0".to_owned();
            Ok(())
        };
        machine.control().change(blank).expect("a change");
        assert_eq!(gpus(machine)[0].facts.serial, HasNone);
    });
}

#[test]
fn what_a_board_lacks_is_told_from_what_cannot_be_told_now_and_hides_no_gpu() {
    let slot = format!("gb200:clique={CLUSTER}.7");
    on_machine(&[&slot], |machine| {
        let whole = gpus(machine).remove(0);
        let calls: [(&str, Forget); 6] = [
            ("nvmlDeviceGetSerial", |gpu, lacks| gpu.facts.serial = absent(lacks)),
            ("nvmlDeviceGetEccMode", |gpu, lacks| gpu.facts.ecc = absent(lacks)),
            ("nvmlDeviceGetNvLinkState", |gpu, lacks| gpu.facts.nvlinks = absent(lacks)),
            ("nvmlDeviceGetGpuFabricInfoV", |gpu, lacks| gpu.facts.nvlink_clique = absent(lacks)),
            ("nvmlDeviceGetAddressingMode", |gpu, lacks| gpu.addressing_mode = absent(lacks)),
            ("nvmlDeviceGetBrand", |gpu, lacks| {
                gpu.brand = if lacks { Known("Unknown".to_owned()) } else { NotNow };
            }),
        ];
        for (call, forget) in calls {
            // NOT_SUPPORTED and FUNCTION_NOT_FOUND; NO_PERMISSION, GPU_IS_LOST,
            // ARGUMENT_VERSION_MISMATCH and UNKNOWN.
            for (code, lacks) in [(3, true), (13, true), (4, false), (15, false), (25, false), (999, false)] {
                fail(machine, call, code);
                let mut expected = whole.clone();
                forget(&mut expected, lacks);
                assert_eq!(gpus(machine), [expected], "{call} answers {code}");
            }
        }
    });
}

/// Takes one fact from a GPU: it lacks it, or it cannot be told now.
type Forget = fn(&mut Gpu, bool);

fn absent<T>(lacks: bool) -> Told<T> {
    if lacks { HasNone } else { NotNow }
}

#[test]
fn a_vgpu_is_told_from_a_gpu_and_its_mode_cannot_be_changed() {
    on_machine(&["h100-80:vgpu=on,mig=on", "h100-80"], |machine| {
        let [guest, host] = <[Gpu; 2]>::try_from(gpus(machine)).expect("two GPUs");
        assert!(guest.vgpu_guest && !host.vgpu_guest);
        assert_eq!((guest.facts.serial, guest.facts.nvlinks), (HasNone, HasNone));
        let mig = guest.mig.expect("MIG");
        assert_eq!(mig.current, MigMode::Enabled);
        assert!(!mig.profiles.is_empty());
        assert!(machine.hardware().set_mig_mode(guest.pci, MigMode::Disabled).is_err());
        machine.control().create_gpu_instance(0, 9, None).expect("the hypervisor makes it");
        let instances = machine.hardware().gpu_instances(guest.pci).expect("instances");
        assert_eq!(instances.len(), 1);
        assert!(machine.hardware().destroy_gpu_instance(guest.pci, instances[0].id).is_err());
    });
}

#[test]
fn a_gpu_that_does_not_say_now_what_hangs_on_its_mode_is_unreadable_and_not_taken_for_another() {
    on_machine(&["h100-80:vgpu=on,mig=on"], |machine| {
        let whole = gpus(machine).remove(0);
        for call in ["nvmlDeviceGetVirtualizationMode", "nvmlDeviceGetArchitecture"] {
            // NO_PERMISSION, GPU_IS_LOST, INSUFFICIENT_RESOURCES, UNKNOWN.
            for code in [4, 15, 23, 999] {
                fail(machine, call, code);
                let inventory = machine.hardware().inventory().expect("an inventory");
                assert_eq!(inventory.gpus, [], "{call} answers {code}");
                let [unreadable] = inventory.unreadable.as_slice() else { panic!("{inventory:?}") };
                assert_eq!((unreadable.pci, unreadable.lost), (Some(whole.pci), code == 15));
                assert!(unreadable.error.contains(&format!("{call} answered ")), "{}", unreadable.error);
            }
        }
        // A driver that does not know the question has no vGPU and no name for the chip.
        fail(machine, "nvmlDeviceGetVirtualizationMode", 3);
        assert_eq!(gpus(machine), [Gpu { vgpu_guest: false, ..whole.clone() }]);
        fail(machine, "nvmlDeviceGetArchitecture", 3);
        assert_eq!(gpus(machine), [Gpu { architecture: Architecture::Unknown, ..whole }]);
    });
}
