//! Which claims running pods use, as the kubelet tells on its
//! `PodResources` socket.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use kerf_dra_driver::claim::ClaimName;
use kerf_dra_driver::names::DriverName;
use tonic::transport::{Channel, Endpoint};

use crate::proto::podresources::ListPodResourcesRequest;
use crate::proto::podresources::pod_resources_lister_client::PodResourcesListerClient;

/// A node with many pods has a long answer.
const MAX_ANSWER: usize = 64 << 20;
const TIME: Duration = Duration::from_secs(10);

/// The claims that are in use.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct InUse {
    names: BTreeSet<ClaimName>,
    cdi_devices: BTreeSet<String>,
}

impl InUse {
    /// Whether a pod uses a claim: by its name, or by a CDI device of its UID.
    pub(crate) fn includes(&self, claim: &ClaimName, cdi_prefix: &str) -> bool {
        self.names.contains(claim) || self.cdi_devices.iter().any(|device| device.starts_with(cdi_prefix))
    }
}

/// Why the kubelet did not tell.
#[derive(Debug, thiserror::Error)]
pub(crate) enum InUseError {
    #[error("the kubelet's PodResources socket cannot be reached")]
    Connect(#[from] tonic::transport::Error),
    #[error("the kubelet does not list pod resources")]
    List(#[from] tonic::Status),
}

/// Asks the kubelet.
pub(crate) async fn in_use(socket: &Path, driver: &DriverName) -> Result<InUse, InUseError> {
    let endpoint = Endpoint::try_from(format!("unix:{}", socket.display()))?;
    let channel: Channel = endpoint.connect_timeout(TIME).timeout(TIME).connect().await?;
    let mut client = PodResourcesListerClient::new(channel).max_decoding_message_size(MAX_ANSWER);
    let answer = client.list(ListPodResourcesRequest {}).await?.into_inner();
    let mut in_use = InUse::default();
    let containers = answer.pod_resources.into_iter().flat_map(|pod| pod.containers);
    for resource in containers.flat_map(|container| container.dynamic_resources) {
        let ours = resource.claim_resources.into_iter().filter(|claim| claim.driver_name == driver.as_str());
        for claim in ours {
            in_use.names.insert(ClaimName {
                namespace: resource.claim_namespace.clone(),
                name: resource.claim_name.clone(),
            });
            in_use.cdi_devices.extend(claim.cdi_devices.into_iter().map(|device| device.name));
        }
    }
    Ok(in_use)
}
