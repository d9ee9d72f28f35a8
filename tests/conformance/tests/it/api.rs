//! An API server in this process, as far as checks and the tests' driver can
//! tell: it keeps objects of any kind, counts revisions, generates names and
//! refuses stale writes. It validates nothing.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock};

use axum::Router;
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::Request;
use axum::http::{Method, StatusCode};
use axum::response::{IntoResponse, Response};
use dra_conformance::Way;
use futures::stream;
use serde_json::{Map, Value, json};
use tokio::sync::watch;

const RESOURCES: [&str; 5] = ["resourceslices", "resourceclaims", "nodes", "pods", "namespaces"];

#[derive(Clone)]
pub(crate) struct Api {
    /// By resource and name: there is one namespace.
    objects: Arc<Mutex<BTreeMap<(String, String), Value>>>,
    revision: watch::Sender<u64>,
    way: Arc<OnceLock<Way>>,
}

impl Api {
    pub(crate) fn new() -> Self {
        let namespace = json!({"metadata": {"name": "default", "resourceVersion": "1"}});
        let objects = BTreeMap::from([(("namespaces".to_owned(), "default".to_owned()), namespace)]);
        Self { objects: Arc::new(Mutex::new(objects)), revision: watch::channel(1).0, way: Arc::default() }
    }

    pub(crate) fn router(&self) -> Router {
        let api = self.clone();
        let serve = move |request| {
            let api = api.clone();
            async move { api.serve(request).await }
        };
        Router::new().fallback(serve)
    }

    pub(crate) fn client(&self) -> kube::Client {
        kube::Client::new(self.router(), "default")
    }

    /// The driver's way to it, with whatever trouble.
    pub(crate) fn way(&self) -> &Way {
        self.way.get_or_init(|| Way::new(self.client()))
    }

    /// A client on that way.
    pub(crate) fn distant_client(&self) -> kube::Client {
        // In this runtime, which outlives the driver's.
        self.way();
        let api = self.clone();
        let serve = move |request| {
            let api = api.clone();
            async move { api.way().serve(request).await }
        };
        kube::Client::new(Router::new().fallback(serve), "default")
    }

    /// Says whenever something was written, and at once.
    fn watch(&self) -> Response {
        let state = Some(self.revision.subscribe());
        let events = stream::unfold((state, true), |(state, is_first)| async move {
            let mut revision = state?;
            if !is_first {
                revision.changed().await.ok()?;
            }
            let now = revision.borrow_and_update().to_string();
            let object = json!({"kind": "ResourceSlice", "apiVersion": "resource.k8s.io/v1", "metadata": {"resourceVersion": now}});
            let event = json!({"type": "BOOKMARK", "object": object});
            Some((Ok::<_, axum::Error>(Bytes::from(format!("{event}\n"))), (Some(revision), false)))
        });
        Body::from_stream(events).into_response()
    }

    /// Tells when something was written.
    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.revision.subscribe()
    }

    async fn serve(&self, request: Request) -> Response {
        let (head, body) = request.into_parts();
        let body: Value =
            serde_json::from_slice(&to_bytes(body, usize::MAX).await.unwrap()).unwrap_or_default();
        let segments: Vec<&str> = head.uri.path().split('/').collect();
        let at = segments.iter().rposition(|segment| RESOURCES.contains(segment)).expect("a known resource");
        let name = segments.get(at + 1).map(|name| (*name).to_owned());
        let mut objects = self.objects.lock().unwrap();
        let key = |name: &str| (segments[at].to_owned(), name.to_owned());
        let stored = name.as_ref().map(|name| objects.get(&key(name)).cloned());
        let mut object = match (&head.method, stored) {
            (&Method::GET, None) if head.uri.query().is_some_and(|query| query.contains("watch=")) => {
                return self.watch();
            }
            (&Method::GET, None) => {
                let selected = objects.iter().filter(|((resource, _), object)| {
                    resource == segments[at] && is_selected(object, head.uri.query().unwrap_or_default())
                });
                let items: Vec<&Value> = selected.map(|(_, object)| object).collect();
                return axum::Json(
                    json!({"kind": "List", "apiVersion": "v1", "metadata": {}, "items": items}),
                )
                .into_response();
            }
            (&Method::POST, None) => {
                let mut object = body;
                let metadata = &mut object["metadata"];
                let number = *self.revision.borrow();
                if let Some(prefix) = metadata["generateName"].as_str() {
                    metadata["name"] = json!(format!("{prefix}{number:05}"));
                }
                if objects.contains_key(&key(metadata["name"].as_str().unwrap())) {
                    return failure(StatusCode::CONFLICT, "AlreadyExists");
                }
                metadata["uid"] = json!(format!("00000000-0000-4000-9000-{number:012}"));
                object
            }
            (_, Some(None)) => return failure(StatusCode::NOT_FOUND, "NotFound"),
            (&Method::GET, Some(Some(object))) => return axum::Json(object).into_response(),
            (&Method::DELETE, Some(Some(_))) => {
                objects.remove(&key(&name.unwrap()));
                self.revision.send_modify(|revision| *revision += 1);
                return axum::Json(json!({"kind": "Status", "status": "Success"})).into_response();
            }
            (&Method::PUT, Some(Some(stored))) => {
                let sent = &body["metadata"]["resourceVersion"];
                if !sent.is_null() && *sent != stored["metadata"]["resourceVersion"] {
                    return failure(StatusCode::CONFLICT, "Conflict");
                }
                body
            }
            (&Method::PATCH, Some(Some(mut stored))) => {
                merge(&mut stored, &body);
                stored
            }
            (method, _) => panic!("{method} {}", head.uri),
        };
        self.revision.send_modify(|revision| *revision += 1);
        object["metadata"]["resourceVersion"] = json!(self.revision.borrow().to_string());
        let name = object["metadata"]["name"].as_str().unwrap().to_owned();
        objects.insert(key(&name), object.clone());
        axum::Json(object).into_response()
    }
}

/// A JSON merge patch (RFC 7386).
fn merge(target: &mut Value, patch: &Value) {
    let Some(patch) = patch.as_object() else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = Value::Object(Map::new());
    }
    for (key, value) in patch {
        if value.is_null() {
            target.as_object_mut().unwrap().remove(key);
        } else {
            merge(&mut target[key.as_str()], value);
        }
    }
}

fn is_selected(object: &Value, query: &str) -> bool {
    let selector = query.split('&').find_map(|pair| pair.strip_prefix("fieldSelector="));
    let decoded = selector.unwrap_or_default().replace("%3D", "=").replace("%2C", ",");
    let mut terms = decoded.split(',').filter_map(|term| term.split_once('='));
    terms.all(|(path, value)| path.split('.').fold(object, |at, key| &at[key]).as_str() == Some(value))
}

fn failure(code: StatusCode, reason: &str) -> Response {
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "status": "Failure",
        "code": code.as_u16(), "reason": reason, "message": reason,
    });
    (code, axum::Json(status)).into_response()
}
