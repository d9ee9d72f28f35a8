//! Which claims running pods use, as the kubelet tells on its
//! `PodResources` socket.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use kerf_dra_driver::claim::ClaimName;
use kerf_dra_driver::names::DriverName;
use tonic::transport::{Channel, Endpoint};

use crate::proto::podresources::pod_resources_lister_client::PodResourcesListerClient;
use crate::proto::podresources::{ContainerResources, ListPodResourcesRequest};

/// A node with many pods has a long answer.
const MAX_ANSWER: usize = 64 << 20;
/// How the resource names of device plugins for NVIDIA GPUs begin.
const VENDOR: &str = "nvidia.com/";
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

/// Asks the kubelet which claims of a driver are in use.
pub(crate) async fn in_use(socket: &Path, driver: &DriverName) -> Result<InUse, InUseError> {
    let mut in_use = InUse::default();
    for resource in containers(socket).await?.flat_map(|container| container.dynamic_resources) {
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

/// Whether pods have devices that a device plugin for NVIDIA GPUs gave them,
/// be it gone by now.
pub(crate) async fn have_plugin_devices(socket: &Path) -> Result<bool, InUseError> {
    let mut devices = containers(socket).await?.flat_map(|container| container.devices);
    Ok(devices.any(|devices| devices.resource_name.starts_with(VENDOR) && !devices.device_ids.is_empty()))
}

async fn containers(socket: &Path) -> Result<impl Iterator<Item = ContainerResources>, InUseError> {
    let endpoint = Endpoint::try_from(format!("unix:{}", socket.display()))?;
    let channel: Channel = endpoint.connect_timeout(TIME).timeout(TIME).connect().await?;
    let mut client = PodResourcesListerClient::new(channel).max_decoding_message_size(MAX_ANSWER);
    let answer = client.list(ListPodResourcesRequest {}).await?.into_inner();
    Ok(answer.pod_resources.into_iter().flat_map(|pod| pod.containers))
}
