//! Claims as the API server has them.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use futures::future::BoxFuture;
use kerf_dra_driver::claim::ClaimObject;
use kerf_dra_driver::names::{DeviceName, DriverName};
use tokio::sync::Semaphore;

/// Reads at once. After a restart a kubelet asks for all its claims together.
const AT_ONCE: usize = 8;

/// Where claims are read from. Both calls are quorum reads: an old answer
/// could prepare a claim that is not allocated any more.
pub trait ClaimSource: Send + Sync + fmt::Debug {
    /// A claim; absent where there is none of that name.
    fn get<'a>(
        &'a self,
        namespace: &'a str,
        name: &'a str,
    ) -> BoxFuture<'a, Result<Option<ClaimObject>, ClaimSourceError>>;

    /// The devices of a pool that any claim of the cluster has allocated. Not
    /// for every day: it reads all claims.
    fn allocated<'a>(
        &'a self,
        driver: &'a DriverName,
        pool: &'a str,
    ) -> BoxFuture<'a, Result<BTreeSet<DeviceName>, ClaimSourceError>>;
}

/// Claims that are read a few at a time.
#[derive(Debug)]
pub(crate) struct Claims {
    pub(crate) source: Arc<dyn ClaimSource>,
    reads: Semaphore,
}

impl Claims {
    pub(crate) fn of(source: Arc<dyn ClaimSource>) -> Self {
        Self { source, reads: Semaphore::new(AT_ONCE) }
    }

    /// A claim, for who has no GPU yet.
    pub(crate) async fn get(
        &self,
        namespace: &str,
        name: &str,
    ) -> Result<Option<ClaimObject>, ClaimSourceError> {
        // It is never closed.
        let _read = self.reads.acquire().await;
        self.source.get(namespace, name).await
    }

    /// The same for who has GPUs: others wait for these, so it stands in no
    /// line. There are never more of them than GPUs.
    pub(crate) async fn get_now(
        &self,
        namespace: &str,
        name: &str,
    ) -> Result<Option<ClaimObject>, ClaimSourceError> {
        self.source.get(namespace, name).await
    }
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

    /// The same error with its cause.
    #[must_use]
    pub fn caused_by(mut self, source: impl std::error::Error + Send + Sync + 'static) -> Self {
        self.source = Some(Box::new(source));
        self
    }
}
