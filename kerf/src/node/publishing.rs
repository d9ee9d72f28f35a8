//! Publishing, as long as this is the youngest instance of its node.
//!
//! What describes the node lives as long as that: the owner with its records,
//! the publisher, reconcile, the status socket. A former instance only serves.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use kerf_controller::{DesiredPools, Identity, PublishStatus, Publisher};
use kerf_dra_driver::inventory::Inventory;
use kerf_kubelet_plugin::{Channels, Instances, Lead, NodeLayout, Owner, Plugin, Rival, RivalKind, Stored};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
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

    /// Returns when the kubelet may get to know this instance: it publishes, the
    /// GPUs were read or cannot be for now, and no other driver has its name.
    /// Where it cannot be told who publishes, claims must be served all the same.
    pub(crate) async fn until_known(&self) {
        let (mut inventory, mut trouble) = (self.inventory.subscribe(), self.trouble.subscribe());
        let (mut standing, mut rivals) = (self.standing.subscribe(), self.rivals.subscribe());
        let is_free = |rivals: &Option<Arc<[Rival]>>| {
            rivals.as_deref().is_some_and(|all| all.iter().all(|rival| rival.kind != RivalKind::SameName))
        };
        tokio::select! {
            biased;
            () = seen(&mut standing, |standing| *standing == Standing::Leading) => {}
            () = seen(&mut trouble, Option::is_some) => {}
        }
        if *standing.borrow() != Standing::Leading {
            return;
        }
        // The kubelet would ask this one to give back the other's claims.
        seen(&mut rivals, is_free).await;
        let known = async {
            tokio::select! {
                () = seen(&mut inventory, Option::is_some) => {}
                () = seen(&mut trouble, Option::is_some) => {}
            }
        };
        let _ = tokio::time::timeout(PATIENCE, known).await;
    }
}

/// Returns when a value is as wanted.
async fn seen<T>(values: &mut watch::Receiver<T>, wanted: impl FnMut(&T) -> bool) {
    let _ = values.wait_for(wanted).await;
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
    /// Publishes whenever this is the youngest instance, until cancelled; then
    /// nothing writes any more.
    ///
    /// # Errors
    /// A part of it panicked.
    pub(crate) async fn run(self, cancel: CancellationToken) -> Result<()> {
        let Some(mut instances) = cancel.run_until_cancelled(self.join()).await else { return Ok(()) };
        let (plugin, others) = (self.plugin.clone(), instances.others());
        let _following = AbortOnDropHandle::new(tokio::spawn({
            let cancel = cancel.clone();
            async move { plugin.follow(others, cancel).await }
        }));
        while !cancel.is_cancelled() {
            let error = match cancel.run_until_cancelled(instances.lead()).await {
                None => return Ok(()),
                Some(Ok(lead)) => match self.lead(lead, &mut instances, &cancel).await? {
                    Ok(()) => continue,
                    Err(error) => error,
                },
                Some(Err(error)) => error.into(),
            };
            self.pause(&error, &cancel).await;
        }
        Ok(())
    }

    /// Joins the instances of the node, once: who joins again is the youngest.
    async fn join(&self) -> Instances {
        loop {
            match Instances::join(&self.plugin_dir) {
                Ok(instances) => return instances,
                Err(error) => self.pause(&error.into(), &CancellationToken::new()).await,
            }
        }
    }

    async fn pause(&self, error: &anyhow::Error, cancel: &CancellationToken) {
        let error = format!("{error:#}");
        warn!(error, "nothing can be published, trying again");
        self.outlets.trouble.send_replace(Some(error));
        cancel.run_until_cancelled(tokio::time::sleep(RETRY)).await;
        self.outlets.trouble.send_replace(None);
    }

    /// One term. The lead is given up when nothing writes any more. The outer
    /// error is a panic: nobody knows what the node looks like then.
    async fn lead(
        &self,
        lead: Lead,
        instances: &mut Instances,
        cancel: &CancellationToken,
    ) -> Result<Result<(), anyhow::Error>> {
        let outlets = &self.outlets;
        let term = cancel.child_token();
        let mut tasks = match self.begin(lead, &term).await {
            Ok(tasks) => tasks,
            Err(error) => return Ok(Err(error)),
        };
        outlets.standing.send_replace(Standing::Leading);
        let ended = tokio::select! {
            // All parts end with it.
            biased;
            () = cancel.cancelled() => Ok(()),
            overtaken = instances.overtaken() => overtaken.map_err(Into::into),
            Some(ended) = tasks.join_next() => {
                ended.context("a part of publishing ended")?;
                Err(anyhow!("a part of publishing ended by itself"))
            }
        };
        term.cancel();
        while let Some(ended) = tasks.join_next().await {
            ended.context("a part of publishing ended")?;
        }
        outlets.standing.send_replace(Standing::Overtaken);
        outlets.layout.send_replace(None);
        outlets.trouble.send_replace(None);
        outlets.rivals.send_replace(None);
        outlets.published.send_replace(PublishStatus::default());
        Ok(ended)
    }

    /// Starts what describes the node.
    async fn begin(&self, lead: Lead, term: &CancellationToken) -> Result<JoinSet<()>> {
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
        let owner = Owner::new(self.plugin.clone(), channels, lead)?;
        let desired = watch::Sender::new(None);
        // A claim on what is published must find somebody who prepares it.
        let (publisher, outcome) = Publisher::new(
            self.client.clone(),
            self.identity.clone(),
            desired.subscribe(),
            self.plugin.serving(),
        );
        let bridge = Bridge { layouts: outlets.layout.subscribe(), desired, published: outcome, stored };
        let report = Arc::clone(&self.report);
        let answer = move || -> status_socket::Answer {
            let report = Arc::clone(&report);
            Box::pin(async move {
                report.json().await.unwrap_or_else(|error| {
                    warn!(%error, "the node's status cannot be written down");
                    Vec::new()
                })
            })
        };
        let mut tasks = JoinSet::new();
        tasks.spawn(bridge.run(outlets.published.clone(), term.clone()));
        tasks.spawn(owner.run(term.clone()));
        tasks.spawn(publisher.run(term.clone()));
        let (plugin, until) = (self.plugin.clone(), term.clone());
        tasks.spawn(async move { plugin.keep_reconciled(until).await });
        tasks.spawn(self.events.clone().tell_rivals(outlets.rivals.subscribe(), term.clone()));
        tasks.spawn(status_socket::serve(self.plugin_dir.clone(), answer, term.clone()));
        Ok(tasks)
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
