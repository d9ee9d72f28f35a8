//! A pool as the scheduler's allocator sees it: which devices there are, and
//! what the counters leave beside those that are held.

use std::collections::{BTreeMap, BTreeSet};

use kerf_api::quantity::Quantity;

use super::slices::{SeenDevice, SeenSlice};
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
    pub(super) devices: Vec<&'a SeenDevice>,
    held: BTreeSet<DeviceName>,
    /// What there is where nothing is held.
    all: Left<'a>,
    left: Left<'a>,
}

impl<'a> Pool<'a> {
    /// The pools of a driver. `held` tells what of one is held.
    pub(super) fn all(
        driver: &DriverName,
        slices: &'a [SeenSlice],
        held: impl Fn(&str) -> BTreeSet<DeviceName>,
    ) -> Vec<Self> {
        let mut by_name: BTreeMap<&str, Vec<&SeenSlice>> = BTreeMap::new();
        for slice in slices.iter().filter(|slice| *slice.driver == *driver.as_str()) {
            by_name.entry(&slice.pool).or_default().push(slice);
        }
        by_name.into_iter().map(|(name, slices)| Self::of(name, slices, held(name))).collect()
    }

    fn of(name: &'a str, mut slices: Vec<&'a SeenSlice>, held: BTreeSet<DeviceName>) -> Self {
        let newest = slices.iter().map(|slice| slice.generation).max();
        slices.retain(|slice| Some(slice.generation) == newest);
        slices.sort_by_key(|slice| &slice.name);
        let count = slices.first().map_or(0, |slice| slice.count);
        let sets = slices.iter().flat_map(|slice| &slice.counters);
        let all: Left<'a> = sets
            .flat_map(|(set, amounts)| {
                amounts.iter().map(|(counter, amount)| ((&**set, &**counter), *amount))
            })
            .collect();
        let mut pool = Self {
            node: slices.iter().find_map(|slice| slice.node.as_deref()).unwrap_or(name),
            name,
            complete: usize::try_from(count).is_ok_and(|count| count == slices.len()),
            devices: slices.iter().flat_map(|slice| &slice.devices).collect(),
            held,
            left: all.clone(),
            all,
        };
        for device in pool.devices.iter().filter(|device| pool.held.contains(&device.name)) {
            for (key, cost) in costs(device) {
                pool.left.entry(key).and_modify(|left| *left = less(*left, cost));
            }
        }
        pool
    }

    /// How many of these devices can be allocated together, if nothing else is.
    pub(super) fn free(&self, devices: &[&'a SeenDevice]) -> usize {
        if !self.complete {
            return 0;
        }
        let devices = devices.iter().copied();
        together(
            &self.left,
            devices.filter(|device| !self.held.contains(&device.name) && !device.is_tainted()),
        )
    }

    /// How many of these devices could be allocated together if nothing was held
    /// or tainted; at most so many where slices are missing.
    pub(super) fn room(&self, devices: &[&'a SeenDevice]) -> usize {
        if self.complete { together(&self.all, devices.iter().copied()) } else { devices.len() }
    }
}

fn together<'a>(left: &Left<'a>, devices: impl Iterator<Item = &'a SeenDevice>) -> usize {
    // A GPU's devices take of few of the node's counters.
    let mut changed: Left<'a> = BTreeMap::new();
    let mut count = 0;
    for device in devices {
        let fits = costs(device).all(|(key, cost)| {
            changed.get(&key).or_else(|| left.get(&key)).is_some_and(|left| *left >= cost)
        });
        if fits {
            for (key, cost) in costs(device) {
                let left =
                    changed.entry(key).or_insert_with(|| left.get(&key).copied().unwrap_or(Quantity::ZERO));
                *left = less(*left, cost);
            }
            count += 1;
        }
    }
    count
}

fn less(left: Quantity, cost: Quantity) -> Quantity {
    left.checked_sub(cost).unwrap_or(Quantity::ZERO)
}

fn costs(device: &SeenDevice) -> impl Iterator<Item = ((&str, &str), Quantity)> {
    device
        .costs
        .iter()
        .flat_map(|(set, amounts)| amounts.iter().map(|(counter, cost)| ((&**set, &**counter), *cost)))
}
