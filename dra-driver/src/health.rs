//! Whether containers can still use the devices they have, as the kubelet tells
//! it in the status of their pods (KEP-4680).
//!
//! Only hardware is health. What keeps a device from being given out
//! ([`taint`](crate::taint)) does not concern who has it already: a partition
//! works on when its profile is filtered out or another driver appears.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::claim::ClaimName;
use crate::inventory::{GpuInstance, Inventory};
use crate::journal::{BootId, Device, Entry, Phase};
use crate::names::{DeviceName, PciAddress};
use crate::published::{GpuRecord, LeavingReason};

/// Most bytes of a message; the kubelet cuts what is longer.
const MAX_MESSAGE: usize = 1024;

/// Whether a device can be used. Devices of one GPU share their message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Health {
    /// As far as is known.
    Healthy,
    /// Not any more, for this reason.
    Unhealthy(Arc<str>),
    /// Nobody knows, for this reason.
    Unknown(Arc<str>),
}

/// What is wrong, why, and what to do about it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The driver says that the GPU is lost, or lists it no more.
    #[error(
        "GPU {gpu} is lost, and containers cannot use it any more: {reason}; delete the pods that use it, then reset it or reboot the node"
    )]
    Lost {
        /// The GPU.
        gpu: PciAddress,
        /// How that is seen.
        reason: String,
    },
    /// The GPU is there but could not be read.
    #[error(
        "GPU {gpu} cannot be read, so it is not known whether it works: {reason}; kerf asks again, and the node's kernel log may say more (`dmesg`, lines with NVRM)"
    )]
    Unread {
        /// The GPU.
        gpu: PciAddress,
        /// Why.
        reason: String,
    },
    /// The driver does not answer at all.
    #[error(
        "the node's GPUs cannot be read, so it is not known whether they work: {reason}; kerf asks again, and `kerf doctor` in the node's kerf pod looks for the cause"
    )]
    Unanswered {
        /// Why.
        reason: String,
    },
    /// A partition that kerf made.
    #[error(
        "somebody destroyed the partition that claim {claim} holds, and containers cannot use it any more: delete the claim's pods; kerf makes it again for the next pod"
    )]
    Destroyed {
        /// The claim.
        claim: ClaimName,
    },
    /// A partition that kerf did not make.
    #[error(
        "the partition is not there any more, and containers cannot use it: whoever made it has destroyed it; delete the pods that use it"
    )]
    Gone,
}

impl Fault {
    fn message(&self) -> Arc<str> {
        let mut text = self.to_string();
        text.truncate(text.floor_char_boundary(MAX_MESSAGE));
        text.into()
    }
}

/// What is known of the hardware.
#[derive(Debug, Clone, Copy)]
pub enum Reading<'a> {
    /// The driver does not answer, for this reason.
    Unanswered(&'a str),
    /// It was read.
    Read {
        /// What is there.
        inventory: &'a Inventory,
        /// The held partitions that are not there any more, with who holds them.
        vanished: &'a BTreeMap<DeviceName, ClaimName>,
    },
}

/// The devices of an entry on a GPU that were there when it was prepared and are
/// not among the GPU's instances.
///
/// None of an entry that is worked on, or of another boot: no container has
/// what it describes.
pub fn vanished<'a>(
    entry: &'a Entry,
    boot: &BootId,
    gpu: PciAddress,
    instances: &'a [GpuInstance],
) -> impl Iterator<Item = &'a DeviceName> {
    let lives = entry.phase == Phase::Completed && entry.boot_id == *boot;
    let is_there = move |device: &Device| match device {
        Device::Partition { placement, .. } => entry
            .partition(gpu, *placement)
            .is_none_or(|step| instances.iter().any(|instance| step.owns(instance))),
        Device::Fixed { instance, compute_instance, uuid, .. } => instances.iter().any(|found| {
            let is_same = |compute: &crate::inventory::ComputeInstance| {
                compute.id == *compute_instance && compute.uuid == *uuid
            };
            found.id == *instance && found.compute_instances.iter().any(is_same)
        }),
        Device::Whole { .. } | Device::Unknown(_) => true,
    };
    entry
        .devices
        .iter()
        .zip(&entry.allocation)
        .filter(move |(device, _)| lives && device.gpu() == Some(gpu) && !is_there(device))
        .map(|(_, allocated)| &allocated.device)
}

/// The health of each of some published devices, in their order.
pub(crate) fn of<'a>(
    published: &[DeviceName],
    record: impl Fn(PciAddress) -> Option<&'a GpuRecord>,
    reading: Reading<'_>,
) -> Vec<(DeviceName, Health)> {
    let (inventory, vanished) = match reading {
        Reading::Unanswered(reason) => {
            let unknown = Health::Unknown(Fault::Unanswered { reason: reason.to_owned() }.message());
            return published.iter().map(|name| (name.clone(), unknown.clone())).collect();
        }
        Reading::Read { inventory, vanished } => (inventory, vanished),
    };
    let mut gpus: BTreeMap<Option<PciAddress>, Health> = BTreeMap::new();
    let health = |name: &DeviceName| {
        let pci = name.gpu();
        let gpu = gpus.entry(pci).or_insert_with(|| pci.map_or(Health::Healthy, |pci| gpu(pci, inventory)));
        if *gpu != Health::Healthy {
            return gpu.clone();
        }
        let published = pci.and_then(&record).and_then(|record| record.devices.get(name));
        let is_foreign = published
            .and_then(|published| published.device.partition())
            .is_some_and(|partition| partition.fixed);
        let has_left = published
            .and_then(|published| published.leaving.as_ref())
            .is_some_and(|leaving| leaving.reason == LeavingReason::Lost);
        match vanished.get(name) {
            Some(claim) if !is_foreign => {
                Health::Unhealthy(Fault::Destroyed { claim: claim.clone() }.message())
            }
            None if !has_left => Health::Healthy,
            _ => Health::Unhealthy(Fault::Gone.message()),
        }
    };
    published.iter().cloned().zip(published.iter().map(health)).collect()
}

/// What is not healthy of a GPU's devices, a sentence for each kind.
pub fn sentences(devices: &[(DeviceName, Health)], gpu: PciAddress) -> Vec<String> {
    let mut kinds: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    for (_, health) in devices.iter().filter(|(name, _)| name.gpu() == Some(gpu)) {
        match health {
            Health::Healthy => {}
            Health::Unhealthy(message) => *kinds.entry(("unhealthy", message)).or_default() += 1,
            Health::Unknown(message) => *kinds.entry(("of unknown health", message)).or_default() += 1,
        }
    }
    kinds
        .into_iter()
        .map(|((word, message), count)| {
            let devices = if count == 1 { "device is" } else { "devices are" };
            format!("{count} {devices} {word}: {message}")
        })
        .collect()
}

/// The health of all that is on a GPU. One whose address could not be read may be
/// any that is missing.
fn gpu(gpu: PciAddress, inventory: &Inventory) -> Health {
    if inventory.gpu(gpu).is_some() {
        return Health::Healthy;
    }
    let unreadable =
        |pci: Option<PciAddress>| inventory.unreadable.iter().filter(move |found| found.pci == pci);
    let found = unreadable(Some(gpu))
        .next()
        .or_else(|| unreadable(None).find(|found| !found.lost))
        .or_else(|| unreadable(None).next());
    match found {
        Some(found) if !found.lost => {
            Health::Unknown(Fault::Unread { gpu, reason: found.error.clone() }.message())
        }
        Some(found) => Health::Unhealthy(Fault::Lost { gpu, reason: found.error.clone() }.message()),
        None => {
            let reason = "the driver does not list it any more".to_owned();
            Health::Unhealthy(Fault::Lost { gpu, reason }.message())
        }
    }
}

#[cfg(test)]
mod tests;
