//! Tests of the journal's format.

use super::*;
use crate::names::DeviceName;

fn pci(bus: u8) -> PciAddress {
    PciAddress { domain: 0, bus, device: 0, function: 0 }
}

fn uid() -> ClaimUid {
    "0a1b2c3d-1111-2222-3333-444455556666".parse().expect("a uid")
}

fn entry() -> Entry {
    let placement = Placement { start: 4, size: 1 };
    let profile_name = crate::names::ProfileName::new("1g.10gb").expect("a profile");
    Entry {
        version: VERSION,
        uid: uid(),
        claim: ClaimName { namespace: "ns".to_owned(), name: "c".to_owned() },
        boot_id: BootId("boot".to_owned()),
        allocation: vec![Allocated {
            request: "r".to_owned(),
            pool: "node/gpu".to_owned(),
            device: DeviceName::partition(pci(1), &profile_name, 4),
            admin_access: false,
            share_id: None,
            config: None,
        }],
        devices: vec![Device::Partition { gpu: pci(1), profile: ProfileId(19), placement }],
        steps: vec![Step::Partition(PartitionStep {
            gpu: pci(1),
            profile: ProfileId(19),
            profile_name,
            placement,
            progress: PartitionProgress::Intent { existing: vec![GpuInstanceId(7)] },
        })],
        phase: Phase::Started,
        error: None,
        unknown: BTreeMap::new(),
    }
}

/// What another version would have written.
fn written_by_another(change: impl FnOnce(&mut Value)) -> Vec<u8> {
    let mut value = serde_json::to_value(entry()).expect("serialises");
    change(&mut value);
    let body = value.to_string();
    format!("{PREFIX}{}{MIDDLE}{body}}}\n", hex(&Sha256::digest(body.as_bytes()))).into_bytes()
}

#[test]
fn an_entry_is_read_as_it_was_written_and_its_file_is_json() {
    let bytes = entry().encode();
    assert_eq!(Entry::decode(&bytes).expect("decodes"), entry());
    let json: Value = serde_json::from_slice(&bytes).expect("JSON");
    assert_eq!(json["entry"]["steps"][0]["progress"]["state"], "intent");
}

#[test]
fn a_file_that_was_cut_or_changed_anywhere_is_refused() {
    let bytes = entry().encode();
    for length in 0..bytes.len() {
        assert!(Entry::decode(&bytes[..length]).is_err(), "cut at {length}");
    }
    for at in 0..bytes.len() {
        let mut changed = bytes.clone();
        changed[at] ^= 1;
        assert!(Entry::decode(&changed).is_err(), "changed at {at}");
    }
}

#[test]
fn fields_and_steps_of_the_next_version_are_kept() {
    let bytes = written_by_another(|value| {
        value["version"] = (VERSION + 1).into();
        value["later"] = serde_json::json!({"a": 1});
        let step = serde_json::json!({"step": "timeSlice", "gpu": "0000:01:00.0", "interval": 2});
        value["steps"].as_array_mut().expect("steps").push(step);
    });
    let read = Entry::decode(&bytes).expect("one version ahead is read");
    assert!(matches!(read.steps[1], Step::Unknown(_)));
    assert!(read.has_hardware(&read.boot_id), "what cannot be judged is not taken for nothing");
    assert_eq!(read.gpus(), BTreeSet::from([pci(1)]));
    let again = serde_json::to_value(Entry::decode(&read.encode()).expect("decodes")).expect("serialises");
    assert_eq!(again["later"]["a"], 1);
    assert_eq!(again["steps"][1]["interval"], 2);
}

#[test]
fn a_device_of_the_next_version_is_kept_and_keeps_its_gpu_from_others() {
    let later = serde_json::json!({"device": "share", "gpu": "0000:01:00.0", "of": 4});
    for (unknown, elsewhere) in [(later, false), (serde_json::json!({"device": "fabric"}), true)] {
        let bytes = written_by_another(|value| value["devices"][0] = unknown.clone());
        let read = Entry::decode(&bytes).expect("another kind is read");
        assert_eq!(read.devices, [Device::Unknown(unknown)]);
        assert_eq!(Entry::decode(&read.encode()).expect("decodes"), read);
        let occupied = read.occupied(&read.boot_id);
        let placement = Placement { start: 0, size: 1 };
        let on = |bus| Device::Partition { gpu: pci(bus), profile: ProfileId(19), placement };
        assert!(occupied[0].overlaps(&on(1)) && on(1).overlaps(occupied[0]));
        assert_eq!(occupied[0].overlaps(&on(2)), elsewhere);
        assert_eq!(on(2).overlaps(occupied[0]), elsewhere);
    }
}

#[test]
fn two_versions_ahead_is_not_guessed_at() {
    let bytes = written_by_another(|value| value["version"] = (VERSION + 2).into());
    assert!(matches!(Entry::decode(&bytes), Err(EntryError::Version(_))));
}

#[test]
fn a_file_name_tells_the_gpus_even_if_the_file_cannot_be_read() {
    let two = BTreeSet::from([pci(1), pci(2)]);
    let name = file_name(&uid(), &two);
    assert_eq!(name, "0a1b2c3d-1111-2222-3333-444455556666_0000-01-00-0_0000-02-00-0.json");
    assert_eq!(FileName::parse(&name), Some(FileName { uid: uid(), gpus: GpusInName::These(two) }));
    let many: BTreeSet<_> = (0..13).map(pci).collect();
    assert_eq!(FileName::parse(&file_name(&uid(), &many)).expect("parses").gpus, GpusInName::All);
    let most: BTreeSet<_> =
        (0..12).map(|bus| PciAddress { domain: 0x1_0000, bus, device: 0, function: 0 }).collect();
    assert!(file_name(&"a".repeat(64).parse().expect("a uid"), &most).len() <= 255);
    for wrong in [".x.json", "x.json.tmp", "../x.json", "x_y.json", "instance.lock"] {
        assert_eq!(FileName::parse(wrong), None, "{wrong}");
    }
}

#[test]
fn an_entry_of_another_boot_occupies_nothing() {
    let entry = entry();
    assert_eq!(entry.occupied(&entry.boot_id).len(), 1);
    assert!(entry.occupied(&BootId("later".to_owned())).is_empty());
}

#[test]
fn an_instance_is_ours_only_if_all_that_is_known_of_it_agrees() {
    let boot = BootId("boot".to_owned());
    let instance = |id, start, uuid: Option<&str>| GpuInstance {
        id: GpuInstanceId(id),
        profile: ProfileId(19),
        placement: Placement { start, size: 1 },
        compute_instances: uuid
            .into_iter()
            .map(|uuid| crate::inventory::ComputeInstance {
                id: ComputeInstanceId(0),
                full: true,
                uuid: uuid.to_owned(),
            })
            .collect(),
    };
    let with = |progress| {
        let mut entry = entry();
        if let Some(Step::Partition(step)) = entry.steps.first_mut() {
            step.progress = progress;
        }
        entry
    };
    let intent = with(PartitionProgress::Intent { existing: vec![GpuInstanceId(7)] });
    assert!(intent.owns(&boot, pci(1), &instance(8, 4, None)));
    assert!(!intent.owns(&boot, pci(1), &instance(7, 4, None)), "listed before");
    assert!(!intent.owns(&boot, pci(1), &instance(8, 5, None)), "elsewhere");
    assert!(!intent.owns(&boot, pci(2), &instance(8, 4, None)), "another GPU");
    assert!(!intent.owns(&BootId("later".to_owned()), pci(1), &instance(8, 4, None)), "another boot");
    let ready = with(PartitionProgress::Ready {
        instance: GpuInstanceId(8),
        compute_instance: ComputeInstanceId(0),
        uuid: "MIG-1".to_owned(),
    });
    assert!(ready.owns(&boot, pci(1), &instance(8, 4, Some("MIG-1"))));
    assert!(!ready.owns(&boot, pci(1), &instance(8, 4, None)), "without what proves it");
    let undoing = Entry { phase: Phase::Undoing, ..ready.clone() };
    assert!(undoing.owns(&boot, pci(1), &instance(8, 4, None)), "half undone");
    assert!(!undoing.owns(&boot, pci(1), &instance(8, 4, Some("MIG-2"))), "another compute instance");
    assert!(!ready.owns(&boot, pci(1), &instance(8, 4, Some("MIG-2"))), "another compute instance");
    assert!(!with(PartitionProgress::Absent).owns(&boot, pci(1), &instance(8, 4, None)));
}
