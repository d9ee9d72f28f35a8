//! What an API server left out of a slice without an error: a disabled feature
//! gate drops its fields on create and update. The version says nothing
//! certain about gates, so what was stored is compared with what was sent.

use std::collections::BTreeSet;
use std::fmt;

use k8s_openapi::api::resource::v1::{Device, DeviceAttribute, ResourceSliceSpec};

use crate::diff::same_spec;

/// A feature whose fields were dropped, under the name of its gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Feature {
    /// Counters: without them a partition is allocated beside its whole GPU.
    PartitionableDevices,
    /// Taints: without them a device that must not be used is allocated.
    DeviceTaints,
    /// Binding conditions: without them nothing waits for the device.
    BindingConditions,
    /// Shares: without them one claim takes the whole device.
    ConsumableCapacity,
    /// Groups that keep modes apart.
    CompatibilityGroups,
    /// Memory and CPU that a device takes from its node.
    NodeAllocatableResources,
    /// Attributes that are lists.
    ListTypeAttributes,
    /// The attribute that names the partition type.
    PartitionableDevicesType,
    /// Kubelet calls that can be left out.
    OptionalNodeOperations,
    /// A difference that no known gate explains.
    Unknown,
}

impl Feature {
    /// The feature gate that an administrator can turn on.
    pub fn gate(self) -> &'static str {
        match self {
            Self::PartitionableDevices => "DRAPartitionableDevices",
            Self::DeviceTaints => "DRADeviceTaints",
            Self::BindingConditions => "DRADeviceBindingConditions",
            Self::ConsumableCapacity => "DRAConsumableCapacity",
            Self::CompatibilityGroups => "DRADeviceCompatibilityGroups",
            Self::NodeAllocatableResources => "DRANodeAllocatableResources",
            Self::ListTypeAttributes => "DRAListTypeAttributes",
            Self::PartitionableDevicesType => "DRAPartitionableDevicesType",
            Self::OptionalNodeOperations => "DRAOptionalNodeOperations",
            Self::Unknown => "an unknown feature",
        }
    }

    /// Whether a device without it could be allocated when it must not be.
    /// Such a slice is deleted at once; others stay, poorer but true.
    pub fn guards(self) -> bool {
        !matches!(
            self,
            Self::ListTypeAttributes | Self::PartitionableDevicesType | Self::OptionalNodeOperations
        )
    }

    /// Leaves the feature out of what is wanted, so that the rest can still be
    /// compared. Only features that guard nothing can be left out.
    pub(crate) fn leave_out(self, spec: &mut ResourceSliceSpec) {
        match self {
            Self::ListTypeAttributes => {
                for device in spec.devices.iter_mut().flatten() {
                    device.attributes.iter_mut().for_each(|all| all.retain(|_, value| !is_list(value)));
                }
            }
            Self::PartitionableDevicesType => spec.partition_type_attribute = None,
            Self::OptionalNodeOperations => spec.skip_node_operations = None,
            _ => {}
        }
    }
}

impl fmt::Display for Feature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.gate())
    }
}

/// Compares an answer of the API server with what was sent to it.
pub fn dropped(sent: &ResourceSliceSpec, stored: &ResourceSliceSpec) -> BTreeSet<Feature> {
    if same_spec(sent, stored) {
        return BTreeSet::new();
    }
    let mut features = BTreeSet::new();
    let mut note = |lost: bool, feature| {
        if lost {
            features.insert(feature);
        }
    };
    let gone = |sent: bool, stored: bool| sent && !stored;
    note(
        gone(has(sent.shared_counters.as_ref()), has(stored.shared_counters.as_ref()))
            || gone(sent.per_device_node_selection.is_some(), stored.per_device_node_selection.is_some()),
        Feature::PartitionableDevices,
    );
    note(
        gone(sent.partition_type_attribute.is_some(), stored.partition_type_attribute.is_some()),
        Feature::PartitionableDevicesType,
    );
    note(
        gone(has(sent.skip_node_operations.as_ref()), has(stored.skip_node_operations.as_ref())),
        Feature::OptionalNodeOperations,
    );
    let pairs = sent.devices.iter().flatten().zip(stored.devices.iter().flatten());
    for (sent, stored) in pairs {
        for (feature, uses) in USES {
            note(gone(uses(sent), uses(stored)), *feature);
        }
    }
    // What the named features explain may hide what they do not.
    let mut explained = sent.clone();
    for feature in &features {
        remove(*feature, &mut explained);
    }
    if !same_spec(&explained, stored) {
        features.insert(Feature::Unknown);
    }
    features
}

/// Whether a device uses a feature.
type Uses = fn(&Device) -> bool;

/// The features that can be seen on a device.
const USES: &[(Feature, Uses)] = &[
    (Feature::PartitionableDevices, |device| has(device.consumes_counters.as_ref())),
    (Feature::DeviceTaints, |device| has(device.taints.as_ref())),
    (Feature::BindingConditions, |device| {
        device.binds_to_node.is_some()
            || has(device.binding_conditions.as_ref())
            || has(device.binding_failure_conditions.as_ref())
    }),
    (Feature::ConsumableCapacity, |device| {
        device.allow_multiple_allocations.is_some()
            || device.capacity.iter().flatten().any(|(_, capacity)| capacity.request_policy.is_some())
    }),
    (Feature::CompatibilityGroups, |device| {
        let mut consumed = device.consumes_counters.iter().flatten();
        consumed.any(|consumption| has(consumption.compatibility_groups.as_ref()))
    }),
    (Feature::NodeAllocatableResources, |device| {
        device.node_allocatable_resources.as_ref().is_some_and(|resources| !resources.is_empty())
    }),
    (Feature::ListTypeAttributes, |device| {
        device.attributes.iter().flatten().any(|(_, value)| is_list(value))
    }),
];

fn has<T>(list: Option<&Vec<T>>) -> bool {
    list.is_some_and(|list| !list.is_empty())
}

fn is_list(value: &DeviceAttribute) -> bool {
    value.bools.is_some() || value.ints.is_some() || value.strings.is_some() || value.versions.is_some()
}

/// Removes every field of a feature, as a server with its gate off does.
fn remove(feature: Feature, spec: &mut ResourceSliceSpec) {
    match feature {
        Feature::PartitionableDevices => {
            spec.shared_counters = None;
            spec.per_device_node_selection = None;
        }
        Feature::ListTypeAttributes | Feature::PartitionableDevicesType | Feature::OptionalNodeOperations => {
            feature.leave_out(spec);
        }
        _ => {}
    }
    for device in spec.devices.iter_mut().flatten() {
        match feature {
            Feature::PartitionableDevices => device.consumes_counters = None,
            Feature::DeviceTaints => device.taints = None,
            Feature::BindingConditions => {
                device.binds_to_node = None;
                device.binding_conditions = None;
                device.binding_failure_conditions = None;
            }
            Feature::ConsumableCapacity => {
                device.allow_multiple_allocations = None;
                let capacities = device.capacity.iter_mut().flatten();
                capacities.for_each(|(_, capacity)| capacity.request_policy = None);
            }
            Feature::CompatibilityGroups => {
                let consumed = device.consumes_counters.iter_mut().flatten();
                consumed.for_each(|consumption| consumption.compatibility_groups = None);
            }
            Feature::NodeAllocatableResources => device.node_allocatable_resources = None,
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use k8s_openapi::api::resource::v1::{CounterSet, DeviceCounterConsumption, DeviceTaint};

    use super::*;

    fn spec() -> ResourceSliceSpec {
        let list = DeviceAttribute { ints: Some(vec![0]), ..DeviceAttribute::default() };
        ResourceSliceSpec {
            devices: Some(vec![Device {
                name: "gpu".to_owned(),
                attributes: Some(BTreeMap::from([("numaNode".to_owned(), list)])),
                consumes_counters: Some(vec![DeviceCounterConsumption {
                    counter_set: "set".to_owned(),
                    ..DeviceCounterConsumption::default()
                }]),
                taints: Some(vec![DeviceTaint {
                    key: "gpu.nvidia.com/lost".to_owned(),
                    effect: "NoSchedule".to_owned(),
                    ..DeviceTaint::default()
                }]),
                allow_multiple_allocations: Some(true),
                ..Device::default()
            }]),
            ..ResourceSliceSpec::default()
        }
    }

    #[test]
    fn each_feature_that_a_server_drops_is_named_and_nothing_else() {
        for feature in [
            Feature::PartitionableDevices,
            Feature::DeviceTaints,
            Feature::ConsumableCapacity,
            Feature::ListTypeAttributes,
        ] {
            let mut stored = spec();
            remove(feature, &mut stored);
            assert_eq!(dropped(&spec(), &stored), BTreeSet::from([feature]));
        }
        assert_eq!(dropped(&spec(), &spec()), BTreeSet::new());
    }

    #[test]
    fn several_dropped_features_are_all_named() {
        let mut stored = spec();
        remove(Feature::DeviceTaints, &mut stored);
        remove(Feature::PartitionableDevices, &mut stored);
        let expected = BTreeSet::from([Feature::DeviceTaints, Feature::PartitionableDevices]);
        assert_eq!(dropped(&spec(), &stored), expected);
    }

    #[test]
    fn a_counter_slice_that_comes_back_empty_lost_its_counters() {
        let counters = CounterSet { name: "set".to_owned(), ..CounterSet::default() };
        let sent =
            ResourceSliceSpec { shared_counters: Some(vec![counters]), ..ResourceSliceSpec::default() };
        let expected = BTreeSet::from([Feature::PartitionableDevices]);
        assert_eq!(dropped(&sent, &ResourceSliceSpec::default()), expected);
    }

    #[test]
    fn a_difference_that_no_gate_explains_is_unknown_and_guards() {
        let mut stored = spec();
        remove(Feature::DeviceTaints, &mut stored);
        stored.devices.iter_mut().flatten().for_each(|device| device.name = "other".to_owned());
        let found = dropped(&spec(), &stored);
        assert!(found.contains(&Feature::Unknown), "{found:?}");
        assert!(Feature::Unknown.guards());
    }

    #[test]
    fn what_only_informs_can_be_left_out_and_then_nothing_differs() {
        let mut stored = spec();
        remove(Feature::ListTypeAttributes, &mut stored);
        let mut wanted = spec();
        Feature::ListTypeAttributes.leave_out(&mut wanted);
        assert!(same_spec(&wanted, &stored));
    }
}
