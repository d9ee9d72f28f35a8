//! The journal's format: one file for each claim that has, or may have,
//! something on this node.
//!
//! A file is one JSON object with a fixed frame, `{"sha256":"…","entry":…}`;
//! the checksum is over the bytes of the entry as they stand, never over a
//! value serialised again, so that a field that is added later does not make
//! older files look broken.
//!
//! Of a later version, what an entry has beside the fields of this one is kept,
//! and so are devices and steps of other kinds, whole: such a device keeps its
//! GPU from others. Fields that a later version adds *within* a known kind are
//! lost when this one writes the entry, so it must not rely on them alone.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::claim::{Allocated, ClaimName, gpus_of};
use crate::inventory::{ComputeInstanceId, GpuInstance, GpuInstanceId, Placement, ProfileId};
use crate::names::{ClaimUid, PciAddress};
use crate::step::{PartitionProgress, PartitionStep, Step};

/// The version this code writes. One version back and forth is read.
pub const VERSION: u32 = 1;

/// File names hold at most this many addresses: a name has at most 255 bytes.
const MAX_GPUS_IN_NAME: usize = 12;

/// The kernel's id of the running boot.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BootId(pub String);

/// What is remembered of a claim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Entry {
    /// The format's version.
    pub version: u32,
    /// The claim.
    pub uid: ClaimUid,
    /// The claim's name, for messages and for reading it from the API.
    pub claim: ClaimName,
    /// The boot in which the steps were done.
    pub boot_id: BootId,
    /// What was allocated.
    pub allocation: Vec<Allocated>,
    /// What each device is, in the order of the allocation.
    pub devices: Vec<Device>,
    /// What was, or is to be, done.
    pub steps: Vec<Step>,
    /// How far the whole is.
    pub phase: Phase,
    /// Why the last attempt to finish or undo it did not succeed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Fields of a later version.
    #[serde(flatten)]
    pub unknown: BTreeMap<String, Value>,
}

/// How far an entry is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Phase {
    /// Being prepared, or left in the middle of it.
    Started,
    /// Prepared: the kubelet was, or could have been, answered.
    Completed,
    /// Being undone, or left in the middle of it.
    Undoing,
}

/// A word for log lines.
impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Started => "started",
            Self::Completed => "completed",
            Self::Undoing => "undoing",
        })
    }
}

/// What an allocated device is on the hardware.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "device", rename_all = "camelCase")]
pub enum Device {
    /// A whole GPU.
    Whole {
        /// The GPU.
        gpu: PciAddress,
    },
    /// A partition that a step of this entry makes.
    Partition {
        /// The GPU.
        gpu: PciAddress,
        /// The profile.
        profile: ProfileId,
        /// Where it is.
        placement: Placement,
    },
    /// A partition that somebody else made, and that is never destroyed here.
    #[serde(rename_all = "camelCase")]
    Fixed {
        /// The GPU.
        gpu: PciAddress,
        /// The profile.
        profile: ProfileId,
        /// Where it is.
        placement: Placement,
        /// Its GPU instance.
        instance: GpuInstanceId,
        /// Its compute instance.
        compute_instance: ComputeInstanceId,
        /// Its UUID.
        uuid: String,
    },
    /// A device of a later version. It is kept, and may be all of its GPU.
    #[serde(untagged)]
    Unknown(Value),
}

impl Device {
    /// The GPU it is on, as far as this version can tell.
    pub fn gpu(&self) -> Option<PciAddress> {
        match self {
            Self::Whole { gpu } | Self::Partition { gpu, .. } | Self::Fixed { gpu, .. } => Some(*gpu),
            Self::Unknown(value) => gpu_of(value),
        }
    }

    /// Whether it may be on a GPU.
    pub fn may_be_on(&self, gpu: PciAddress) -> bool {
        self.gpu().is_none_or(|on| on == gpu)
    }

    /// The memory slices it takes; absent where it may take all.
    pub fn placement(&self) -> Option<Placement> {
        match self {
            Self::Whole { .. } | Self::Unknown(_) => None,
            Self::Partition { placement, .. } | Self::Fixed { placement, .. } => Some(*placement),
        }
    }

    /// Whether both cannot be in use at once.
    pub fn overlaps(&self, other: &Self) -> bool {
        self.gpu().is_none_or(|gpu| other.may_be_on(gpu))
            && match (self.placement(), other.placement()) {
                (Some(ours), Some(theirs)) => ours.overlaps(theirs),
                _ => true,
            }
    }
}

impl Entry {
    /// The GPUs it touches. Its file may be written only by who holds the
    /// locks of all of them.
    pub fn gpus(&self) -> BTreeSet<PciAddress> {
        let mut gpus = gpus_of(&self.allocation);
        gpus.extend(self.devices.iter().filter_map(Device::gpu));
        gpus.extend(self.steps.iter().filter_map(|step| match step {
            Step::MigMode(step) => Some(step.gpu),
            Step::Partition(step) => Some(step.gpu),
            Step::Unknown(value) => gpu_of(value),
        }));
        gpus
    }

    /// Its steps that make partitions.
    pub fn partitions(&self) -> impl Iterator<Item = &PartitionStep> {
        self.steps.iter().filter_map(|step| match step {
            Step::Partition(step) => Some(step),
            Step::MigMode(_) | Step::Unknown(_) => None,
        })
    }

    /// The step that makes a partition.
    pub fn partition(&self, gpu: PciAddress, placement: Placement) -> Option<&PartitionStep> {
        self.partitions().find(|step| step.gpu == gpu && step.placement == placement)
    }

    /// Whether a GPU instance was made for this entry.
    pub fn owns(&self, boot: &BootId, gpu: PciAddress, instance: &GpuInstance) -> bool {
        let owns = |step: &PartitionStep| match self.phase {
            Phase::Started | Phase::Completed => step.owns(instance),
            Phase::Undoing => step.owns_rest(instance),
        };
        self.boot_id == *boot && self.partitions().any(|step| step.gpu == gpu && owns(step))
    }

    /// Whether it has devices or steps of a later version: only that knows what
    /// its containers get.
    pub fn is_partly_unknown(&self) -> bool {
        self.devices.iter().any(|device| matches!(device, Device::Unknown(_)))
            || self.steps.iter().any(|step| matches!(step, Step::Unknown(_)))
    }

    /// The devices that nobody else may use as long as this entry stands.
    ///
    /// None for an entry of another boot, until it is prepared again; for one
    /// that is incomplete, what may still be there.
    pub fn occupied(&self, boot: &BootId) -> Vec<&Device> {
        if self.boot_id != *boot {
            return Vec::new();
        }
        self.devices
            .iter()
            .zip(&self.allocation)
            .filter(|(_, allocated)| !allocated.admin_access)
            .map(|(device, _)| device)
            .filter(|device| match (self.phase, device) {
                // What another version does to the hardware is not known.
                (Phase::Completed, _) | (_, Device::Unknown(_)) => true,
                (_, Device::Partition { gpu, placement, .. }) => {
                    self.partition(*gpu, *placement).is_some_and(PartitionStep::occupies)
                }
                // An unfinished prepare was never answered, an unfinished undo
                // was asked for by the kubelet: neither has a user.
                (_, Device::Whole { .. } | Device::Fixed { .. }) => false,
            })
            .collect()
    }

    /// Whether undoing it would have to do something to hardware.
    pub fn has_hardware(&self, boot: &BootId) -> bool {
        self.boot_id == *boot
            && self.steps.iter().any(|step| match step {
                Step::MigMode(_) => false,
                Step::Partition(step) => step.occupies(),
                Step::Unknown(_) => true,
            })
    }

    /// Whether every partition is there as far as the entry knows.
    pub fn is_ready(&self) -> bool {
        self.partitions().all(|step| matches!(step.progress, PartitionProgress::Ready { .. }))
    }

    /// The file's content.
    pub fn encode(&self) -> Vec<u8> {
        // Serialising these types cannot fail: no map has keys but strings.
        let body = serde_json::to_vec(self).unwrap_or_default();
        let mut bytes = format!("{PREFIX}{}{MIDDLE}", hex(&Sha256::digest(&body))).into_bytes();
        bytes.extend_from_slice(&body);
        bytes.extend_from_slice(SUFFIX);
        bytes
    }

    /// Reads a file's content.
    pub fn decode(bytes: &[u8]) -> Result<Self, EntryError> {
        let rest = bytes.strip_prefix(PREFIX.as_bytes()).ok_or(EntryError::Frame)?;
        let (sum, rest) = rest.split_at_checked(64).ok_or(EntryError::Frame)?;
        let body = rest
            .strip_prefix(MIDDLE.as_bytes())
            .and_then(|rest| rest.strip_suffix(SUFFIX))
            .ok_or(EntryError::Frame)?;
        if hex(&Sha256::digest(body)).as_bytes() != sum {
            return Err(EntryError::Checksum);
        }
        let version: VersionOnly = serde_json::from_slice(body).map_err(EntryError::Content)?;
        if version.version.abs_diff(VERSION) > 1 {
            return Err(EntryError::Version(version.version));
        }
        serde_json::from_slice(body).map_err(EntryError::Content)
    }

    /// The name of its file: `<uid>_<pci>_….json`.
    pub fn file_name(&self) -> String {
        file_name(&self.uid, &self.gpus())
    }
}

/// Where a step or device of a later version says which GPU it is about, as all
/// do so far.
fn gpu_of(value: &Value) -> Option<PciAddress> {
    value.get("gpu")?.as_str()?.parse().ok()
}

const PREFIX: &str = "{\"sha256\":\"";
const MIDDLE: &str = "\",\"entry\":";
const SUFFIX: &[u8] = b"}\n";

#[derive(Deserialize)]
struct VersionOnly {
    version: u32,
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        text.push(char::from_digit(u32::from(byte >> 4), 16).unwrap_or('0'));
        text.push(char::from_digit(u32::from(byte & 15), 16).unwrap_or('0'));
        text
    })
}

/// Why a journal file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum EntryError {
    /// It does not have the fixed frame.
    #[error("the file is not a journal entry, or it was cut")]
    Frame,
    /// The content is not what was written.
    #[error("the checksum does not fit the content")]
    Checksum,
    /// Written by a version too far away.
    #[error("version {0} of the format is not known here (this is version {VERSION})")]
    Version(u32),
    /// Not the fields that are needed.
    #[error("the content is not a journal entry")]
    Content(#[source] serde_json::Error),
}

/// The name of a claim's file.
pub fn file_name(uid: &ClaimUid, gpus: &BTreeSet<PciAddress>) -> String {
    if gpus.len() > MAX_GPUS_IN_NAME {
        return format!("{uid}_all.json");
    }
    let mut name = uid.to_string();
    for gpu in gpus {
        name.push('_');
        name.push_str(&gpu.dashed());
    }
    name.push_str(".json");
    name
}

/// What the name of a journal file tells without its content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileName {
    /// The claim.
    pub uid: ClaimUid,
    /// Its GPUs.
    pub gpus: GpusInName,
}

/// The GPUs that a file name tells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GpusInName {
    /// More than a name can hold.
    All,
    /// These.
    These(BTreeSet<PciAddress>),
}

impl GpusInName {
    /// Whether a GPU may be among them.
    pub fn may_include(&self, gpu: PciAddress) -> bool {
        match self {
            Self::All => true,
            Self::These(gpus) => gpus.contains(&gpu),
        }
    }
}

impl FileName {
    /// Reads a file's name; absent where it is none of a journal's.
    pub fn parse(name: &str) -> Option<Self> {
        let mut parts = name.strip_suffix(".json")?.split('_');
        let uid = parts.next()?.parse().ok()?;
        let parts: Vec<&str> = parts.collect();
        let gpus = if parts == ["all"] {
            GpusInName::All
        } else {
            GpusInName::These(
                parts.iter().map(|part| PciAddress::parse_dashed(part).ok()).collect::<Option<_>>()?,
            )
        };
        Some(Self { uid, gpus })
    }
}

#[cfg(test)]
mod tests;
