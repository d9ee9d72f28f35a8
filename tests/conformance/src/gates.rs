//! Fields of slices that an API server drops where a feature gate is off.

use serde_json::{Map, Value};

const OF_SLICES: [&str; 4] =
    ["sharedCounters", "perDeviceNodeSelection", "partitionTypeAttribute", "skipNodeOperations"];
const OF_DEVICES: [&str; 9] = [
    "allowMultipleAllocations",
    "bindingConditions",
    "bindingFailureConditions",
    "bindsToNode",
    "consumesCounters",
    "nodeAllocatableResources",
    "nodeSelector",
    "nodeName",
    "taints",
];
/// Of capacities.
const POLICY: &str = "requestPolicy";
/// Attributes that are lists.
const LISTS: [&str; 4] = ["bools", "ints", "strings", "versions"];

/// A slice without them, if it is one that had some.
pub(crate) fn strip(slice: &[u8]) -> Option<Vec<u8>> {
    let text = std::str::from_utf8(slice).ok()?;
    // A server-side apply may be YAML.
    let mut value: Value = serde_json::from_str(text).or_else(|_| serde_saphyr::from_str(text)).ok()?;
    let spec = value.get_mut("spec")?.as_object_mut()?;
    let mut had = without(spec, &OF_SLICES);
    for device in spec.get_mut("devices").and_then(Value::as_array_mut).into_iter().flatten() {
        let Some(device) = device.as_object_mut() else { continue };
        had |= without(device, &OF_DEVICES);
        for capacity in fields(device, "capacity") {
            had |= capacity.1.as_object_mut().is_some_and(|capacity| without(capacity, &[POLICY]));
        }
        if let Some(attributes) = device.get_mut("attributes").and_then(Value::as_object_mut) {
            let number = attributes.len();
            attributes.retain(|_, value| !LISTS.iter().any(|list| value.get(list).is_some()));
            had |= attributes.len() < number;
        }
    }
    had.then(|| value.to_string().into_bytes())
}

fn fields<'a>(
    device: &'a mut Map<String, Value>,
    name: &str,
) -> impl Iterator<Item = (&'a String, &'a mut Value)> {
    device.get_mut(name).and_then(Value::as_object_mut).into_iter().flatten()
}

fn without(object: &mut Map<String, Value>, names: &[&str]) -> bool {
    let removed = names.iter().filter_map(|name| object.remove(*name)).filter(|value| !value.is_null());
    removed.count() > 0
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_a_gate_may_hide_is_dropped_and_nothing_else() {
        let slice = json!({"metadata": {"name": "a"}, "spec": {
            "driver": "d", "nodeName": "n", "sharedCounters": [{"name": "set"}],
            "devices": [{
                "name": "0",
                "consumesCounters": [{}],
                "attributes": {"a": {"int": 1}, "b": {"ints": [1]}},
                "capacity": {"memory": {"value": "1", "requestPolicy": {}}},
            }],
        }});
        let kept = json!({"metadata": {"name": "a"}, "spec": {
            "driver": "d", "nodeName": "n",
            "devices": [{"name": "0", "attributes": {"a": {"int": 1}}, "capacity": {"memory": {"value": "1"}}}],
        }});
        let stripped = strip(slice.to_string().as_bytes()).expect("something was dropped");
        assert_eq!(serde_json::from_slice::<Value>(&stripped).expect("JSON"), kept);
        assert_eq!(strip(kept.to_string().as_bytes()), None);
        let yaml = strip(b"spec:\n  devices:\n  - {name: a, taints: [{}]}\n").expect("something was dropped");
        assert_eq!(yaml, br#"{"spec":{"devices":[{"name":"a"}]}}"#);
        assert_eq!(strip(b"k8s\0\x0a\x1d"), None);
    }
}
