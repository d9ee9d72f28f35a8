//! What is said of a driver: the one thing an author writes.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde::Deserialize;
use serde_json::Value;

/// A driver under test, as its author describes it in YAML.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Profile {
    /// The driver's name.
    pub driver: String,
    /// The Node that it publishes for. With `registry` it is made if there is none,
    /// and taken away at the end.
    pub node: String,
    /// Where claims are made.
    #[serde(default = "default_namespace")]
    pub namespace: String,
    /// Where the driver puts its registration socket.
    #[serde(default)]
    pub registry: Option<PathBuf>,
    /// Where the driver writes CDI specs.
    #[serde(default)]
    pub cdi: Vec<PathBuf>,
    /// The folder in which the driver keeps what it knows, and nothing else.
    #[serde(default)]
    pub state: Option<PathBuf>,
    /// One or two kinds of claims; two of them must be able to live at once.
    #[serde(default)]
    pub claims: Vec<ClaimProfile>,
    /// A kind of claims that get shares of a device (`allowMultipleAllocations`).
    #[serde(default)]
    pub shares: Option<ClaimProfile>,
    /// The driver's command line. `{instance}` stands for a name of its own of
    /// each process, where two can run beside each other; `{kubeconfig}` for a
    /// file that leads to the API server by a way on which there can be trouble.
    #[serde(default)]
    pub start: Vec<String>,
    /// More environment for it, with the same placeholders.
    #[serde(default)]
    pub environment: BTreeMap<String, String>,
    /// A command that makes the driver believe at its next start that the
    /// machine was booted. CDI folders are emptied too.
    #[serde(default)]
    pub reboot: Vec<String>,
    /// Commands that make the devices hang, and answer again.
    #[serde(default)]
    pub hang: Option<Pair>,
    /// Commands that make prepares of the first kind of claims take ten seconds and
    /// more, but not those of the second, and make them fast again.
    #[serde(default)]
    pub slow: Option<Pair>,
    /// Without `registry`: slices may be deleted and edited all the same.
    #[serde(default)]
    pub disturb: bool,
    /// How long things may take.
    #[serde(default)]
    pub limits: Limits,
}

/// Two commands.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pair {
    /// From now on it is so.
    pub begin: Vec<String>,
    /// As before again.
    pub end: Vec<String>,
}

/// A claim that the driver can serve.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ClaimProfile {
    /// The class that its request names.
    pub device_class: String,
    /// Attributes of the devices that may be allocated to it; it gets the first
    /// free one in published order. A name without a domain is of the driver's.
    #[serde(default)]
    pub matching: BTreeMap<String, Value>,
    /// Opaque parameters for the driver.
    #[serde(default)]
    pub parameters: Option<Value>,
    /// What a share consumes of each capacity; two must fit in one device.
    #[serde(default)]
    pub capacity: BTreeMap<String, String>,
}

/// How long things may take, in seconds.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Limits {
    /// From a start to an answering registration socket.
    pub start: f64,
    /// From a change to slices that are right.
    pub publish: f64,
    /// How long nothing may be written when nothing happens.
    pub quiet: f64,
    /// From SIGTERM to the end of the process.
    pub stop: f64,
    /// From a claim's end that nobody told the driver of to its device being free.
    /// None: it waits to be told.
    pub collect: Option<f64>,
}

impl Default for Limits {
    fn default() -> Self {
        // The Go helper looks again 30 s after another's change and keeps its
        // own writes in mind for 60 s.
        Self { start: 60.0, publish: 120.0, quiet: 10.0, stop: 30.0, collect: None }
    }
}

pub(crate) fn seconds(value: f64) -> Duration {
    Duration::try_from_secs_f64(value).unwrap_or(Duration::MAX)
}

fn default_namespace() -> String {
    "default".to_owned()
}

impl Profile {
    /// Reads it from a file.
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("the profile {} cannot be read", path.display()))?;
        Self::parse(&text).with_context(|| format!("the profile {}", path.display()))
    }

    /// Reads it from YAML.
    pub fn parse(text: &str) -> Result<Self> {
        let profile: Self = serde_saphyr::from_str(text)?;
        ensure!(
            profile.claims.len() <= 2,
            "there are {} kinds of claims; at most 2 are used",
            profile.claims.len()
        );
        for path in profile.registry.iter().chain(&profile.state).chain(&profile.cdi) {
            ensure!(path.is_absolute(), "{} is no absolute path", path.display());
        }
        Ok(profile)
    }
}
