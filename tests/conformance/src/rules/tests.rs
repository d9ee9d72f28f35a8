use k8s_openapi::api::resource::v1::ResourceSlice;
use serde_json::{Value, json};

use super::*;

fn slice(spec: Value) -> ResourceSlice {
    let mut spec = spec;
    spec["driver"] = json!("example.com");
    if spec["pool"].is_null() {
        spec["pool"] = json!({"name": "pool", "generation": 1, "resourceSliceCount": 1});
    }
    serde_json::from_value(json!({"metadata": {"name": "slice"}, "spec": spec})).expect("a slice")
}

fn with_device(device: Value) -> [ResourceSlice; 1] {
    let mut device = device;
    device["name"] = json!("device");
    [slice(json!({"devices": [device]}))]
}

fn said(result: Result<()>) -> String {
    result.err().map(|error| error.to_string()).unwrap_or_default()
}

fn map(number: usize, value: &Value) -> Value {
    (0..number).map(|index| (format!("name{index}"), value.clone())).collect::<serde_json::Map<_, _>>().into()
}

#[test]
fn a_slice_at_every_limit_is_right_and_one_beyond_is_told() {
    let device = |attributes, taints, sets| {
        let consumed: Vec<Value> =
            (0..sets).map(|set| json!({"counterSet": set.to_string(), "counters": {}})).collect();
        with_device(json!({
            "attributes": map(attributes, &json!({"int": 1})),
            "capacity": {"memory": {"value": "1"}},
            "taints": vec![json!({"key": "k", "effect": "NoSchedule"}); taints],
            "consumesCounters": consumed,
        }))
    };
    let sets = |sets: usize, counters: usize| {
        let set = json!({"name": "set", "counters": map(counters, &json!({"value": "1"}))});
        [slice(json!({"sharedCounters": vec![set; sets]}))]
    };
    let devices = |number: usize| [slice(json!({"devices": vec![json!({"name": "d"}); number]}))];
    for right in [device(31, 16, 2), sets(8, 32), devices(128)] {
        assert_eq!(said(limits(&right)), "");
    }
    for (wrong, says) in [
        (device(32, 0, 0), "33 attributes and capacities at `device`, 32 are possible"),
        (device(0, 17, 0), "17 taints at `device`, 16 are possible"),
        (device(0, 0, 3), "3 consumed counter sets at `device`, 2 are possible"),
        (sets(9, 1), "9 counter sets, 8 are possible"),
        (sets(1, 33), "33 counters in `set`, 32 are possible"),
        (devices(129), "129 devices, 128 are possible"),
    ] {
        assert_eq!(said(limits(&wrong)), format!("slice has {says}"));
    }
    let both = json!({"devices": [{"name": "d"}], "sharedCounters": [{"name": "set", "counters": {}}]});
    assert_eq!(said(limits(&[slice(both)])), "slice has devices and counter sets");
    assert_eq!(said(room_for_taints(&devices(64))), "");
    assert!(said(room_for_taints(&devices(65))).starts_with("slice has 65 devices"));
}

#[test]
fn attributes_have_a_name_and_one_value_of_at_most_64_characters() {
    let with = |name: &str, value: Value| with_device(json!({"attributes": {name: value}}));
    for name in ["a", "_x1", "example.com/model", &"a".repeat(32)] {
        assert_eq!(said(attributes(&with(name, json!({"string": "x".repeat(64)})))), "", "{name}");
    }
    for name in ["", "1a", "a-b", "Example.com/a", "example.com/", &"a".repeat(33)] {
        assert!(
            said(attributes(&with(name, json!({"int": 1})))).contains("an attribute or capacity"),
            "{name}"
        );
    }
    assert!(said(attributes(&with("a", json!({"string": "x".repeat(65)})))).contains("65 characters long"));
    assert!(said(attributes(&with("a", json!({})))).contains("0 values"));
    assert!(said(attributes(&with("a", json!({"int": 1, "ints": [1]})))).contains("2 values"));
    let capacity = with_device(json!({"capacity": {"a-b": {"value": "1"}}}));
    assert!(said(attributes(&capacity)).contains("`a-b`"));
}

#[test]
fn standard_attributes_have_one_form() {
    let with = |name: &str, value: Value| {
        let name = format!("resource.kubernetes.io/{name}");
        said(standard_attributes(&with_device(json!({"attributes": {name: value}}))))
    };
    for (name, value) in [
        ("pciBusID", json!({"string": "0000:3b:00.0"})),
        ("pcieRoot", json!({"string": "pci0000:3a"})),
        ("numaNode", json!({"int": 0})),
        ("numaNode", json!({"ints": [0, 1]})),
        ("later", json!({"int": 1})),
    ] {
        assert_eq!(with(name, value), "", "{name}");
    }
    for (name, value) in [
        ("pciBusID", json!({"string": "3b:00.0"})),
        ("pciBusID", json!({"string": "0000:3B:00.0"})),
        ("pciBusID", json!({"string": "0000:3b.00:0"})),
        ("pciBusID", json!({"int": 1})),
        ("pcieRoot", json!({"string": "0000:3a"})),
        ("pcieRoot", json!({"string": "pci0000:3a/0"})),
        ("numaNode", json!({"int": -1})),
        ("numaNode", json!({"ints": []})),
        ("numaNode", json!({"string": "0"})),
    ] {
        assert!(with(name, value).contains(name), "{name}");
    }
}

#[test]
fn a_pool_is_complete_by_its_newest_generation() {
    let of = |generation: i64, count: i64| {
        slice(json!({"pool": {"name": "pool", "generation": generation, "resourceSliceCount": count}}))
    };
    assert_eq!(said(complete(&[of(2, 2), of(2, 2), of(1, 9)])), "");
    assert!(said(one_generation(&[of(2, 2), of(2, 2), of(1, 9)])).contains("slice is of 1"));
    assert_eq!(said(one_generation(&[of(2, 2), of(2, 2)])), "");
    for wrong in [vec![of(2, 2)], vec![of(2, 1), of(2, 2)], vec![of(1, 2), of(2, 2)]] {
        assert!(said(complete(&wrong)).contains("of generation 2"));
    }
}

#[test]
fn names_are_labels_and_domains() {
    for good in ["a", "gpu-0", "0", &"a".repeat(63)] {
        assert!(is_label(good) && is_domain(good), "{good}");
    }
    for bad in ["", "-a", "a-", "A", "a_b", &"a".repeat(64)] {
        assert!(!is_label(bad) && !is_domain(bad), "{bad}");
    }
    assert!(is_domain("gpu.example.com") && !is_domain("gpu..com") && !is_domain(&"a.".repeat(32)));
}
