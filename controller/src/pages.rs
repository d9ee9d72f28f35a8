//! Lists of the whole cluster: a quorum read, page by page, of which only what
//! is asked for is kept.

use std::time::Duration;

use kube::api::{ListParams, Request};
use serde::Deserialize;
use serde::de::DeserializeOwned;

/// Objects a page: what is not asked for is forgotten with its page. One object
/// may be half a megabyte of somebody's configs and annotations, so a page is
/// short.
const PAGE: u32 = 50;
/// The limit of one page's request.
const REQUEST: Duration = Duration::from_secs(30);
/// How often a list is begun anew when its continuation has expired.
const BEGINNINGS: usize = 3;

/// Why objects could not be listed.
#[derive(Debug, thiserror::Error)]
pub enum ListError {
    /// The API server refused or could not be reached.
    #[error("cannot list {what}")]
    Refused {
        /// Of which kind.
        what: &'static str,
        /// Why.
        #[source]
        source: Box<kube::Error>,
    },
    /// A page did not come in time.
    #[error("cannot list {what}: no answer from the API server in {} s", limit.as_secs_f32())]
    TooSlow {
        /// Of which kind.
        what: &'static str,
        /// For how long it was waited for.
        limit: Duration,
    },
    /// The list took longer than the API server keeps a revision.
    #[error("cannot list {what}: the list expired {BEGINNINGS} times before it was complete")]
    Expired {
        /// Of which kind.
        what: &'static str,
    },
}

/// A kind of objects, or some of them.
#[derive(Debug, Clone, Copy)]
pub struct Listed<'a> {
    /// The kind, for people.
    pub what: &'static str,
    /// Where they are.
    pub path: &'a str,
    /// A field selector.
    pub fields: Option<&'a str>,
}

impl<'a> Listed<'a> {
    /// The ResourceSlices that a field selector chooses.
    pub fn slices(fields: &'a str) -> Self {
        let path = "/apis/resource.k8s.io/v1/resourceslices";
        Self { what: "ResourceSlices", path, fields: Some(fields) }
    }
}

#[derive(Deserialize)]
struct Page<T> {
    metadata: PageMetadata,
    items: Vec<T>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct PageMetadata {
    #[serde(rename = "continue")]
    continue_: Option<String>,
    resource_version: Option<String>,
}

/// All objects of which `keep` makes something, now.
pub async fn list<T: DeserializeOwned, U: Send>(
    client: &kube::Client,
    listed: Listed<'_>,
    keep: impl FnMut(T) -> Option<U> + Send,
) -> Result<Vec<U>, ListError> {
    Ok(list_within(client, listed, REQUEST, keep).await?.0)
}

/// The same with a limit of one page's request, and the revision of the list.
pub(crate) async fn list_within<T: DeserializeOwned, U: Send>(
    client: &kube::Client,
    listed: Listed<'_>,
    limit: Duration,
    mut keep: impl FnMut(T) -> Option<U> + Send,
) -> Result<(Vec<U>, Option<String>), ListError> {
    let mut found = Vec::new();
    let mut take = |is_first: bool, text: &str| {
        if is_first {
            found.clear();
        }
        let page: Page<T> = serde_json::from_str(text)?;
        found.extend(page.items.into_iter().filter_map(&mut keep));
        Ok(page.metadata)
    };
    let revision = pages(client, listed, limit, &mut take).await?;
    Ok((found, revision))
}

/// Takes a page, and says where the next one begins.
type Take<'a> = dyn FnMut(bool, &str) -> Result<PageMetadata, serde_json::Error> + Send + 'a;

/// Not generic, since it would be in the binary for each kind.
async fn pages(
    client: &kube::Client,
    listed: Listed<'_>,
    limit: Duration,
    take: &mut Take<'_>,
) -> Result<Option<String>, ListError> {
    let Listed { what, path, fields } = listed;
    let refused = |error| ListError::Refused { what, source: Box::new(error) };
    for _ in 0..BEGINNINGS {
        // Without a resource version the API server answers from a quorum.
        let mut params = ListParams::default().limit(PAGE);
        params.field_selector = fields.map(str::to_owned);
        loop {
            let request = Request::new(path);
            let request = request.list(&params).map_err(|error| refused(kube::Error::BuildRequest(error)))?;
            let text = match tokio::time::timeout(limit, client.request_text(request)).await {
                Ok(Ok(text)) => text,
                Ok(Err(kube::Error::Api(status))) if status.code == 410 => break,
                Ok(Err(error)) => return Err(refused(error)),
                Err(_) => return Err(ListError::TooSlow { what, limit }),
            };
            let is_first = params.continue_token.is_none();
            let page = take(is_first, &text).map_err(|error| refused(kube::Error::SerdeError(error)))?;
            match page.continue_.filter(|token| !token.is_empty()) {
                Some(token) => params = params.continue_token(&token),
                None => return Ok(page.resource_version),
            }
        }
    }
    Err(ListError::Expired { what })
}
