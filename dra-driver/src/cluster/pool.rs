//! A pool as the scheduler's allocator sees it: which devices there are, and
//! what the counters leave beside those that are held.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::resource::v1::{Device, ResourceSlice};
use kerf_api::quantity::Quantity;

use crate::names::{DeviceName, DriverName};

/// By counter set and counter.
type Left<'a> = BTreeMap<(&'a str, &'a str), Quantity>;

/// The slices of one pool, of its newest generation.
pub(super) struct Pool<'a> {
    pub(super) node: &'a str,
    pub(super) name: &'a str,
    /// Whether all its slices are there.
    pub(super) complete: bool,
    /// In the order in which the allocator tries them.
    pub(super) devices: Vec<&'a Device>,
    held: BTreeSet<String>,
    left: Left<'a>,
}

impl<'a> Pool<'a> {
    /// The pools of a driver. `held` tells what of one is held.
    pub(super) fn all<'h>(
        driver: &DriverName,
        slices: &'a [ResourceSlice],
        held: impl Fn(&str) -> Vec<&'h DeviceName>,
    ) -> Vec<Self> {
        let mut by_name: BTreeMap<&str, Vec<&ResourceSlice>> = BTreeMap::new();
        for slice in slices.iter().filter(|slice| slice.spec.driver == driver.as_str()) {
            by_name.entry(&slice.spec.pool.name).or_default().push(slice);
        }
        by_name.into_iter().map(|(name, slices)| Self::of(name, slices, &held(name))).collect()
    }

    fn of(name: &'a str, mut slices: Vec<&'a ResourceSlice>, held: &[&DeviceName]) -> Self {
        let newest = slices.iter().map(|slice| slice.spec.pool.generation).max();
        slices.retain(|slice| Some(slice.spec.pool.generation) == newest);
        slices.sort_by_key(|slice| slice.metadata.name.as_deref());
        let count = slices.first().map_or(0, |slice| slice.spec.pool.resource_slice_count);
        let mut pool = Self {
            node: slices.iter().find_map(|slice| slice.spec.node_name.as_deref()).unwrap_or(name),
            name,
            complete: usize::try_from(count).is_ok_and(|count| count == slices.len()),
            devices: slices.iter().flat_map(|slice| slice.spec.devices.iter().flatten()).collect(),
            held: held.iter().map(ToString::to_string).collect(),
            left: BTreeMap::new(),
        };
        for set in slices.iter().flat_map(|slice| slice.spec.shared_counters.iter().flatten()) {
            pool.left.extend(set.counters.iter().filter_map(|(counter, amount)| {
                Some(((set.name.as_str(), counter.as_str()), Quantity::try_from(&amount.value).ok()?))
            }));
        }
        for device in pool.devices.iter().filter(|device| pool.held.contains(&device.name)) {
            take(&mut pool.left, device);
        }
        pool
    }

    /// How many of these devices can be allocated together, if nothing else is.
    pub(super) fn free(&self, devices: impl Iterator<Item = &'a Device>) -> usize {
        if !self.complete {
            return 0;
        }
        let mut left = self.left.clone();
        let mut count = 0;
        for device in devices.filter(|device| !self.held.contains(&device.name) && !is_tainted(device)) {
            if fits(&left, device) {
                take(&mut left, device);
                count += 1;
            }
        }
        count
    }
}

/// Whether no new claim gets it.
pub(super) fn is_tainted(device: &Device) -> bool {
    device.taints.iter().flatten().any(|taint| taint.effect != "None")
}

fn costs(device: &Device) -> impl Iterator<Item = ((&str, &str), Quantity)> {
    device.consumes_counters.iter().flatten().flat_map(|set| {
        set.counters.iter().filter_map(|(counter, amount)| {
            Some(((set.counter_set.as_str(), counter.as_str()), Quantity::try_from(&amount.value).ok()?))
        })
    })
}

fn fits(left: &Left<'_>, device: &Device) -> bool {
    costs(device).all(|(key, cost)| left.get(&key).is_some_and(|left| *left >= cost))
}

fn take<'a>(left: &mut Left<'a>, device: &'a Device) {
    for (key, cost) in costs(device) {
        if let Some(left) = left.get_mut(&key) {
            *left = left.checked_sub(cost).unwrap_or(Quantity::ZERO);
        }
    }
}
