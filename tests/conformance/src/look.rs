//! Whether there is anything to check at all, before the first check: an API
//! server, and slices of the driver.

use anyhow::{Result, bail, ensure};

use crate::context::{Context, until};
use crate::profile::seconds;

impl Context {
    /// Asks the API server once for slices: without these nothing can be checked.
    pub async fn reach(&self) -> Result<()> {
        self.cluster.published().await.map(drop)
    }

    /// Starts the driver, if it is to be started, and waits for its slices, so that
    /// of a driver that publishes nothing it is said once why. It ends everything then.
    pub async fn look(&mut self) -> Result<()> {
        let looked = self.appeared().await;
        if looked.is_err() {
            self.end().await;
        }
        looked
    }

    async fn appeared(&mut self) -> Result<()> {
        self.begin().await?;
        // It may publish once it is registered. Checks tell what is wrong with that.
        let registered = if self.profile.registry.is_some() { self.plugin().await.map(drop) } else { Ok(()) };
        let published = until(seconds(self.profile.limits.publish), async || {
            if let Some(error) = self.ended() {
                return Ok(Err(error));
            }
            ensure!(!self.cluster.published().await?.is_empty(), "there is none");
            Ok(Ok(()))
        });
        let error = match published.await {
            Ok(ended) => return ended,
            Err(error) => error,
        };
        let others = self.cluster.publishers().await?;
        let others = if others.is_empty() { "nobody".to_owned() } else { others.join(", ") };
        let socket = registered.err().map(|error| format!("; its sockets: {error:#}")).unwrap_or_default();
        bail!(
            "no slice of the driver `{}` on the node `{}` ({error:#}). There are slices of: {others}{socket}. \
             See that `driver` and `node` of the profile are right and that the driver runs",
            self.profile.driver,
            self.profile.node
        )
    }
}
