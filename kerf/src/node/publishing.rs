//! Publishing, as long as this is the youngest instance of its node.
//!
//! What describes the node lives as long as that: the owner with its records,
//! the publisher, reconcile, the status socket. A former instance only serves.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use kerf_controller::{DesiredPools, Identity, PublishStatus, Publisher};
use kerf_dra_driver::inventory::Inventory;
use kerf_kubelet_plugin::{Channels, Instances, Lead, NodeLayout, Owner, Plugin, Rival, ServeError, Stored};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::events::NodeEvents;
use super::report::Report;
use super::status_socket;

/// The pause after something that is needed to publish could not be had.
const RETRY: Duration = Duration::from_secs(10);
/// How long the kubelet is kept waiting for the first inventory.
const PATIENCE: Duration = Duration::from_secs(5);

/// Whether this instance is the one that publishes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Standing {
    /// Not yet: another one has not handed over.
    #[default]
    Waiting,
    /// It is.
    Leading,
    /// Not any more: a younger one is there.
    Overtaken,
}

/// What others are told, whoever publishes.
#[derive(Debug, Clone)]
pub(crate) struct Outlets {
    pub(crate) inventory: watch::Sender<Option<Arc<Inventory>>>,
    pub(crate) layout: watch::Sender<Option<Arc<NodeLayout>>>,
    pub(crate) trouble: watch::Sender<Option<String>>,
    pub(crate) rivals: watch::Sender<Option<Arc<[Rival]>>>,
    pub(crate) published: watch::Sender<PublishStatus>,
    pub(crate) standing: watch::Sender<Standing>,
}

impl Outlets {
    pub(crate) fn new() -> Self {
        Self {
            inventory: watch::Sender::new(None),
            layout: watch::Sender::new(None),
            trouble: watch::Sender::new(None),
            rivals: watch::Sender::new(None),
            published: watch::Sender::new(PublishStatus::default()),
            standing: watch::Sender::new(Standing::default()),
        }
    }

    /// Returns when claims can be prepared, as far as that is up to the GPUs:
    /// these were read, or could not be, or take too long.
    pub(crate) async fn until_known(&self) {
        let (mut inventory, mut trouble) = (self.inventory.subscribe(), self.trouble.subscribe());
        let known = async {
            tokio::select! {
                _ = inventory.wait_for(Option::is_some) => {}
                _ = trouble.wait_for(Option::is_some) => {}
            }
        };
        let _ = tokio::time::timeout(PATIENCE, known).await;
    }
}

/// Publishing, with all that it needs.
pub(crate) struct Publishing {
    pub(crate) plugin: Plugin,
    pub(crate) client: kube::Client,
    pub(crate) identity: Identity,
    pub(crate) plugin_dir: PathBuf,
    pub(crate) report: Arc<Report>,
    pub(crate) outlets: Outlets,
    pub(crate) events: NodeEvents,
}

impl Publishing {
    /// Publishes whenever this is the youngest instance, until cancelled.
    pub(crate) async fn run(self, cancel: CancellationToken) {
        let until_cancelled = async {
            loop {
                let Err(error) = self.keep_published(&cancel).await else { return };
                let error = format!("{error:#}");
                warn!(error, "nothing can be published, trying again");
                self.outlets.trouble.send_replace(Some(error));
                tokio::time::sleep(RETRY).await;
            }
        };
        tokio::select! {
            () = cancel.cancelled() => {}
            () = until_cancelled => {}
        }
    }

    async fn keep_published(&self, cancel: &CancellationToken) -> Result<()> {
        let mut instances = Instances::join(&self.plugin_dir)?;
        loop {
            let lead = instances.lead().await?;
            let term = cancel.child_token();
            let _ends = term.clone().drop_guard();
            let ended = self.lead(lead, &mut instances, term).await;
            self.outlets.standing.send_replace(Standing::Overtaken);
            self.outlets.layout.send_replace(None);
            self.outlets.trouble.send_replace(None);
            ended?;
        }
    }

    /// One term. The lead is given up when nothing writes any more.
    async fn lead(
        &self,
        lead: Lead,
        instances: &mut Instances,
        term: CancellationToken,
    ) -> Result<(), anyhow::Error> {
        let outlets = &self.outlets;
        // What the former instance wrote until now.
        self.plugin.refresh().await;
        let stored = watch::Sender::new(Stored::default());
        let channels = Channels {
            inventory: outlets.inventory.clone(),
            layout: outlets.layout.clone(),
            trouble: outlets.trouble.clone(),
            rivals: outlets.rivals.clone(),
            stored: stored.subscribe(),
        };
        let owner = Owner::new(self.plugin.clone(), channels)
            .context("the records of what was published cannot be read")?;
        let desired = watch::Sender::new(None);
        // A claim on what is published must find somebody who prepares it.
        let (publisher, outcome) = Publisher::new(
            self.client.clone(),
            self.identity.clone(),
            desired.subscribe(),
            self.plugin.serving(),
        );
        let mut tasks = JoinSet::new();
        let bridge = Bridge { layouts: outlets.layout.subscribe(), desired, published: outcome, stored };
        tasks.spawn(bridge.run(outlets.published.clone(), term.clone()));
        outlets.standing.send_replace(Standing::Leading);
        tasks.spawn(owner.run(term.clone()));
        tasks.spawn(publisher.run(term.clone()));
        let (plugin, until) = (self.plugin.clone(), term.clone());
        tasks.spawn(async move { plugin.keep_reconciled(until).await });
        let (plugin, others, until) = (self.plugin.clone(), instances.others(), term.clone());
        tasks.spawn(async move { plugin.follow(others, until).await });
        let (events, rivals) = (self.events.clone(), outlets.rivals.subscribe());
        tasks.spawn(events.tell_rivals(rivals, term.clone()));
        let report = Arc::clone(&self.report);
        let answer = move || -> status_socket::Answer {
            let report = Arc::clone(&report);
            Box::pin(async move { report.json().await })
        };
        tasks.spawn(status_socket::serve(self.plugin_dir.clone(), answer, term.clone()));
        let overtaken: Result<(), ServeError> = instances.overtaken().await;
        term.cancel();
        tasks.join_all().await;
        drop(lead);
        Ok(overtaken?)
    }
}

/// Carries layouts to the publisher, and back which of them is stored.
struct Bridge {
    layouts: watch::Receiver<Option<Arc<NodeLayout>>>,
    desired: watch::Sender<Option<Arc<DesiredPools>>>,
    published: watch::Receiver<PublishStatus>,
    stored: watch::Sender<Stored>,
}

impl Bridge {
    async fn run(mut self, outlet: watch::Sender<PublishStatus>, term: CancellationToken) {
        let mut last: Option<(Arc<NodeLayout>, Arc<DesiredPools>)> = None;
        loop {
            let layout = self.layouts.borrow_and_update().clone();
            if let Some(layout) =
                layout.filter(|layout| last.as_ref().is_none_or(|(sent, _)| !Arc::ptr_eq(sent, layout)))
            {
                let pools: Arc<DesiredPools> = Arc::new(layout.slices.iter().cloned().collect());
                last = Some((layout, Arc::clone(&pools)));
                self.desired.send_replace(Some(pools));
            }
            let status = self.published.borrow_and_update().clone();
            self.stored.send_if_modified(|stored| {
                let is_last = |pools: &Arc<DesiredPools>| {
                    last.as_ref()
                        .filter(|(_, sent)| Arc::ptr_eq(sent, pools))
                        .map(|(layout, _)| Arc::clone(layout))
                };
                let layout = status.stored.as_ref().and_then(is_last);
                // Once found missing, they are not hoped for again: what is
                // published without them would be in use by then.
                let counters = stored.counters && !status.dropped.iter().any(|feature| feature.guards());
                let same = match (&stored.layout, &layout) {
                    (Some(before), Some(now)) => Arc::ptr_eq(before, now),
                    (None, None) => true,
                    _ => false,
                };
                let changed = !same || stored.counters != counters;
                *stored = Stored { layout, counters };
                changed
            });
            outlet.send_if_modified(|last| {
                let changed = *last != status;
                *last = status;
                changed
            });
            tokio::select! {
                () = term.cancelled() => return,
                changed = self.layouts.changed() => if changed.is_err() { return },
                changed = self.published.changed() => if changed.is_err() { return },
            }
        }
    }
}
