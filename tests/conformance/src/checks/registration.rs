//! What a kubelet finds in its registry and asks before it calls.

use std::path::Path;

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use futures::future::try_join_all;
use tonic::Code;

use crate::check::checks;
use crate::context::{Context, until};
use crate::kubelet::{self, CALL, GET_INFO, GET_INFO_METHOD, HEALTH, MAX_PATH, NOTIFY, Version, said};
use crate::profile::seconds;
use crate::proto::dra_v1::{NodePrepareResourcesRequest, NodePrepareResourcesResponse};
use crate::proto::registration::{InfoRequest, PluginInfo};
use crate::rules::is_domain;
use crate::wire;

checks! {
    "REG-001" [Registry] "A registration socket of the driver's name answers GetInfo within one second.",
        "kubelet pluginmanager: GetInfo has a deadline of 1 s" => answers;
    "REG-002" [Registry] "The plugin's type is `DRAPlugin`.", "kubelet pluginwatcher: DRAPlugin" => plugin_type;
    "REG-003" [Registry] "The driver's name is a DNS subdomain of at most 63 characters.",
        "ResourceSliceSpec.driver" => driver_name;
    "REG-004" [Registry] "The endpoint is an absolute path of at most 107 bytes on which somebody listens.",
        "kubelet DRA plugin registration; unix(7)" => endpoint;
    "REG-005" [Registry] "supported_versions names a version of the DRA service, `v1.DRAPlugin` before `v1beta1.DRAPlugin`.",
        "kubelet: the first version of the list that it knows is used" => versions;
    "REG-006" [Registry] "Every version in supported_versions is served, and nothing else is listed.",
        "kubelet DRA plugin registration" => listed_is_served;
    "REG-007" [Registry] "The registration socket answers a client that sends its escaped path as `:authority`.",
        "kubelet pluginmanager dials with grpc-go, which makes that of a path" => registration_authority;
    "REG-008" [Registry] "The DRA socket answers a client that sends `localhost` as `:authority`.",
        "kubelet 1.34 and later: unix:<path>" => dra_authority_localhost;
    "REG-009" [Registry] "The DRA socket answers a client that sends its escaped path as `:authority`.",
        "kubelet up to 1.33; kubernetes/kubernetes 133920" => dra_authority_path;
    "REG-010" [Registry] "GetInfo answers the same to ten clients at once.",
        "kubelet: registration is tried anew after a restart, and with backoff" => parallel_info;
    "REG-011" [Registry] "NotifyRegistrationStatus is answered within five seconds, twice too.",
        "kubelet pluginmanager: NotifyRegistrationStatus has a deadline of 5 s" => notify;
    "REG-012" [Registry] "After it is told that its registration failed, the driver can still be registered.",
        "kubelet: registration is tried anew" => failed_registration;
    "REG-013" [Registry] "A method that the DRA socket does not serve is answered with Unimplemented.",
        "gRPC; kubernetes/kubernetes 141855" => unknown_method;
    "REG-014" [Registry Start] "Asked to end (SIGTERM), the driver ends and removes both sockets.",
        "kubelet pluginwatcher: a socket's removal is the plugin's deregistration" => sockets_removed;
    "REG-015" [Registry Start] "Killed and started again, the driver serves on both sockets, whatever files are left.",
        "kubelet pluginwatcher: a socket that is made anew is registered anew" => stale_sockets;
}

async fn answers(context: &mut Context) -> Result<()> {
    context.plugin().await.map(drop)
}

async fn plugin_type(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    ensure!(plugin.info.r#type == "DRAPlugin", "the type is `{}`", plugin.info.r#type);
    Ok(())
}

async fn driver_name(context: &mut Context) -> Result<()> {
    let registry = context.registry()?.to_owned();
    let limit = seconds(context.profile.limits.start);
    let name = until(limit, async || {
        let found = kubelet::look(&registry).await?;
        let plugins = found.into_iter().filter_map(|found| found.info.ok());
        let mut ours = plugins.filter(|info| info.r#type == "DRAPlugin");
        ours.next()
            .map(|info| info.name)
            .with_context(|| format!("no DRA plugin answers in {}", registry.display()))
    })
    .await?;
    ensure!(is_domain(&name), "the name is `{name}`");
    Ok(())
}

async fn endpoint(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let path = plugin.endpoint();
    ensure!(path.is_absolute(), "the endpoint is `{}`", path.display());
    for path in [path, plugin.registration.as_path()] {
        let length = path.as_os_str().len();
        ensure!(length <= MAX_PATH, "{} has {length} bytes", path.display());
    }
    tokio::net::UnixStream::connect(path)
        .await
        .with_context(|| format!("nobody listens on {}", path.display()))?;
    Ok(())
}

async fn versions(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let first = plugin.version()?;
    let both = Version::ALL.into_iter().all(|version| plugin.lists(version.listed()));
    ensure!(
        !both || first == Version::V1,
        "a kubelet would speak the older version: {:?}",
        plugin.info.supported_versions
    );
    Ok(())
}

async fn listed_is_served(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    for listed in &plugin.info.supported_versions {
        if let Some(version) = Version::ALL.into_iter().find(|version| version.listed() == listed) {
            let answer = plugin.call_prepare(version, &[], CALL).await;
            answer.map_err(|status| {
                anyhow!("{listed} is listed, and an empty prepare fails: {}", said(&status))
            })?;
        } else if let Some((_, method)) = HEALTH.into_iter().find(|(version, _)| version == listed) {
            // The Go helper lists it for drivers without it too, and a kubelet
            // that is told so does not ask again.
            match plugin.watch_health(method).await {
                Err(status) if status.code() != Code::Unimplemented => {
                    bail!("{listed} is listed, and NodeWatchResources fails: {}", said(&status));
                }
                _ => {}
            }
        } else {
            bail!("`{listed}` is no version that a kubelet knows");
        }
    }
    Ok(())
}

async fn registration_authority(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let authority = wire::authority(&plugin.registration);
    let call = wire::call(&plugin.registration, &authority, GET_INFO_METHOD, &InfoRequest {}, GET_INFO);
    let info: PluginInfo = call.await.with_context(|| format!("with the authority `{authority}`"))?;
    ensure!(info == plugin.info, "it answered something else: {info:?}");
    Ok(())
}

async fn empty_prepare(socket: &Path, authority: &str, version: Version) -> Result<()> {
    let message = NodePrepareResourcesRequest::default();
    let call = wire::call(socket, authority, version.prepare(), &message, CALL);
    let answer: NodePrepareResourcesResponse =
        call.await.with_context(|| format!("with the authority `{authority}`"))?;
    ensure!(answer.claims.is_empty(), "an empty prepare was answered with {:?}", answer.claims);
    Ok(())
}

async fn dra_authority_localhost(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    empty_prepare(plugin.endpoint(), "localhost", plugin.version()?).await
}

async fn dra_authority_path(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    empty_prepare(plugin.endpoint(), &wire::authority(plugin.endpoint()), plugin.version()?).await
}

async fn parallel_info(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    let calls = (0..10).map(|_| kubelet::get_info(&plugin.registration));
    for info in try_join_all(calls).await.map_err(|status| anyhow!(said(&status)))? {
        ensure!(info == plugin.info, "one client is told {info:?}, another {:?}", plugin.info);
    }
    Ok(())
}

async fn notify(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    for time in ["first", "second"] {
        let answer = plugin.notify("").await;
        answer
            .map_err(|status| anyhow!("the {time} time within {} s: {}", NOTIFY.as_secs(), said(&status)))?;
    }
    Ok(())
}

async fn failed_registration(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    // Drivers with the Go helper answer this with the error that they were told.
    plugin.notify("made up by dra-conformance").await.ok();
    let plugin = context.plugin().await?;
    let answer = plugin.call_prepare(plugin.version()?, &[], CALL).await;
    answer.map(drop).map_err(|status| anyhow!("an empty prepare fails: {}", said(&status)))
}

async fn unknown_method(context: &mut Context) -> Result<()> {
    const METHOD: &str = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodeConformance";
    let plugin = context.plugin().await?;
    let channel = kubelet::channel(plugin.endpoint());
    let answer = kubelet::unary::<_, InfoRequest>(channel, METHOD, InfoRequest {}, CALL).await;
    match answer {
        Err(status) if status.code() == Code::Unimplemented => Ok(()),
        Err(status) => Err(anyhow!("it is answered with {}", said(&status))),
        Ok(_) => Err(anyhow!("it is answered as if it were there")),
    }
}

async fn sockets_removed(context: &mut Context) -> Result<()> {
    let plugin = context.plugin().await?;
    context.terminate(crate::context::FIRST).await?;
    for path in [plugin.registration.as_path(), plugin.endpoint()] {
        ensure!(!path.exists(), "{} is still there", path.display());
    }
    Ok(())
}

async fn stale_sockets(context: &mut Context) -> Result<()> {
    context.plugin().await?;
    let plugin = context.crash().await?;
    empty_prepare(plugin.endpoint(), "localhost", plugin.version()?).await
}
