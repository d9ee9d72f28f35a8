//! Which of our devices claims hold, asked once when it matters: before a
//! device is withdrawn, and when the journal is lost. Nothing watches claims
//! here, since every node would watch those of the whole cluster.

use std::collections::BTreeSet;

use kerf_dra_driver::cluster::SeenClaim;
use kerf_dra_driver::names::{DeviceName, DriverName};

use crate::pages::{self, ListError, Listed};

/// The claims of all namespaces.
pub const CLAIMS: Listed<'_> =
    Listed { what: "ResourceClaims", path: "/apis/resource.k8s.io/v1/resourceclaims", fields: None };

/// The names of all devices of `driver` in `pools` that any claim of the
/// cluster has allocated, now: a quorum read, page by page.
pub async fn allocated_devices(
    client: kube::Client,
    driver: &DriverName,
    pools: &BTreeSet<String>,
) -> Result<BTreeSet<DeviceName>, ListError> {
    let devices = |claim: SeenClaim| {
        let ours = claim.holdings(driver).filter(|(pool, _)| pools.contains(*pool));
        let devices: Vec<DeviceName> = ours.map(|(_, holding)| holding.device).collect();
        (!devices.is_empty()).then_some(devices)
    };
    Ok(pages::list(&client, CLAIMS, devices).await?.into_iter().flatten().collect())
}
