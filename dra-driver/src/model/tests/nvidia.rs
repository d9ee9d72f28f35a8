//! The keys of NVIDIA's driver and ours, one by one.

use super::*;

/// What NVIDIA's driver publishes: key, type, and whether whole GPUs, static
/// partitions, dynamic partitions and passthrough devices have it.
const ATTRIBUTES: &[(&str, &str, [bool; 4])] = &[
    ("type", "string", [true, true, true, true]),
    ("uuid", "string", [true, true, false, true]),
    ("parentUUID", "string", [false, true, true, false]),
    ("profile", "string", [false, true, true, false]),
    ("productName", "string", [true, true, true, true]),
    ("brand", "string", [true, true, true, false]),
    ("architecture", "string", [true, true, true, false]),
    ("cudaComputeCapability", "version", [true, true, true, false]),
    ("driverVersion", "version", [true, true, true, false]),
    ("cudaDriverVersion", "version", [true, true, true, false]),
    ("addressingMode", "string", [true, true, true, false]),
    ("deviceID", "string", [false, false, false, true]),
    ("vendorID", "string", [false, false, false, true]),
    ("iommuFDEnabled", "bool", [false, false, false, true]),
    ("gpuModuleID", "int", [true, false, false, true]),
    ("partition<N>", "int", [true, false, false, true]),
    ("resource.kubernetes.io/pciBusID", "string", [true, true, true, true]),
    ("resource.kubernetes.io/pcieRoot", "string", [true, true, true, true]),
    ("resource.kubernetes.io/numaNode", "int", [true, true, true, true]),
];

/// Its capacities, of the same devices.
const CAPACITIES: &[(&str, [bool; 4])] = &[
    ("memory", [true, true, true, false]),
    ("multiprocessors", [false, true, true, false]),
    ("copyEngines", [false, true, true, false]),
    ("decoders", [false, true, true, false]),
    ("encoders", [false, true, true, false]),
    ("jpegEngines", [false, true, true, false]),
    ("ofaEngines", [false, true, true, false]),
    ("memorySlice<i>", [false, true, false, false]),
    ("addressableMemory", [false, false, false, true]),
];

/// What it has and we have not. `docs/compatibility.md` says why of each.
const NOT_OURS: [&str; 7] = [
    "addressableMemory",
    "deviceID",
    "gpuModuleID",
    "iommuFDEnabled",
    "memorySlice<i>",
    "partition<N>",
    "vendorID",
];

/// What we have and it has not.
const OURS: &[(&str, &str, [bool; 3])] = &[
    ("eccEnabled", "bool", [true, true, true]),
    ("migCapable", "bool", [true, false, false]),
    ("migMode", "string", [true, false, false]),
    ("nvlinkClique", "string", [true, false, false]),
    ("nvlinks", "int", [true, false, false]),
    ("serial", "string", [true, true, true]),
];

/// A whole GPU, a static and a dynamic partition of which everything is known.
fn devices() -> [ModelDevice; 3] {
    let gpu = mig_on(gpu(Model::H100, "0000:65:00.0"));
    let model = model_with(&settings(), &gpu, &[instance(&gpu, "1g.10gb", 0)]);
    ["gpu-0000-65-00-0", "gpu-0000-65-00-0-mig-1g-10gb-0", "gpu-0000-65-00-0-mig-1g-10gb-1"]
        .map(|name| model.devices[&DeviceName::parse(name).expect("a name")].clone())
}

#[test]
fn each_key_of_nvidias_driver_is_published_on_the_same_devices_or_named_as_missing() {
    let devices = devices();
    let mut expected: BTreeMap<&str, (&str, [bool; 3])> =
        OURS.iter().map(|(key, kind, on)| (*key, (*kind, *on))).collect();
    for (key, kind, [gpu, fixed, dynamic, _]) in ATTRIBUTES {
        if !NOT_OURS.contains(key) {
            assert_eq!(expected.insert(key, (kind, [*gpu, *fixed, *dynamic])), None, "{key} is not ours");
        }
    }
    let mut published: BTreeMap<&str, (&str, [bool; 3])> = BTreeMap::new();
    for (at, device) in devices.iter().enumerate() {
        for (key, value) in &device.attributes {
            let (kind, on) = published.entry(key).or_insert((kind_of(value), [false; 3]));
            assert_eq!(*kind, kind_of(value), "{key}");
            on[at] = true;
        }
    }
    assert_eq!(published, expected);

    let has = |name: &str| devices.each_ref().map(|device| device.capacity.contains_key(name));
    for (name, [gpu, fixed, dynamic, _]) in CAPACITIES.iter().filter(|(name, _)| !NOT_OURS.contains(name)) {
        assert_eq!(has(name), [*gpu, *fixed, *dynamic], "{name}");
    }
    let known: BTreeSet<&str> = CAPACITIES.iter().map(|(name, _)| *name).collect();
    for name in devices.iter().flat_map(|device| device.capacity.keys()) {
        assert!(known.contains(name.as_str()), "the capacity {name} is ours alone");
    }
}

#[test]
fn the_page_of_compatibility_tells_every_difference() {
    let page = rows(include_str!("../../../../docs/compatibility.md"), "Attributes and capacities");
    let mut differing: Vec<&str> = NOT_OURS.into_iter().chain(OURS.iter().map(|(key, ..)| *key)).collect();
    differing.sort_unstable();
    assert_eq!(page.keys().copied().collect::<Vec<_>>(), differing);
    for (key, row) in &page {
        let ours = OURS.iter().any(|(known, ..)| known == key);
        let expected = if ours { ["–", "yes"] } else { ["yes", "–"] };
        assert_eq!(row[..2], expected, "{key}");
        assert!(!row[2].is_empty(), "{key} has no reason");
    }
}
