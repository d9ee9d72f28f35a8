use std::sync::Arc;
use std::time::Duration;

use axum::Router;

use super::*;

const SLICES: &str = "/apis/resource.k8s.io/v1/resourceslices";
const CLAIM: &str = "/apis/resource.k8s.io/v1/namespaces/resources/resourceclaims/a/status";

/// A way to a server that says what it gets, and to a watch what never ends.
fn way() -> Arc<Way> {
    let server = Router::new().fallback(|request: Request| async move {
        if request.uri().query() == Some("watch=true") {
            let first = stream::once(std::future::ready(Ok::<_, axum::Error>(Bytes::from("an event"))));
            return Body::from_stream(first.chain(stream::pending()));
        }
        request.into_body()
    });
    Arc::new(Way::new(Client::new(server, "default")))
}

async fn ask(way: &Way, method: &str, uri: &str) -> (u16, String) {
    let request = Request::builder().method(method).uri(uri).body(Body::from("it")).expect("a request");
    let answer = way.serve(request).await;
    let code = answer.status().as_u16();
    let bytes = to_bytes(answer.into_body(), usize::MAX).await.expect("a body");
    (code, String::from_utf8(bytes.to_vec()).expect("text"))
}

async fn code(way: &Way, method: &str, uri: &str) -> u16 {
    ask(way, method, uri).await.0
}

#[tokio::test]
async fn the_first_of_what_is_asked_for_are_answered_as_told() {
    let way = way();
    assert_eq!(ask(&way, "PUT", SLICES).await, (200, "it".to_owned()));
    way.set(Fault::Answer(Requests::SliceWrites, 409, "Conflict", 2));
    assert_eq!(code(&way, "GET", SLICES).await, 200);
    assert_eq!(code(&way, "POST", SLICES).await, 409);
    let (code_, text) = ask(&way, "PUT", &format!("{SLICES}/a")).await;
    assert_eq!(code_, 409);
    assert!(text.contains(r#""reason":"Conflict""#), "{text}");
    assert_eq!(way.met(), 2);
    assert_eq!(code(&way, "PUT", SLICES).await, 200);
    for (requests, uri, read, write) in [
        (Requests::Slices, SLICES, 403, 403),
        (Requests::SliceWatches, SLICES, 200, 200),
        (Requests::ClaimReads, CLAIM, 403, 200),
        (Requests::StatusWrites, CLAIM, 200, 403),
        (Requests::Claim("a".to_owned()), CLAIM, 403, 403),
        (Requests::Claim("b".to_owned()), CLAIM, 200, 200),
        (Requests::Slices, CLAIM, 200, 200),
        (Requests::All, "/api/v1/nodes/a", 403, 403),
    ] {
        way.set(Fault::Answer(requests.clone(), 403, "Forbidden", u32::MAX));
        assert_eq!(
            (code(&way, "GET", uri).await, code(&way, "PATCH", uri).await),
            (read, write),
            "{requests:?} {uri}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_held_is_silent_and_then_fails() {
    let way = way();
    way.set(Fault::Hold(Requests::Claim("a".to_owned())));
    let asked = tokio::spawn({
        let way = way.clone();
        async move { code(&way, "GET", CLAIM).await }
    });
    tokio::time::sleep(Duration::from_mins(1)).await;
    assert!(!asked.is_finished());
    assert_eq!((code(&way, "GET", SLICES).await, way.met()), (200, 1));
    way.set(Fault::None);
    assert_eq!(asked.await.expect("an answer"), 503);
    assert_eq!(code(&way, "GET", CLAIM).await, 200);
}

async fn watch(way: &Way) -> BoxStream<'static, Result<Bytes, axum::Error>> {
    let request = Request::builder().uri(format!("{SLICES}?watch=true")).body(Body::empty());
    let mut events = way.serve(request.expect("a request")).await.into_body().into_data_stream().boxed();
    assert_eq!(events.next().await.expect("an event").expect("no error"), "an event");
    events
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_runs_is_held_or_ended_too() {
    let way = way();
    let mut events = watch(&way).await;
    way.set(Fault::Hold(Requests::All));
    let silent = tokio::time::timeout(Duration::from_mins(1), events.next()).await;
    assert!(silent.is_err(), "{silent:?}");
    way.set(Fault::None);
    assert!(events.next().await.expect("news").is_err());
    assert!(events.next().await.is_none());

    let mut events = watch(&way).await;
    way.set(Fault::Answer(Requests::SliceWrites, 409, "Conflict", 1));
    let silent = tokio::time::timeout(Duration::from_mins(1), events.next()).await;
    assert!(silent.is_err(), "{silent:?}");
    way.set(Fault::Answer(Requests::SliceWatches, 410, "Expired", 1));
    assert!(events.next().await.is_none());
}

#[tokio::test]
async fn what_is_written_of_slices_is_stripped() {
    let way = way();
    way.set(Fault::Strip);
    let put = async |body: &'static str| {
        let request = Request::builder().method("PUT").uri(SLICES).body(Body::from(body)).expect("a request");
        to_bytes(way.serve(request).await.into_body(), usize::MAX).await.expect("a body")
    };
    assert_eq!(put(r#"{"spec":{"driver":"d"}}"#).await, r#"{"spec":{"driver":"d"}}"#);
    assert_eq!(way.met(), 0);
    assert_eq!(put(r#"{"spec":{"driver":"d","sharedCounters":[{}]}}"#).await, r#"{"spec":{"driver":"d"}}"#);
    assert_eq!(way.met(), 1);
}
