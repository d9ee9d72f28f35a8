//! Which of our devices claims hold, asked once when it matters: before a
//! device is withdrawn, and when the journal is lost. Nothing watches claims
//! here, since every node would watch those of the whole cluster.

use std::collections::BTreeSet;

use k8s_openapi::api::resource::v1::DeviceRequestAllocationResult;
use kerf_dra_driver::names::{ClaimUid, DeviceName, DriverName};
use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::pages::{self, ListError, Listed};

/// The claims of all namespaces.
pub const CLAIMS: Listed<'_> =
    Listed { what: "ResourceClaims", path: "/apis/resource.k8s.io/v1/resourceclaims", fields: None };

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
) -> Result<BTreeSet<DeviceName>, ListError> {
    let claims = holding_claims(client, driver, pools).await?;
    Ok(claims.into_iter().flat_map(|claim| claim.devices).map(|held| held.device).collect())
}

/// All claims of the cluster that have devices of `driver` in `pools`
/// allocated, now: a quorum read, page by page.
pub async fn holding_claims(
    client: kube::Client,
    driver: &DriverName,
    pools: &BTreeSet<String>,
) -> Result<Vec<HoldingClaim>, ListError> {
    pages::list(&client, CLAIMS, |claim: Claim| holding(claim, driver, pools)).await
}

// As much of claims as is asked for. What their users wrote is passed over
// without being decoded: nested deeply enough, the config of one claim would
// make the list of all unreadable.

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
        let claim = format!(
            "{{\"metadata\":{{\"uid\":\"6c6a2883-c84a-48b0-b48f-c045d6ab4684\",\"managedFields\":{nested}}},\"spec\":\
             {{\"devices\":{{\"config\":{config}}}}},\"status\":{{\"allocation\":{{\"devices\":{{\"config\":{config},\
             \"results\":[{result}]}}}}}}}}"
        );
        let claim: Claim = serde_json::from_str(&claim).unwrap();
        let driver = "gpu.nvidia.com".parse().unwrap();
        let pools = BTreeSet::from(["p".to_owned()]);
        assert!(holding(claim, &driver, &pools).is_some());
    }
}
