//! The settings that decide what of a node is published.

use std::collections::BTreeSet;
use std::str::FromStr;

use crate::inventory::Gpu;
use crate::names::{DriverName, NameError, ProfileName};

/// What the operator chose for this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// The name everything else is derived from.
    pub driver: DriverName,
    /// The node's name.
    pub node: String,
    /// What to do about MIG modes; absent for the default of each GPU.
    pub mig_mode: Option<MigModePolicy>,
    /// Which MIG profiles are published.
    pub mig_profiles: ProfileFilter,
    /// What becomes of GPU instances that somebody else made.
    pub foreign_partitions: ForeignPartitions,
}

impl Settings {
    /// The policy in force for a GPU. Where a mode change needs a GPU reset
    /// (Ampere), or cannot be made (vGPU guests), the mode is kept whatever
    /// was chosen.
    pub fn mig_mode_policy(&self, gpu: &Gpu) -> MigModePolicy {
        if gpu.vgpu_guest || !gpu.architecture.changes_mig_mode_live() {
            MigModePolicy::Keep
        } else {
            self.mig_mode.unwrap_or(MigModePolicy::Manage)
        }
    }
}

/// What kerf does about a GPU's MIG mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MigModePolicy {
    /// Both whole GPU and partitions are published; prepare changes the mode.
    Manage,
    /// Only what the current mode serves is published.
    Keep,
}

impl FromStr for MigModePolicy {
    type Err = SettingError;

    fn from_str(text: &str) -> Result<Self, SettingError> {
        match text {
            "manage" => Ok(Self::Manage),
            "keep" => Ok(Self::Keep),
            _ => Err(SettingError::new(text, "`manage` or `keep`")),
        }
    }
}

/// Which MIG profiles are published.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum ProfileFilter {
    /// Every profile a GPU has.
    #[default]
    All,
    /// These, by name. None of them: no partition is published.
    Only(BTreeSet<ProfileName>),
}

impl ProfileFilter {
    /// Whether a profile is published.
    pub fn admits(&self, profile: &ProfileName) -> bool {
        match self {
            Self::All => true,
            Self::Only(names) => names.contains(profile),
        }
    }
}

/// Reads `all`, `none`, or names with commas between: `1g.10gb,3g.40gb`.
impl FromStr for ProfileFilter {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        match text.trim() {
            "all" => Ok(Self::All),
            "none" => Ok(Self::Only(BTreeSet::new())),
            names => names.split(',').map(ProfileName::new).collect::<Result<_, _>>().map(Self::Only),
        }
    }
}

/// What becomes of GPU instances that are in no journal entry. They are never
/// destroyed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ForeignPartitions {
    /// Those with one compute instance that spans them are published.
    #[default]
    Publish,
    /// They only take away what they occupy.
    Ignore,
}

impl FromStr for ForeignPartitions {
    type Err = SettingError;

    fn from_str(text: &str) -> Result<Self, SettingError> {
        match text {
            "publish" => Ok(Self::Publish),
            "ignore" => Ok(Self::Ignore),
            _ => Err(SettingError::new(text, "`publish` or `ignore`")),
        }
    }
}

/// A setting's text that is none of its values.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not {expected}")]
pub struct SettingError {
    text: String,
    expected: &'static str,
}

impl SettingError {
    fn new(text: &str, expected: &'static str) -> Self {
        Self { text: text.chars().take(80).collect(), expected }
    }
}
