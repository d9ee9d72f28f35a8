//! What the driver's sockets answer.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use axum::http::uri::PathAndQuery;
use dra_conformance::proto::dra_v1::dra_plugin_server::{DraPlugin, DraPluginServer};
use dra_conformance::proto::dra_v1::{
    NodePrepareResourceResponse, NodePrepareResourcesRequest, NodePrepareResourcesResponse,
    NodeUnprepareResourceResponse, NodeUnprepareResourcesRequest, NodeUnprepareResourcesResponse,
};
use dra_conformance::proto::health_v1::dra_resource_health_server::{
    DraResourceHealth, DraResourceHealthServer,
};
use dra_conformance::proto::health_v1::{
    DeviceHealth, DeviceIdentifier, NodeWatchResourcesRequest, NodeWatchResourcesResponse,
};
use dra_conformance::proto::registration::registration_server::{Registration, RegistrationServer};
use dra_conformance::proto::registration::{
    InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
};
use futures::StreamExt as _;
use futures::stream::BoxStream;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::Api;
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use crate::claims::WORK;
use crate::driver::{Defect, Instance, NAME, NODE, devices, pool};

/// Tells calls of v1beta1, which are served as v1.
const BETA: &str = "x-beta";

/// What a process knows until it ends.
#[derive(Default)]
pub(crate) struct Memory {
    infos: u32,
    registrations: u32,
    streams: u32,
    has_given_up: bool,
    pub(crate) has_hung: bool,
    pub(crate) prepares: u32,
    pub(crate) busy: BTreeSet<String>,
    pub(crate) refused: BTreeSet<String>,
    pub(crate) lost: BTreeSet<String>,
    pub(crate) remembered: BTreeMap<String, ResourceClaim>,
    pub(crate) held: BTreeSet<String>,
}

fn bind(instance: &Instance, path: &Path) -> Result<UnixListenerStream> {
    if !instance.has(Defect::StaleSocketsInTheWay) {
        std::fs::remove_file(path).ok();
    }
    Ok(UnixListenerStream::new(UnixListener::bind(path)?))
}

pub(crate) async fn serve(instance: Instance) -> Result<()> {
    if instance.has(Defect::GivesUpOnDevices) && instance.does_hang() {
        return Ok(());
    }
    if instance.has(Defect::WaitsForApi) {
        Api::<Node>::all(instance.client.clone()).get(NODE).await?;
    }
    let dra = bind(&instance, &instance.dra_socket())?;
    let routed = instance.clone();
    let layer = tower::util::MapRequestLayer::new(move |request| route(&routed, request));
    let mut server = Server::builder().layer(layer).add_service(DraPluginServer::new(instance.clone()));
    if !instance.has(Defect::WithoutHealth) {
        server = server.add_service(DraResourceHealthServer::new(instance.clone()));
    }
    let calls = server.serve_with_incoming(dra);
    let registry = bind(&instance, &instance.registration_socket())?;
    let registrations =
        Server::builder().add_service(RegistrationServer::new(instance)).serve_with_incoming(registry);
    tokio::try_join!(calls, registrations)?;
    Ok(())
}

/// v1beta1 has the same messages as v1.
fn route<B>(instance: &Instance, mut request: axum::http::Request<B>) -> axum::http::Request<B> {
    let uri = request.uri();
    let mut path = uri.path().replace(".v1beta1.", ".v1.");
    if path != uri.path() {
        request.headers_mut().insert(BETA, "true".parse().unwrap());
    }
    let uri = request.uri();
    if instance.has(Defect::LocalhostRefused)
        && uri.authority().is_some_and(|authority| authority == "localhost")
    {
        "/nothing".clone_into(&mut path);
    }
    if instance.has(Defect::UnknownMethodServed) && !path.ends_with("Resources") {
        "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources".clone_into(&mut path);
    }
    let mut parts = uri.clone().into_parts();
    parts.path_and_query = Some(PathAndQuery::try_from(path).unwrap());
    *request.uri_mut() = parts.try_into().unwrap();
    request
}

#[tonic::async_trait]
impl Registration for Instance {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        if self.has(Defect::SlowInfo) {
            tokio::time::sleep(Duration::from_millis(1500)).await;
        }
        while self.has(Defect::AsksDevices) && self.does_hang() {
            tokio::time::sleep(WORK).await;
        }
        let infos = {
            let mut memory = self.memory.lock().unwrap();
            memory.infos += 1;
            if memory.has_given_up {
                return Err(Status::unavailable("given up"));
            }
            memory.infos
        };
        let mut versions = vec!["v1.DRAPlugin", "v1beta1.DRAPlugin"];
        if self.has(Defect::BetaFirst) {
            versions.reverse();
        }
        if !self.has(Defect::WithoutHealth) && !self.has(Defect::HealthUnlisted) {
            versions.push("v1.DRAResourceHealth");
        }
        if self.has(Defect::ListsMore) || self.has(Defect::InfoDiffers) && infos % 2 == 0 {
            versions.push("v2.DRAPlugin");
        }
        let endpoint =
            if self.has(Defect::DeadEndpoint) { self.root.join("nobody") } else { self.dra_socket() };
        Ok(Response::new(PluginInfo {
            r#type: if self.has(Defect::WrongType) { "CSIPlugin" } else { "DRAPlugin" }.to_owned(),
            name: if self.has(Defect::BadName) { "Driver_Example" } else { NAME }.to_owned(),
            endpoint: endpoint.display().to_string(),
            supported_versions: versions.into_iter().map(str::to_owned).collect(),
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let mut memory = self.memory.lock().unwrap();
        memory.registrations += 1;
        if self.has(Defect::RegistersOnce) && memory.registrations > 1 {
            return Err(Status::already_exists("registered already"));
        }
        memory.has_given_up = self.has(Defect::GivesUp) && !request.into_inner().plugin_registered;
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}

#[tonic::async_trait]
impl DraPlugin for Instance {
    async fn node_prepare_resources(
        &self,
        request: Request<NodePrepareResourcesRequest>,
    ) -> Result<Response<NodePrepareResourcesResponse>, Status> {
        let is_beta = request.metadata().contains_key(BETA);
        let mut claims = BTreeMap::new();
        for claim in request.into_inner().claims {
            let entry = match self.prepare(&claim, is_beta).await {
                Ok(devices) => NodePrepareResourceResponse { devices, error: String::new() },
                Err(error) => NodePrepareResourceResponse { devices: vec![], error: format!("{error:#}") },
            };
            claims.insert(claim.uid, entry);
            if self.has(Defect::FirstClaimOnly) {
                break;
            }
        }
        let failed = claims.values().find(|entry| !entry.error.is_empty()).cloned();
        if let Some(failed) = failed.filter(|_| self.has(Defect::OneFailsAll)) {
            for entry in claims.values_mut() {
                entry.clone_from(&failed);
            }
        }
        Ok(Response::new(NodePrepareResourcesResponse { claims }))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<NodeUnprepareResourcesRequest>,
    ) -> Result<Response<NodeUnprepareResourcesResponse>, Status> {
        let mut claims = BTreeMap::new();
        for claim in request.into_inner().claims {
            let is_known = self.disk.lock().unwrap().claims.contains_key(&self.key(&claim));
            if self.has(Defect::UnknownUnanswered) && !is_known {
                continue;
            }
            let error =
                self.unprepare(&claim).await.err().map(|error| format!("{error:#}")).unwrap_or_default();
            claims.insert(claim.uid, NodeUnprepareResourceResponse { error });
        }
        Ok(Response::new(NodeUnprepareResourcesResponse { claims }))
    }
}

#[tonic::async_trait]
impl DraResourceHealth for Instance {
    type NodeWatchResourcesStream = BoxStream<'static, Result<NodeWatchResourcesResponse, Status>>;

    async fn node_watch_resources(
        &self,
        _: Request<NodeWatchResourcesRequest>,
    ) -> Result<Response<Self::NodeWatchResourcesStream>, Status> {
        let streams = {
            let mut memory = self.memory.lock().unwrap();
            memory.streams += 1;
            memory.streams
        };
        let mut names = devices(self.defect);
        if self.has(Defect::HealthOfSome) {
            names.truncate(1);
        }
        if self.has(Defect::HealthOnFirstStream) && streams > 1 {
            names.clear();
        }
        let health = if self.has(Defect::HealthStatusUnknown) { 7 } else { 1 };
        let devices = names.into_iter().map(|device_name| DeviceHealth {
            device: Some(DeviceIdentifier { pool_name: pool(), device_name }),
            health,
            last_updated_time: 1,
            health_check_timeout_seconds: 2,
            message: String::new(),
        });
        let message = NodeWatchResourcesResponse { devices: devices.collect() };
        let is_once = self.has(Defect::HealthOnce);
        let stream = futures::stream::unfold(0, move |sent: u32| {
            let message = message.clone();
            async move {
                match sent {
                    0 => {}
                    _ if is_once => std::future::pending().await,
                    _ => tokio::time::sleep(Duration::from_millis(500)).await,
                }
                Some((Ok(message), sent + 1))
            }
        });
        Ok(Response::new(stream.boxed()))
    }
}
