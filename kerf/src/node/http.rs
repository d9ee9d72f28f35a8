//! `/healthz`, `/readyz` and `/metrics`.
//!
//! `/healthz` answers as long as the runtime turns over. `/readyz` answers 200
//! once nothing is missing, else 503 with what is, a line each.

use std::future::IntoFuture;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// How long requests that have begun may go on at the end.
const GRACE: Duration = Duration::from_secs(1);

#[derive(Debug, Clone)]
struct Shared {
    missing: watch::Receiver<Vec<String>>,
    registry: Arc<Registry>,
}

/// Serves until cancelled.
pub(crate) async fn serve(
    listener: TcpListener,
    missing: watch::Receiver<Vec<String>>,
    registry: Arc<Registry>,
    cancel: CancellationToken,
) -> std::io::Result<()> {
    let router = Router::new()
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics))
        .with_state(Shared { missing, registry });
    let serve = axum::serve(listener, router).with_graceful_shutdown(cancel.clone().cancelled_owned());
    tokio::select! {
        served = serve.into_future() => served,
        // A client that sends half a request keeps nobody.
        () = async { cancel.cancelled().await; tokio::time::sleep(GRACE).await } => Ok(()),
    }
}

async fn readyz(State(shared): State<Shared>) -> Response {
    let missing = shared.missing.borrow().clone();
    if missing.is_empty() {
        "ready\n".into_response()
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, missing.join("\n") + "\n").into_response()
    }
}

async fn metrics(State(shared): State<Shared>) -> Response {
    let mut text = String::new();
    match prometheus_client::encoding::text::encode(&mut text, &shared.registry) {
        Ok(()) => {
            let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
            ([(header::CONTENT_TYPE, kind)], text).into_response()
        }
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response(),
    }
}
