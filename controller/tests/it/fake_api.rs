//! An API server in this process, as far as the publisher can tell: it keeps
//! slices, nodes and claims, counts revisions, generates names, refuses stale
//! writes, pages and watches. It can drop fields and fail on purpose.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};

use axum::Router;
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::Request;
use axum::http::{Method, StatusCode};
use axum::response::{IntoResponse, Response};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice, ResourceSliceSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};
use tokio::sync::watch;

/// Drops fields from what is stored, as a disabled feature gate does.
pub(crate) type Gate = Box<dyn Fn(&mut ResourceSliceSpec) + Send>;
/// Runs once after a successful update.
pub(crate) type AfterUpdate = Box<dyn FnOnce(&mut Store) + Send>;

#[derive(Clone)]
pub(crate) struct FakeApi {
    store: Arc<Mutex<Store>>,
    revision: watch::Sender<u64>,
}

#[derive(Default)]
pub(crate) struct Store {
    pub(crate) slices: BTreeMap<String, ResourceSlice>,
    pub(crate) nodes: BTreeMap<String, Node>,
    pub(crate) claims: Vec<ResourceClaim>,
    /// Requests as `METHOD resource`, in their order.
    pub(crate) requests: Vec<String>,
    pub(crate) gates: Vec<Gate>,
    /// Answers for the next requests of a method, instead of serving them.
    pub(crate) failures: VecDeque<(Method, StatusCode)>,
    pub(crate) after_update: Option<AfterUpdate>,
    /// Watches end before they tell anything.
    pub(crate) cut_watches: bool,
    /// Watches from before this revision are answered with 410.
    oldest: u64,
    /// The next continued list is answered with 410, this many times.
    pub(crate) expire_pages: u32,
    revision: u64,
    uids: u64,
    history: Vec<(u64, &'static str, ResourceSlice)>,
}

impl Store {
    fn next_revision(&mut self) -> String {
        self.revision += 1;
        self.revision.to_string()
    }

    fn record(&mut self, kind: &'static str, slice: ResourceSlice) {
        self.history.push((self.revision, kind, slice));
    }

    fn put(&mut self, mut slice: ResourceSlice, kind: &'static str) -> ResourceSlice {
        for gate in &self.gates {
            gate(&mut slice.spec);
        }
        for device in slice.spec.devices.iter_mut().flatten() {
            for taint in device.taints.iter_mut().flatten() {
                taint.time_added.get_or_insert_with(|| Time(Timestamp::now()));
            }
        }
        slice.metadata.resource_version = Some(self.next_revision());
        let name = slice.metadata.name.clone().expect("a name");
        self.slices.insert(name, slice.clone());
        self.record(kind, slice.clone());
        slice
    }

    /// Stores a slice as a foreign writer would create it.
    pub(crate) fn create(&mut self, mut slice: ResourceSlice) -> ResourceSlice {
        self.uids += 1;
        slice.metadata.uid = Some(format!("uid-{}", self.uids));
        if let Some(prefix) = slice.metadata.generate_name.clone() {
            slice.metadata.name = Some(format!("{prefix}{:05}", self.uids));
        }
        self.put(slice, "ADDED")
    }

    /// Changes a slice as a foreign writer would.
    pub(crate) fn edit(&mut self, name: &str, change: impl FnOnce(&mut ResourceSlice)) {
        let mut slice = self.slices.get(name).cloned().expect("a stored slice");
        change(&mut slice);
        self.put(slice, "MODIFIED");
    }

    /// Deletes a slice as a foreign writer would.
    pub(crate) fn delete(&mut self, name: &str) {
        if let Some(mut slice) = self.slices.remove(name) {
            slice.metadata.resource_version = Some(self.next_revision());
            self.record("DELETED", slice);
        }
    }

    /// Deletes everything, as a kubelet does.
    pub(crate) fn wipe(&mut self) {
        for name in self.names() {
            self.delete(&name);
        }
    }

    /// Ends the history: watches will not hear of what has been.
    pub(crate) fn forget(&mut self) {
        self.history.clear();
    }

    /// Closes all watches; those who come back are told to list first.
    pub(crate) fn expire_watches(&mut self) {
        self.history.clear();
        self.oldest = self.revision;
    }

    pub(crate) fn names(&self) -> Vec<String> {
        self.slices.keys().cloned().collect()
    }

    pub(crate) fn set_node(&mut self, name: &str, uid: &str) {
        let metadata =
            ObjectMeta { name: Some(name.to_owned()), uid: Some(uid.to_owned()), ..ObjectMeta::default() };
        self.nodes.insert(name.to_owned(), Node { metadata, ..Node::default() });
    }

    /// How many requests wrote something.
    pub(crate) fn writes(&self) -> usize {
        self.requests.iter().filter(|request| !request.starts_with("GET")).count()
    }
}

impl FakeApi {
    pub(crate) fn new() -> Self {
        let mut store = Store { revision: 100, ..Store::default() };
        store.set_node("node-1", "node-uid-1");
        Self { store: Arc::new(Mutex::new(store)), revision: watch::channel(100).0 }
    }

    /// A client of this server.
    pub(crate) fn client(&self) -> kube::Client {
        let api = self.clone();
        let serve = move |request| {
            let api = api.clone();
            async move { api.serve(request).await }
        };
        kube::Client::new(Router::new().fallback(serve), "default")
    }

    /// Looks at the store or changes it; watches see the change.
    pub(crate) fn with<T>(&self, action: impl FnOnce(&mut Store) -> T) -> T {
        let mut store = self.lock();
        let result = action(&mut store);
        self.revision.send_replace(store.revision);
        result
    }

    fn lock(&self) -> MutexGuard<'_, Store> {
        self.store.lock().unwrap()
    }

    async fn serve(&self, request: Request) -> Response {
        let (head, body) = request.into_parts();
        let body = to_bytes(body, usize::MAX).await.unwrap();
        let query = parse_query(head.uri.query().unwrap_or_default());
        let path = head.uri.path().to_owned();
        let mut segments = path.rsplit('/');
        let last = segments.next().unwrap_or_default();
        let (resource, name) = match last {
            "resourceslices" | "resourceclaims" => (last, None),
            _ => (segments.next().unwrap_or_default(), Some(last)),
        };
        let watching = query.get("watch").is_some_and(|value| value == "true" || value == "1");
        let verb = if watching { "WATCH" } else { "" };
        let mut store = self.lock();
        store.requests.push(format!("{} {verb}{resource}", head.method));
        if store.failures.front().is_some_and(|(method, _)| *method == head.method && !watching) {
            let (_, code) = store.failures.pop_front().unwrap();
            return failure(code, code.canonical_reason().unwrap_or_default());
        }
        match (&head.method, resource, name) {
            (&Method::GET, "nodes", Some(name)) => match store.nodes.get(name) {
                Some(node) => axum::Json(node).into_response(),
                None => failure(StatusCode::NOT_FOUND, "NotFound"),
            },
            (&Method::GET, "resourceclaims", None) => {
                let items: Vec<Value> = store.claims.iter().map(|claim| json!(claim)).collect();
                page(&mut store, &query, &items)
            }
            (&Method::GET, "resourceslices", None) if watching => {
                drop(store);
                self.watch(&query)
            }
            (&Method::GET, "resourceslices", None) => {
                let selected = store.slices.values().filter(|slice| is_selected(slice, &query));
                let items: Vec<Value> = selected.map(|slice| json!(slice)).collect();
                page(&mut store, &query, &items)
            }
            (_, "resourceslices", name) => {
                let answer = write(&mut store, &head.method, name, &body);
                self.revision.send_replace(store.revision);
                answer
            }
            _ => failure(StatusCode::NOT_FOUND, "NotFound"),
        }
    }

    fn watch(&self, query: &BTreeMap<String, String>) -> Response {
        let from: u64 = query.get("resourceVersion").and_then(|rv| rv.parse().ok()).unwrap_or(0);
        if self.lock().cut_watches {
            return Response::new(Body::empty());
        }
        if from < self.lock().oldest {
            let status = json!({"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"});
            let line = format!("{}\n", json!({"type": "ERROR", "object": status}));
            return Response::new(Body::from(line));
        }
        let start = (self.clone(), self.revision.subscribe(), from, query.clone());
        let events = futures::stream::unfold(start, |(api, mut revision, seen, query)| async move {
            loop {
                let (lines, newest, oldest) = {
                    let store = api.lock();
                    let news = store
                        .history
                        .iter()
                        .filter(|(at, _, slice)| *at > seen && is_selected(slice, &query));
                    let lines: Vec<String> = news
                        .map(|(_, kind, slice)| json!({"type": kind, "object": slice}).to_string() + "\n")
                        .collect();
                    (lines, store.revision, store.oldest)
                };
                // An expired watch is closed; its next beginning is refused.
                if seen < oldest {
                    return None;
                }
                if !lines.is_empty() {
                    let next = (api, revision, newest, query);
                    return Some((Ok::<_, std::io::Error>(Bytes::from(lines.concat())), next));
                }
                revision.changed().await.ok()?;
            }
        });
        Response::new(Body::from_stream(events))
    }
}

fn write(store: &mut Store, method: &Method, name: Option<&str>, body: &[u8]) -> Response {
    let stored = name.and_then(|name| store.slices.get(name).cloned());
    match (method, name) {
        (&Method::POST, None) => {
            let slice = serde_json::from_slice(body).unwrap();
            (StatusCode::CREATED, axum::Json(store.create(slice))).into_response()
        }
        (&Method::PUT, Some(_)) => {
            let Some(stored) = stored else { return failure(StatusCode::NOT_FOUND, "NotFound") };
            let slice: ResourceSlice = serde_json::from_slice(body).unwrap();
            if slice.metadata.resource_version != stored.metadata.resource_version {
                return failure(StatusCode::CONFLICT, "Conflict");
            }
            let answer = axum::Json(store.put(slice, "MODIFIED")).into_response();
            if let Some(action) = store.after_update.take() {
                action(store);
            }
            answer
        }
        (&Method::DELETE, Some(name)) => {
            let Some(stored) = stored else { return failure(StatusCode::NOT_FOUND, "NotFound") };
            let options: Value = serde_json::from_slice(body).unwrap_or_default();
            let wanted = &options["preconditions"];
            let mismatch = |key: &str, has: Option<&String>| {
                wanted[key].as_str().is_some_and(|wanted| Some(wanted) != has.map(String::as_str))
            };
            if mismatch("uid", stored.metadata.uid.as_ref())
                || mismatch("resourceVersion", stored.metadata.resource_version.as_ref())
            {
                return failure(StatusCode::CONFLICT, "Conflict");
            }
            store.delete(name);
            axum::Json(json!({"kind": "Status", "status": "Success"})).into_response()
        }
        _ => failure(StatusCode::METHOD_NOT_ALLOWED, "MethodNotAllowed"),
    }
}

fn page(store: &mut Store, query: &BTreeMap<String, String>, items: &[Value]) -> Response {
    let limit = query.get("limit").and_then(|limit| limit.parse().ok()).unwrap_or(usize::MAX);
    let start: usize = query.get("continue").and_then(|token| token.parse().ok()).unwrap_or(0);
    if start > 0 && store.expire_pages > 0 {
        store.expire_pages -= 1;
        return failure(StatusCode::GONE, "Expired");
    }
    let end = start.saturating_add(limit).min(items.len());
    let token = if end < items.len() { end.to_string() } else { String::new() };
    axum::Json(json!({
        "kind": "List",
        "apiVersion": "v1",
        "metadata": {"resourceVersion": store.revision.to_string(), "continue": token},
        "items": &items[start..end],
    }))
    .into_response()
}

fn failure(code: StatusCode, reason: &str) -> Response {
    let message = format!("made up: {reason}");
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "status": "Failure",
        "code": code.as_u16(), "reason": reason, "message": message,
    });
    (code, axum::Json(status)).into_response()
}

fn is_selected(slice: &ResourceSlice, query: &BTreeMap<String, String>) -> bool {
    let Some(selector) = query.get("fieldSelector") else { return true };
    selector.split(',').all(|term| match term.split_once('=') {
        Some(("spec.nodeName", node)) => slice.spec.node_name.as_deref() == Some(node),
        Some(("spec.driver", driver)) => slice.spec.driver == driver,
        _ => panic!("the API server does not know the field selector {term}"),
    })
}

fn parse_query(query: &str) -> BTreeMap<String, String> {
    let decode = |text: &str| text.replace("%3D", "=").replace("%2C", ",").replace("%2F", "/");
    let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
    pairs.map(|(key, value)| (key.to_owned(), decode(value))).collect()
}
