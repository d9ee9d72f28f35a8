//! The device model: what one GPU offers, in the terms of the DRA API but
//! without its types.
//!
//! This module turns an inventory and the settings into devices with their
//! costs. It never looks at what was published before or who holds what; that
//! is `published`. Order and slices are `layout`, taints are `taint`.

mod attributes;
mod counters;
mod settings;

use std::collections::{BTreeMap, BTreeSet};

use kerf_api::attributes::{Amount, attribute, device_type, mig_mode};
use serde::{Deserialize, Deserializer, Serialize};

use attributes::Attributes;
pub use counters::Counters;
pub(crate) use counters::quantity;
pub use settings::{ForeignPartitions, MigModePolicy, ProfileFilter, SettingError, Settings};

use crate::inventory::{Gpu, GpuInstance, Inventory, Mig, MigMode, Placement, Profile, ProfileId};
use crate::names::{DeviceName, PciAddress, ProfileName};

/// What one GPU offers now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuModel {
    /// Which GPU.
    pub pci: PciAddress,
    /// The MIG mode it is in; absent where it has no MIG.
    pub mode: Option<MigMode>,
    /// Everything it has, foreign instances not subtracted.
    pub counters: Counters,
    /// Its devices, by name.
    pub devices: BTreeMap<DeviceName, ModelDevice>,
    /// The GPU instances that somebody else made.
    pub foreign: Vec<Occupied>,
    /// The attributes that cannot be told now.
    pub untold: BTreeSet<String>,
}

/// One device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelDevice {
    /// What it is.
    pub kind: DeviceKind,
    /// Its attributes by key.
    #[serde(deserialize_with = "known_attributes")]
    pub attributes: BTreeMap<String, AttributeValue>,
    /// Its capacities by name; memory in bytes.
    pub capacity: BTreeMap<String, u64>,
    /// What an allocation of it takes out of its GPU's counter set. Empty for
    /// a static partition, which has been taken out already.
    pub consumes: Counters,
    /// What has been taken out of the counter set on its behalf. Only static
    /// partitions have this.
    #[serde(default, skip_serializing_if = "Counters::is_empty")]
    pub reserves: Counters,
}

impl ModelDevice {
    /// Whether both cost the same: only then may one stand for the other
    /// while a claim holds it.
    pub fn costs_as(&self, other: &Self) -> bool {
        self.consumes == other.consumes && self.reserves == other.reserves
    }

    /// The partition it is, if it is one.
    pub fn partition(&self) -> Option<&Partition> {
        match &self.kind {
            DeviceKind::Whole => None,
            DeviceKind::Partition(partition) => Some(partition),
        }
    }
}

/// What a device is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum DeviceKind {
    /// A whole GPU.
    Whole,
    /// A MIG partition.
    Partition(Partition),
}

/// A MIG partition: one profile at one placement.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Partition {
    /// What identifies the profile on this GPU.
    pub profile: ProfileId,
    /// What the profile is called.
    pub profile_name: ProfileName,
    /// Where it is.
    pub placement: Placement,
    /// How many other partitions the GPU could have share a memory slice with
    /// it; the fewer, the less an allocation of it prevents.
    pub crowding: u32,
    /// Whether it exists already, made by somebody else.
    pub fixed: bool,
}

/// An attribute's value.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum AttributeValue {
    /// A text of at most 64 bytes.
    String(String),
    /// A semantic version.
    Version(String),
    /// A whole number.
    Int(i64),
    /// Yes or no.
    Bool(bool),
}

/// Attributes without those whose values are of a kind that a later version
/// wrote: no attribute is worth a record that cannot be read.
fn known_attributes<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<BTreeMap<String, AttributeValue>, D::Error> {
    let all = BTreeMap::<String, serde_json::Value>::deserialize(deserializer)?;
    Ok(all.into_iter().filter_map(|(key, value)| Some((key, serde_json::from_value(value).ok()?))).collect())
}

/// A foreign GPU instance: where it is and what it takes away.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Occupied {
    /// The memory slices it occupies.
    pub placement: Placement,
    /// What it takes out of the counter set, slices included.
    pub cost: Counters,
}

impl GpuModel {
    /// What a GPU offers. `foreign` are its GPU instances that no journal
    /// entry names; the caller decided that under the GPU's lock.
    pub fn of(settings: &Settings, inventory: &Inventory, gpu: &Gpu, foreign: &[GpuInstance]) -> Self {
        // A GPU that names profiles but no placement cannot be partitioned.
        let mig = gpu.mig.as_ref().filter(|mig| possible_partitions(mig).next().is_some());
        let policy = settings.mig_mode_policy(gpu);
        let (whole, partitions) = match (mig, policy) {
            (None, _) => (true, false),
            (Some(_), MigModePolicy::Manage) => (true, true),
            (Some(mig), MigModePolicy::Keep) => {
                (mig.current == MigMode::Disabled, mig.current == MigMode::Enabled)
            }
        };
        let counters = Counters::of_gpu(gpu, mig);
        let foreign_here = mig.map_or(&[][..], |_| foreign);
        let mut devices = BTreeMap::new();
        if whole {
            let mode = mig.map(|_| match policy {
                MigModePolicy::Manage => mig_mode::MANAGED,
                // Only what is off is published as a whole.
                MigModePolicy::Keep => mig_mode::DISABLED,
            });
            devices.insert(DeviceName::whole(gpu.pci), whole_gpu(inventory, gpu, mode, &counters));
        }
        if let Some(mig) = mig.filter(|_| partitions) {
            for (profile, placement) in possible_partitions(mig) {
                let name = DeviceName::partition(gpu.pci, &profile.name, placement.start);
                // Two profiles of one name cannot be told apart by name, and a
                // name the API refuses would cost the node all its slices.
                let publishable = settings.mig_profiles.admits(&profile.name)
                    && !devices.contains_key(&name)
                    && DeviceName::parse(name.as_str()).is_ok();
                if !publishable {
                    continue;
                }
                let instance = foreign_here
                    .iter()
                    .find(|instance| instance.profile == profile.id && instance.placement == placement)
                    .filter(|_| settings.foreign_partitions == ForeignPartitions::Publish);
                let device = partition(inventory, gpu, mig, profile, placement, instance);
                // A vGPU has the GPU instances that its hypervisor made: more
                // cannot be made in the guest.
                if !gpu.vgpu_guest || device.partition().is_some_and(|partition| partition.fixed) {
                    devices.insert(name, device);
                }
            }
        }
        let occupied = |instance: &GpuInstance| Occupied {
            placement: instance.placement,
            // What an instance of an unknown profile takes cannot be known:
            // nothing is offered beside it.
            cost: mig.and_then(|mig| mig.profile(instance.profile)).map_or_else(
                || counters.clone(),
                |profile| Counters::of_partition(profile, instance.placement),
            ),
        };
        Self {
            pci: gpu.pci,
            mode: mig.map(|mig| mig.current),
            foreign: foreign_here.iter().map(occupied).collect(),
            counters,
            devices,
            untold: attributes::untold(gpu),
        }
    }
}

/// Every profile at every placement.
fn possible_partitions(mig: &Mig) -> impl Iterator<Item = (&Profile, Placement)> {
    mig.profiles
        .iter()
        .flat_map(|profile| counters::placements(profile).map(move |placement| (profile, placement)))
}

/// A whole GPU; `mode` is what becomes of its MIG mode, absent without MIG.
fn whole_gpu(
    inventory: &Inventory,
    gpu: &Gpu,
    mode: Option<&'static str>,
    counters: &Counters,
) -> ModelDevice {
    let mut attributes = Attributes::of_gpu(inventory, gpu);
    attributes.bool(attribute::MIG_CAPABLE, mode.is_some());
    if let Some(mode) = mode {
        attributes.string(attribute::MIG_MODE, mode);
    }
    // Partitions reach nothing through NVLink.
    attributes.nvlink(gpu);
    attributes.string(attribute::TYPE, device_type::GPU);
    attributes.string(attribute::UUID, &gpu.uuid);
    // NVML does not tell the memory of every board; zero would be a lie.
    let memory = (gpu.memory.0 > 0).then(|| (Amount::Memory.capacity().to_owned(), gpu.memory.0));
    ModelDevice {
        kind: DeviceKind::Whole,
        attributes: attributes.into_values(),
        capacity: memory.into_iter().collect(),
        consumes: counters.clone(),
        reserves: Counters::default(),
    }
}

/// A partition; a static one where a foreign instance with one full compute
/// instance stands at its placement.
fn partition(
    inventory: &Inventory,
    gpu: &Gpu,
    mig: &Mig,
    profile: &Profile,
    placement: Placement,
    foreign: Option<&GpuInstance>,
) -> ModelDevice {
    let existing = foreign.and_then(|instance| match instance.compute_instances.as_slice() {
        [only] if only.full => Some(only),
        _ => None,
    });
    let mut attributes = Attributes::of_gpu(inventory, gpu);
    attributes.string(attribute::TYPE, device_type::MIG);
    attributes.string(attribute::PARENT_UUID, &gpu.uuid);
    attributes.string(attribute::PROFILE, profile.name.as_str());
    if let Some(compute_instance) = existing {
        attributes.string(attribute::UUID, &compute_instance.uuid);
    }
    let crowding =
        possible_partitions(mig).filter(|(_, other)| other.overlaps(placement)).count().saturating_sub(1);
    let cost = Counters::of_partition(profile, placement);
    let (consumes, reserves) =
        if existing.is_some() { (Counters::default(), cost) } else { (cost, Counters::default()) };
    ModelDevice {
        kind: DeviceKind::Partition(Partition {
            profile: profile.id,
            profile_name: profile.name.clone(),
            placement,
            crowding: u32::try_from(crowding).unwrap_or(u32::MAX),
            fixed: existing.is_some(),
        }),
        attributes: attributes.into_values(),
        capacity: Amount::ALL
            .into_iter()
            .map(|amount| (amount.capacity().to_owned(), counters::amount_of(profile, amount)))
            .collect(),
        consumes,
        reserves,
    }
}

#[cfg(test)]
mod tests;
