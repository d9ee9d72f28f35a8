//! Claims for the plugin, read from the API server.

use std::collections::BTreeSet;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use k8s_openapi::api::resource::v1::ResourceClaim;
use kerf_controller::claims::allocated_devices;
use kerf_controller::sentence;
use kerf_dra_driver::claim::ClaimObject;
use kerf_dra_driver::names::{DeviceName, DriverName};
use kerf_kubelet_plugin::{ClaimSource, ClaimSourceError};
use kube::api::{GetParams, Request};
use kube::core::response::reason;
use kube::{Client, Error, Resource};

/// The limit of one read. The kubelet asks again.
const PATIENCE: Duration = Duration::from_secs(10);

/// Claims of an API server.
pub(crate) struct ApiClaims {
    client: Client,
}

impl ApiClaims {
    pub(crate) fn new(client: Client) -> Self {
        Self { client }
    }
}

impl fmt::Debug for ApiClaims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ApiClaims")
    }
}

type Answer<'a, T> = Pin<Box<dyn Future<Output = Result<T, ClaimSourceError>> + Send + 'a>>;

impl ClaimSource for ApiClaims {
    fn get<'a>(&'a self, namespace: &'a str, name: &'a str) -> Answer<'a, Option<ClaimObject>> {
        Box::pin(async move {
            let claims = Request::new(ResourceClaim::url_path(&(), Some(namespace)));
            let request = claims.get(name, &GetParams::default()).map_err(|error| {
                ClaimSourceError::new("the claim's name could not be one").caused_by(error)
            })?;
            match tokio::time::timeout(PATIENCE, self.client.request(request)).await {
                Ok(Ok(claim)) => Ok(Some(claim)),
                // Only the API server says so: what else answers 404 knows no claims.
                Ok(Err(Error::Api(status))) if status.reason == reason::NOT_FOUND => Ok(None),
                Ok(Err(error)) => {
                    // kube would print a whole status, not the server's sentence.
                    let why = sentence(&error);
                    Err(ClaimSourceError::new(format!("the API server refused or did not answer: {why}")))
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
                ClaimSourceError::new(format!("which devices claims hold is not known: {}", sentence(&error)))
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use axum::Router;
    use axum::http::StatusCode;
    use kerf_dra_driver::claim::Claim;

    use super::*;

    const UID: &str = "6c6a2883-c84a-48b0-b48f-c045d6ab4684";

    /// Claims of a server that always gives the same answer.
    fn answered(code: StatusCode, body: String) -> ApiClaims {
        let path = "/apis/resource.k8s.io/v1/namespaces/ns/resourceclaims/c";
        let router = Router::new().route(path, axum::routing::get(async move || (code, body)));
        ApiClaims::new(Client::new(router, "default"))
    }

    #[tokio::test]
    async fn a_claim_can_be_prepared_however_deeply_the_config_of_another_driver_is_nested() {
        let nested = "{\"a\":".repeat(1_000) + "0" + &"}".repeat(1_000);
        let claim = format!(
            r#"{{
                "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
                "metadata": {{"uid": "{UID}", "namespace": "ns", "name": "c"}},
                "spec": {{"devices": {{"config": [
                    {{"opaque": {{"driver": "other.example.com", "parameters": {nested}}}}}
                ]}}}},
                "status": {{
                    "allocation": {{"devices": {{
                        "config": [{{
                            "source": "FromClaim",
                            "opaque": {{"driver": "other.example.com", "parameters": {nested}}}
                        }}],
                        "results": [{{
                            "request": "r", "driver": "gpu.nvidia.com", "pool": "node/gpu",
                            "device": "gpu-0000-17-00-0"
                        }}]
                    }}}},
                    "reservedFor": [{{"resource": "pods", "name": "p", "uid": "p"}}]
                }}
            }}"#
        );
        let object =
            answered(StatusCode::OK, claim).get("ns", "c").await.expect("an answer").expect("a claim");
        let (uid, driver) = (UID.parse().expect("a uid"), "gpu.nvidia.com".parse().expect("a driver name"));
        let claim = Claim::resolve(&object, &uid, &driver, "node/gpu").expect("it can be prepared");
        assert_eq!(claim.allocation.len(), 1);
    }

    #[tokio::test]
    async fn what_the_api_server_refuses_is_told_in_its_own_sentence() {
        let message = "resourceclaims.resource.k8s.io 'c' is forbidden: User 'kerf' cannot get it";
        let status = format!(
            r#"{{"kind": "Status", "status": "Failure", "reason": "Forbidden", "code": 403, "message": "{message}"}}"#
        );
        let error = answered(StatusCode::FORBIDDEN, status).get("ns", "c").await.expect_err("forbidden");
        assert_eq!(
            kerf_kubelet_plugin::chain(&error),
            format!("the API server refused or did not answer: {message}")
        );
    }

    #[tokio::test]
    async fn a_claim_is_gone_only_if_the_api_server_says_so() {
        let status = r#"{"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404}"#;
        let gone = answered(StatusCode::NOT_FOUND, status.to_owned());
        assert!(gone.get("ns", "c").await.expect("an answer").is_none());
        let proxy = answered(StatusCode::NOT_FOUND, "404 page not found".to_owned());
        proxy.get("ns", "c").await.expect_err("nobody knows");
    }
}
