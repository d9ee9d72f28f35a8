//! Tests of decisions that need no effects. That overlaps with entries are
//! refused is tested where entries come from, in `kubelet-plugin`.

use super::*;
use crate::inventory::{
    Architecture, BoardFacts, Bytes, ComputeInstance, ComputeInstanceId, GpuInstanceId, ProfileId, Told,
};
use crate::model::ProfileFilter;
use crate::names::{DriverName, ProfileName};

fn pci() -> PciAddress {
    PciAddress { domain: 0, bus: 0x65, device: 0, function: 0 }
}

fn name() -> ProfileName {
    ProfileName::new("1g.10gb").expect("a profile")
}

fn inventory(architecture: Architecture, mode: Option<MigMode>, instances: Vec<GpuInstance>) -> Inventory {
    let profile = Profile {
        id: ProfileId(19),
        name: name(),
        memory: Bytes::from_mib(9856),
        compute_slices: 1,
        multiprocessors: 16,
        copy_engines: 1,
        decoders: 1,
        encoders: 0,
        jpeg_engines: 1,
        ofa_engines: 0,
        max_instances: 7,
        placements: (0..7).map(|start| Placement { start, size: 1 }).collect(),
    };
    Inventory {
        gpus: vec![Gpu {
            pci: pci(),
            minor: 0,
            uuid: "GPU-1".to_owned(),
            product: "NVIDIA H100".to_owned(),
            brand: Told::Known("Nvidia".to_owned()),
            architecture,
            compute_capability: (9, 0),
            memory: Bytes::from_mib(81_559),
            addressing_mode: Told::HasNone,
            numa_node: None,
            pcie_root: None,
            vgpu_guest: false,
            facts: BoardFacts::default(),
            mig: mode.map(|mode| Mig { current: mode, pending: mode, profiles: vec![profile], instances }),
        }],
        ..Inventory::default()
    }
}

fn plan(inventory: &Inventory, devices: &[DeviceName]) -> Result<Plan, Refusal> {
    let settings = Settings {
        driver: DriverName::DEFAULT.parse().expect("a driver name"),
        node: "node".to_owned(),
        mig_mode: None,
        mig_profiles: ProfileFilter::All,
        foreign_partitions: ForeignPartitions::Publish,
    };
    let claim = Claim {
        uid: "uid".parse().expect("a uid"),
        name: ClaimName { namespace: "ns".to_owned(), name: "c".to_owned() },
        allocation: devices
            .iter()
            .map(|device| Allocated {
                request: "r".to_owned(),
                pool: "node/gpu".to_owned(),
                device: device.clone(),
                admin_access: false,
                share_id: None,
                config: None,
            })
            .collect(),
    };
    let boot = BootId("boot".to_owned());
    Plan::for_claim(&claim, Situation { settings: &settings, inventory, entries: &[], boot: &boot })
}

fn slice(start: u32) -> DeviceName {
    DeviceName::partition(pci(), &name(), start)
}

#[test]
fn the_mode_changes_once_and_before_anything_is_made() {
    let plan =
        plan(&inventory(Architecture::Hopper, Some(MigMode::Disabled), Vec::new()), &[slice(4), slice(5)])
            .expect("can be served");
    assert!(matches!(
        plan.steps.as_slice(),
        [Step::MigMode(MigModeStep { mode: MigMode::Enabled, .. }), Step::Partition(_), Step::Partition(_)]
    ));
}

#[test]
fn a_whole_gpu_needs_no_step_whether_or_not_it_knows_mig() {
    for inventory in [
        inventory(Architecture::Ada, None, Vec::new()),
        inventory(Architecture::Ampere, Some(MigMode::Disabled), Vec::new()),
    ] {
        assert_eq!(plan(&inventory, &[DeviceName::whole(pci())]).expect("can be served").steps, []);
    }
}

#[test]
fn where_a_change_needs_a_reset_the_mode_is_kept_and_the_refusal_says_so() {
    let refusal = plan(&inventory(Architecture::Ampere, Some(MigMode::Disabled), Vec::new()), &[slice(4)])
        .expect_err("kept")
        .to_string();
    assert!(refusal.contains("with MIG enabled, but it is disabled"), "{refusal}");
}

#[test]
fn a_foreign_instance_serves_only_where_it_is_exactly_the_device() {
    let foreign = |start, computes: u32| GpuInstance {
        id: GpuInstanceId(3),
        profile: ProfileId(19),
        placement: Placement { start, size: 1 },
        compute_instances: (0..computes)
            .map(|id| ComputeInstance {
                id: ComputeInstanceId(id),
                full: computes == 1,
                uuid: format!("MIG-{id}"),
            })
            .collect(),
    };
    let with = |instance| {
        plan(&inventory(Architecture::Hopper, Some(MigMode::Enabled), vec![instance]), &[slice(4)])
    };
    let exact = with(foreign(4, 1)).expect("served as it is");
    assert!(exact.steps.is_empty());
    assert!(matches!(exact.devices.as_slice(), [Device::Fixed { .. }]));
    assert!(matches!(with(foreign(4, 0)), Err(Refusal::Foreign { .. })));
    assert!(matches!(with(foreign(4, 2)), Err(Refusal::Foreign { .. })));
    assert_eq!(with(foreign(5, 1)).expect("beside it").steps.len(), 1);
}

#[test]
fn what_the_gpu_does_not_have_and_what_excludes_itself_is_refused() {
    let hopper = inventory(Architecture::Hopper, Some(MigMode::Enabled), Vec::new());
    assert!(matches!(plan(&hopper, &[slice(9)]), Err(Refusal::NoDevice { .. })));
    let elsewhere = DeviceName::whole(PciAddress { bus: 0x66, ..pci() });
    assert!(matches!(plan(&hopper, &[elsewhere]), Err(Refusal::NoGpu { .. })));
    let off = inventory(Architecture::Hopper, Some(MigMode::Disabled), Vec::new());
    assert!(matches!(plan(&off, &[DeviceName::whole(pci()), slice(4)]), Err(Refusal::WithinClaim { .. })));
}
