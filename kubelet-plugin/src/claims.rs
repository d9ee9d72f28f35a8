//! Claims as the API server has them.

use std::fmt;

use futures::FutureExt;
use futures::future::BoxFuture;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::ListParams;
use kube::{Api, Client};

/// Where claims are read from. Both calls are quorum reads: an old answer
/// could prepare a claim that is not allocated any more.
pub trait ClaimSource: Send + Sync + fmt::Debug {
    /// A claim; absent where there is none of that name.
    fn get<'a>(
        &'a self,
        namespace: &'a str,
        name: &'a str,
    ) -> BoxFuture<'a, Result<Option<ResourceClaim>, ClaimSourceError>>;

    /// Every claim of the cluster.
    fn list(&self) -> BoxFuture<'_, Result<Vec<ResourceClaim>, ClaimSourceError>>;
}

/// The API server did not answer, or not as it should.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct ClaimSourceError {
    message: String,
    #[source]
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl ClaimSourceError {
    /// An error with what failed as a sentence.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), source: None }
    }
}

impl From<kube::Error> for ClaimSourceError {
    fn from(error: kube::Error) -> Self {
        Self { message: "the API server refused or did not answer".to_owned(), source: Some(Box::new(error)) }
    }
}

/// How many claims a page of the list has.
const PAGE: u32 = 500;

/// Claims read from an API server.
#[derive(Clone)]
pub struct ApiClaims(pub Client);

impl fmt::Debug for ApiClaims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ApiClaims")
    }
}

impl ClaimSource for ApiClaims {
    fn get<'a>(
        &'a self,
        namespace: &'a str,
        name: &'a str,
    ) -> BoxFuture<'a, Result<Option<ResourceClaim>, ClaimSourceError>> {
        async move { Ok(Api::namespaced(self.0.clone(), namespace).get_opt(name).await?) }.boxed()
    }

    fn list(&self) -> BoxFuture<'_, Result<Vec<ResourceClaim>, ClaimSourceError>> {
        async move {
            let api: Api<ResourceClaim> = Api::all(self.0.clone());
            let mut claims = Vec::new();
            let mut page = ListParams::default().limit(PAGE);
            loop {
                let mut list = api.list(&page).await?;
                claims.append(&mut list.items);
                match list.metadata.continue_.filter(|token| !token.is_empty()) {
                    Some(token) => page.continue_token = Some(token),
                    None => return Ok(claims),
                }
            }
        }
        .boxed()
    }
}
