//! What there is of a class, in the cluster and on one node of it.

use std::collections::BTreeMap;

use super::pool::Pool;
use super::slices::SeenDevice;
use crate::names::DriverName;

/// What a class of the chart gives out.
pub(super) enum Class<'a> {
    Whole,
    Partition,
    /// The profile, with dots for plus signs.
    Profile(&'a str),
}

impl<'a> Class<'a> {
    pub(super) fn named(name: &'a str, driver: &DriverName) -> Option<Self> {
        let kind = name.strip_suffix(driver.class_domain())?.strip_suffix('.')?;
        match kind {
            "gpu" => Some(Self::Whole),
            "mig" => Some(Self::Partition),
            _ => kind.strip_prefix("mig-").map(Self::Profile),
        }
    }

    fn takes(&self, device: &SeenDevice) -> bool {
        match (self, device.profile.as_deref()) {
            (Self::Whole, profile) => profile.is_none(),
            (Self::Partition, profile) => profile.is_some(),
            (Self::Profile(wanted), profile) => profile.is_some_and(|profile| {
                let dotted = profile.bytes().map(|byte| if byte == b'+' { b'.' } else { byte });
                dotted.eq(wanted.bytes())
            }),
        }
    }
}

/// So many on the node that has most.
#[derive(Clone, Copy)]
pub(super) struct Most<'a> {
    pub(super) count: usize,
    pub(super) node: &'a str,
}

impl<'a> Most<'a> {
    fn raise(&mut self, count: usize, node: &'a str) {
        if count > self.count {
            *self = Self { count, node };
        }
    }
}

/// What there is of a class.
pub(super) struct Supply<'a> {
    pub(super) published: usize,
    pub(super) tainted: usize,
    /// What can be allocated together now.
    pub(super) free: Most<'a>,
    /// What could be if nothing was held or tainted.
    pub(super) room: Most<'a>,
    /// Whether somewhere there is less room than there are devices.
    pub(super) overlaps: bool,
    /// Whether a node has room for all of its own.
    pub(super) all_fit: bool,
    /// Whether all that a node has can be allocated now.
    all_free: bool,
    /// With how many devices have each.
    taints: BTreeMap<(&'a str, &'a str), usize>,
}

impl<'a> Supply<'a> {
    pub(super) fn of(class: &Class<'_>, pools: &[Pool<'a>]) -> Self {
        let none = Most { count: 0, node: "" };
        let mut supply = Self {
            published: 0,
            tainted: 0,
            free: none,
            room: none,
            overlaps: false,
            all_fit: false,
            all_free: false,
            taints: BTreeMap::new(),
        };
        for pool in pools {
            let devices: Vec<&'a SeenDevice> =
                pool.devices.iter().copied().filter(|device| class.takes(device)).collect();
            if !devices.is_empty() {
                supply.add(pool, &devices);
            }
        }
        supply
    }

    fn add(&mut self, pool: &Pool<'a>, devices: &[&'a SeenDevice]) {
        let (free, room) = (pool.free(devices), pool.room(devices));
        self.published += devices.len();
        self.tainted += devices.iter().filter(|device| device.is_tainted()).count();
        self.free.raise(free, pool.node);
        self.room.raise(room, pool.node);
        self.overlaps |= room < devices.len();
        self.all_fit |= room == devices.len();
        self.all_free |= free == devices.len();
        for taint in devices.iter().flat_map(|device| &device.taints) {
            *self.taints.entry(taint.kind()).or_default() += 1;
        }
    }

    /// Whether a node can give so many now; all that it has, where no number is given.
    pub(super) fn is_enough(&self, count: Option<usize>) -> bool {
        match count {
            Some(count) => self.published > 0 && self.free.count >= count,
            None => self.all_free,
        }
    }

    pub(super) fn taints(&self) -> String {
        let taints = self.taints.iter();
        let taints: Vec<String> =
            taints.map(|((key, value), count)| format!("{key}={value} ({count})")).collect();
        taints.join(", ")
    }
}
