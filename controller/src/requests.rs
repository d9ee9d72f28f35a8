//! The publisher's requests to the API server, each with a time limit and an
//! error that says what was being done. Nothing is decided here.

use std::error::Error;
use std::time::Duration;

use futures::Stream;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kerf_dra_driver::error::in_one_sentence;
use kube::api::{Api, DeleteParams, PartialObjectMeta, PostParams, Preconditions, WatchEvent, WatchParams};

use crate::pages::{ListError, Listed, list_within};
use crate::pools::Identity;

/// After so many seconds the API server ends a watch.
pub(crate) const WATCH_SECONDS: u32 = 290;

/// Why a request did not succeed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RequestError {
    #[error("cannot {what}")]
    Refused {
        what: String,
        #[source]
        source: Box<kube::Error>,
    },
    #[error("cannot {what}: no answer from the API server in {} s", limit.as_secs_f32())]
    TooSlow { what: String, limit: Duration },
    #[error(transparent)]
    List(#[from] ListError),
    #[error("the Node `{node}` has no uid")]
    NoUid { node: String },
}

/// An error and its causes in one sentence.
pub fn sentence(error: &(dyn Error + 'static)) -> String {
    in_one_sentence(error, said)
}

/// What an error says for itself. kube prints a whole status where the API
/// server's message is meant.
fn said(error: &(dyn Error + 'static)) -> String {
    let status = error
        .downcast_ref::<kube::Error>()
        .or_else(|| error.downcast_ref::<Box<kube::Error>>().map(AsRef::as_ref))
        .and_then(|error| if let kube::Error::Api(status) = error { Some(&**status) } else { None })
        .or_else(|| error.downcast_ref::<kube::core::Status>())
        .or_else(|| error.downcast_ref::<Box<kube::core::Status>>().map(AsRef::as_ref));
    status.map_or_else(|| error.to_string(), |status| status.message.clone())
}

/// All slices of an identity at one revision.
#[derive(Debug)]
pub(crate) struct Live {
    pub(crate) slices: Vec<ResourceSlice>,
    pub(crate) revision: u64,
}

/// Sends requests for the slices of one identity.
#[derive(Debug, Clone)]
pub(crate) struct Requests {
    slices: Api<ResourceSlice>,
    nodes: Api<Node>,
    node: String,
    /// Selects the identity's slices, in lists and watches.
    selector: String,
    limit: Duration,
}

impl Requests {
    pub(crate) fn new(client: kube::Client, identity: &Identity, limit: Duration) -> Self {
        Self {
            slices: Api::all(client.clone()),
            nodes: Api::all(client),
            node: identity.node.clone(),
            selector: format!("spec.nodeName={},spec.driver={}", identity.node, identity.driver),
            limit,
        }
    }

    async fn send<T>(
        &self,
        what: &str,
        request: impl Future<Output = kube::Result<T>>,
    ) -> Result<T, RequestError> {
        match tokio::time::timeout(self.limit, request).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(source)) => Err(RequestError::Refused { what: what.to_owned(), source: Box::new(source) }),
            Err(_) => Err(RequestError::TooSlow { what: what.to_owned(), limit: self.limit }),
        }
    }

    /// The Node's uid now. It changes when a node is deleted and registers
    /// anew, and slices of the old one are garbage.
    pub(crate) async fn node_uid(&self) -> Result<String, RequestError> {
        let what = format!("get the Node `{}`", self.node);
        let node = self.send(&what, self.nodes.get_metadata(&self.node)).await?;
        node.metadata.uid.ok_or_else(|| RequestError::NoUid { node: self.node.clone() })
    }

    /// A quorum read of the identity's slices.
    pub(crate) async fn list(&self) -> Result<Live, RequestError> {
        let listed = Listed::slices(&self.selector);
        let client = self.slices.clone().into_client();
        let (mut slices, version) = list_within(&client, listed, self.limit, Some::<ResourceSlice>).await?;
        slices.sort_by(|left, right| left.metadata.name.cmp(&right.metadata.name));
        Ok(Live { slices, revision: revision(version.as_deref()).unwrap_or(0) })
    }

    /// Tells of changes after a revision, without the slices' content, for
    /// [`WATCH_SECONDS`].
    pub(crate) async fn watch(
        &self,
        after: u64,
    ) -> Result<
        impl Stream<Item = kube::Result<WatchEvent<PartialObjectMeta<ResourceSlice>>>> + use<>,
        RequestError,
    > {
        let params = WatchParams::default().fields(&self.selector).disable_bookmarks().timeout(WATCH_SECONDS);
        let after = after.to_string();
        self.send("watch ResourceSlices", self.slices.watch_metadata(&params, &after)).await
    }

    /// Creates a slice and returns it as stored.
    pub(crate) async fn create(&self, slice: &ResourceSlice) -> Result<ResourceSlice, RequestError> {
        let params = PostParams::default();
        self.send("create a ResourceSlice", self.slices.create(&params, slice)).await
    }

    /// Replaces a slice if it still has the resource version it was planned
    /// with, and returns it as stored.
    pub(crate) async fn update(&self, slice: &ResourceSlice) -> Result<ResourceSlice, RequestError> {
        let name = name(slice);
        let what = format!("update the ResourceSlice `{name}`");
        self.send(&what, self.slices.replace(name, &PostParams::default(), slice)).await
    }

    /// Deletes a slice if it is still the one that was listed. One that is
    /// gone already is no error.
    pub(crate) async fn delete(&self, slice: &ResourceSlice) -> Result<(), RequestError> {
        let name = name(slice);
        let params = DeleteParams {
            preconditions: Some(Preconditions {
                uid: slice.metadata.uid.clone(),
                resource_version: slice.metadata.resource_version.clone(),
            }),
            ..DeleteParams::default()
        };
        let what = format!("delete the ResourceSlice `{name}`");
        match self.send(&what, self.slices.delete(name, &params)).await {
            Err(RequestError::Refused { source, .. }) if is_not_found(&source) => Ok(()),
            answer => answer.map(|_| ()),
        }
    }
}

fn name(slice: &ResourceSlice) -> &str {
    slice.metadata.name.as_deref().unwrap_or_default()
}

fn is_not_found(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.is_not_found())
}

/// A resource version as a number. Kubernetes compares them so since 1.35;
/// one that is no number is always news.
pub(crate) fn revision(version: Option<&str>) -> Option<u64> {
    version.and_then(|version| version.parse().ok())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use axum::Router;
    use axum::http::StatusCode;
    use axum::response::IntoResponse;
    use serde_json::json;

    use super::*;

    #[tokio::test]
    async fn a_list_that_expires_begins_anew_and_has_the_revision_of_the_new_one() {
        let asked = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&asked);
        let serve = move || async move {
            let page = |name: &str, revision: &str, token: &str| {
                let spec =
                    json!({"driver": "d", "pool": {"name": "p", "generation": 1, "resourceSliceCount": 1}});
                axum::Json(json!({
                    "metadata": {"resourceVersion": revision, "continue": token},
                    "items": [{"metadata": {"name": name}, "spec": spec}],
                }))
                .into_response()
            };
            match counter.fetch_add(1, Ordering::Relaxed) {
                0 => page("old", "7", "more"),
                1 => {
                    (StatusCode::GONE, axum::Json(json!({"status": "Failure", "code": 410}))).into_response()
                }
                2 => page("b", "9", "more"),
                _ => page("a", "9", ""),
            }
        };
        let client = kube::Client::new(Router::new().fallback(serve), "default");
        let identity = Identity { node: "node-1".to_owned(), driver: "d".parse().expect("a driver name") };
        let requests = Requests::new(client, &identity, Duration::from_mins(1));
        let live = requests.list().await.expect("a list");
        let names: Vec<_> = live.slices.iter().filter_map(|slice| slice.metadata.name.as_deref()).collect();
        assert_eq!((names, live.revision, asked.load(Ordering::Relaxed)), (vec!["a", "b"], 9, 4));
    }
}
