//! Claims for the plugin, read from the API server.

use std::collections::BTreeSet;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use k8s_openapi::api::resource::v1::ResourceClaim;
use kerf_controller::claims::allocated_devices;
use kerf_dra_driver::names::{DeviceName, DriverName};
use kerf_kubelet_plugin::{ClaimSource, ClaimSourceError};
use kube::{Api, Client};
use tokio::sync::Semaphore;

/// The limit of one read. The kubelet asks again.
const PATIENCE: Duration = Duration::from_secs(10);

/// Reads at once. After a restart a kubelet asks for all its claims together.
const AT_ONCE: usize = 8;

/// Claims of an API server.
pub(crate) struct ApiClaims {
    client: Client,
    reads: Semaphore,
}

impl ApiClaims {
    pub(crate) fn new(client: Client) -> Self {
        Self { client, reads: Semaphore::new(AT_ONCE) }
    }
}

impl fmt::Debug for ApiClaims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ApiClaims")
    }
}

type Answer<'a, T> = Pin<Box<dyn Future<Output = Result<T, ClaimSourceError>> + Send + 'a>>;

impl ClaimSource for ApiClaims {
    fn get<'a>(&'a self, namespace: &'a str, name: &'a str) -> Answer<'a, Option<ResourceClaim>> {
        Box::pin(async move {
            // It is never closed.
            let _read = self.reads.acquire().await;
            let claims: Api<ResourceClaim> = Api::namespaced(self.client.clone(), namespace);
            match tokio::time::timeout(PATIENCE, claims.get_opt(name)).await {
                Ok(Ok(claim)) => Ok(claim),
                Ok(Err(error)) => {
                    Err(ClaimSourceError::new("the API server refused or did not answer").caused_by(error))
                }
                Err(_) => Err(ClaimSourceError::new(format!(
                    "the API server has not answered for {} s",
                    PATIENCE.as_secs()
                ))),
            }
        })
    }

    fn allocated<'a>(&'a self, driver: &'a DriverName, pool: &'a str) -> Answer<'a, BTreeSet<DeviceName>> {
        Box::pin(async move {
            let pools = BTreeSet::from([pool.to_owned()]);
            allocated_devices(self.client.clone(), driver, &pools).await.map_err(|error| {
                ClaimSourceError::new("which devices claims hold is not known").caused_by(error)
            })
        })
    }
}
