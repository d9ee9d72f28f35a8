//! Claims that have no devices yet, and as much of the reason as slices and
//! claims tell.

use std::collections::BTreeMap;

use k8s_openapi::jiff::Timestamp;
use serde::Serialize;

use super::claims::{AskedFor, SeenClaim};
use super::pool::Pool;
use super::supply::{Class, Supply};
use crate::claim::ClaimName;
use crate::names::DriverName;

/// A claim that asks for devices of this driver and has none yet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct WaitingClaim {
    /// The claim.
    pub claim: ClaimName,
    /// Its UID.
    pub uid: String,
    /// When it was made, as RFC 3339 writes it.
    pub since: String,
    /// How long that is.
    pub waited_seconds: u64,
    /// Whether a pod owns it: it was made from a template, or for an extended
    /// resource.
    pub owned_by_pod: bool,
    /// The pods that wait for it; absent where they are not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pods: Option<Vec<String>>,
    /// What it asks for, alternatives each on its own.
    pub requests: Vec<WaitingRequest>,
    /// What the scheduler said last of one of the pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scheduler: Option<SchedulerEvent>,
}

/// One request of a claim that waits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct WaitingRequest {
    /// `request`, or `request/alternative`.
    pub request: String,
    /// The class's name.
    pub class: String,
    /// How many devices; absent for all of a node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub count: Option<usize>,
    /// How many devices of the class there are in the cluster; absent for a
    /// class that is not known by its name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub published: Option<usize>,
    /// How many of them have a taint.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tainted: Option<usize>,
    /// How many can be allocated together on the node that has most.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub free_on_one_node: Option<usize>,
    /// Whether enough are free, and the claim names no selector or constraint
    /// that could leave them out.
    pub enough_free: bool,
    /// Why it waits, as far as that is known.
    pub why: String,
}

/// The scheduler's own reason.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SchedulerEvent {
    /// The pod that it is about.
    pub pod: String,
    /// When it was said last, as RFC 3339 writes it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub at: Option<String>,
    /// The sentence.
    pub message: String,
}

/// Since when a claim waits for devices of a driver, if it does.
pub(super) fn waits_for(claim: &SeenClaim, driver: &DriverName) -> Option<Timestamp> {
    let is_ours = |asked: AskedFor<'_>| Class::named(asked.class, driver).is_some();
    claim.waits_since().filter(|_| claim.asked_for().any(is_ours))
}

/// The claims that wait for devices of a driver, oldest first.
pub(super) fn waiting(
    driver: &DriverName,
    pools: &[Pool<'_>],
    claims: &[SeenClaim],
    now: Timestamp,
) -> Vec<WaitingClaim> {
    // By class: thousands of claims ask for few.
    let mut supplies: BTreeMap<&str, Option<Supply<'_>>> = BTreeMap::new();
    let mut found: Vec<(Timestamp, WaitingClaim)> = Vec::new();
    for claim in claims {
        let Some(since) = waits_for(claim, driver) else { continue };
        let mut requests = Vec::new();
        for asked in claim.asked_for() {
            let supply = supplies
                .entry(asked.class)
                .or_insert_with(|| Class::named(asked.class, driver).map(|class| Supply::of(&class, pools)));
            requests.push(request(supply.as_ref(), asked));
        }
        let owner = claim.owner();
        let waiting = WaitingClaim {
            claim: claim.name(),
            uid: claim.uid().to_owned(),
            since: since.to_string(),
            waited_seconds: u64::try_from(now.duration_since(since).as_secs()).unwrap_or(0),
            owned_by_pod: owner.is_some(),
            pods: owner.map(|owner| vec![owner]),
            requests,
            scheduler: None,
        };
        found.push((since, waiting));
    }
    found.sort_by(|(one, first), (other, second)| (one, &first.claim).cmp(&(other, &second.claim)));
    found.into_iter().map(|(_, waiting)| waiting).collect()
}

fn request(supply: Option<&Supply<'_>>, asked: AskedFor<'_>) -> WaitingRequest {
    let enough = supply.is_some_and(|supply| supply.is_enough(asked.count));
    WaitingRequest {
        why: supply.map_or_else(
            || "what this class gives out is not known here".to_owned(),
            |supply| if enough { beside_free(supply, &asked) } else { why(supply, &asked) },
        ),
        published: supply.map(|supply| supply.published),
        tainted: supply.map(|supply| supply.tainted),
        free_on_one_node: supply.map(|supply| supply.free.count),
        enough_free: enough && !asked.is_narrowed,
        request: asked.name,
        class: asked.class.to_owned(),
        count: asked.count,
    }
}

/// Why a request is not met though enough is free.
fn beside_free(supply: &Supply<'_>, asked: &AskedFor<'_>) -> String {
    let more = if asked.is_narrowed { "its selectors or constraints, " } else { "" };
    format!(
        "{} could be allocated on {}: {more}another request of its pods, where these may run, or a \
         DeviceTaintRule is in the way, the scheduler has its feature gate DRAPartitionableDevices off, or it has \
         not looked again yet",
        supply.free.count, supply.free.node
    )
}

/// Why a request is not met where not enough is free: first what stays so
/// whatever others give back.
fn why(supply: &Supply<'_>, asked: &AskedFor<'_>) -> String {
    let Supply { published, tainted, free, room, .. } = supply;
    let mut why = match asked.count {
        _ if *published == 0 => {
            return format!(
                "no node publishes such a device: no GPU has it, `migProfiles` or `migMode` leave it out, kerf does \
                 not run there, or there is no such class (`kubectl get deviceclass {}`)",
                asked.class
            );
        }
        Some(count) if count > room.count => {
            let together = if supply.overlaps { " that fit beside each other" } else { "" };
            return format!(
                "no node has {count} such devices{together}: {} has most, {}",
                room.node, room.count
            );
        }
        None if !supply.all_fit => {
            return "all of a node are asked for, and on no node do they fit beside each other, since they overlap: \
                    no claim can have them; name a count"
                .to_owned();
        }
        _ if tainted == published => {
            format!("none of {published} is free: all have a taint: {}", supply.taints())
        }
        Some(count) if free.count > 0 => {
            format!(
                "{count} are needed on one node, and {} has most that are free: {}",
                free.node, free.count
            )
        }
        None => {
            format!("all of a node are needed, and on each some of the {published} are held or have a taint")
        }
        Some(_) if *tainted == 0 => {
            format!("none of {published} is free: each is held, or overlaps what is held on its GPU")
        }
        Some(_) => format!(
            "none of {published} is free: {tainted} have a taint ({}), and the others are held, or overlap what is \
             held on their GPU",
            supply.taints()
        ),
    };
    if *tainted > 0 && asked.tolerates {
        why += "; whether it tolerates the taints is not evaluated";
    }
    why
}
