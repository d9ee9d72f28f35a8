//! `kerf node`: joins hardware, plugin, owner and publisher, and serves what
//! operators look at.
//!
//! The order of starting is the order of trust: the journal is read and what a
//! crash left is settled before the hardware is described; slices are
//! published once the kubelet's socket serves. On SIGTERM the sockets go and
//! the slices stay, so that a quick restart withdraws nothing.

mod api_claims;
mod http;
mod metrics;
mod status_socket;

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use kerf_controller::{DesiredPools, Identity, PublishStatus, Publisher};
use kerf_dra_driver::inventory::Inventory;
use kerf_dra_driver::model::Settings;
use kerf_dra_driver::names::gpu_pool;
use kerf_dra_driver::status::{self, NodeStatus, Publication};
use kerf_gpu::{NvmlHardware, Roots};
use kerf_kubelet_plugin::{
    Channels, ExtraMount, HookProgram, NodeLayout, Owner, Plugin, PluginConfig, Registration, Stored,
};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::{error, info};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::prelude::*;

use self::api_claims::ApiClaims;
use self::status_socket::StatusSocket;
use crate::arguments::NodeArguments;
use crate::memory;

/// Runs until SIGTERM or SIGINT, or until a part of it cannot go on.
pub(crate) fn run(arguments: NodeArguments) -> Result<()> {
    // `Targets` reads the same text as the usual filter, less its patterns on
    // fields, without a regular expression engine.
    let filter: Targets = arguments
        .log_level
        .parse()
        .with_context(|| format!("`{}` is not a log level or filter", arguments.log_level))?;
    let lines = tracing_subscriber::fmt::layer().json().flatten_event(true).with_writer(std::io::stderr);
    tracing_subscriber::registry().with(lines.with_filter(filter)).init();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("the runtime cannot be made")?;
    let result = runtime.block_on(serve(arguments));
    // A thread that hangs in the driver does not keep the process.
    runtime.shutdown_background();
    if let Err(error) = &result {
        error!(error = format!("{error:#}"), "kerf node ends");
    }
    result
}

/// What the command line asks for.
struct Wanted {
    roots: Roots,
    config: PluginConfig,
    http_address: SocketAddr,
}

impl Wanted {
    fn by(arguments: NodeArguments) -> Result<Self> {
        let NodeArguments {
            kubelet,
            node_name,
            roots,
            hook,
            mig_mode,
            mig_profiles,
            foreign_partitions,
            extra_mount,
            http_address,
            log_level: _,
        } = arguments;
        let hardware = roots.hardware();
        let config = PluginConfig {
            pool: gpu_pool(&node_name),
            plugin_dir: kubelet.plugin_dir(),
            registry_dir: kubelet.registry_dir(),
            pod_resources_socket: kubelet.pod_resources_socket(),
            cdi_dir: roots.cdi_root,
            hook: HookProgram::of_this_process(hook.copies(&kubelet.driver_name))
                .context("this process's own program cannot be read")?,
            extra_mounts: extra_mount.iter().map(|text| parse_mount(text)).collect::<Result<_>>()?,
            proc_root: roots.proc_root,
            settings: Settings {
                driver: kubelet.driver_name,
                node: node_name,
                mig_mode,
                mig_profiles,
                foreign_partitions,
            },
        };
        Ok(Self { roots: hardware, config, http_address })
    }
}

async fn serve(arguments: NodeArguments) -> Result<()> {
    let Wanted { roots, config, http_address } = Wanted::by(arguments)?;
    let settings = config.settings.clone();
    let plugin_dir = config.plugin_dir.clone();
    info!(version = env!("CARGO_PKG_VERSION"), node = settings.node, driver = %settings.driver, "kerf node starts");
    let cancel = CancellationToken::new();
    let client = kube::Client::try_default().await.context(
        "the API server's address and credentials were not found (run in a pod, or set KUBECONFIG)",
    )?;

    let inventory = watch::Sender::new(None);
    let claims = Arc::new(ApiClaims::new(client.clone()));
    let plugin = Plugin::new(config, Arc::new(NvmlHardware::new(roots)), claims, inventory.subscribe())?;
    let socket = StatusSocket::bind(&plugin_dir).context("the status socket cannot be made")?;
    let listener = TcpListener::bind(http_address)
        .await
        .with_context(|| format!("{http_address} cannot be served (see --http-address)"))?;

    let stored = watch::Sender::new(Stored::default());
    let channels = Channels {
        inventory: inventory.clone(),
        layout: watch::Sender::new(None),
        trouble: watch::Sender::new(None),
        stored: stored.subscribe(),
    };
    let (layout, trouble) = (channels.layout.subscribe(), channels.trouble.subscribe());
    let owner =
        Owner::new(plugin.clone(), channels).context("the records of what was published cannot be read")?;
    let desired = watch::Sender::new(None);
    let identity = Identity { driver: settings.driver.clone(), node: settings.node.clone() };
    // A claim on what is published must find somebody who prepares it.
    let (publisher, outcome) =
        Publisher::new(client.clone(), identity, desired.subscribe(), plugin.serving());
    let missing = watch::Sender::new(vec!["kerf node is starting".to_owned()]);
    let registry = Arc::new(metrics::registry(plugin.clone(), outcome.clone(), missing.subscribe()));
    let report = Report {
        settings,
        plugin: plugin.clone(),
        inventory: inventory.subscribe(),
        layout: layout.clone(),
        published: outcome.clone(),
        missing: missing.subscribe(),
    };

    let mut parts = JoinSet::new();
    let http = http::serve(listener, missing.subscribe(), registry, cancel.clone());
    part(&mut parts, "the HTTP server", async { http.await.map_err(Into::into) });
    let stop = cancel.clone();
    part(&mut parts, "the status socket", async move {
        let report = Arc::new(report);
        let answer = move || -> status_socket::Answer {
            let report = Arc::clone(&report);
            Box::pin(async move { report.json().await })
        };
        Ok(socket.serve(answer, stop).await?)
    });
    let readiness = keep_readiness(plugin.registration(), outcome.clone(), trouble, missing, cancel.clone());
    part(&mut parts, "readiness", readiness);
    let serving = plugin.clone();
    let slim = memory::keep_slim(inventory.subscribe(), outcome.clone(), plugin.journal(), cancel.clone());
    part(&mut parts, "the heap", slim);
    let stop = cancel.clone();
    part(&mut parts, "the kubelet's side", async move {
        serving.start().await.context("what a former process left cannot be settled")?;
        serving.listen(stop.clone()).context("GPUs cannot be listened to")?;
        let mut tasks = JoinSet::new();
        let (reconciling, until) = (serving.clone(), stop.clone());
        tasks.spawn(async move { reconciling.keep_reconciled(until).await });
        tasks.spawn(owner.run(stop.clone()));
        tasks.spawn(bridge(layout, desired, outcome, stored, stop.clone()));
        tasks.spawn(publisher.run(stop.clone()));
        serving.serve(stop).await?;
        tasks.join_all().await;
        Ok(())
    });

    let mut terminate = signal(SignalKind::terminate()).context("SIGTERM cannot be caught")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("SIGINT cannot be caught")?;
    let ended = tokio::select! {
        _ = terminate.recv() => Ok(()),
        _ = interrupt.recv() => Ok(()),
        Some(ended) = parts.join_next() => ended.map_err(Into::into).and_then(|result| result),
    };
    info!("kerf node stops");
    cancel.cancel();
    let drain = async { while parts.join_next().await.is_some() {} };
    if tokio::time::timeout(Duration::from_secs(10), drain).await.is_err() {
        error!("parts of kerf node did not end in time; what they were doing is in the journal");
    }
    ended
}

/// A part of the node that never ends by itself.
fn part(
    parts: &mut JoinSet<Result<()>>,
    name: &'static str,
    work: impl Future<Output = Result<()>> + Send + 'static,
) {
    parts.spawn(async move { work.await.with_context(|| format!("{name} failed")) });
}

/// Carries layouts to the publisher, and back which of them is stored.
async fn bridge(
    mut layouts: watch::Receiver<Option<Arc<NodeLayout>>>,
    desired: watch::Sender<Option<Arc<DesiredPools>>>,
    mut published: watch::Receiver<PublishStatus>,
    stored: watch::Sender<Stored>,
    cancel: CancellationToken,
) {
    let mut last: Option<(Arc<NodeLayout>, Arc<DesiredPools>)> = None;
    loop {
        let layout = layouts.borrow_and_update().clone();
        if let Some(layout) =
            layout.filter(|layout| last.as_ref().is_none_or(|(sent, _)| !Arc::ptr_eq(sent, layout)))
        {
            let pools: Arc<DesiredPools> = Arc::new(layout.slices.iter().cloned().collect());
            last = Some((layout, Arc::clone(&pools)));
            desired.send_replace(Some(pools));
        }
        let status = published.borrow_and_update().clone();
        stored.send_if_modified(|stored| {
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
        tokio::select! {
            () = cancel.cancelled() => return,
            changed = layouts.changed() => if changed.is_err() { return },
            changed = published.changed() => if changed.is_err() { return },
        }
    }
}

/// Keeps the list of what is missing until the node is ready.
async fn keep_readiness(
    mut registration: watch::Receiver<Registration>,
    mut published: watch::Receiver<PublishStatus>,
    mut trouble: watch::Receiver<Option<String>>,
    missing: watch::Sender<Vec<String>>,
    cancel: CancellationToken,
) -> Result<()> {
    loop {
        let mut reasons: Vec<String> = trouble.borrow_and_update().clone().into_iter().collect();
        reasons.extend(match &*registration.borrow_and_update() {
            Registration::Registered => None,
            Registration::Waiting => Some("the kubelet has not registered the plugin".to_owned()),
            Registration::Refused(reason) => Some(format!("the kubelet refuses the plugin: {reason}")),
        });
        reasons.extend(published.borrow_and_update().missing());
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
        }
    }
}

/// How long a status waits for the hardware before it tells the last inventory.
const FRESH: Duration = Duration::from_secs(3);

/// Where the node's status comes from.
#[derive(Debug)]
struct Report {
    settings: Settings,
    plugin: Plugin,
    inventory: watch::Receiver<Option<Arc<Inventory>>>,
    layout: watch::Receiver<Option<Arc<NodeLayout>>>,
    published: watch::Receiver<PublishStatus>,
    missing: watch::Receiver<Vec<String>>,
}

impl Report {
    /// The status now: the owner's inventory is as old as the last event.
    async fn json(&self) -> Vec<u8> {
        let inventory = match tokio::time::timeout(FRESH, self.plugin.observe()).await {
            Ok(Ok(observed)) => Some(observed.inventory),
            _ => self.inventory.borrow().clone(),
        };
        let layout = self.layout.borrow().clone();
        let journal = self.plugin.journal().borrow().clone();
        let (generation, slices) = {
            let published = self.published.borrow();
            (published.generation, published.slices)
        };
        let devices: Vec<_> = layout
            .iter()
            .flat_map(|layout| &layout.slices)
            .filter_map(|slice| slice.devices.clone())
            .flatten()
            .collect();
        let entries: Vec<_> = journal.entries.values().map(AsRef::as_ref).collect();
        let status = NodeStatus {
            node: self.settings.node.clone(),
            driver: self.settings.driver.to_string(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            nvidia_driver: inventory.as_ref().map(|inventory| inventory.driver_version.clone()),
            missing: self.missing.borrow().clone(),
            publication: Publication { pool: gpu_pool(&self.settings.node), generation, slices },
            gpus: status::gpus(&inventory.unwrap_or_default(), &entries, self.plugin.boot_id(), &devices),
        };
        serde_json::to_vec(&status).unwrap_or_default()
    }
}

fn parse_mount(text: &str) -> Result<ExtraMount> {
    let (host_path, container_path) = text
        .split_once(':')
        .filter(|(host, container)| {
            host.starts_with('/') && container.starts_with('/') && !container.contains(':')
        })
        .ok_or_else(|| {
            anyhow!("--extra-mount `{text}` is not HOST_PATH:CONTAINER_PATH with two absolute paths")
        })?;
    Ok(ExtraMount { host_path: host_path.to_owned(), container_path: container_path.to_owned() })
}
