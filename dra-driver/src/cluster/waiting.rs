//! Claims that have no devices yet, and as much of the reason as slices and
//! claims tell.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::Device;
use k8s_openapi::jiff::Timestamp;
use serde::Serialize;

use super::claims::{AskedFor, SeenClaim};
use super::pool::{Pool, is_tainted};
use super::profile;
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
    /// Whether a pod owns it: it was made from a template.
    pub from_template: bool,
    /// The pods that wait for it, as far as they are known.
    pub pods: Vec<String>,
    /// What it asks for, alternatives each on its own.
    pub requests: Vec<WaitingRequest>,
    /// What the scheduler said last of one of the pods.
    pub scheduler: Option<SchedulerEvent>,
}

/// One request of a claim that waits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct WaitingRequest {
    /// `request`, or `request/alternative`.
    pub request: String,
    /// The class.
    pub class: String,
    /// How many devices; absent for all of a node.
    pub count: Option<usize>,
    /// How many devices of the class there are in the cluster; absent for a
    /// class that is not known by its name.
    pub published: Option<usize>,
    /// How many of them have a taint.
    pub tainted: Option<usize>,
    /// How many can be allocated together on the node that has most.
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
    pub at: Option<String>,
    /// The sentence.
    pub message: String,
}

/// What a class of the chart gives out.
enum Class<'a> {
    Whole,
    Partition,
    /// The profile, with dots for plus signs.
    Profile(&'a str),
}

impl<'a> Class<'a> {
    /// The chart's classes end with the driver name's domain: `nvidia.com` for
    /// `gpu.nvidia.com`.
    fn named(name: &'a str, driver: &DriverName) -> Option<Self> {
        let domain = driver.as_str().strip_prefix("gpu.").unwrap_or(driver.as_str());
        let kind = name.strip_suffix(domain)?.strip_suffix('.')?;
        match kind {
            "gpu" => Some(Self::Whole),
            "mig" => Some(Self::Partition),
            _ => kind.strip_prefix("mig-").map(Self::Profile),
        }
    }

    fn takes(&self, device: &Device) -> bool {
        match (self, profile(device)) {
            (Self::Whole, profile) => profile.is_none(),
            (Self::Partition, profile) => profile.is_some(),
            (Self::Profile(wanted), profile) => {
                profile.is_some_and(|profile| profile.replace('+', ".") == *wanted)
            }
        }
    }
}

/// The claims that wait for devices of a driver, oldest first.
pub(super) fn waiting(
    driver: &DriverName,
    pools: &[Pool<'_>],
    claims: &[SeenClaim],
    now: Timestamp,
) -> Vec<WaitingClaim> {
    let mut found: Vec<(Timestamp, WaitingClaim)> = claims
        .iter()
        .filter_map(|claim| {
            let since = claim.waits_since()?;
            let is_ours = |asked: AskedFor<'_>| Class::named(asked.class, driver).is_some();
            if !claim.asked_for().any(is_ours) {
                return None;
            }
            let owner = claim.owner();
            let waiting = WaitingClaim {
                claim: claim.name(),
                uid: claim.uid().to_owned(),
                since: since.to_string(),
                waited_seconds: u64::try_from(now.duration_since(since).as_secs()).unwrap_or(0),
                from_template: owner.is_some(),
                pods: owner.into_iter().collect(),
                requests: claim.asked_for().map(|asked| request(driver, pools, asked)).collect(),
                scheduler: None,
            };
            Some((since, waiting))
        })
        .collect();
    found.sort_by(|(one, first), (other, second)| (one, &first.claim).cmp(&(other, &second.claim)));
    found.into_iter().map(|(_, waiting)| waiting).collect()
}

fn request(driver: &DriverName, pools: &[Pool<'_>], asked: AskedFor<'_>) -> WaitingRequest {
    let AskedFor { name, class, count, is_narrowed } = asked;
    let mut request = WaitingRequest {
        request: name,
        class: class.to_owned(),
        count,
        published: None,
        tainted: None,
        free_on_one_node: None,
        enough_free: false,
        why: "what this class gives out is not known here".to_owned(),
    };
    let Some(known) = Class::named(class, driver) else { return request };
    let of_pool = |pool: &Pool<'_>| pool.devices.iter().filter(|device| known.takes(device)).count();
    let free = |pool: &Pool<'_>| pool.free(pool.devices.iter().copied().filter(|device| known.takes(device)));
    let devices: Vec<&Device> =
        pools.iter().flat_map(|pool| &pool.devices).copied().filter(|device| known.takes(device)).collect();
    let tainted: Vec<&Device> = devices.iter().copied().filter(|device| is_tainted(device)).collect();
    let most = pools.iter().map(|pool| (free(pool), pool)).max_by_key(|(free, _)| *free);
    let (free_here, node) = most.map_or((0, ""), |(free, pool)| (free, pool.node));
    let enough = match count {
        Some(count) => free_here >= count,
        None => pools.iter().any(|pool| of_pool(pool) > 0 && free(pool) == of_pool(pool)),
    };
    request.why = if devices.is_empty() {
        "no node publishes such a device: no GPU has it, `migProfiles` or `migMode` leave it out, or kerf does \
         not run there"
            .to_owned()
    } else if enough {
        let more = if is_narrowed { "its selectors or constraints, " } else { "" };
        format!(
            "{free_here} could be allocated on {node}: {more}another request of its pods, where these may run, or \
             a DeviceTaintRule is in the way, the scheduler has its feature gate DRAPartitionableDevices off, or it \
             has not looked again yet"
        )
    } else if tainted.len() == devices.len() {
        format!("none of {} is free: all have a taint: {}", devices.len(), taints(&tainted))
    } else if let Some(count) = count.filter(|_| free_here > 0) {
        format!("{count} are needed on one node, and {node} has most that are free: {free_here}")
    } else if count.is_none() {
        format!(
            "all of a node are needed, and on each some of the {} are held or have a taint",
            devices.len()
        )
    } else if tainted.is_empty() {
        format!("none of {} is free: each is held, or overlaps what is held on its GPU", devices.len())
    } else {
        format!(
            "none of {} is free: {} have a taint ({}), and the others are held, or overlap what is held on their GPU",
            devices.len(),
            tainted.len(),
            taints(&tainted)
        )
    };
    request.enough_free = enough && !is_narrowed;
    request.published = Some(devices.len());
    request.tainted = Some(tainted.len());
    request.free_on_one_node = Some(free_here);
    request
}

/// The taints of devices, with how many have each.
fn taints(devices: &[&Device]) -> String {
    let mut kinds: BTreeMap<String, usize> = BTreeMap::new();
    for taint in devices.iter().flat_map(|device| device.taints.iter().flatten()) {
        *kinds.entry(format!("{}={}", taint.key, taint.value.as_deref().unwrap_or_default())).or_default() +=
            1;
    }
    let kinds: Vec<String> = kinds.into_iter().map(|(kind, count)| format!("{kind} ({count})")).collect();
    kinds.join(", ")
}
