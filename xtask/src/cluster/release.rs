//! The releases of Kubernetes that a cluster can run. One a minor version is
//! enough: what differs between them is which features are on.

use std::fmt;
use std::str::FromStr;

use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};

/// A release of Kubernetes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Release {
    /// What every check runs on.
    #[default]
    #[serde(rename = "1.37.2")]
    Newest,
    /// The oldest that serves all that kerf publishes.
    #[serde(rename = "1.36.3")]
    Oldest,
}

impl Release {
    /// All, the default first.
    pub const ALL: [Self; 2] = [Self::Newest, Self::Oldest];

    /// Its number.
    pub const fn version(self) -> &'static str {
        match self {
            Self::Newest => "1.37.2",
            Self::Oldest => "1.36.3",
        }
    }

    /// What `kubelet --version` reports.
    pub(super) const fn tag(self) -> &'static str {
        match self {
            Self::Newest => "v1.37.2",
            Self::Oldest => "v1.36.3",
        }
    }

    /// The file with its module graph, in `tests/cluster`; its checksums are in
    /// the file of the same name that ends in `.sum`.
    pub(super) const fn module(self) -> &'static str {
        match self {
            Self::Newest => "go.mod",
            Self::Oldest => "1.36.mod",
        }
    }
}

impl fmt::Display for Release {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.version())
    }
}

impl FromStr for Release {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let Some(release) = Self::ALL.into_iter().find(|release| release.version() == text) else {
            let known = Self::ALL.map(Self::version).join(" and ");
            bail!(
                "there is no module graph for Kubernetes {text:?} in tests/cluster; those of {known} are there"
            );
        };
        Ok(release)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_release_is_refused_with_those_that_are_known() {
        let refusal = "1.35.4".parse::<Release>().expect_err("there is no such graph").to_string();
        assert!(refusal.contains("\"1.35.4\"") && refusal.contains("1.37.2 and 1.36.3"), "{refusal}");
    }

    #[test]
    fn a_release_is_spelled_alike_on_the_command_line_in_settings_and_by_its_programs() {
        for release in Release::ALL {
            assert_eq!(release.to_string().parse::<Release>().expect("its own number"), release);
            assert_eq!(serde_json::to_string(&release).expect("JSON"), format!("{:?}", release.version()));
            assert_eq!(release.tag(), format!("v{release}"));
        }
    }
}
