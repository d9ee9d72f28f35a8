//! What the driver's sockets answer.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use axum::http::uri::PathAndQuery;
use dra_conformance::proto::dra_v1::dra_plugin_server::{DraPlugin, DraPluginServer};
use dra_conformance::proto::dra_v1::{
    Claim, Device, NodePrepareResourceResponse, NodePrepareResourcesRequest, NodePrepareResourcesResponse,
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
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::Api;
use serde_json::json;
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use crate::driver::{Defect, Entry, Instance, NAME, devices, pool};

/// A call is under way for so long that others can come in between.
const WORK: Duration = Duration::from_millis(20);
/// How long the API server may take.
const PATIENCE: Duration = Duration::from_secs(1);
/// Tells calls of v1beta1, which are served as v1.
const BETA: &str = "x-beta";

/// What a process knows until it ends.
#[derive(Default)]
pub(crate) struct Memory {
    infos: u32,
    registrations: u32,
    streams: u32,
    has_given_up: bool,
    has_hung: bool,
    prepares: u32,
    busy: BTreeSet<String>,
    refused: BTreeSet<String>,
    lost: BTreeSet<String>,
    remembered: BTreeMap<String, ResourceClaim>,
    held: BTreeSet<String>,
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

/// Marks something as under way until it is dropped.
struct Busy<'a>(&'a Instance, String);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        if !self.0.has(Defect::CancelledStaysBusy) {
            self.0.memory.lock().unwrap().busy.remove(&self.1);
        }
    }
}

impl Instance {
    /// Waits until nobody works on a claim. A wrong driver does not wait.
    async fn busy(&self, key: &str, does_wait: bool) -> Result<Busy<'_>> {
        loop {
            {
                let mut memory = self.memory.lock().unwrap();
                let is_any = self.has(Defect::BusyWithAnyClaim) && !memory.busy.is_empty();
                if !is_any && memory.busy.insert(key.to_owned()) {
                    return Ok(Busy(self, key.to_owned()));
                }
                ensure!(does_wait && !is_any, "busy");
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    fn does_hang(&self) -> bool {
        self.disk.lock().unwrap().does_hang
    }

    /// What the devices do. What has hung once hangs for ever in a wrong driver.
    async fn work(&self, for_ever: Defect) -> Result<()> {
        tokio::time::sleep(WORK).await;
        while self.does_hang() {
            if self.has(for_ever) {
                self.memory.lock().unwrap().has_hung = true;
            }
            tokio::time::sleep(WORK).await;
        }
        ensure!(!self.memory.lock().unwrap().has_hung, "the devices hang");
        Ok(())
    }

    fn key(&self, claim: &Claim) -> String {
        if self.has(Defect::KeyedByName) { claim.name.clone() } else { claim.uid.clone() }
    }

    async fn claim(&self, claim: &Claim) -> Result<Option<ResourceClaim>> {
        let remembered = self.memory.lock().unwrap().remembered.get(&claim.uid).cloned();
        if remembered.is_some() && self.has(Defect::RemembersClaims) {
            return Ok(remembered);
        }
        let claims: Api<ResourceClaim> = Api::namespaced(self.client.clone(), &claim.namespace);
        let got = tokio::time::timeout(PATIENCE, claims.get_opt(&claim.name)).await;
        if got.is_err() && self.has(Defect::OutageRemembered) {
            self.memory.lock().unwrap().lost.insert(claim.uid.clone());
        }
        ensure!(!self.memory.lock().unwrap().lost.contains(&claim.uid), "there was no answer before");
        let found = got.context("no answer of the API server")??;
        if let Some(found) = &found {
            self.memory.lock().unwrap().remembered.insert(claim.uid.clone(), found.clone());
        }
        Ok(found)
    }

    /// What is allocated of ours, and under which request.
    async fn allocated(&self, claim: &Claim) -> Result<Option<(String, String)>> {
        let Some(object) = self.claim(claim).await? else {
            ensure!(self.has(Defect::MissingAccepted), "the claim does not exist");
            return Ok(None);
        };
        let uid = object.metadata.uid.unwrap_or_default();
        ensure!(uid == claim.uid || self.has(Defect::UidIgnored), "the claim was replaced");
        let Some(allocation) = object.status.and_then(|status| status.allocation) else {
            ensure!(self.has(Defect::UnallocatedAccepted), "nothing is allocated");
            return Ok(None);
        };
        let allocated = allocation.devices.unwrap_or_default();
        for config in allocated.config.into_iter().flatten() {
            let opaque = config.opaque.context("a config is opaque")?;
            let is_known = opaque.driver != NAME || opaque.parameters.0["kind"] == "Known";
            ensure!(is_known || self.has(Defect::AnyParameters), "unknown parameters");
        }
        let mut results = allocated.results.into_iter().flatten();
        let result = results.find(|result| result.driver == NAME || self.has(Defect::ForeignTaken));
        let result = result.context("nothing of ours is allocated")?;
        let base = result.request.split('/').next().unwrap_or_default().to_owned();
        let request = if self.has(Defect::AlternativeNamed) { result.request } else { base };
        if self.has(Defect::SpecBeforeRefusal) {
            self.write_spec(claim, &result.device)?;
        }
        let is_ours = devices(self.defect).contains(&result.device);
        ensure!(
            is_ours || self.has(Defect::AnyDevice) || self.has(Defect::ForeignTaken),
            "there is no such device"
        );
        Ok(Some((result.device, request)))
    }

    fn spec_path(&self, claim: &Claim) -> PathBuf {
        self.root.join("cdi").join(format!("driver.example.com-claim_{}.json", self.key(claim)))
    }

    fn id(&self, claim: &Claim, device: &str) -> String {
        match self.defect {
            Some(Defect::BadIds) => device.to_owned(),
            Some(Defect::NamesWithoutUid) => format!("driver.example.com/claim={device}"),
            Some(Defect::IdsOfTheProcess) => {
                format!("driver.example.com/claim={}-{device}-{}", claim.uid, self.process)
            }
            Some(Defect::NewIdsEachTime) => {
                let number = self.memory.lock().unwrap().prepares;
                format!("driver.example.com/claim={}-{device}-{number}", claim.uid)
            }
            _ => format!("driver.example.com/claim={}-{device}", claim.uid),
        }
    }

    fn write_spec(&self, claim: &Claim, device: &str) -> Result<()> {
        let id = self.id(claim, device);
        let name = id.split_once('=').map_or("none", |(_, name)| name);
        let node = if self.has(Defect::MissingDeviceNode) { "/dev/conformance-missing" } else { "/dev/null" };
        let edits = json!({"env": ["A=b"], "deviceNodes": [{"path": "/dev/device", "hostPath": node}]});
        let version = if self.has(Defect::InvalidSpec) { "new" } else { "0.6.0" };
        let spec = json!({
            "cdiVersion": version,
            "kind": "driver.example.com/claim",
            "devices": [{"name": name, "containerEdits": edits}],
        });
        let (path, draft) = (self.spec_path(claim), self.spec_path(claim).with_extension("draft"));
        std::fs::write(&draft, spec.to_string())?;
        std::fs::rename(&draft, path)?;
        if self.has(Defect::DraftLeft) {
            std::fs::write(&draft, "")?;
        }
        Ok(())
    }

    async fn prepare(&self, claim: &Claim, is_beta: bool) -> Result<Vec<Device>> {
        let key = self.key(claim);
        let _busy = self
            .busy(&key, !self.has(Defect::BusyWithTheClaim) && !self.has(Defect::CancelledStaysBusy))
            .await?;
        self.memory.lock().unwrap().prepares += 1;
        let Some((device, request)) = self.allocated(claim).await? else { return Ok(Vec::new()) };
        if self.has(Defect::RefusedForEver) {
            ensure!(!self.memory.lock().unwrap().refused.contains(&key), "refused before");
        }
        let is_prepared = {
            let mut disk = self.disk.lock().unwrap();
            let mut memory = self.memory.lock().unwrap();
            let holder = disk.claims.iter().find(|(holder, entry)| **holder != key && entry.device == device);
            let is_held =
                holder.is_some() || memory.held.contains(&device) && !disk.claims.contains_key(&key);
            if is_held && !self.has(Defect::DoubleUse) {
                memory.refused.insert(key);
                bail!("{device} is in use");
            }
            ensure!(
                !self.has(Defect::UnpreparedForEver) || !disk.unprepared.contains(&key),
                "it was unprepared before"
            );
            if self.has(Defect::NeverFreed) {
                memory.held.insert(device.clone());
            }
            let boot = disk.boot;
            let known = disk.claims.get(&key);
            let is_interrupted = known.is_some_and(|entry| !entry.is_complete);
            ensure!(!self.has(Defect::PrepareInterrupted) || !is_interrupted, "it was interrupted");
            let is_prepared = known.is_some_and(|entry| entry.is_complete);
            // As one that never starts over from what it finds.
            let is_unknown = known.is_none() && self.spec_path(claim).exists();
            ensure!(!self.has(Defect::UnknownSpecRefused) || !is_unknown, "there is a spec already");
            let entry = Entry { device: device.clone(), is_complete: is_prepared, boot };
            disk.claims.insert(key.clone(), entry);
            disk.save(&self.root);
            is_prepared
        };
        self.work(Defect::PrepareHangsForEver).await?;
        let has_spec = self.has(Defect::SpecOnlyOnce) && is_prepared;
        if !self.has(Defect::NoSpec) && !has_spec {
            let written = self.write_spec(claim, &device);
            if !self.has(Defect::SpecErrorsIgnored)
                && let Err(error) = written
            {
                let mut disk = self.disk.lock().unwrap();
                disk.claims.remove(&key);
                disk.save(&self.root);
                return Err(error);
            }
        }
        {
            let mut disk = self.disk.lock().unwrap();
            if let Some(entry) = disk.claims.get_mut(&key) {
                entry.is_complete = true;
            }
            disk.save(&self.root);
        }
        if self.has(Defect::CancelledStaysBusy) {
            self.memory.lock().unwrap().busy.remove(&key);
        }
        let mut ids = vec![self.id(claim, &device)];
        if self.has(Defect::BetaDiffers) && is_beta {
            ids.clear();
        }
        let device_name = if self.has(Defect::OtherDevice) { "device-9".to_owned() } else { device };
        Ok(vec![Device {
            request_names: vec![request],
            pool_name: pool(),
            device_name,
            cdi_device_ids: ids,
            share_id: None,
        }])
    }

    async fn unprepare(&self, claim: &Claim) -> Result<()> {
        let key = self.key(claim);
        let _busy = self
            .busy(&key, !self.has(Defect::BusyUnprepare) && !self.has(Defect::CancelledStaysBusy))
            .await?;
        ensure!(!self.has(Defect::UnprepareFails), "it cannot be unprepared");
        if self.has(Defect::UnprepareReadsApi) {
            self.claim(claim).await?.context("the claim does not exist")?;
        }
        {
            let mut disk = self.disk.lock().unwrap();
            let boot = disk.boot;
            let Some(entry) = disk.claims.get_mut(&key) else {
                ensure!(!self.has(Defect::UnknownFails), "the claim is not prepared");
                return Ok(());
            };
            ensure!(entry.boot == boot || !self.has(Defect::OtherBootRefused), "it is of another boot");
            ensure!(entry.is_complete || !self.has(Defect::UnprepareInterrupted), "it was interrupted");
            entry.is_complete = false;
            disk.save(&self.root);
        }
        self.work(Defect::UnprepareHangsForEver).await?;
        if !self.has(Defect::SpecStays) {
            std::fs::remove_file(self.spec_path(claim)).ok();
        }
        let mut disk = self.disk.lock().unwrap();
        disk.claims.remove(&key);
        disk.unprepared.insert(key);
        disk.save(&self.root);
        Ok(())
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
