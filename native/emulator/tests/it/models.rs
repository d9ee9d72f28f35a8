//! Every built-in model: that its numbers fit together, and that the rules of
//! MIG come out of them as names and memory slices alone tell them.

use std::collections::BTreeSet;
use std::process::Command;

use kerf_emulator::code::Code;
use kerf_emulator::mig;
use kerf_emulator::model::{self, Mig, Model, Profile};
use kerf_emulator::state::Gpu;

use crate::rules::gpu;
use crate::support::{Lab, text};

/// A profile's name, read: `2g.48gb+me.all` is (2, 48, `+me.all`).
fn read(name: &str) -> (u32, u32, &str) {
    let (slices, rest) = name.split_once("g.").unwrap();
    let (memory, attribute) = rest.split_once("gb").unwrap();
    (slices.parse().unwrap(), memory.parse().unwrap(), attribute)
}

fn with_mig() -> Vec<(String, Model, Mig)> {
    let models = model::built_in().unwrap();
    models.into_iter().filter_map(|(key, model)| Some((key, model.clone(), model.mig?))).collect()
}

#[test]
fn every_model_says_where_its_numbers_come_from_and_has_ids_of_its_own() {
    let models = model::built_in().unwrap();
    let mut ids = BTreeSet::new();
    for (key, model) in &models {
        assert!(key.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-')), "{key}");
        assert!(!model.sources.is_empty(), "{key} names no source");
        assert!(ids.insert((&model.name, model.packed_device_id())), "{key} has the ids of another");
        for packed in [model.packed_device_id(), model.packed_subsystem_id()] {
            assert_eq!(packed & 0xffff, 0x10de, "{key}: {packed:#x} is not NVIDIA's");
            assert_ne!(packed >> 16, 0, "{key}: an id does not parse");
        }
        assert!(model.memory_mib > 0 && model.power_limit_w > 0, "{key}");
    }
}

#[test]
fn a_profile_is_what_its_name_says() {
    for (key, model, mig) in with_mig() {
        let board = model.memory_mib.div_ceil(1024);
        let whole = mig.whole().unwrap();
        let (mut ids, mut enums, mut names) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
        for profile in &mig.profiles {
            let what = format!("{key} {}", profile.name);
            assert!(ids.insert(profile.id), "{what}: the id is another's");
            assert!(enums.insert(profile.profile), "{what}: the enum is another's");
            assert!(names.insert(&profile.name), "{what}: the name is another's");
            let (slices, memory, attribute) = read(&profile.name);
            assert_eq!(profile.slices, slices, "{what}");
            // The driver names the share of the board, rounded.
            let (size, all) = (u64::from(profile.size), u64::from(mig.memory_slices));
            assert_eq!(u64::from(memory), (2 * board * size + all) / (2 * all), "{what}");
            let doubled = profile.size * whole.slices.next_power_of_two()
                > slices.next_power_of_two() * mig.memory_slices;
            let expected = match (slices, attribute, doubled) {
                (1, "", false) => 0,
                (2, "", _) => 1,
                (3, "", _) => 2,
                (4, "", _) => 3,
                (7, "", _) => 4,
                (1, "+me", false) => 7,
                (2, "+me", _) => 8,
                (1, "", true) => 9,
                (1, "+gfx", _) => 10,
                (2, "+gfx", _) => 11,
                (4, "+gfx", _) => 12,
                (1, "-me", _) => 13,
                (2, "-me", _) => 14,
                (1, "+me.all", _) => 15,
                (2, "+me.all", _) => 16,
                other => panic!("{what}: {other:?} has no enum"),
            };
            assert_eq!(profile.profile, expected, "{what}");
            let engines = [profile.decoders, profile.encoders, profile.jpeg_engines, profile.ofa_engines];
            match attribute {
                "-me" => assert_eq!(engines, [0; 4], "{what}"),
                "+me" => assert!(profile.decoders > 0 && profile.ofa_engines == whole.ofa_engines, "{what}"),
                "+me.all" => assert_eq!(
                    engines,
                    [whole.decoders, whole.encoders, whole.jpeg_engines, whole.ofa_engines],
                    "{what}"
                ),
                _ if profile.size < mig.memory_slices => assert_eq!(profile.ofa_engines, 0, "{what}"),
                _ => assert_eq!(
                    (profile.slices, profile.memory_mib),
                    (whole.slices, whole.memory_mib),
                    "{what}"
                ),
            }
        }
        assert_eq!(mig.max_devices, whole.slices, "{key}");
        assert!(whole.memory_mib < model.memory_mib, "{key}: the driver keeps some memory");
    }
}

#[test]
fn placements_maxima_and_instance_ids_fit_together() {
    for (key, _, mig) in with_mig() {
        let whole = mig.whole().unwrap();
        for profile in &mig.profiles {
            let what = format!("{key} {}", profile.name);
            assert!(profile.starts.is_sorted_by(|one, next| one + profile.size <= *next), "{what}");
            assert!(profile.starts.iter().all(|start| start + profile.size <= mig.memory_slices), "{what}");
            let fit = u32::try_from(profile.starts.len()).unwrap().min(whole.slices / profile.slices);
            let most = if read(&profile.name).2.starts_with("+me") { 1 } else { fit };
            assert_eq!(profile.max_instances, most, "{what}");
            let (first, last) = profile.instance_ids;
            assert!(first <= last && last < 15, "{what}: a GPU numbers 15 GPU instances");
            assert!(last - first + 1 >= profile.max_instances, "{what}");
            for other in mig.profiles.iter().filter(|other| other.size != profile.size) {
                let (from, to) = other.instance_ids;
                assert!(last < from || to < first, "{what} and {} take the same ids", other.name);
            }
            assert!(profile.compute.iter().all(|id| mig.compute_profile(*id).is_some()), "{what}");
            let full = mig.full_compute(profile).unwrap();
            assert_eq!((full.name(profile), full.starts(profile)), (profile.name.clone(), vec![0]), "{what}");
        }
    }
}

/// Whether instances may stand together: they share no memory slice, have no
/// more compute slices than the GPU, and of `+me` and `+me.all` there is one,
/// the latter leaving nothing to any but `-me`.
fn legal(compute_slices: u32, set: &[(&Profile, u32)]) -> bool {
    let apart = set.iter().enumerate().all(|(at, (profile, start))| {
        set[at + 1..]
            .iter()
            .all(|(other, there)| start + profile.size <= *there || there + other.size <= *start)
    });
    let names: Vec<_> = set.iter().map(|(profile, _)| read(&profile.name)).collect();
    let media = names.iter().filter(|(_, _, attribute)| attribute.starts_with("+me")).count();
    let greedy = names.iter().any(|(_, _, attribute)| *attribute == "+me.all");
    let modest = names.iter().filter(|(_, _, attribute)| *attribute == "-me").count();
    apart
        && names.iter().map(|(slices, _, _)| slices).sum::<u32>() <= compute_slices
        && media <= 1
        && (!greedy || modest + 1 == set.len())
}

/// Tries every placement beside every legal set, and answers how many sets
/// there are.
fn explore<'model>(
    model: &'model Model,
    gpu: &Gpu,
    set: &mut Vec<(&'model Profile, u32)>,
    from: usize,
) -> usize {
    let mig = mig::of(model).unwrap();
    let whole = mig.whole().unwrap();
    let compute_slices = read(&whole.name).0;
    let placements: Vec<(&Profile, u32)> = mig
        .profiles
        .iter()
        .flat_map(|profile| profile.starts.iter().map(move |start| (profile, *start)))
        .collect();
    let mut sets = 1;
    for (at, (profile, start)) in placements.into_iter().enumerate() {
        set.push((profile, start));
        let mut with = gpu.clone();
        let made = mig::create_gpu_instance(model, &mut with, profile.id, Some((start, profile.size)), 1);
        let allowed = legal(compute_slices, set);
        let names =
            || set.iter().map(|(profile, start)| format!("{}@{start}", profile.name)).collect::<Vec<_>>();
        let expected = if allowed { Ok(()) } else { Err(Code::INSUFFICIENT_RESOURCES) };
        assert_eq!(made.map(|_| ()), expected, "{}: {:?}", model.name, names());
        if allowed && at >= from {
            let memory: u64 = set.iter().map(|(profile, _)| profile.memory_mib).sum();
            assert!(memory <= whole.memory_mib, "{}: {:?} have {memory} MiB", model.name, names());
            sets += explore(model, &with, set, at + 1);
        }
        set.pop();
    }
    sets
}

#[test]
fn engines_refuse_no_set_that_placements_allow_and_allow_no_other() {
    for (key, model, _) in with_mig() {
        let sets = explore(&model, &gpu(&key), &mut Vec::new(), 0);
        assert!(sets > mig::of(&model).unwrap().profiles.len(), "{key}: {sets}");
    }
}

#[test]
fn a_machine_takes_every_model_and_both_programs_list_it() {
    let models = model::built_in().unwrap();
    let slots: Vec<String> = models
        .iter()
        .map(|(key, model)| if model.mig.is_some() { format!("{key}:mig=on") } else { key.clone() })
        .collect();
    let lab = Lab::new(&slots.iter().map(String::as_str).collect::<Vec<_>>());
    let listed = lab.control(&["models"]);
    let nvml = lab.nvml();
    for (index, (key, model)) in (0..).zip(&models) {
        assert!(
            listed.lines().any(|line| line.starts_with(&format!("{key} ")) && line.contains(&model.name))
        );
        let gpu = nvml.device_by_index(index).unwrap();
        assert_eq!(gpu.name().unwrap(), model.name);
        assert_eq!(gpu.memory_info().unwrap().total, model.memory_mib << 20);
        assert_eq!(gpu.pci_info().unwrap().pci_device_id, model.packed_device_id());
        assert_eq!(gpu.mig_mode().is_ok(), model.mig.is_some(), "{key}");
        // The profile with the longest name is also made, with its full
        // compute instance.
        let profiles = model.mig.iter().flat_map(|mig| &mig.profiles);
        if let Some(longest) = profiles.max_by_key(|profile| profile.name.len()) {
            lab.control(&["mig", "create", "--gpu", &index.to_string(), "--profile", &longest.name]);
        }
    }
    let smi = |arguments: &[&str]| {
        text(&Command::new(lab.path("driver/usr/bin/nvidia-smi")).args(arguments).output().unwrap())
    };
    let list = smi(&["-L"]);
    for model in models.values() {
        assert!(list.contains(&format!(": {} (UUID: GPU-", model.name)), "{list}");
    }
    assert!(list.contains("  MIG 2g.48gb+me.all Device  0: (UUID: MIG-"), "{list}");
    assert!(list.contains("  MIG 1g.10gb+me  Device  0: (UUID: MIG-"), "{list}");
    let widths: BTreeSet<usize> = smi(&[]).lines().map(str::len).filter(|width| *width > 0).collect();
    assert_eq!(widths.len(), 1, "every line of the table is as wide as the others");
}

#[test]
fn double_memory_has_the_second_revision_of_the_compute_profile_from_hopper_on() {
    let lab = Lab::new(&["h100-80:mig=on"]);
    let made = lab.control(&["mig", "create", "--gpu", "0", "--profile", "1g.20gb"]);
    assert!(made.contains("MIG-"), "{made}");
    let state = lab.machine().state().unwrap();
    let instance = &state.gpus[0].instances[0];
    assert_eq!((instance.profile, instance.compute[0].profile), (15, 7));
}

#[test]
fn an_unknown_model_is_answered_with_those_there_are() {
    let lab = Lab::new(&["l4"]);
    for arguments in [&["init", "--force", "--gpu", "h900"][..], &["models", "h900"]] {
        let sentence = lab.refused(arguments);
        assert!(sentence.contains("no model `h900`"), "{sentence}");
        for key in model::built_in().unwrap().keys() {
            assert!(sentence.contains(key.as_str()), "{key} is not named: {sentence}");
        }
    }
    assert!(lab.control(&["models", "b300"]).contains("\"derived\""));
}
