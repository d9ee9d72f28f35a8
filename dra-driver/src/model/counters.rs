//! Counters: what a GPU has of each thing, and what a device takes of it.

use std::collections::BTreeMap;

use kerf_api::attributes::{Amount, memory_slice_counter};
use kerf_api::quantity::Quantity;
use serde::{Deserialize, Serialize};

use crate::inventory::{Gpu, Mig, Placement, Profile};

/// Most memory slices a GPU can have here: with the seven other counters they
/// fill a counter set (the API takes 32). Hardware has 4, 8 or 12.
pub(crate) const MAX_MEMORY_SLICES: u32 = 25;

/// Amounts by counter name; memory in bytes.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Counters(BTreeMap<String, u64>);

impl Counters {
    /// Everything a GPU has.
    ///
    /// The values are what NVML's profile infos say: of each thing as much as
    /// the profile that has most of it, or, where that is more, as all
    /// instances of one profile together. With these the counters admit each
    /// legal set of partitions and no other.
    pub(crate) fn of_gpu(gpu: &Gpu, mig: Option<&Mig>) -> Self {
        let Some(mig) = mig else {
            return Self(BTreeMap::from([(Amount::Memory.counter().to_owned(), gpu.memory.0)]));
        };
        let mut all = BTreeMap::new();
        for amount in Amount::ALL {
            let of_profiles = mig.profiles.iter().map(|profile| {
                amount_of(profile, amount).saturating_mul(u64::from(possible_instances(profile)))
            });
            let mut value = of_profiles.max().unwrap_or(0);
            if amount == Amount::Memory {
                value = value.max(gpu.memory.0);
            }
            all.insert(amount.counter().to_owned(), value);
        }
        let slices = mig.profiles.iter().flat_map(placements).map(placement_end).max().unwrap_or(0);
        all.extend((0..slices).map(|slice| (memory_slice_counter(slice), 1)));
        Self(all)
    }

    /// What a partition takes: its engines, and exactly its memory slices.
    pub(crate) fn of_partition(profile: &Profile, placement: Placement) -> Self {
        let mut all = Self::of_slices(placement);
        for amount in Amount::ALL {
            let value = amount_of(profile, amount);
            // The API wants a device to consume at least one counter.
            if value > 0 || amount == Amount::Memory {
                all.0.insert(amount.counter().to_owned(), value);
            }
        }
        all
    }

    /// The memory slices of a placement alone.
    fn of_slices(placement: Placement) -> Self {
        let end = placement_end(placement).min(MAX_MEMORY_SLICES);
        Self((placement.start..end).map(|slice| (memory_slice_counter(slice), 1)).collect())
    }

    /// Whether there is nothing in it.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The amount under a name, zero where it is absent.
    pub fn get(&self, name: &str) -> u64 {
        self.0.get(name).copied().unwrap_or(0)
    }

    /// Names and amounts in the order of the names.
    pub fn iter(&self) -> impl Iterator<Item = (&str, u64)> {
        self.0.iter().map(|(name, value)| (name.as_str(), *value))
    }

    /// Whether `cost` can be taken out of it.
    pub fn covers(&self, cost: &Self) -> bool {
        cost.iter().all(|(name, value)| self.get(name) >= value)
    }

    /// Takes out as much of `cost` as there is. Names stay: a device that
    /// consumes a counter its set does not name makes the whole pool invalid.
    pub fn take(&mut self, cost: &Self) {
        for (name, left) in &mut self.0 {
            *left = left.saturating_sub(cost.get(name));
        }
    }

    /// The smaller amount of each name that is in both.
    #[must_use]
    pub fn common(&self, other: &Self) -> Self {
        let common =
            self.0.iter().filter_map(|(name, value)| Some((name.clone(), *other.0.get(name)?.min(value))));
        Self(common.collect())
    }

    /// The smaller amount of each name in both; those in `other` only are
    /// added where `keep` says so.
    pub(crate) fn narrowed_to(&self, other: &Self, keep: impl Fn(&str) -> bool) -> Self {
        let mut all = self.0.clone();
        for (name, value) in &other.0 {
            match all.get_mut(name) {
                Some(own) => *own = (*own).min(*value),
                None if keep(name) => {
                    all.insert(name.clone(), *value);
                }
                None => {}
            }
        }
        Self(all)
    }
}

/// The quantity of a counter or capacity, in the family readers expect.
pub(crate) fn quantity(name: &str, value: u64) -> Quantity {
    if name == Amount::Memory.counter() { Quantity::bytes(value) } else { Quantity::count(value) }
}

/// How much of something an instance of a profile has.
pub(crate) fn amount_of(profile: &Profile, amount: Amount) -> u64 {
    match amount {
        Amount::Memory => profile.memory.0,
        Amount::Multiprocessors => profile.multiprocessors.into(),
        Amount::CopyEngines => profile.copy_engines.into(),
        Amount::Decoders => profile.decoders.into(),
        Amount::Encoders => profile.encoders.into(),
        Amount::JpegEngines => profile.jpeg_engines.into(),
        Amount::OfaEngines => profile.ofa_engines.into(),
    }
}

/// The placements of a profile that can be published.
pub(crate) fn placements(profile: &Profile) -> impl Iterator<Item = Placement> {
    profile.placements.iter().copied().filter(|placement| {
        placement.size > 0
            && placement.start.checked_add(placement.size).is_some_and(|end| end <= MAX_MEMORY_SLICES)
    })
}

fn placement_end(placement: Placement) -> u32 {
    placement.start.saturating_add(placement.size)
}

/// How many instances of a profile a GPU really holds: NVML's number, which is
/// also bounded by the placements there are.
fn possible_instances(profile: &Profile) -> u32 {
    let placements = u32::try_from(placements(profile).count()).unwrap_or(u32::MAX);
    profile.max_instances.min(placements).max(1)
}
