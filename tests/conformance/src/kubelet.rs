//! The kubelet's side: finds the driver's socket, registers it and calls it,
//! with the kubelet's own time limits.

use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use hyper_util::rt::TokioIo;
use prost::Message;
use tokio::net::UnixStream;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status, Streaming};
use tonic_prost::ProstCodec;

use crate::api::Claim;
use crate::proto::dra_v1::{
    Device, NodePrepareResourcesRequest, NodePrepareResourcesResponse, NodeUnprepareResourcesRequest,
    NodeUnprepareResourcesResponse,
};
use crate::proto::health_v1::{NodeWatchResourcesRequest, NodeWatchResourcesResponse};
use crate::proto::registration::{InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse};

/// The kubelet's limits (`pkg/kubelet/pluginmanager`, `pkg/kubelet/cm/dra/plugin`).
pub(crate) const GET_INFO: Duration = Duration::from_secs(1);
pub(crate) const NOTIFY: Duration = Duration::from_secs(5);
pub(crate) const CALL: Duration = Duration::from_secs(45);
/// The longest path of a socket: `sun_path` less its end, see unix(7).
pub(crate) const MAX_PATH: usize = 107;

pub(crate) const GET_INFO_METHOD: &str = "/pluginregistration.Registration/GetInfo";
const NOTIFY_METHOD: &str = "/pluginregistration.Registration/NotifyRegistrationStatus";

/// A version of the DRA service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Version {
    V1,
    V1Beta1,
}

impl Version {
    pub(crate) const ALL: [Self; 2] = [Self::V1, Self::V1Beta1];

    /// As a plugin lists it. It is not the service's full name.
    pub(crate) fn listed(self) -> &'static str {
        match self {
            Self::V1 => "v1.DRAPlugin",
            Self::V1Beta1 => "v1beta1.DRAPlugin",
        }
    }

    pub(crate) fn prepare(self) -> &'static str {
        match self {
            Self::V1 => "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources",
            Self::V1Beta1 => "/k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin/NodePrepareResources",
        }
    }

    fn unprepare(self) -> &'static str {
        match self {
            Self::V1 => "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodeUnprepareResources",
            Self::V1Beta1 => "/k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin/NodeUnprepareResources",
        }
    }
}

/// Versions of the health service as a plugin lists them, and their methods.
pub(crate) const HEALTH: [(&str, &str); 2] = [
    ("v1.DRAResourceHealth", "/v1.DRAResourceHealth/NodeWatchResources"),
    ("v1alpha1.DRAResourceHealth", "/v1alpha1.DRAResourceHealth/NodeWatchResources"),
];

/// A connection to a socket, not made before the first call.
pub(crate) fn channel(socket: &Path) -> Channel {
    let socket = socket.to_owned();
    Endpoint::from_static("http://localhost").connect_with_connector_lazy(tower::service_fn(move |_| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    }))
}

async fn ready(channel: Channel) -> Result<Grpc<Channel>, Status> {
    let mut grpc = Grpc::new(channel);
    grpc.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
    Ok(grpc)
}

/// One call, which the caller gives up after `limit` as it told the server.
pub(crate) async fn unary<Q, A>(
    channel: Channel,
    method: &'static str,
    message: Q,
    limit: Duration,
) -> Result<A, Status>
where
    Q: Message + Send + Sync + 'static,
    A: Message + Default + Send + Sync + 'static,
{
    let call = async {
        let mut grpc = ready(channel).await?;
        let mut request = Request::new(message);
        request.set_timeout(limit);
        let codec = ProstCodec::<Q, A>::default();
        let answer = grpc.unary(request, PathAndQuery::from_static(method), codec).await?;
        Ok::<A, Status>(answer.into_inner())
    };
    let late = || Status::deadline_exceeded(format!("no answer in {} s", limit.as_secs_f32()));
    match tokio::time::timeout(limit, call).await {
        // How tonic says that the time it told the server is over.
        Ok(Err(status)) if status.code() == Code::Cancelled && status.message() == "Timeout expired" => {
            Err(late())
        }
        Ok(answer) => answer,
        Err(_) => Err(late()),
    }
}

pub(crate) async fn get_info(socket: &Path) -> Result<PluginInfo, Status> {
    unary(channel(socket), GET_INFO_METHOD, InfoRequest {}, GET_INFO).await
}

/// A file in the registry that may be a registration socket, and what is said
/// on it.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) path: PathBuf,
    modified: (i64, i64),
    pub(crate) info: Result<PluginInfo, Status>,
}

/// What a kubelet finds in its registry, oldest first. It passes over names
/// that begin with a dot, and what is no socket.
pub(crate) async fn look(registry: &Path) -> Result<Vec<Found>> {
    let mut found = Vec::new();
    let entries = std::fs::read_dir(registry)
        .with_context(|| format!("the registry {} cannot be read", registry.display()))?;
    for entry in entries {
        let entry = entry?;
        let Ok(metadata) = entry.metadata() else { continue };
        if !metadata.file_type().is_socket() || entry.file_name().to_string_lossy().starts_with('.') {
            continue;
        }
        let path = entry.path();
        let info = get_info(&path).await;
        found.push(Found { path, modified: (metadata.mtime(), metadata.mtime_nsec()), info });
    }
    found.sort_by_key(|found| found.modified);
    Ok(found)
}

/// The driver, as a kubelet knows it.
#[derive(Debug, Clone)]
pub(crate) struct Plugin {
    pub(crate) registration: PathBuf,
    pub(crate) info: PluginInfo,
    dra: Channel,
}

impl Plugin {
    /// The youngest socket on which `driver` answers, less those in `except`.
    pub(crate) async fn find(registry: &Path, driver: &str, except: &[PathBuf]) -> Result<Self> {
        let mut seen = Vec::new();
        for found in look(registry).await?.into_iter().rev() {
            match found.info {
                Ok(info) if info.name == driver && !except.contains(&found.path) => {
                    let dra = channel(Path::new(&info.endpoint));
                    return Ok(Self { registration: found.path, info, dra });
                }
                Ok(info) => seen.push(format!("`{}` on {}", info.name, found.path.display())),
                Err(status) => seen.push(format!("{}: {}", found.path.display(), said(&status))),
            }
        }
        bail!("no registration socket of `{driver}` answers in {} [{}]", registry.display(), seen.join(", "))
    }

    /// Tells it how its registration went.
    pub(crate) async fn notify(&self, error: &str) -> Result<(), Status> {
        let status = RegistrationStatus { plugin_registered: error.is_empty(), error: error.to_owned() };
        let channel = channel(&self.registration);
        unary::<_, RegistrationStatusResponse>(channel, NOTIFY_METHOD, status, NOTIFY).await.map(drop)
    }

    pub(crate) fn endpoint(&self) -> &Path {
        Path::new(&self.info.endpoint)
    }

    pub(crate) fn lists(&self, version: &str) -> bool {
        self.info.supported_versions.iter().any(|listed| listed == version)
    }

    /// The version that a kubelet speaks: the first of the plugin's list that it knows.
    pub(crate) fn version(&self) -> Result<Version> {
        let listed = self.info.supported_versions.iter();
        let known =
            listed.filter_map(|listed| Version::ALL.into_iter().find(|version| version.listed() == listed));
        known.into_iter().next().with_context(|| {
            format!(
                "supported_versions names no version of the DRA service: {:?}",
                self.info.supported_versions
            )
        })
    }

    /// `NodePrepareResources` as it is answered.
    pub(crate) async fn call_prepare(
        &self,
        version: Version,
        claims: &[&Claim],
        limit: Duration,
    ) -> Result<NodePrepareResourcesResponse, Status> {
        let message =
            NodePrepareResourcesRequest { claims: claims.iter().map(|claim| claim.wire()).collect() };
        unary(self.dra.clone(), version.prepare(), message, limit).await
    }

    /// `NodePrepareResources` with what a kubelet demands of the answer. The
    /// devices of each claim, or why there are none.
    pub(crate) async fn prepare_all(&self, claims: &[&Claim]) -> Result<Vec<Result<Vec<Device>, String>>> {
        let answer = self.call_prepare(self.version()?, claims, CALL).await;
        let mut answer =
            answer.map_err(|status| anyhow::anyhow!("NodePrepareResources: {}", said(&status)))?;
        let mut results = Vec::new();
        for claim in claims {
            let entry = answer.claims.remove(&claim.uid);
            let entry =
                entry.with_context(|| format!("the answer to a prepare has no entry for {}", claim.uid))?;
            results.push(if entry.error.is_empty() { Ok(entry.devices) } else { Err(entry.error) });
        }
        let unknown: Vec<&String> = answer.claims.keys().collect();
        ensure!(
            unknown.is_empty(),
            "the answer to a prepare has entries that were not asked for: {unknown:?}"
        );
        Ok(results)
    }

    /// The devices of a claim that must be prepared.
    pub(crate) async fn prepare(&self, claim: &Claim) -> Result<Vec<Device>> {
        let result = self.prepare_all(&[claim]).await?.pop().context("no claim was asked for")?;
        result.map_err(|error| anyhow::anyhow!("the claim was not prepared: {error}"))
    }

    /// Why a claim is not prepared. An error of the whole call is one too.
    pub(crate) async fn refusal(&self, claim: &Claim) -> Result<String> {
        let answer = self.call_prepare(self.version()?, &[claim], CALL).await;
        let Ok(mut answer) = answer else {
            return Ok(answer.err().map(|status| said(&status)).unwrap_or_default());
        };
        let entry =
            answer.claims.remove(&claim.uid).context("the answer to a prepare has no entry for the claim")?;
        ensure!(!entry.error.is_empty(), "it was prepared: {:?}", entry.devices);
        Ok(entry.error)
    }

    /// `NodeUnprepareResources`, which must succeed for all.
    pub(crate) async fn unprepare_all(&self, claims: &[&Claim]) -> Result<()> {
        self.unprepare_with(self.version()?, claims).await
    }

    pub(crate) async fn unprepare_with(&self, version: Version, claims: &[&Claim]) -> Result<()> {
        let message =
            NodeUnprepareResourcesRequest { claims: claims.iter().map(|claim| claim.wire()).collect() };
        let answer: Result<NodeUnprepareResourcesResponse, Status> =
            unary(self.dra.clone(), version.unprepare(), message, CALL).await;
        let mut answer =
            answer.map_err(|status| anyhow::anyhow!("NodeUnprepareResources: {}", said(&status)))?;
        for claim in claims {
            let entry = answer.claims.remove(&claim.uid);
            let entry = entry
                .with_context(|| format!("the answer to an unprepare has no entry for {}", claim.uid))?;
            ensure!(entry.error.is_empty(), "the claim was not unprepared: {}", entry.error);
        }
        Ok(())
    }

    pub(crate) async fn unprepare(&self, claim: &Claim) -> Result<()> {
        self.unprepare_all(&[claim]).await
    }

    /// The health stream's method in the version that a kubelet prefers.
    pub(crate) fn health_method(&self) -> Option<&'static str> {
        HEALTH.into_iter().find(|(listed, _)| self.lists(listed)).map(|(_, method)| method)
    }

    /// Opens the health stream.
    pub(crate) async fn watch_health(
        &self,
        method: &'static str,
    ) -> Result<Streaming<NodeWatchResourcesResponse>, Status> {
        let mut grpc = ready(self.dra.clone()).await?;
        let codec = ProstCodec::<NodeWatchResourcesRequest, NodeWatchResourcesResponse>::default();
        let request = Request::new(NodeWatchResourcesRequest {});
        Ok(grpc.server_streaming(request, PathAndQuery::from_static(method), codec).await?.into_inner())
    }
}

/// A status as a sentence.
pub(crate) fn said(status: &Status) -> String {
    format!("{:?}: {}", status.code(), status.message())
}
