//! The settings that decide what of a node is published.

use std::collections::BTreeSet;
use std::str::FromStr;

use crate::inventory::{Gpu, Inventory};
use crate::names::{DriverName, ProfileName};

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
    /// The names of it that no GPU of a node has. None where that cannot be
    /// told: a GPU that cannot be read may have them, and a node without MIG
    /// gets the fleet's one value too.
    pub fn absent(&self, inventory: &Inventory) -> Vec<ProfileName> {
        let Self::Only(names) = self else { return Vec::new() };
        let profiles: BTreeSet<&ProfileName> = inventory
            .gpus
            .iter()
            .flat_map(|gpu| &gpu.mig)
            .flat_map(|mig| &mig.profiles)
            .map(|profile| &profile.name)
            .collect();
        if profiles.is_empty() || !inventory.unreadable.is_empty() {
            return Vec::new();
        }
        names.iter().filter(|name| !profiles.contains(name)).cloned().collect()
    }

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
    type Err = SettingError;

    fn from_str(text: &str) -> Result<Self, SettingError> {
        let name = |text: &str| {
            ProfileName::new(text).ok().filter(|name| is_profile(name.as_str())).ok_or_else(|| {
                SettingError::new(text, "a MIG profile such as `1g.10gb`, nor `all` or `none`")
            })
        };
        match text.trim() {
            "all" => Ok(Self::All),
            "none" => Ok(Self::Only(BTreeSet::new())),
            names => names.split(',').map(name).collect::<Result<_, _>>().map(Self::Only),
        }
    }
}

/// Whether a text has the form of all profiles so far: `<n>g.<n>gb`, then what
/// sets it apart from its siblings. What a driver names is not held to it; what
/// a person wrote otherwise is a slip.
fn is_profile(text: &str) -> bool {
    let number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    text.split_once("g.").and_then(|(slices, rest)| Some((slices, rest.split_once("gb")?))).is_some_and(
        |(slices, (size, apart))| {
            number(slices) && number(size) && (apart.is_empty() || apart.starts_with(['+', '-']))
        },
    )
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{Model, gpu, inventory};
    use crate::inventory::UnreadableGpu;

    fn filter(text: &str) -> ProfileFilter {
        text.parse().expect("a filter")
    }

    #[test]
    fn a_name_that_cannot_be_a_profile_is_refused_with_the_name_in_the_sentence() {
        for text in
            ["1g.5gb", "1g.10gb+me,3g.40gb", "1g.24gb-me,2g.48gb+me.all,4g.96gb+gfx", "1g.0gb", "none"]
        {
            assert!(text.parse::<ProfileFilter>().is_ok(), "{text}");
        }
        for (text, wrong) in [
            ("1g10gb", "1g10gb"),
            ("1g.10gb,large", "large"),
            ("1g.10gb,", ""),
            ("", ""),
            ("1g.10", "1g.10"),
            ("1c.2g.20gb", "1c.2g.20gb"),
            ("1g.10gb.me", "1g.10gb.me"),
            ("1g.10gbx", "1g.10gbx"),
            ("19", "19"),
        ] {
            let error = text.parse::<ProfileFilter>().expect_err(text).to_string();
            assert_eq!(
                error,
                format!("`{wrong}` is not a MIG profile such as `1g.10gb`, nor `all` or `none`")
            );
        }
    }

    #[test]
    fn names_that_no_gpu_has_are_told_where_that_is_known() {
        let mut node = inventory([gpu(Model::H100, "0000:17:00.0"), gpu(Model::L4, "0000:65:00.0")]);
        let absent = |filter: &ProfileFilter, node: &Inventory| {
            filter.absent(node).iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        let wanted = filter("1g.10gb,1g.5gb,3g.40gb");
        assert_eq!(absent(&wanted, &node), ["1g.5gb"]);
        for all in ["all", "none", "1g.10gb"] {
            assert!(absent(&filter(all), &node).is_empty(), "{all}");
        }
        let no_mig = inventory([gpu(Model::L4, "0000:65:00.0")]);
        assert!(absent(&wanted, &no_mig).is_empty());
        node.unreadable.push(UnreadableGpu {
            index: 1,
            pci: None,
            error: "it hangs".to_owned(),
            lost: false,
        });
        assert!(absent(&wanted, &node).is_empty());
    }
}
