//! What is asked of an API server, and what is said of its answers.

use std::sync::{Arc, Mutex};

use axum::Router;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::*;

/// Claims that wait, each in a namespace of its own, and the requests for pods and events.
fn client(
    namespaces: &[String],
    answer: impl Fn(&str) -> Response + Clone + Send + Sync + 'static,
) -> (Client, Arc<Mutex<Vec<String>>>) {
    let exactly = json!({"deviceClassName": "gpu.nvidia.com"});
    let claims: Vec<Value> = namespaces
        .iter()
        .map(|namespace| {
            json!({
                "metadata": {
                    "namespace": namespace, "name": "c", "uid": namespace, "creationTimestamp": "2026-11-30T10:00:00Z",
                },
                "spec": {"devices": {"requests": [{"name": "r", "exactly": exactly}]}},
            })
        })
        .collect();
    let asked: Arc<Mutex<Vec<String>>> = Arc::default();
    let seen = Arc::clone(&asked);
    let serve = move |request: Request| {
        let path = request.uri().path().to_owned();
        let answer = match path.rsplit('/').next() {
            Some("resourceslices") => items(&[]),
            Some("resourceclaims") => items(&claims),
            _ => {
                let answer = answer(&path);
                seen.lock().expect("no test fails in here").push(path);
                answer
            }
        };
        async move { answer }
    };
    (Client::new(Router::new().fallback(serve), "default"), asked)
}

fn items(items: &[Value]) -> Response {
    axum::Json(json!({"metadata": {}, "items": items})).into_response()
}

fn forbidden() -> Response {
    let status =
        json!({"status": "Failure", "message": "pods is forbidden", "reason": "Forbidden", "code": 403});
    (StatusCode::FORBIDDEN, axum::Json(status)).into_response()
}

fn pod() -> Response {
    items(&[
        json!({"metadata": {"name": "user"}, "spec": {"resourceClaims": [{"name": "c", "resourceClaimName": "c"}]}}),
        json!({"metadata": {"name": "other"}, "spec": {}}),
    ])
}

async fn status(client: &Client) -> ClusterStatus {
    look(client, &"gpu.nvidia.com".parse().expect("a driver name")).await.expect("a status")
}

#[tokio::test]
async fn pods_that_may_not_be_read_in_one_namespace_are_in_the_others() {
    let namespaces = ["a", "b", "c"].map(str::to_owned);
    let (client, _) = client(&namespaces, |path| if path.contains("/b/") { pod() } else { forbidden() });
    let mut status = status(&client).await;
    let Err(Unread { error, namespaces }) = find_pods(&client, &mut status).await else {
        panic!("two namespaces are forbidden");
    };
    let pods: Vec<_> = status.waiting.iter().map(|waiting| waiting.pods.clone()).collect();
    assert_eq!(pods, [None, Some(vec!["user".to_owned()]), None]);
    assert_eq!(
        explained(&error, &namespaces).to_string(),
        "cannot list Pods: pods is forbidden; give this user the verb `list` on pods in the namespaces a, c, or \
         take a kubeconfig of one who has it"
    );
}

#[tokio::test]
async fn events_of_a_namespace_where_they_are_forbidden_are_asked_for_once() {
    let namespaces = ["a", "b"].map(str::to_owned);
    let (client, asked) = client(&namespaces, |path| {
        if path.ends_with("/pods") {
            pod()
        } else if path.contains("/b/") {
            items(&[json!({"metadata": {}, "message": "0/1 nodes are available"})])
        } else {
            forbidden()
        }
    });
    let mut status = status(&client).await;
    let mut twin = status.waiting[0].clone();
    twin.claim.name = "twin".to_owned();
    twin.pods = Some(vec!["twin".to_owned()]);
    status.waiting.insert(0, twin);
    assert!(find_pods(&client, &mut status).await.is_ok());
    let Err(Unread { namespaces, .. }) = find_reasons(&client, &mut status).await else {
        panic!("a namespace is forbidden");
    };
    assert_eq!(namespaces, BTreeSet::from(["a".to_owned()]));
    let said: Vec<bool> = status.waiting.iter().map(|waiting| waiting.scheduler.is_some()).collect();
    assert_eq!(said, [false, false, true]);
    let asked = asked.lock().expect("no test fails in there");
    assert_eq!(asked.iter().filter(|path| path.ends_with("/a/events")).count(), 1);
}

#[tokio::test]
async fn pods_are_asked_for_in_so_many_namespaces_and_no_more() {
    let namespaces: Vec<String> = (0..MOST + 2).map(|number| format!("n{number:03}")).collect();
    let (client, asked) = client(&namespaces, |_| items(&[]));
    let mut status = status(&client).await;
    assert!(find_pods(&client, &mut status).await.is_ok());
    assert_eq!(asked.lock().expect("no test fails in there").len(), MOST);
    assert!(status.notes.iter().any(|note| note.ends_with("not in 2 more")), "{:?}", status.notes);
    assert_eq!(status.waiting.iter().filter(|waiting| waiting.pods.is_none()).count(), 2);
}

#[tokio::test]
async fn what_takes_too_long_or_fails_in_one_namespace_is_not_tried_in_the_next() {
    let namespaces = ["a", "b"].map(str::to_owned);
    let (client, asked) = client(&namespaces, |_| StatusCode::INTERNAL_SERVER_ERROR.into_response());
    let mut status = status(&client).await;
    assert!(find_pods(&client, &mut status).await.is_err());
    assert_eq!(asked.lock().expect("no test fails in there").len(), 1);
}
