//! Events on the Node object: what an operator of the cluster must know and no
//! pod's event tells.

use std::sync::Arc;

use k8s_openapi::api::core::v1::ObjectReference;
use kerf_kubelet_plugin::Rival;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::warn;

/// The longest note that the API takes (events.k8s.io/v1).
const MAX_NOTE: usize = 1024;

/// How long the API server has to take an event.
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(10);

/// Where events go.
#[derive(Clone)]
pub(crate) struct NodeEvents {
    recorder: Recorder,
    node: ObjectReference,
}

impl NodeEvents {
    pub(crate) fn new(client: &kube::Client, node: &str) -> Self {
        let reporter = Reporter { controller: "kerf".to_owned(), instance: Some(node.to_owned()) };
        let node = ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Node".to_owned()),
            name: Some(node.to_owned()),
            // As the kubelet does: `kubectl describe node` looks for it.
            uid: Some(node.to_owned()),
            ..ObjectReference::default()
        };
        Self { recorder: Recorder::new(client.clone(), reporter), node }
    }

    /// Tells of others who hand out the same GPUs, once for each.
    pub(crate) async fn tell_rivals(
        self,
        mut rivals: watch::Receiver<Option<Arc<[Rival]>>>,
        cancel: CancellationToken,
    ) {
        let mut told: Arc<[Rival]> = Arc::default();
        loop {
            let now = rivals.borrow_and_update().clone().unwrap_or_default();
            for rival in now.iter().filter(|rival| !told.contains(rival)) {
                let note = rival.to_string();
                let warned = self.warn("GPUsHandedOutByOthers", "Publish", note);
                if cancel.run_until_cancelled(warned).await.is_none() {
                    return;
                }
            }
            told = now;
            tokio::select! {
                () = cancel.cancelled() => return,
                changed = rivals.changed() => if changed.is_err() { return },
            }
        }
    }

    async fn warn(&self, reason: &str, action: &str, mut note: String) {
        note.truncate(note.floor_char_boundary(MAX_NOTE));
        let event = Event {
            type_: EventType::Warning,
            reason: reason.to_owned(),
            note: Some(note),
            action: action.to_owned(),
            secondary: None,
        };
        // The log and readiness say the same.
        match tokio::time::timeout(PATIENCE, self.recorder.publish(&event, &self.node)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => warn!(error = kerf_kubelet_plugin::chain(&error), "an event cannot be written"),
            Err(_) => warn!("an event cannot be written: no answer from the API server"),
        }
    }
}
