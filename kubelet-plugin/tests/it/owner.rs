//! The owner of the inventory while the API server errs or much happens.

use std::sync::atomic::Ordering;
use std::time::Duration;

use kerf_kubelet_plugin::Stored;
use tokio::time::Instant;

use super::node;
use super::rivals::Running;

/// Generous: it is reached only by a failure.
const LIMIT: Duration = Duration::from_secs(20);

#[tokio::test]
async fn a_list_that_failed_is_made_again_however_much_happens_on_the_node() {
    let root = tempfile::tempdir().unwrap();
    let node = node(&root);
    node.claims.fails.store(true, Ordering::SeqCst);
    let mut owner = Running::on(node).await;
    let is_said = |trouble: &Option<String>| trouble.is_some();
    tokio::time::timeout(LIMIT, owner.trouble.wait_for(is_said)).await.unwrap().unwrap();
    owner.node.claims.fails.store(false, Ordering::SeqCst);
    let started = Instant::now();
    while owner.layout.borrow().is_none() {
        assert!(started.elapsed() < LIMIT, "{:?}", owner.trouble.borrow());
        // Whatever wakes it, oftener than the pause is long.
        owner.stored.send_replace(Stored::default());
        let _ = tokio::time::timeout(Duration::from_millis(20), owner.layout.changed()).await;
    }
    let is_well = |trouble: &Option<String>| trouble.is_none();
    tokio::time::timeout(LIMIT, owner.trouble.wait_for(is_well)).await.unwrap().unwrap();
    owner.cancel.cancel();
    owner.task.await.unwrap();
}
