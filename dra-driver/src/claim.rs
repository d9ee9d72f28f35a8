//! A ResourceClaim as the node needs it: what of its allocation is ours, with
//! the configs resolved.
//!
//! Whether the devices exist is not decided here (see [`crate::plan`]); that
//! the claim may be prepared at all is.

use std::collections::BTreeSet;
use std::fmt;

use k8s_openapi::api::resource::v1::{DeviceAllocationConfiguration, OpaqueDeviceConfiguration};
use k8s_openapi::apimachinery::pkg::runtime::RawExtension;
use kerf_api::config::{ConfigError, ConfigTarget, Configs, DeviceConfig};
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::names::{ClaimUid, DeviceName, DriverName, NameError, PciAddress};

/// What identifies a claim to people.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ClaimName {
    /// Its namespace.
    pub namespace: String,
    /// Its name there.
    pub name: String,
}

impl fmt::Display for ClaimName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// A ResourceClaim, as much of it as a node asks for. What its users wrote
/// beside that is passed over, and configs stay text until they are known to be
/// ours: nested deeply enough, that of another driver would make the claim
/// unreadable.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct ClaimObject {
    metadata: Metadata,
    status: Option<Status>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Metadata {
    uid: Option<String>,
    namespace: Option<String>,
    name: Option<String>,
    deletion_timestamp: Option<IgnoredAny>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Status {
    allocation: Option<Allocation>,
    reserved_for: Option<Vec<IgnoredAny>>,
}

#[derive(Debug, Clone, Deserialize)]
struct Allocation {
    devices: Option<Devices>,
}

#[derive(Debug, Clone, Deserialize)]
struct Devices {
    results: Option<Vec<DeviceResult>>,
    config: Option<Vec<Config>>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
struct DeviceResult {
    request: String,
    driver: String,
    pool: String,
    device: String,
    admin_access: Option<bool>,
    share_id: Option<String>,
}

#[derive(Debug, Clone, Deserialize)]
struct Config {
    source: String,
    requests: Option<Vec<String>>,
    opaque: Option<Opaque>,
}

#[derive(Debug, Clone, Deserialize)]
struct Opaque {
    driver: String,
    parameters: Box<RawValue>,
}

impl ClaimObject {
    /// What identifies it to programs.
    pub fn uid(&self) -> Option<&str> {
        self.metadata.uid.as_deref()
    }
}

impl Config {
    /// The config as the API has it, if it is of a driver.
    fn of(&self, driver: &DriverName) -> Option<Result<DeviceAllocationConfiguration, ClaimError>> {
        let opaque = self.opaque.as_ref().filter(|opaque| opaque.driver == driver.as_str())?;
        let parameters = match serde_json::from_str(opaque.parameters.get()) {
            Ok(parameters) => RawExtension(parameters),
            Err(error) => {
                return Some(Err(ClaimError::UnreadableConfig {
                    driver: driver.clone(),
                    reason: error.to_string(),
                }));
            }
        };
        Some(Ok(DeviceAllocationConfiguration {
            source: self.source.clone(),
            requests: self.requests.clone(),
            opaque: Some(OpaqueDeviceConfiguration { driver: opaque.driver.clone(), parameters }),
        }))
    }
}

/// A claim with what it was allocated of this node's devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// What identifies it to programs.
    pub uid: ClaimUid,
    /// What identifies it to people.
    pub name: ClaimName,
    /// Its results of our driver, in the order of the allocation.
    pub allocation: Vec<Allocated>,
}

/// One result of an allocation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Allocated {
    /// The request, `gpu` or `gpu/sub`.
    pub request: String,
    /// The pool of the device.
    pub pool: String,
    /// The device.
    pub device: DeviceName,
    /// Whether this is administrative access beside other claims.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub admin_access: bool,
    /// Which share of the device, where it is shared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share_id: Option<String>,
    /// The config that applies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config: Option<DeviceConfig>,
}

impl Allocated {
    /// The request's name without the subrequest, as the kubelet wants it.
    pub fn main_request(&self) -> &str {
        self.request.split_once('/').map_or(self.request.as_str(), |(main, _)| main)
    }

    /// What it is called within its claim: `<device>[-<share id>]`.
    pub fn local_name(&self) -> String {
        match &self.share_id {
            Some(share) => format!("{}-{share}", self.device),
            None => self.device.to_string(),
        }
    }
}

/// What helps against an allocation that no node can serve.
pub(crate) const ALLOCATE_ANEW: &str =
    "delete the pod and its claim, and let the scheduler allocate the next";

/// Why a claim cannot be prepared as it stands.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ClaimError {
    /// The API has no claim of that name.
    #[error("the claim does not exist (any more); delete the pod, so that another is made with a claim")]
    NotFound,
    /// There is another claim of the same name.
    #[error(
        "the claim was replaced by another of the same name (UID {found}); delete the pod, so that another gets \
         that claim"
    )]
    Replaced {
        /// The UID it has now.
        found: String,
    },
    /// Being deleted.
    #[error("the claim is being deleted; delete the pod, so that another is made with another claim")]
    BeingDeleted,
    /// Nothing allocated.
    #[error("the claim is not allocated; delete the pod, and let the scheduler place the next")]
    NotAllocated,
    /// Allocated, but nobody may use it.
    #[error("the claim is reserved for no pod; delete the pod, and let the scheduler place the next")]
    NotReserved,
    /// A pool that is not this node's.
    #[error(
        "device `{device}` was allocated from pool `{pool}`, which is not this node's (`{expected}`); delete the \
         pod, and let the scheduler place the next where its claim is allocated"
    )]
    UnknownPool {
        /// As allocated.
        device: String,
        /// As allocated.
        pool: String,
        /// This node's.
        expected: String,
    },
    /// A device of a name this driver never publishes.
    #[error("device `{0}` is none that this driver publishes; {ALLOCATE_ANEW}")]
    UnknownDevice(String),
    /// The same device twice.
    #[error("device `{0}` was allocated twice to the claim; {ALLOCATE_ANEW}")]
    Twice(String),
    /// A name that could not be one.
    #[error(transparent)]
    Name(#[from] NameError),
    /// A config that is nested too deeply, or has a number out of all bounds.
    #[error(
        "a device config for `{driver}` cannot be decoded ({reason}); correct the claim's manifest or its class, then delete claim \
         and pod"
    )]
    UnreadableConfig {
        /// Our driver.
        driver: DriverName,
        /// Why.
        reason: String,
    },
    /// A config that cannot be used.
    #[error(transparent)]
    Config(#[from] ConfigError),
}

impl Claim {
    /// Resolves the claim that a kubelet asked for by `uid`.
    pub fn resolve(
        object: &ClaimObject,
        uid: &ClaimUid,
        driver: &DriverName,
        pool: &str,
    ) -> Result<Self, ClaimError> {
        let metadata = &object.metadata;
        let found = object.uid().unwrap_or_default();
        if found != uid.as_str() {
            return Err(ClaimError::Replaced { found: found.to_owned() });
        }
        if metadata.deletion_timestamp.is_some() {
            return Err(ClaimError::BeingDeleted);
        }
        let status = object.status.as_ref().ok_or(ClaimError::NotAllocated)?;
        let allocation = status.allocation.as_ref().ok_or(ClaimError::NotAllocated)?;
        if status.reserved_for.as_ref().is_none_or(Vec::is_empty) {
            return Err(ClaimError::NotReserved);
        }
        let devices = allocation.devices.as_ref();
        let configs = devices
            .and_then(|devices| devices.config.as_deref())
            .unwrap_or_default()
            .iter()
            .filter_map(|config| config.of(driver))
            .collect::<Result<Vec<_>, _>>()?;
        let configs = Configs::decode(driver.as_str(), &configs)?;
        let allocation = devices
            .and_then(|devices| devices.results.as_deref())
            .unwrap_or_default()
            .iter()
            .filter(|result| result.driver == driver.as_str())
            .map(|result| allocated(result, &configs, pool))
            .collect::<Result<Vec<_>, _>>()?;
        let mut seen = BTreeSet::new();
        for one in &allocation {
            if !one.admin_access && !seen.insert(one.local_name()) {
                return Err(ClaimError::Twice(one.local_name()));
            }
        }
        let text = |value: &Option<String>| value.clone().unwrap_or_default();
        Ok(Self {
            uid: uid.clone(),
            name: ClaimName { namespace: text(&metadata.namespace), name: text(&metadata.name) },
            allocation,
        })
    }

    /// The GPUs it touches.
    pub fn gpus(&self) -> BTreeSet<PciAddress> {
        gpus_of(&self.allocation)
    }
}

/// Whether a claim is allocated just so: its results of a driver in a pool, in
/// their order. Whether it may be prepared, and its configs, are not asked.
pub fn is_allocated(object: &ClaimObject, driver: &DriverName, pool: &str, allocation: &[Allocated]) -> bool {
    let results = object
        .status
        .as_ref()
        .and_then(|status| status.allocation.as_ref()?.devices.as_ref()?.results.as_deref())
        .unwrap_or_default();
    let found = results
        .iter()
        .filter(|result| result.driver == driver.as_str() && result.pool == pool)
        .map(|result| (result.request.as_str(), result.device.as_str(), result.share_id.as_deref()));
    let wanted =
        allocation.iter().map(|one| (one.request.as_str(), one.device.as_str(), one.share_id.as_deref()));
    found.eq(wanted)
}

/// Whether two allocations are the same shares of the same devices for the same
/// requests. The API never changes an allocation, but what is resolved from its
/// configs may be another thing to another version of this code.
pub fn is_same(one: &[Allocated], other: &[Allocated]) -> bool {
    fn keys(all: &[Allocated]) -> impl Iterator<Item = (&str, &str, &DeviceName, &Option<String>)> {
        all.iter().map(|one| (one.request.as_str(), one.pool.as_str(), &one.device, &one.share_id))
    }
    keys(one).eq(keys(other))
}

/// The GPUs that results are on.
pub fn gpus_of(allocation: &[Allocated]) -> BTreeSet<PciAddress> {
    allocation.iter().filter_map(|one| one.device.gpu()).collect()
}

fn allocated(result: &DeviceResult, configs: &Configs, pool: &str) -> Result<Allocated, ClaimError> {
    if result.pool != pool {
        return Err(ClaimError::UnknownPool {
            device: result.device.clone(),
            pool: result.pool.clone(),
            expected: pool.to_owned(),
        });
    }
    let device = DeviceName::parse(&result.device)?;
    let target = target_of(&device).ok_or_else(|| ClaimError::UnknownDevice(result.device.clone()))?;
    if let Some(share) = &result.share_id {
        // It becomes part of CDI device names, where a UUID is harmless.
        share.parse::<ClaimUid>()?;
    }
    Ok(Allocated {
        request: result.request.clone(),
        pool: result.pool.clone(),
        config: configs.for_result(&result.request, target)?,
        device,
        admin_access: result.admin_access.unwrap_or_default(),
        share_id: result.share_id.clone(),
    })
}

fn target_of(device: &DeviceName) -> Option<ConfigTarget> {
    let whole = DeviceName::whole(device.gpu()?);
    match device.as_str().strip_prefix(whole.as_str())? {
        "" => Some(ConfigTarget::Gpu),
        rest if rest.starts_with("-mig-") => Some(ConfigTarget::Mig),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
