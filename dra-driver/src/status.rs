//! What a node's operator wants to see, as data: the answer of `kerf node` on
//! its status socket, drawn by `kerf status`.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::Device;
use kerf_api::attributes::{Amount, attribute};
use kerf_api::quantity::Quantity;
use serde::{Deserialize, Serialize};

use crate::claim::ClaimName;
use crate::inventory::{Bytes, Gpu, Inventory, MigMode, Placement};
use crate::journal::{self, BootId, Entry, Phase};
use crate::model::{ForeignPartitions, MigModePolicy, Settings};
use crate::names::{DeviceName, PciAddress, ProfileName};
use crate::taint;

/// A node at one instant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeStatus {
    /// The node's name.
    pub node: String,
    /// The driver name.
    pub driver: String,
    /// The version of kerf.
    pub version: String,
    /// The NVIDIA driver's version, where there is one.
    pub nvidia_driver: Option<String>,
    /// What is missing until the node is ready, a sentence each; none when it is.
    pub missing: Vec<String>,
    /// What is published.
    pub publication: Publication,
    /// The profiles of `--mig-profiles` that no GPU of the node has.
    #[serde(default)]
    pub absent_profiles: Vec<ProfileName>,
    /// The GPUs, in PCI order.
    pub gpus: Vec<GpuStatus>,
    /// The claims that are not prepared, or not to the end.
    #[serde(default)]
    pub unprepared: Vec<UnpreparedClaim>,
}

/// What the API server holds of this node.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Publication {
    /// The pool.
    pub pool: String,
    /// The generation of the pool that is stored.
    pub generation: i64,
    /// The number of ResourceSlices that are stored.
    pub slices: usize,
}

/// A GPU at one instant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuStatus {
    /// The name of the whole GPU's device.
    pub name: DeviceName,
    /// Its address.
    pub pci: PciAddress,
    /// Whether it does not answer, or is not there any more. What is said of it
    /// then is what was published.
    #[serde(default)]
    pub lost: bool,
    /// Its product name; empty where nobody knows it.
    pub product: String,
    /// The board's memory; 0 where nobody knows it.
    pub memory: Bytes,
    /// Its MIG mode; absent where it has no MIG profiles.
    pub mig: Option<MigMode>,
    /// What of it is offered, in whichever MIG mode it is.
    #[serde(default)]
    pub offered: Offered,
    /// How many memory slices it has; 0 where it has no MIG profiles.
    pub memory_slices: u32,
    /// The claims that hold the whole GPU, `namespace/name`.
    pub held_by: Vec<String>,
    /// The partitions on it, ordered by start.
    pub partitions: Vec<PartitionStatus>,
    /// What keeps it from being allocated, a sentence each.
    pub conditions: Vec<String>,
    /// What of it containers cannot use, or may not be able to, a sentence each:
    /// what the kubelet is told of its devices.
    #[serde(default)]
    pub health: Vec<String>,
}

/// What of a GPU is offered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Offered {
    /// The whole GPU and partitions: the MIG mode follows the claims.
    #[default]
    Both,
    /// The whole GPU: it has no MIG, or MIG is kept off.
    Whole,
    /// Partitions: MIG is kept on.
    Partitions,
    /// Nothing: a vGPU guest in MIG mode has the partitions that its hypervisor
    /// made, and there are none, or the settings ignore them.
    Nothing,
}

/// A partition at one instant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PartitionStatus {
    /// The profile's name.
    pub profile: String,
    /// Where it is.
    pub placement: Placement,
    /// The claim that holds it, `namespace/name`; absent for a partition that
    /// kerf did not make.
    pub held_by: Option<String>,
}

/// A prepare that did not succeed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FailedPrepare {
    /// The claim, as the kubelet names it.
    pub claim: ClaimName,
    /// Its UID, as the kubelet says it.
    pub uid: String,
    /// Why, as a sentence.
    pub error: String,
    /// When, as RFC 3339 writes it.
    pub at: String,
}

/// A claim that was asked for, or has something here, and is not prepared.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct UnpreparedClaim {
    /// The claim.
    pub claim: ClaimName,
    /// Its UID.
    pub uid: String,
    /// How far what it has here is; absent where it has nothing.
    pub phase: Option<Phase>,
    /// Whether what it has is of a former boot, and so not there any more.
    pub former_boot: bool,
    /// When its last prepare failed, as RFC 3339 writes it; absent where none
    /// did since `kerf node` started.
    pub failed_at: Option<String>,
    /// Why that failed, or else why it could not be finished or undone.
    pub error: Option<String>,
}

/// The claims that are not prepared, by name.
pub fn unprepared(entries: &[&Entry], boot: &BootId, failed: &[FailedPrepare]) -> Vec<UnpreparedClaim> {
    let mut claims: BTreeMap<String, UnpreparedClaim> = BTreeMap::new();
    for entry in entries {
        let uid = entry.uid.to_string();
        let former_boot = entry.boot_id != *boot;
        let whole = entry.phase == Phase::Completed && entry.error.is_none() && !former_boot;
        // A claim that is prepared and was asked for anew, in vain, is both.
        if whole && failed.iter().all(|failed| failed.uid != uid) {
            continue;
        }
        claims.insert(
            uid.clone(),
            UnpreparedClaim {
                claim: entry.claim.clone(),
                uid,
                phase: Some(entry.phase),
                former_boot,
                failed_at: None,
                error: entry.error.clone(),
            },
        );
    }
    for failed in failed {
        let claim = claims.entry(failed.uid.clone()).or_insert_with(|| UnpreparedClaim {
            claim: failed.claim.clone(),
            uid: failed.uid.clone(),
            phase: None,
            former_boot: false,
            failed_at: None,
            error: None,
        });
        claim.failed_at = Some(failed.at.clone());
        claim.error = Some(failed.error.clone());
    }
    let mut claims: Vec<UnpreparedClaim> = claims.into_values().collect();
    claims.sort_by(|one, other| one.claim.cmp(&other.claim));
    claims
}

/// Describes GPUs for an operator: what is there, whose it is, and what of it
/// is not given out.
pub fn gpus(
    settings: &Settings,
    inventory: &Inventory,
    entries: &[&Entry],
    boot: &BootId,
    published: &[Device],
) -> Vec<GpuStatus> {
    let mut gpus: Vec<GpuStatus> =
        inventory.gpus.iter().map(|gpu| describe(settings, gpu, entries, boot)).collect();
    // A GPU that is lost is still published, and claims may still hold it.
    let known = published
        .iter()
        .filter_map(gpu_of)
        .chain(entries.iter().flat_map(|entry| entry.gpus()))
        .chain(inventory.unreadable.iter().filter_map(|gpu| gpu.pci));
    for pci in known {
        if gpus.iter().all(|gpu| gpu.pci != pci) {
            gpus.push(lost(pci, entries, published));
        }
    }
    for gpu in &mut gpus {
        let of_gpu: Vec<&Device> =
            published.iter().filter(|device| gpu_of(device) == Some(gpu.pci)).collect();
        // Of one that hangs, the last inventory is known.
        gpu.lost |= of_gpu
            .iter()
            .flat_map(|device| device.taints.iter().flatten())
            .any(|found| taint::is_gpu_lost(&settings.driver, found));
        let taints = of_gpu.iter().flat_map(|device| device.taints.iter().flatten());
        gpu.conditions =
            conditions(taints.map(|taint| (taint.key.as_str(), taint.value.as_deref().unwrap_or_default())));
        let errors = inventory.unreadable.iter().filter(|unreadable| unreadable.pci == Some(gpu.pci));
        gpu.conditions.extend(errors.map(|unreadable| unreadable.error.clone()));
    }
    gpus.sort_by_key(|gpu| gpu.pci);
    gpus
}

fn gpu_of(device: &Device) -> Option<PciAddress> {
    DeviceName::parse(&device.name).ok()?.gpu()
}

fn describe(settings: &Settings, gpu: &Gpu, entries: &[&Entry], boot: &BootId) -> GpuStatus {
    let mig = gpu.mig.as_ref();
    let partitions = mig.into_iter().flat_map(|mig| {
        mig.instances.iter().map(move |instance| PartitionStatus {
            profile: mig.profile(instance.profile).map_or_else(
                || format!("profile {}", instance.profile.0),
                |profile| profile.name.to_string(),
            ),
            placement: instance.placement,
            held_by: entries
                .iter()
                .find(|entry| entry.owns(boot, gpu.pci, instance))
                .map(|entry| entry.claim.to_string()),
        })
    });
    let mut partitions: Vec<PartitionStatus> = partitions.collect();
    partitions.sort_by_key(|partition| partition.placement);
    let placements = mig.into_iter().flat_map(|mig| &mig.profiles).flat_map(|profile| &profile.placements);
    GpuStatus {
        name: DeviceName::whole(gpu.pci),
        pci: gpu.pci,
        lost: false,
        product: gpu.product.clone(),
        memory: gpu.memory,
        mig: mig.map(|mig| mig.current),
        offered: match (mig, settings.mig_mode_policy(gpu)) {
            (Some(mig), _)
                if gpu.vgpu_guest
                    && mig.current == MigMode::Enabled
                    && (mig.instances.is_empty()
                        || settings.foreign_partitions == ForeignPartitions::Ignore) =>
            {
                Offered::Nothing
            }
            (Some(mig), MigModePolicy::Keep) if mig.current == MigMode::Enabled => Offered::Partitions,
            (Some(_), MigModePolicy::Manage) => Offered::Both,
            (Some(_), MigModePolicy::Keep) | (None, _) => Offered::Whole,
        },
        memory_slices: placements
            .map(|placement| placement.start.saturating_add(placement.size))
            .max()
            .unwrap_or(0),
        held_by: whole_holders(gpu.pci, entries),
        partitions,
        conditions: Vec::new(),
        health: Vec::new(),
    }
}

/// A GPU that nobody can ask: what was published of it, and who holds it.
fn lost(pci: PciAddress, entries: &[&Entry], published: &[Device]) -> GpuStatus {
    let name = DeviceName::whole(pci);
    let devices = || published.iter().filter(|device| gpu_of(device) == Some(pci));
    let text = |device: &Device, key: &str| device.attributes.as_ref()?.get(key)?.string.clone();
    let memory = devices().find(|device| device.name == name.as_str()).and_then(|device| {
        let memory = &device.capacity.as_ref()?.get(Amount::Memory.capacity())?.value;
        Quantity::try_from(memory).ok()?.units()
    });
    let held = entries.iter().flat_map(|entry| {
        let devices = entry.devices.iter().zip(&entry.allocation);
        devices.map(move |(device, allocated)| (entry, device, allocated))
    });
    let partitions =
        held.filter(|(_, device, _)| device.gpu() == Some(pci)).filter_map(|(entry, device, allocated)| {
            let (journal::Device::Partition { profile, .. } | journal::Device::Fixed { profile, .. }) =
                device
            else {
                return None;
            };
            let published = devices().find(|published| published.name == allocated.device.as_str());
            let profile = published
                .and_then(|published| text(published, attribute::PROFILE))
                .unwrap_or_else(|| format!("profile {}", profile.0));
            Some(PartitionStatus {
                profile,
                placement: device.placement()?,
                held_by: Some(entry.claim.to_string()),
            })
        });
    let mut partitions: Vec<PartitionStatus> = partitions.collect();
    partitions.sort_by_key(|partition| partition.placement);
    GpuStatus {
        pci,
        lost: true,
        product: devices().find_map(|device| text(device, attribute::PRODUCT_NAME)).unwrap_or_default(),
        memory: Bytes(memory.unwrap_or(0)),
        mig: None,
        offered: Offered::default(),
        memory_slices: 0,
        held_by: whole_holders(pci, entries),
        partitions,
        conditions: Vec::new(),
        health: Vec::new(),
        name,
    }
}

fn whole_holders(pci: PciAddress, entries: &[&Entry]) -> Vec<String> {
    let whole = DeviceName::whole(pci);
    entries
        .iter()
        .filter(|entry| entry.allocation.iter().any(|allocated| allocated.device == whole))
        .map(|entry| entry.claim.to_string())
        .collect()
}

/// The taints of a GPU's devices, keys and values, as one sentence for each kind.
pub(crate) fn conditions<'a>(taints: impl Iterator<Item = (&'a str, &'a str)>) -> Vec<String> {
    let mut kinds: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    for taint in taints {
        *kinds.entry(taint).or_default() += 1;
    }
    kinds
        .into_iter()
        .map(|((key, value), count)| {
            let devices = if count == 1 { "device is" } else { "devices are" };
            format!("{count} {devices} not given out: {key}={value}")
        })
        .collect()
}

#[cfg(test)]
mod tests;
