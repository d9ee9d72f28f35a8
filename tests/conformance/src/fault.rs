//! What becomes of a driver's requests on their way to the API server, as API
//! servers, their load balancers and their administrators do it.

use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context as _, Result};
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::Request;
use axum::http::{HeaderMap, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse as _, Response};
use futures::StreamExt as _;
use futures::stream::{self, BoxStream};
use kube::Client;
use serde_json::json;
use tokio::sync::watch;

use crate::gates;

/// One kind of trouble.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Fault {
    /// None.
    #[default]
    None,
    /// These are not answered until this is over. Then they fail.
    Hold(Requests),
    /// The first so many of these are answered with a code and its reason. Watches
    /// among them that run end.
    Answer(Requests, u16, &'static str, u32),
    /// What is written of slices has no fields that a feature gate may hide.
    Strip,
}

/// Which of a driver's requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Requests {
    /// Every one.
    All,
    /// That write slices.
    SliceWrites,
    /// That watch slices.
    SliceWatches,
    /// That read or write slices.
    Slices,
    /// That read claims.
    ClaimReads,
    /// Of the claim of that name.
    Claim(String),
    /// That write a claim's status.
    StatusWrites,
}

/// What one request is about.
struct Asked {
    is_write: bool,
    is_watch: bool,
    resource: String,
    name: Option<String>,
}

impl Asked {
    fn of(method: &Method, uri: &Uri) -> Self {
        let segments: Vec<&str> = uri.path().split('/').collect();
        let at = segments.iter().position(|segment| ["resourceslices", "resourceclaims"].contains(segment));
        let word = |offset: usize| at.and_then(|at| segments.get(at + offset)).map(|word| (*word).to_owned());
        let mut parameters = uri.query().unwrap_or_default().split('&');
        Self {
            is_write: method != Method::GET,
            is_watch: parameters.any(|parameter| parameter == "watch=true" || parameter == "watch=1"),
            resource: word(0).unwrap_or_default(),
            name: word(1),
        }
    }
}

impl Requests {
    fn have(&self, asked: &Asked) -> bool {
        let (slices, claims) = (asked.resource == "resourceslices", asked.resource == "resourceclaims");
        match self {
            Self::All => true,
            Self::SliceWrites => slices && asked.is_write,
            Self::SliceWatches => slices && asked.is_watch,
            Self::Slices => slices,
            Self::ClaimReads => claims && !asked.is_write,
            Self::Claim(name) => claims && asked.name.as_ref() == Some(name),
            Self::StatusWrites => claims && asked.is_write,
        }
    }
}

/// The way.
pub struct Way {
    client: Client,
    fault: watch::Sender<Fault>,
    met: AtomicU32,
}

impl fmt::Debug for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", *self.fault.borrow())
    }
}

impl Way {
    /// To the API server of a client.
    pub fn new(client: Client) -> Self {
        Self { client, fault: watch::Sender::default(), met: AtomicU32::new(0) }
    }

    /// From now on.
    pub fn set(&self, fault: Fault) {
        self.met.store(0, Ordering::Relaxed);
        self.fault.send_replace(fault);
    }

    /// How many requests have met the fault.
    pub fn met(&self) -> u32 {
        self.met.load(Ordering::Relaxed)
    }

    /// Passes a request on, if nothing happens to it.
    pub async fn serve(&self, request: Request) -> Response {
        let asked = Asked::of(request.method(), request.uri());
        let mut fault = self.fault.subscribe();
        let now = fault.borrow_and_update().clone();
        let mut strips = false;
        match now {
            Fault::Hold(requests) if requests.have(&asked) => {
                self.met.fetch_add(1, Ordering::Relaxed);
                let _ = fault.changed().await;
                return failure(StatusCode::SERVICE_UNAVAILABLE, "ServiceUnavailable");
            }
            Fault::Answer(requests, code, reason, times)
                if requests.have(&asked) && self.met.fetch_add(1, Ordering::Relaxed) < times =>
            {
                return failure(StatusCode::from_u16(code).unwrap_or_default(), reason);
            }
            Fault::Strip => strips = Requests::SliceWrites.have(&asked),
            _ => {}
        }
        let passed = self.pass(request, strips);
        let mut meanwhile = fault.clone();
        tokio::select! {
            answer = passed => match answer {
                Ok(answer) => answer.map(|body| interrupted(body, fault, asked)),
                Err(error) => failure(StatusCode::BAD_GATEWAY, &format!("{error:#}")),
            },
            // Sent, and not answered.
            _ = is_met(&mut meanwhile, &asked) => failure(StatusCode::SERVICE_UNAVAILABLE, "ServiceUnavailable"),
        }
    }

    async fn pass(&self, request: Request, strips: bool) -> Result<Response> {
        let (mut head, body) = request.into_parts();
        let mut bytes = to_bytes(body, usize::MAX).await.context("the request ended half way")?;
        if strips && let Some(without) = gates::strip(&bytes) {
            self.met.fetch_add(1, Ordering::Relaxed);
            bytes = Bytes::from(without);
        }
        end_to_end(&mut head.headers);
        // The API server's client says who it is.
        for name in [header::HOST, header::AUTHORIZATION, header::CONTENT_LENGTH] {
            head.headers.remove(name);
        }
        let answer = self.client.send(Request::from_parts(head, bytes.into())).await?;
        let (mut head, body) = answer.into_parts();
        end_to_end(&mut head.headers);
        Ok(Response::from_parts(head, Body::new(body)))
    }
}

/// Removes the headers that are of one connection.
fn end_to_end(headers: &mut HeaderMap) {
    for name in [header::CONNECTION, header::TRANSFER_ENCODING, header::UPGRADE, header::TE] {
        headers.remove(name);
    }
}

/// Waits until such a request was held and is not any more, or, if it is a watch,
/// until one is told to end (false).
async fn is_met(fault: &mut watch::Receiver<Fault>, asked: &Asked) -> bool {
    let mut was_held = false;
    loop {
        let is_held = matches!(&*fault.borrow(), Fault::Hold(requests) if requests.have(asked));
        if was_held && !is_held {
            return true;
        }
        was_held = is_held;
        if fault.changed().await.is_err() {
            return std::future::pending().await;
        }
        // What was set before the watch began has let it pass.
        if asked.is_watch && matches!(&*fault.borrow(), Fault::Answer(requests, ..) if requests.have(asked)) {
            return was_held;
        }
    }
}

/// An answer of which, once such requests are held, nothing more is heard; one
/// that is told to end does.
fn interrupted(body: Body, fault: watch::Receiver<Fault>, asked: Asked) -> Body {
    type State = (BoxStream<'static, Result<Bytes, axum::Error>>, watch::Receiver<Fault>, Asked);
    let state: Option<State> = Some((body.into_data_stream().boxed(), fault, asked));
    Body::from_stream(stream::unfold(state, |state| async {
        let (mut body, mut fault, asked) = state?;
        tokio::select! {
            biased;
            is_held = is_met(&mut fault, &asked) => {
                is_held.then(|| (Err(axum::Error::new("the way was cut")), None))
            }
            part = body.next() => part.map(|part| (part, Some((body, fault, asked)))),
        }
    }))
}

/// A `Status`, as the API server answers it.
fn failure(code: StatusCode, reason: &str) -> Response {
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "code": code.as_u16(), "reason": reason, "message": format!("made up by dra-conformance: {reason}"),
    });
    (code, axum::Json(status)).into_response()
}

#[cfg(test)]
mod tests;
