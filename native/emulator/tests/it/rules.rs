//! The rules as a property: whatever is tried, hardware's limits hold.

use std::collections::BTreeSet;

use kerf_emulator::code::Code;
use kerf_emulator::install::{Plan, Slot};
use kerf_emulator::mig;
use kerf_emulator::model::{self, Mig, Profile};
use kerf_emulator::state::Gpu;
use proptest::prelude::*;

#[derive(Debug, Clone)]
enum Try {
    Create { profile: usize, start: Option<usize> },
    Compute { instance: usize, profile: usize },
    DestroyCompute { instance: usize, compute: usize },
    Destroy { instance: usize },
}

fn tries() -> impl Strategy<Value = Vec<Try>> {
    let one = prop_oneof![
        4 => (0..11_usize, proptest::option::of(0..7_usize)).prop_map(|(profile, start)| Try::Create { profile, start }),
        3 => (0..7_usize, 0..6_usize).prop_map(|(instance, profile)| Try::Compute { instance, profile }),
        2 => (0..7_usize, 0..7_usize).prop_map(|(instance, compute)| Try::DestroyCompute { instance, compute }),
        2 => (0..7_usize).prop_map(|instance| Try::Destroy { instance }),
    ];
    proptest::collection::vec(one, 1..60)
}

pub(crate) fn gpu(model: &str) -> Gpu {
    let plan = Plan {
        gpus: vec![Slot { model: model.to_owned(), mig: true, ..Slot::default() }],
        numa_nodes: 1,
        seed: "rules".to_owned(),
        driver_version: "1".to_owned(),
        cuda_version: 13000,
        models: model::built_in().unwrap(),
    };
    plan.state().unwrap().gpus.remove(0)
}

fn attempt(model: &model::Model, gpu: &mut Gpu, what: &Try, serial: u32) -> Result<(), Code> {
    let mig = mig::of(model)?;
    let instance_id =
        |gpu: &Gpu, at: usize| gpu.instances.get(at).map(|found| found.id).ok_or(Code::NOT_FOUND);
    match *what {
        Try::Create { profile, start } => {
            let profile = &mig.profiles[profile % mig.profiles.len()];
            let placement = start.map(|start| (profile.starts[start % profile.starts.len()], profile.size));
            mig::create_gpu_instance(model, gpu, profile.id, placement, serial).map(|_| ())
        }
        Try::Compute { instance, profile } => {
            let id = instance_id(gpu, instance)?;
            let profile = mig.compute_profiles[profile % mig.compute_profiles.len()].id;
            mig::create_compute_instance(model, gpu, id, profile, None, serial).map(|_| ())
        }
        Try::DestroyCompute { instance, compute } => {
            let id = instance_id(gpu, instance)?;
            let compute =
                gpu.instances[instance].compute.get(compute).map(|found| found.id).ok_or(Code::NOT_FOUND)?;
            mig::destroy_compute_instance(gpu, id, compute)
        }
        Try::Destroy { instance } => {
            let id = instance_id(gpu, instance)?;
            let occupied = !gpu.instances[instance].compute.is_empty();
            let outcome = mig::destroy_gpu_instance(gpu, id);
            assert_eq!(outcome, if occupied { Err(Code::IN_USE) } else { Ok(()) });
            outcome
        }
    }
}

fn check(mig: &Mig, gpu: &Gpu) {
    let whole = mig.whole().unwrap();
    let profiles: Vec<&Profile> =
        gpu.instances.iter().map(|found| mig.profile(found.profile).unwrap()).collect();
    let sum = |field: fn(&Profile) -> u32| profiles.iter().copied().map(field).sum::<u32>();
    for (name, field) in [
        ("compute slices", (|profile| profile.slices) as fn(&Profile) -> u32),
        ("multiprocessors", |profile| profile.multiprocessors),
        ("copy engines", |profile| profile.copy_engines),
        ("decoders", |profile| profile.decoders),
        ("JPEG engines", |profile| profile.jpeg_engines),
        ("OFA engines", |profile| profile.ofa_engines),
    ] {
        assert!(sum(field) <= field(whole), "{name}: {} of {}", sum(field), field(whole));
    }
    let mut slices = BTreeSet::new();
    for found in &gpu.instances {
        assert!(
            (found.start..found.start + found.size)
                .all(|slice| slice < mig.memory_slices && slices.insert(slice))
        );
        let profile = mig.profile(found.profile).unwrap();
        assert!((profile.instance_ids.0..=profile.instance_ids.1).contains(&found.id));
        let mut compute_slices = BTreeSet::new();
        for compute in &found.compute {
            let mut own = compute.start..compute.start + compute.size;
            assert!(own.all(|slice| slice < profile.slices && compute_slices.insert(slice)));
        }
    }
    let ids: BTreeSet<u32> = gpu.instances.iter().map(|found| found.id).collect();
    assert_eq!(ids.len(), gpu.instances.len());
    let uuids: BTreeSet<&str> = gpu.mig_devices().map(|(_, compute)| compute.uuid.as_str()).collect();
    assert_eq!(uuids.len(), gpu.mig_devices().count());
    for profile in &mig.profiles {
        let room = !mig::free_starts(mig, gpu, profile).is_empty();
        assert_eq!(mig::remaining(mig, gpu, profile) > 0, room, "{}", profile.name);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_sequence_of_creates_and_destroys_exceeds_slices_engines_or_ids(tries in tries()) {
        let models = model::built_in().unwrap();
        for (key, model) in models.iter().filter(|(_, model)| model.mig.is_some()) {
            let mut gpu = gpu(key);
            for (serial, what) in (1..).zip(&tries) {
                let before = gpu.clone();
                if attempt(model, &mut gpu, what, serial).is_err() {
                    prop_assert_eq!(&before, &gpu);
                }
                check(mig::of(model).unwrap(), &gpu);
            }
        }
    }
}

#[test]
fn every_known_full_set_of_partitions_fits() {
    let models = model::built_in().unwrap();
    for (key, set) in [
        ("h100-80", vec![(19, 0), (19, 1), (19, 2), (19, 3), (19, 4), (19, 5), (19, 6)]),
        ("h100-80", vec![(9, 0), (9, 4)]),
        ("h100-80", vec![(5, 0), (9, 4)]),
        ("a100-40", vec![(9, 4), (5, 0)]),
        ("a100-40", vec![(15, 0), (15, 2), (15, 4), (15, 6)]),
        ("a100-40", vec![(14, 0), (14, 2), (14, 4), (20, 6)]),
        ("a30", vec![(6, 0), (5, 2)]),
        ("a30", vec![(14, 0), (14, 1), (14, 2), (21, 3)]),
    ] {
        let mut gpu = gpu(key);
        let model = &models[key];
        for (profile, start) in &set {
            let size = mig::of(model).unwrap().profile(*profile).unwrap().size;
            mig::create_gpu_instance(model, &mut gpu, *profile, Some((*start, size)), 1)
                .unwrap_or_else(|code| panic!("{key} {set:?} at {profile}:{start}: {code}"));
        }
    }
}

#[test]
fn an_instance_made_again_at_the_same_place_has_the_same_id_and_uuid() {
    let models = model::built_in().unwrap();
    let model = &models["h100-80"];
    let mut gpu = gpu("h100-80");
    let mut made = || {
        let id = mig::create_gpu_instance(model, &mut gpu, 9, Some((4, 4)), 1).unwrap();
        let compute = mig::create_compute_instance(model, &mut gpu, id, 2, None, 2).unwrap();
        let uuid = gpu.mig_devices().next().unwrap().1.uuid.clone();
        mig::destroy_compute_instance(&mut gpu, id, compute).unwrap();
        mig::destroy_gpu_instance(&mut gpu, id).unwrap();
        (id, uuid)
    };
    assert_eq!(made(), made());
}
