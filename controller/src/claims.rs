//! Which of our devices claims hold, asked once when it matters: before a
//! device is withdrawn, and when the journal is lost. Nothing watches claims
//! here, since every node would watch those of the whole cluster.

use std::collections::BTreeSet;
use std::time::Duration;

use k8s_openapi::api::resource::v1::DeviceRequestAllocationResult;
use kerf_dra_driver::names::{ClaimUid, DeviceName, DriverName};
use kube::api::{ListParams, Request};
use serde::Deserialize;
use serde::de::IgnoredAny;

/// Where the claims of all namespaces are.
const CLAIMS: &str = "/apis/resource.k8s.io/v1/resourceclaims";
/// Claims a page: what is not ours is forgotten with its page. One claim may be
/// half a megabyte of somebody's configs and annotations, so a page is short.
const PAGE: u32 = 50;
/// The limit of one page's request.
const REQUEST: Duration = Duration::from_secs(30);
/// How often a list is begun anew when its continuation has expired.
const BEGINNINGS: usize = 3;

/// Why claims could not be listed. Nothing may be withdrawn then.
#[derive(Debug, thiserror::Error)]
pub enum ListClaimsError {
    /// The API server refused or could not be reached.
    #[error("cannot list ResourceClaims")]
    Refused(#[source] Box<kube::Error>),
    /// A page did not come in time.
    #[error("cannot list ResourceClaims: no answer from the API server in {} s", REQUEST.as_secs())]
    TooSlow,
    /// The list took longer than the API server keeps a revision.
    #[error("cannot list ResourceClaims: the list expired {BEGINNINGS} times before it was complete")]
    Expired,
}

/// A claim that has devices of ours allocated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HoldingClaim {
    /// The claim's uid.
    pub uid: ClaimUid,
    /// The claim's namespace.
    pub namespace: String,
    /// The claim's name.
    pub name: String,
    /// Whether a consumer has reserved it.
    pub reserved: bool,
    /// Our devices in it, in the order of the allocation.
    pub devices: Vec<HeldDevice>,
}

/// One of our devices in a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeldDevice {
    /// The request it was allocated for.
    pub request: String,
    /// Its pool.
    pub pool: String,
    /// Its name.
    pub device: DeviceName,
    /// The share, for devices that are allocated several times.
    pub share_id: Option<String>,
    /// Whether it is held by admin access, beside other claims.
    pub admin_access: bool,
}

/// The names of all devices of `driver` in `pools` that any claim of the
/// cluster has allocated, now.
pub async fn allocated_devices(
    client: kube::Client,
    driver: &DriverName,
    pools: &BTreeSet<String>,
) -> Result<BTreeSet<DeviceName>, ListClaimsError> {
    let claims = holding_claims(client, driver, pools).await?;
    Ok(claims.into_iter().flat_map(|claim| claim.devices).map(|held| held.device).collect())
}

/// All claims of the cluster that have devices of `driver` in `pools`
/// allocated, now: a quorum read, page by page.
pub async fn holding_claims(
    client: kube::Client,
    driver: &DriverName,
    pools: &BTreeSet<String>,
) -> Result<Vec<HoldingClaim>, ListClaimsError> {
    'beginning: for _ in 0..BEGINNINGS {
        // Without a resource version the API server answers from a quorum.
        let mut params = ListParams::default().limit(PAGE);
        let mut found = Vec::new();
        loop {
            // Only a selector that is not one fails, and there is none.
            let request = Request::new(CLAIMS)
                .list(&params)
                .map_err(|error| ListClaimsError::Refused(Box::new(kube::Error::BuildRequest(error))))?;
            let page = match tokio::time::timeout(REQUEST, client.request::<Page>(request)).await {
                Ok(Ok(page)) => page,
                Ok(Err(kube::Error::Api(status))) if status.code == 410 => continue 'beginning,
                Ok(Err(error)) => return Err(ListClaimsError::Refused(Box::new(error))),
                Err(_) => return Err(ListClaimsError::TooSlow),
            };
            found.extend(page.items.into_iter().filter_map(|claim| holding(claim, driver, pools)));
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => params = params.continue_token(&token),
                None => return Ok(found),
            }
        }
    }
    Err(ListClaimsError::Expired)
}

// As much of claims as is asked for. What their users wrote is passed over
// without being decoded: nested deeply enough, the config of one claim would
// make the list of all unreadable.

#[derive(Deserialize)]
struct Page {
    metadata: PageMetadata,
    items: Vec<Claim>,
}

#[derive(Deserialize)]
struct PageMetadata {
    #[serde(rename = "continue")]
    continue_: Option<String>,
}

#[derive(Deserialize)]
struct Claim {
    metadata: Metadata,
    status: Option<Status>,
}

#[derive(Deserialize)]
struct Metadata {
    uid: Option<String>,
    namespace: Option<String>,
    name: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Status {
    allocation: Option<Allocation>,
    reserved_for: Option<Vec<IgnoredAny>>,
}

#[derive(Deserialize)]
struct Allocation {
    devices: Option<Devices>,
}

#[derive(Deserialize)]
struct Devices {
    results: Option<Vec<DeviceRequestAllocationResult>>,
}

/// What a claim holds of ours; none if it holds nothing.
fn holding(claim: Claim, driver: &DriverName, pools: &BTreeSet<String>) -> Option<HoldingClaim> {
    let status = claim.status?;
    let results = status.allocation?.devices?.results?;
    let ours =
        results.into_iter().filter(|result| result.driver == driver.as_str() && pools.contains(&result.pool));
    let devices: Vec<HeldDevice> = ours
        .filter_map(|result| {
            Some(HeldDevice {
                // The API takes only DNS labels, so nothing is passed over.
                device: DeviceName::parse(&result.device).ok()?,
                request: result.request,
                pool: result.pool,
                share_id: result.share_id,
                admin_access: result.admin_access.unwrap_or(false),
            })
        })
        .collect();
    if devices.is_empty() {
        return None;
    }
    Some(HoldingClaim {
        uid: claim.metadata.uid?.parse().ok()?,
        namespace: claim.metadata.namespace.unwrap_or_default(),
        name: claim.metadata.name.unwrap_or_default(),
        reserved: status.reserved_for.is_some_and(|consumers| !consumers.is_empty()),
        devices,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_config_nested_too_deeply_to_be_decoded_hides_no_claim() {
        let nested = "{\"a\":".repeat(1_000) + "0" + &"}".repeat(1_000);
        let config = format!("[{{\"opaque\":{{\"driver\":\"d\",\"parameters\":{nested}}}}}]");
        let result = "{\"request\":\"r\",\"driver\":\"gpu.nvidia.com\",\"pool\":\"p\",\"device\":\"gpu-0000-17-00-0\"}";
        let page = format!(
            "{{\"metadata\":{{\"resourceVersion\":\"1\"}},\"items\":[{{\"metadata\":{{\"uid\":\"\
             6c6a2883-c84a-48b0-b48f-c045d6ab4684\",\"managedFields\":{nested}}},\"spec\":{{\"devices\":\
             {{\"config\":{config}}}}},\"status\":{{\"allocation\":{{\"devices\":{{\"config\":{config},\
             \"results\":[{result}]}}}}}}}}]}}"
        );
        let page: Page = serde_json::from_str(&page).unwrap();
        let driver = "gpu.nvidia.com".parse().unwrap();
        let pools = BTreeSet::from(["p".to_owned()]);
        let found: Vec<_> =
            page.items.into_iter().filter_map(|claim| holding(claim, &driver, &pools)).collect();
        assert_eq!(found.len(), 1);
    }
}
