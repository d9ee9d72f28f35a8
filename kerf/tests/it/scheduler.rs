//! An allocator that knows of a node what is published and nothing else, as
//! the stock scheduler does (KEP-4815): a device can be given out while what
//! all together consume is in the counter sets. It knows no placement.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::resource::v1::{Counter, ResourceSliceSpec};
use kerf_api::quantity::Quantity;
use kerf_dra_driver::names::DeviceName;

/// Amounts by counter set and counter.
type Amounts = BTreeMap<(String, String), u64>;

pub(crate) struct Scheduler {
    sets: Amounts,
    /// What each device without a taint consumes, in published order.
    devices: Vec<(DeviceName, Amounts)>,
}

impl Scheduler {
    pub(crate) fn of(slices: &[ResourceSliceSpec]) -> Self {
        let sets = slices.iter().flat_map(|slice| slice.shared_counters.iter().flatten());
        let sets: Amounts = sets.flat_map(|set| amounts(&set.name, &set.counters)).collect();
        let devices = slices.iter().flat_map(|slice| slice.devices.iter().flatten());
        let devices = devices.filter(|device| device.taints.is_none()).map(|device| {
            let consumed = device.consumes_counters.iter().flatten();
            let consumed = consumed.flat_map(|from| amounts(&from.counter_set, &from.counters)).collect();
            (DeviceName::parse(&device.name).unwrap(), consumed)
        });
        let devices: Vec<(DeviceName, Amounts)> = devices.collect();
        // One of them would make the whole pool invalid.
        for (device, consumed) in &devices {
            assert!(consumed.keys().all(|key| sets.contains_key(key)), "{device} consumes {consumed:?}");
        }
        Self { sets, devices }
    }

    /// The devices that can be given out beside those that are.
    pub(crate) fn free(&self, given: &BTreeSet<DeviceName>) -> Vec<DeviceName> {
        let mut left = self.sets.clone();
        for (_, consumed) in self.devices.iter().filter(|(device, _)| given.contains(device)) {
            for (key, amount) in consumed {
                *left.get_mut(key).unwrap() -= amount;
            }
        }
        let fits = |consumed: &Amounts| consumed.iter().all(|(key, amount)| *amount <= left[key]);
        let free = self.devices.iter().filter(|(device, consumed)| !given.contains(device) && fits(consumed));
        free.map(|(device, _)| device.clone()).collect()
    }
}

fn amounts(set: &str, counters: &BTreeMap<String, Counter>) -> impl Iterator<Item = ((String, String), u64)> {
    let of = |counter: &Counter| counter.value.0.parse::<Quantity>().unwrap().units().unwrap();
    counters.iter().map(move |(name, counter)| ((set.to_owned(), name.clone()), of(counter)))
}
