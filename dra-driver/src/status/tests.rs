//! Tests of what an operator is told.

use std::collections::BTreeSet;

use super::*;
use crate::claim::Allocated;
use crate::fixtures::{Model, gpu, instance, inventory, mig_on, pci, settings};
use crate::inventory::{ProfileId, UnreadableGpu};
use crate::layout::layout;
use crate::model::GpuModel;
use crate::published::merge;
use crate::taint::Conditions;

const ONE: &str = "0000:17:00.0";

fn boot() -> BootId {
    BootId("boot".to_owned())
}

/// A claim `team/<name>` with one device.
fn entry(name: &str, device: DeviceName, is: journal::Device) -> Entry {
    Entry {
        version: journal::VERSION,
        uid: format!("{name}-uid").parse().expect("a uid"),
        claim: ClaimName { namespace: "team".to_owned(), name: name.to_owned() },
        boot_id: boot(),
        allocation: vec![Allocated {
            request: "r".to_owned(),
            pool: "node-1/gpu".to_owned(),
            device,
            admin_access: false,
            share_id: None,
            config: None,
        }],
        devices: vec![is],
        steps: Vec::new(),
        phase: Phase::Completed,
        error: None,
        unknown: BTreeMap::new(),
    }
}

fn whole(name: &str) -> Entry {
    entry(name, DeviceName::whole(pci(ONE)), journal::Device::Whole { gpu: pci(ONE) })
}

/// What is published of one GPU, that is there or not any more.
fn published(gpu: &Gpu, present: bool) -> Vec<Device> {
    let model = GpuModel::of(&settings(), &inventory([gpu.clone()]), gpu, &[]);
    let mut record = merge(gpu.pci, None, Some(&model), &BTreeSet::new());
    if !present {
        record = merge(gpu.pci, record.as_ref(), None, &BTreeSet::new());
    }
    let records: Vec<_> = record.into_iter().collect();
    let slices = layout(&settings(), &records, &Conditions::default());
    slices.into_iter().filter_map(|slice| slice.devices).flatten().collect()
}

fn status(inventory: &Inventory, entries: &[&Entry], published: &[Device]) -> GpuStatus {
    let mut gpus = gpus(&settings(), inventory, entries, &boot(), published);
    assert_eq!(gpus.len(), 1, "{gpus:?}");
    gpus.remove(0)
}

#[test]
fn a_lost_gpu_is_told_as_what_it_was_with_who_holds_it() {
    let h100 = gpu(Model::H100, ONE);
    let gone = published(&h100, false);
    let known = status(&Inventory::default(), &[&whole("train")], &gone);
    assert!(known.lost);
    assert_eq!((known.product.as_str(), known.memory), ("NVIDIA H100 80GB HBM3", h100.memory));
    assert_eq!(known.held_by, ["team/train"]);
    assert_eq!(known.conditions, ["26 devices are not given out: gpu.nvidia.com/lost=gpu"]);

    let placement = Placement { start: 4, size: 4 };
    let profile = ProfileName::new("3g.40gb").expect("a profile");
    let device = journal::Device::Partition { gpu: pci(ONE), profile: ProfileId(9), placement };
    let part = entry("part", DeviceName::partition(pci(ONE), &profile, 4), device);
    let known = status(&Inventory::default(), &[&part], &gone);
    let held_by = Some("team/part".to_owned());
    assert_eq!(known.partitions, [PartitionStatus { profile: "3g.40gb".to_owned(), placement, held_by }]);

    // Neither published nor there: only the journal knows it.
    let known = status(&Inventory::default(), &[&whole("train")], &[]);
    assert!(known.lost && known.product.is_empty());
    assert_eq!(known.held_by, ["team/train"]);
}

#[test]
fn a_gpu_that_hangs_or_cannot_be_read_is_lost_and_one_that_answers_is_not() {
    let h100 = gpu(Model::H100, ONE);
    let node = inventory([h100.clone()]);
    assert!(!status(&node, &[], &published(&h100, true)).lost);
    // The last inventory still has it.
    let hangs = status(&node, &[], &published(&h100, false));
    assert!(hangs.lost && hangs.memory_slices == 8, "{hangs:?}");
    let unreadable =
        UnreadableGpu { index: 0, pci: Some(pci(ONE)), error: "GPU 0 hangs".to_owned(), lost: false };
    let node = Inventory { unreadable: vec![unreadable], ..Inventory::default() };
    let known = status(&node, &[], &[]);
    assert!(known.lost);
    assert_eq!(known.conditions, ["GPU 0 hangs"]);
}

#[test]
fn a_mode_that_is_kept_leaves_only_one_kind_of_device() {
    for (gpu, offered) in [
        (mig_on(gpu(Model::A100, ONE)), Offered::Partitions),
        (gpu(Model::A100, ONE), Offered::Whole),
        (mig_on(gpu(Model::H100, ONE)), Offered::Both),
        (gpu(Model::L4, ONE), Offered::Whole),
    ] {
        assert_eq!(status(&inventory([gpu.clone()]), &[], &[]).offered, offered, "{}", gpu.product);
    }
}

#[test]
fn a_vgpu_guest_offers_what_its_hypervisor_made_or_nothing() {
    let mut guest = mig_on(gpu(Model::H100, ONE));
    guest.vgpu_guest = true;
    let offered = |guest: &Gpu, settings: &Settings| {
        gpus(settings, &inventory([guest.clone()]), &[], &boot(), &[]).remove(0).offered
    };
    let ignore = Settings { foreign_partitions: ForeignPartitions::Ignore, ..settings() };
    assert_eq!(offered(&guest, &settings()), Offered::Nothing);
    let made = instance(&guest, "3g.40gb", 4);
    guest.mig.as_mut().expect("MIG").instances = vec![made];
    assert_eq!(offered(&guest, &settings()), Offered::Partitions);
    assert_eq!(offered(&guest, &ignore), Offered::Nothing);
    guest.mig.as_mut().expect("MIG").current = MigMode::Disabled;
    assert_eq!(offered(&guest, &ignore), Offered::Whole);
}

#[test]
fn claims_that_are_not_prepared_are_told_with_the_last_failure() {
    let failed = |name: &str, error: &str| FailedPrepare {
        claim: ClaimName { namespace: "team".to_owned(), name: name.to_owned() },
        uid: format!("{name}-uid"),
        error: error.to_owned(),
        at: "2026-11-30T07:50:12Z".to_owned(),
    };
    let (done, mut begun, mut old, mut broken) =
        (whole("done"), whole("begun"), whole("old"), whole("broken"));
    begun.phase = Phase::Started;
    begun.error = Some("of the last attempt to undo it".to_owned());
    old.boot_id = BootId("another".to_owned());
    broken.error = Some("the spec cannot be written".to_owned());
    let entries = [&done, &begun, &old, &broken];
    let all =
        unprepared(&entries, &boot(), &[failed("begun", "the GPU is busy"), failed("none", "no claim")]);
    let told: Vec<_> = all
        .iter()
        .map(|one| {
            (
                one.claim.name.as_str(),
                one.phase,
                one.former_boot,
                one.failed_at.is_some(),
                one.error.as_deref(),
            )
        })
        .collect();
    assert_eq!(
        told,
        [
            ("begun", Some(Phase::Started), false, true, Some("the GPU is busy")),
            ("broken", Some(Phase::Completed), false, false, Some("the spec cannot be written")),
            ("none", None, false, true, Some("no claim")),
            ("old", Some(Phase::Completed), true, false, None),
        ]
    );
    let again = unprepared(&[&done], &boot(), &[failed("done", "the API server is away")]);
    assert_eq!((again.len(), again[0].phase), (1, Some(Phase::Completed)));
}
