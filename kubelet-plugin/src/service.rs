//! The DRA plugin service, v1 and v1beta1: the same answers in two dresses.
//!
//! Each claim is answered on its own: the failure of one is its own error, and
//! every claim of a request is in the response.

use std::collections::BTreeMap;

use futures::future::join_all;
use tonic::{Request, Response, Status};

use crate::plugin::{ClaimRequest, Plugin};
use crate::proto::{dra_v1, dra_v1beta1};

macro_rules! serve {
    ($wire:ident, $device:expr) => {
        #[tonic::async_trait]
        impl $wire::dra_plugin_server::DraPlugin for Plugin {
            async fn node_prepare_resources(
                &self,
                request: Request<$wire::NodePrepareResourcesRequest>,
            ) -> Result<Response<$wire::NodePrepareResourcesResponse>, Status> {
                let answers = request.into_inner().claims.into_iter().map(|claim| async move {
                    let uid = claim.uid.clone();
                    let request =
                        ClaimRequest { namespace: claim.namespace, name: claim.name, uid: claim.uid };
                    let answer = match self.prepare(request).await {
                        Ok(devices) => $wire::NodePrepareResourceResponse {
                            devices: devices.into_iter().map($device).collect(),
                            error: String::new(),
                        },
                        Err(error) => $wire::NodePrepareResourceResponse {
                            devices: Vec::new(),
                            error: crate::chain(&error),
                        },
                    };
                    (uid, answer)
                });
                let claims: BTreeMap<_, _> = join_all(answers).await.into_iter().collect();
                Ok(Response::new($wire::NodePrepareResourcesResponse { claims }))
            }

            async fn node_unprepare_resources(
                &self,
                request: Request<$wire::NodeUnprepareResourcesRequest>,
            ) -> Result<Response<$wire::NodeUnprepareResourcesResponse>, Status> {
                let answers = request.into_inner().claims.into_iter().map(|claim| async move {
                    let error = match self.unprepare(claim.uid.clone()).await {
                        Ok(()) => String::new(),
                        Err(error) => crate::chain(&error),
                    };
                    (claim.uid, $wire::NodeUnprepareResourceResponse { error })
                });
                let claims: BTreeMap<_, _> = join_all(answers).await.into_iter().collect();
                Ok(Response::new($wire::NodeUnprepareResourcesResponse { claims }))
            }
        }
    };
}

serve!(dra_v1, |device| dra_v1::Device {
    request_names: vec![device.request],
    pool_name: device.pool,
    device_name: device.device,
    cdi_device_ids: vec![device.cdi_device],
    share_id: device.share_id,
});

serve!(dra_v1beta1, |device| dra_v1beta1::Device {
    request_names: vec![device.request],
    pool_name: device.pool,
    device_name: device.device,
    cdi_device_ids: vec![device.cdi_device],
});
