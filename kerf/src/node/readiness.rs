//! What is missing until a node is ready, as sentences.

use anyhow::Result;
use kerf_kubelet_plugin::Registration;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::info;

use super::publishing::{Outlets, Standing};

/// Why the kubelet asks nothing of this instance.
pub(crate) fn unregistered(registration: &Registration) -> Option<String> {
    match registration {
        Registration::Registered => None,
        Registration::Waiting => Some("the kubelet has not registered the plugin".to_owned()),
        Registration::Refused(reason) => Some(format!("the kubelet refuses the plugin: {reason}")),
        Registration::Unserved(reason) => Some(format!("the kubelet cannot be served: {reason}")),
    }
}

/// Why what there is is not published, where it is this instance's business.
pub(crate) fn unpublished(standing: Standing, published: Option<String>) -> Option<String> {
    match standing {
        Standing::Leading => published,
        Standing::Waiting => Some(
            "publishing has not begun: the node's former instance may not have handed over yet".to_owned(),
        ),
        // It serves until it is ended: its successor may be about to fail.
        Standing::Overtaken => None,
    }
}

/// Keeps the list of what is missing.
pub(crate) async fn keep(
    mut registration: watch::Receiver<Registration>,
    outlets: Outlets,
    missing: watch::Sender<Vec<String>>,
    cancel: CancellationToken,
) -> Result<()> {
    let mut published = outlets.published.subscribe();
    let mut trouble = outlets.trouble.subscribe();
    let mut standing = outlets.standing.subscribe();
    loop {
        let mut reasons: Vec<String> = trouble.borrow_and_update().clone().into_iter().collect();
        reasons.extend(unregistered(&registration.borrow_and_update()));
        let published_reason = published.borrow_and_update().missing();
        reasons.extend(unpublished(*standing.borrow_and_update(), published_reason));
        missing.send_if_modified(|last| {
            if *last == reasons {
                return false;
            }
            if reasons.is_empty() {
                info!("ready");
            } else {
                info!(missing = reasons.join("; "), "not ready");
            }
            *last = reasons;
            true
        });
        tokio::select! {
            () = cancel.cancelled() => return Ok(()),
            changed = registration.changed() => changed?,
            changed = published.changed() => changed?,
            changed = trouble.changed() => changed?,
            changed = standing.changed() => changed?,
        }
    }
}
