//! `kerf node`: joins hardware, plugin, owner and publisher, and serves what
//! operators look at.
//!
//! The order of starting is the order of trust: the journal is read and what a
//! crash left is settled before the hardware is described; the kubelet's socket
//! is served once GPUs are known; slices are published once it serves. On SIGTERM
//! the sockets go and the slices stay, so that a quick restart withdraws nothing.

mod api_claims;
mod events;
mod http;
mod metrics;
pub(crate) mod publishing;
pub(crate) mod readiness;
mod report;
mod status_socket;

use std::future::Future;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use kerf_controller::Identity;
use kerf_dra_driver::model::Settings;
use kerf_dra_driver::names::gpu_pool;
use kerf_gpu::{NvmlHardware, Roots};
use kerf_kubelet_plugin::{ExtraMount, HookProgram, Plugin, PluginConfig};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use tracing::{error, info};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::prelude::*;

use self::api_claims::ApiClaims;
use self::events::NodeEvents;
use self::publishing::{Outlets, Publishing};
use self::report::Report;
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
            instance,
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
            instance,
            plugin_dir: kubelet.plugin_dir(),
            registry_dir: kubelet.registry_dir(),
            device_plugins_dir: kubelet.device_plugins_dir(),
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

    let outlets = Outlets::new();
    let claims = Arc::new(ApiClaims::new(client.clone()));
    let plugin =
        Plugin::new(config, Arc::new(NvmlHardware::new(roots)), claims, outlets.inventory.subscribe())?;
    let listener = TcpListener::bind(http_address)
        .await
        .with_context(|| format!("{http_address} cannot be served (see --http-address)"))?;

    let published = outlets.published.subscribe();
    let missing = watch::Sender::new(vec!["kerf node is starting".to_owned()]);
    let inventory = outlets.inventory.subscribe();
    let absent = report::tell_absent_profiles(settings.clone(), inventory, cancel.clone());
    let report = Arc::new(Report {
        settings: settings.clone(),
        plugin: plugin.clone(),
        inventory: outlets.inventory.subscribe(),
        layout: outlets.layout.subscribe(),
        published: published.clone(),
        missing: missing.subscribe(),
    });
    let registry = Arc::new(metrics::registry(Arc::clone(&report)));

    let mut parts = JoinSet::new();
    let http = http::serve(listener, missing.subscribe(), registry, cancel.clone());
    part(&mut parts, "the HTTP server", async { http.await.map_err(Into::into) });
    let readiness = readiness::keep(plugin.registration(), outlets.clone(), missing, cancel.clone());
    part(&mut parts, "readiness", readiness);
    let slim = memory::keep_slim(outlets.inventory.subscribe(), published, plugin.journal(), cancel.clone());
    part(&mut parts, "the heap", slim);
    part(&mut parts, "the warning of profiles", absent);
    let publishing = Publishing {
        plugin: plugin.clone(),
        events: NodeEvents::new(&client, &settings.node),
        client,
        identity: Identity { driver: settings.driver.clone(), node: settings.node.clone() },
        plugin_dir,
        report,
        outlets: outlets.clone(),
    };
    let stop = cancel.clone();
    part(&mut parts, "the kubelet's side", async move {
        plugin.start().await.context("what a former process left cannot be settled")?;
        plugin.listen(stop.clone()).context("GPUs cannot be listened to")?;
        let mut publishing = AbortOnDropHandle::new(tokio::spawn(publishing.run(stop.clone())));
        // A former instance serves meanwhile: the kubelet gets to know this one
        // when it can prepare.
        let mut serve = pin!(async {
            if stop.run_until_cancelled(outlets.until_known()).await.is_some() {
                plugin.serve(stop.clone()).await;
            }
        });
        tokio::select! {
            () = &mut serve => publishing.await?,
            ended = &mut publishing => {
                ended??;
                if !stop.is_cancelled() {
                    return Err(anyhow!("publishing ended by itself"));
                }
                serve.await;
                Ok(())
            }
        }
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
