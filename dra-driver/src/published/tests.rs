use super::*;
use crate::fixtures::{Model, gpu, instance, inventory, mig_on, names, pci, settings};
use crate::inventory::{BoardFacts, Gpu, GpuInstance, Told};
use crate::layout::layout;
use crate::model::{AttributeValue, Settings};
use crate::taint::Conditions;

const NAME_1G: &str = "gpu-0000-65-00-0-mig-1g-5gb-4";
const NAME_3G: &str = "gpu-0000-65-00-0-mig-3g-20gb-4";

fn model_with(settings: &Settings, gpu: &Gpu, foreign: &[GpuInstance]) -> GpuModel {
    GpuModel::of(settings, &inventory([gpu.clone()]), gpu, foreign)
}

fn a100() -> Gpu {
    mig_on(gpu(Model::A100, "0000:65:00.0"))
}

fn merged(previous: Option<&GpuRecord>, current: &GpuModel, held: &BTreeSet<DeviceName>) -> GpuRecord {
    merge(current.pci, previous, Some(current), held).expect("the GPU is there")
}

fn device(record: &GpuRecord, name: &str) -> PublishedDevice {
    record.devices[&DeviceName::parse(name).expect("a name")].clone()
}

/// The taint keys of a device, without the driver name.
fn taints(record: &GpuRecord, name: &str) -> Vec<String> {
    let slices = layout(&settings(), std::slice::from_ref(record), &Conditions::default());
    let devices = slices.into_iter().flat_map(|slice| slice.devices.unwrap_or_default());
    let device = devices.into_iter().find(|device| device.name == name).expect("it is published");
    let taints = device.taints.unwrap_or_default().into_iter();
    taints.map(|taint| taint.key.trim_start_matches("gpu.nvidia.com/").to_owned()).collect()
}

#[test]
fn a_foreign_instance_takes_slices_and_engines_and_taints_the_whole_gpu() {
    let h100 = mig_on(gpu(Model::H100, "0000:65:00.0"));
    let model = model_with(&settings(), &h100, &[instance(&h100, "3g.40gb", 4)]);
    let record = merged(None, &model, &BTreeSet::new());
    assert_eq!(record.available.get("multiprocessors"), 132 - 60);
    assert_eq!(record.available.get("copy-engines"), 8 - 3);
    let slices: Vec<u64> =
        (0..8).map(|slice| record.available.get(&format!("memory-slice-{slice}"))).collect();
    assert_eq!(slices, [1, 1, 1, 1, 0, 0, 0, 0]);
    assert_eq!(taints(&record, "gpu-0000-65-00-0"), ["foreign"]);
    assert_eq!(taints(&record, "gpu-0000-65-00-0-mig-3g-40gb-4"), [""; 0], "the static partition can be had");
    assert_eq!(taints(&record, "gpu-0000-65-00-0-mig-1g-10gb-4"), ["foreign"]);
    assert_eq!(taints(&record, "gpu-0000-65-00-0-mig-1g-10gb-3"), [""; 0]);
}

#[test]
fn a_held_device_keeps_its_cost_and_the_foreigner_is_not_subtracted_twice() {
    let a100 = a100();
    let held = names([NAME_1G]);
    let before = merged(None, &model_with(&settings(), &a100, &[]), &held);

    // At the very same placement: nothing more is taken.
    let same = merged(Some(&before), &model_with(&settings(), &a100, &[instance(&a100, "1g.5gb", 4)]), &held);
    assert_eq!(same.available, before.counters);
    assert!(device(&same, NAME_1G).device.costs_as(&device(&before, NAME_1G).device));
    assert_eq!(taints(&same, NAME_1G), ["foreign"]);

    // At a larger one: only what goes beyond.
    let more =
        merged(Some(&before), &model_with(&settings(), &a100, &[instance(&a100, "3g.20gb", 4)]), &held);
    assert_eq!(more.available.get("multiprocessors"), 98 - (42 - 14));
    assert_eq!(more.available.get("memory-slice-4"), 1);
    assert_eq!(more.available.get("memory-slice-5"), 0);
    assert!(
        taints(&more, NAME_3G).contains(&"foreign".to_owned()),
        "it waits until its former cost is withdrawn"
    );

    // Also where the foreigner was published from the beginning.
    let fresh = merged(None, &model_with(&settings(), &a100, &[instance(&a100, "3g.20gb", 4)]), &held);
    assert_eq!(taints(&fresh, NAME_3G), ["withheld"], "a place that a claim holds is not given out again");

    // Once released it is subtracted in full.
    let released = merged(
        Some(&more),
        &model_with(&settings(), &a100, &[instance(&a100, "3g.20gb", 4)]),
        &BTreeSet::new(),
    );
    assert_eq!(released.available.get("multiprocessors"), 98 - 42);
}

#[test]
fn a_static_partition_that_is_gone_keeps_its_place_until_it_has_left() {
    let a100 = a100();
    let held = names([NAME_3G]);
    let with = merged(None, &model_with(&settings(), &a100, &[instance(&a100, "3g.20gb", 4)]), &held);
    let gone = merged(Some(&with), &model_with(&settings(), &a100, &[]), &held);
    assert_eq!(taints(&gone, NAME_3G), ["lost"]);
    assert_eq!(gone.available, with.available);
    let mut left = gone.clone();
    left.withdraw(&[DeviceName::parse(NAME_3G).expect("a name")]);
    let anew = merged(Some(&left), &model_with(&settings(), &a100, &[]), &BTreeSet::new());
    assert_eq!(anew.available, anew.counters);
    assert_eq!(taints(&anew, NAME_3G), [""; 0]);
    assert!(!device(&anew, NAME_3G).device.consumes.is_empty());
}

#[test]
fn filtered_lost_and_changed_devices_stay_tainted_and_come_back_clean() {
    let a100 = a100();
    let model = model_with(&settings(), &a100, &[]);
    let before = merged(None, &model, &BTreeSet::new());
    let filter = Settings { mig_profiles: "1g.5gb".parse().expect("a filter"), ..settings() };
    let filtered = merged(Some(&before), &model_with(&filter, &a100, &[]), &BTreeSet::new());
    assert_eq!(filtered.devices.len(), before.devices.len());
    assert_eq!(
        (taints(&filtered, NAME_1G), taints(&filtered, NAME_3G)),
        (vec![], vec!["withheld".to_owned()])
    );

    let lost = merge(a100.pci, Some(&before), None, &BTreeSet::new()).expect("devices are left");
    assert_eq!(taints(&lost, NAME_1G), ["lost"]);
    assert_eq!(merged(Some(&lost), &model, &BTreeSet::new()), before, "back, as if nothing had been");

    let mut upgraded = a100.clone();
    for profile in upgraded.mig.iter_mut().flat_map(|mig| &mut mig.profiles) {
        profile.multiprocessors -= 1;
    }
    let after = merged(Some(&before), &model_with(&settings(), &upgraded, &[]), &BTreeSet::new());
    assert!(device(&after, NAME_1G).device.costs_as(&device(&before, NAME_1G).device));
    assert_eq!(taints(&after, NAME_1G), ["withheld"]);
}

#[test]
fn a_held_device_that_nobody_can_cost_taints_its_gpu_until_its_claim_is_gone() {
    let a100 = a100();
    let unknown = "gpu-0000-65-00-0-mig-9g-99gb-0";
    let model = model_with(&settings(), &a100, &[]);
    let record = merged(None, &model, &names([unknown]));
    assert!(record.devices.keys().all(|name| taints(&record, name.as_str()) == ["withheld"]));
    // Whoever holds it may not be prepared: the journal forgets, this does not.
    let mut record = merged(Some(&record), &model, &BTreeSet::new());
    assert_eq!(taints(&record, NAME_1G), ["withheld"]);
    record.withdraw(&[DeviceName::parse(unknown).expect("a name")]);
    assert_eq!(taints(&merged(Some(&record), &model, &BTreeSet::new()), NAME_1G), [""; 0]);
    // And where the GPU is not even there.
    let record = merge(pci("0000:65:00.0"), None, None, &names([unknown])).expect("it must be remembered");
    assert!(layout(&settings(), &[record], &Conditions::default())[0].shared_counters.is_none());
}

#[test]
fn a_gpu_that_is_gone_and_empty_is_forgotten() {
    let model = model_with(&settings(), &a100(), &[]);
    let mut record = merge(model.pci, None, Some(&model), &BTreeSet::new()).expect("there");
    record = merge(model.pci, Some(&record), None, &BTreeSet::new()).expect("leaving");
    let all: Vec<DeviceName> = record.devices.keys().cloned().collect();
    record.withdraw(&all);
    assert_eq!(merge(model.pci, Some(&record), None, &BTreeSet::new()), None);
}

#[test]
fn what_mig_mode_hides_of_a_gpu_stays_as_it_was_published() {
    let off = gpu(Model::H100, "0000:65:00.0");
    let mut on = mig_on(off.clone());
    on.facts.nvlinks = Told::Known(0);
    on.facts.nvlink_clique = Told::HasNone;
    let whole = DeviceName::whole(off.pci);
    let model = |gpu: &Gpu| model_with(&settings(), gpu, &[]);
    let first = merged(None, &model(&off), &BTreeSet::new());
    let next = merged(Some(&first), &model(&on), &BTreeSet::new());
    assert_eq!(next.devices, first.devices);
    let fresh = merged(None, &model(&on), &BTreeSet::new());
    assert!(!fresh.devices[&whole].device.attributes.contains_key("nvlinks"), "nobody knows it yet");
    // With MIG off, what NVML says is so.
    let mut unbridged = off;
    unbridged.facts = on.facts;
    let last = merged(Some(&next), &model(&unbridged), &BTreeSet::new());
    assert_eq!(last.devices[&whole].device.attributes["nvlinks"], AttributeValue::Int(0));
    assert!(!last.devices[&whole].device.attributes.contains_key("nvlinkClique"));
}

#[test]
fn what_cannot_be_told_now_stays_as_it_was_published_and_what_is_not_there_goes() {
    let before = gpu(Model::H100, "0000:65:00.0");
    let with = |facts: BoardFacts, told: Told<String>| {
        model_with(
            &settings(),
            &Gpu { facts, brand: told.clone(), addressing_mode: told, ..before.clone() },
            &[],
        )
    };
    let first = merged(None, &model_with(&settings(), &before, &[]), &BTreeSet::new());
    let (serial, ecc, nvlinks, nvlink_clique) = (Told::NotNow, Told::NotNow, Told::NotNow, Told::NotNow);
    let untold = with(BoardFacts { serial, ecc, nvlinks, nvlink_clique }, Told::NotNow);
    assert_eq!(merged(Some(&first), &untold, &BTreeSet::new()), first);
    let keys = ["brand", "addressingMode", "serial", "eccEnabled", "nvlinks", "nvlinkClique"];
    let fresh = merged(None, &untold, &BTreeSet::new());
    let lacking = with(BoardFacts::default(), Told::HasNone);
    let bare = merged(Some(&first), &lacking, &BTreeSet::new());
    for published in fresh.devices.values().chain(bare.devices.values()) {
        for key in keys {
            assert!(!published.device.attributes.contains_key(key), "{key}");
        }
    }
    // What nobody could tell before is published as soon as it is told.
    assert_eq!(
        merged(Some(&fresh), &model_with(&settings(), &before, &[]), &BTreeSet::new()).devices,
        first.devices
    );
}

#[test]
fn an_attribute_that_changes_is_published_of_a_held_device_too_and_moves_nothing() {
    let before = gpu(Model::H100, "0000:65:00.0");
    let mut after = before.clone();
    after.facts.ecc = Told::Known(false);
    let whole = DeviceName::whole(before.pci);
    let held = BTreeSet::from([whole.clone()]);
    let model = |gpu: &Gpu| model_with(&settings(), gpu, &[]);
    let first = merged(None, &model(&before), &held);
    let next = merged(Some(&first), &model(&after), &held);
    assert_eq!(next.devices[&whole].device.attributes["eccEnabled"], AttributeValue::Bool(false));
    assert_eq!(next.leaving().count(), 0);
    assert_eq!((&next.counters, &next.available), (&first.counters, &first.available));
    assert!(next.devices.keys().eq(first.devices.keys()));
}

#[test]
fn an_attribute_of_a_kind_that_a_later_version_wrote_costs_no_record() {
    let record = merged(None, &model_with(&settings(), &a100(), &[]), &BTreeSet::new());
    let mut json = serde_json::to_value(&record).expect("a record");
    json["devices"][NAME_1G]["device"]["attributes"]["later"] = serde_json::json!({"ints": [1, 2]});
    assert_eq!(serde_json::from_value::<GpuRecord>(json).expect("a record"), record);
}

#[test]
fn a_record_is_read_back_with_fields_of_another_version() {
    let record = merged(
        None,
        &model_with(&settings(), &a100(), &[instance(&a100(), "3g.20gb", 4)]),
        &names([NAME_1G]),
    );
    let mut json = serde_json::to_value(&record).expect("a record");
    json["later"] = 1.into();
    json["devices"][NAME_1G]["later"] = 2.into();
    let read: GpuRecord = serde_json::from_value(json.clone()).expect("a record");
    let next = merged(Some(&read), &model_with(&settings(), &a100(), &[]), &names([NAME_1G]));
    let json = serde_json::to_value(next).expect("a record");
    assert_eq!((&json["later"], &json["devices"][NAME_1G]["later"]), (&1.into(), &2.into()));
}
