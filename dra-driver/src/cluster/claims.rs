//! Claims, pods and events, as much of them as is asked for. What their users wrote
//! beside that is passed over without being decoded.

use k8s_openapi::jiff::Timestamp;
use serde::Deserialize;
use serde::de::IgnoredAny;

use super::waiting::waits_for;
use super::{Holding, SchedulerEvent};
use crate::claim::ClaimName;
use crate::names::{DeviceName, DriverName};

/// A ResourceClaim of anybody.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct SeenClaim {
    metadata: Metadata,
    #[serde(default)]
    spec: Spec,
    #[serde(default)]
    status: Status,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Metadata {
    uid: String,
    namespace: String,
    pub(super) name: String,
    creation_timestamp: Option<Timestamp>,
    deletion_timestamp: Option<IgnoredAny>,
    owner_references: Vec<Reference>,
}

/// Another object, of whatever kind.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct Reference {
    kind: String,
    resource: String,
    name: String,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct Spec {
    devices: Asked,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct Asked {
    requests: Vec<Request>,
    constraints: Vec<IgnoredAny>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Request {
    name: String,
    exactly: Option<Exactly>,
    first_available: Vec<Exactly>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Exactly {
    /// Only of an alternative.
    name: String,
    device_class_name: String,
    allocation_mode: String,
    count: Option<usize>,
    selectors: Vec<IgnoredAny>,
    tolerations: Vec<IgnoredAny>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Status {
    allocation: Option<Allocation>,
    reserved_for: Vec<Reference>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct Allocation {
    devices: Devices,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct Devices {
    results: Vec<DeviceResult>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct DeviceResult {
    driver: String,
    pool: String,
    device: String,
    admin_access: bool,
}

/// One thing that a claim asks for.
pub(super) struct AskedFor<'a> {
    /// `request`, or `request/alternative`.
    pub(super) name: String,
    pub(super) class: &'a str,
    /// How many; absent for all of a node.
    pub(super) count: Option<usize>,
    /// Whether selectors or constraints say more than the class.
    pub(super) is_narrowed: bool,
    /// Whether taints may leave devices to it.
    pub(super) tolerates: bool,
}

impl SeenClaim {
    /// Whether it holds devices of a driver, or waits for some.
    pub fn concerns(&self, driver: &DriverName) -> bool {
        self.holdings(driver).next().is_some() || waits_for(self, driver).is_some()
    }

    pub(super) fn name(&self) -> ClaimName {
        ClaimName { namespace: self.metadata.namespace.clone(), name: self.metadata.name.clone() }
    }

    pub(super) fn uid(&self) -> &str {
        &self.metadata.uid
    }

    /// Since when it is there, where it has no devices yet and may get some.
    pub(super) fn waits_since(&self) -> Option<Timestamp> {
        let may_get_some = self.status.allocation.is_none() && self.metadata.deletion_timestamp.is_none();
        self.metadata.creation_timestamp.filter(|_| may_get_some)
    }

    /// The pod that it was made for.
    pub(super) fn owner(&self) -> Option<String> {
        let mut owners = self.metadata.owner_references.iter();
        owners.find(|owner| owner.kind == "Pod").map(|owner| owner.name.clone())
    }

    pub(super) fn asked_for(&self) -> impl Iterator<Item = AskedFor<'_>> {
        let constrained = !self.spec.devices.constraints.is_empty();
        self.spec.devices.requests.iter().flat_map(move |request| {
            let alternatives = request.first_available.iter();
            request.exactly.iter().chain(alternatives).map(move |exactly| AskedFor {
                name: match exactly.name.as_str() {
                    "" => request.name.clone(),
                    alternative => format!("{}/{alternative}", request.name),
                },
                class: &exactly.device_class_name,
                count: (exactly.allocation_mode != "All").then_some(exactly.count.unwrap_or(1)),
                is_narrowed: constrained || !exactly.selectors.is_empty(),
                tolerates: !exactly.tolerations.is_empty(),
            })
        })
    }

    /// What it holds of a driver, with the pool of each.
    pub fn holdings(&self, driver: &DriverName) -> impl Iterator<Item = (&str, Holding)> {
        let results = self.status.allocation.iter().flat_map(|allocation| &allocation.devices.results);
        results.filter(move |result| result.driver == driver.as_str()).filter_map(|result| {
            let pods = self.status.reserved_for.iter().filter(|consumer| consumer.resource == "pods");
            let holding = Holding {
                device: DeviceName::parse(&result.device).ok()?,
                profile: None,
                claim: self.name(),
                pods: pods.map(|pod| pod.name.clone()).collect(),
                admin_access: result.admin_access,
            };
            Some((result.pool.as_str(), holding))
        })
    }
}

/// A pod that does not run yet, whether it has a node or not.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct PendingPod {
    metadata: Metadata,
    #[serde(default)]
    spec: PodSpec,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct PodSpec {
    resource_claims: Vec<PodClaim>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct PodClaim {
    resource_claim_name: Option<String>,
}

impl PendingPod {
    /// Whether it names a claim, instead of owning all of its own.
    pub fn names_some(&self) -> bool {
        self.spec.resource_claims.iter().any(|named| named.resource_claim_name.is_some())
    }

    pub(super) fn name(&self) -> &str {
        &self.metadata.name
    }

    pub(super) fn names(&self, claim: &str) -> bool {
        self.spec.resource_claims.iter().any(|named| named.resource_claim_name.as_deref() == Some(claim))
    }
}

/// An event on a pod.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodEvent {
    metadata: Metadata,
    message: Option<String>,
    event_time: Option<Timestamp>,
    last_timestamp: Option<Timestamp>,
    series: Option<Series>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Series {
    last_observed_time: Option<Timestamp>,
}

impl PodEvent {
    /// When it was seen last; who writes events says it in one field or another.
    fn at(&self) -> Option<Timestamp> {
        let series = self.series.as_ref().and_then(|series| series.last_observed_time);
        let times = [series, self.last_timestamp, self.event_time, self.metadata.creation_timestamp];
        times.into_iter().flatten().max()
    }
}

impl SchedulerEvent {
    /// The last of a pod's events.
    pub fn last(pod: &str, events: Vec<PodEvent>) -> Option<Self> {
        let event = events.into_iter().max_by_key(PodEvent::at)?;
        let at = event.at().map(|at| at.to_string());
        Some(Self { pod: pod.to_owned(), at, message: event.message.unwrap_or_default() })
    }
}
