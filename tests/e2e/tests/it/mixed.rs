//! Claims with devices of kerf and of another driver: the kubelet asks each for
//! its own, and one's refusal must cost the other nothing.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context as _, Result, ensure};
use kerf_e2e::{Case, LIMIT, Needs, Scene, wait_until};
use kerf_kubelet_plugin::proto::dra_v1::dra_plugin_server::{DraPlugin, DraPluginServer};
use kerf_kubelet_plugin::proto::registration::registration_server::{Registration, RegistrationServer};
use kerf_kubelet_plugin::proto::{dra_v1 as dra, registration as wire};
use serde_json::json;
use tokio::net::UnixListener;
use tokio::runtime::Runtime;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use crate::manifest::{self, SMALL, request, requests};
use crate::{ground, machine, workload};

/// The cases of this file.
pub(crate) const CASES: &[Case] = &[Case {
    name: "a claim of two drivers waits for both, and both get it back",
    needs: Needs::Driver,
    seconds: 20,
    run: two_drivers,
}];

/// Its name, its class, its pool and its only device's.
const OTHER: &str = "other.example.com";

/// What the other driver has been asked.
#[derive(Debug, Default)]
struct Asked {
    /// It refuses to prepare.
    refuses: bool,
    /// UIDs of claims.
    refused: BTreeSet<String>,
    prepared: BTreeSet<String>,
    given_back: BTreeSet<String>,
}

/// Another driver, as small as one can be.
#[derive(Debug, Clone)]
struct Other {
    endpoint: PathBuf,
    asked: Arc<Mutex<Asked>>,
}

impl Other {
    fn asked<T>(&self, look: impl FnOnce(&mut Asked) -> T) -> T {
        look(&mut self.asked.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn prepare(&self, uid: &str) -> dra::NodePrepareResourceResponse {
        let is_refused = self.asked(|asked| {
            let list = if asked.refuses { &mut asked.refused } else { &mut asked.prepared };
            list.insert(uid.to_owned());
            asked.refuses
        });
        if is_refused {
            return dra::NodePrepareResourceResponse { error: "not today".to_owned(), devices: Vec::new() };
        }
        let device = dra::Device {
            request_names: vec!["other".to_owned()],
            pool_name: OTHER.to_owned(),
            device_name: "only".to_owned(),
            ..dra::Device::default()
        };
        dra::NodePrepareResourceResponse { devices: vec![device], error: String::new() }
    }
}

#[tonic::async_trait]
impl Registration for Other {
    async fn get_info(&self, _: Request<wire::InfoRequest>) -> Result<Response<wire::PluginInfo>, Status> {
        Ok(Response::new(wire::PluginInfo {
            r#type: "DRAPlugin".to_owned(),
            name: OTHER.to_owned(),
            endpoint: self.endpoint.display().to_string(),
            supported_versions: vec!["v1.DRAPlugin".to_owned()],
        }))
    }

    async fn notify_registration_status(
        &self,
        _: Request<wire::RegistrationStatus>,
    ) -> Result<Response<wire::RegistrationStatusResponse>, Status> {
        Ok(Response::new(wire::RegistrationStatusResponse {}))
    }
}

#[tonic::async_trait]
impl DraPlugin for Other {
    async fn node_prepare_resources(
        &self,
        request: Request<dra::NodePrepareResourcesRequest>,
    ) -> Result<Response<dra::NodePrepareResourcesResponse>, Status> {
        let claims = request.into_inner().claims.into_iter();
        let claims = claims.map(|claim| (claim.uid.clone(), self.prepare(&claim.uid))).collect();
        Ok(Response::new(dra::NodePrepareResourcesResponse { claims }))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<dra::NodeUnprepareResourcesRequest>,
    ) -> Result<Response<dra::NodeUnprepareResourcesResponse>, Status> {
        let claims = request.into_inner().claims.into_iter().map(|claim| {
            self.asked(|asked| asked.given_back.insert(claim.uid.clone()));
            (claim.uid, dra::NodeUnprepareResourceResponse::default())
        });
        let claims = claims.collect();
        Ok(Response::new(dra::NodeUnprepareResourcesResponse { claims }))
    }
}

/// The other driver at work; it ends with this value, and its sockets go.
struct Installed {
    other: Other,
    sockets: [PathBuf; 2],
    _runtime: Runtime,
}

impl Drop for Installed {
    fn drop(&mut self) {
        for socket in &self.sockets {
            let _ = fs::remove_file(socket);
        }
    }
}

impl Installed {
    fn new(kubelet: &Path) -> Result<Self> {
        let folder = kubelet.join("plugins").join(OTHER);
        fs::create_dir_all(&folder)?;
        let (endpoint, registration) =
            (folder.join("dra@plugin.sock"), kubelet.join(format!("plugins_registry/{OTHER}@reg.sock")));
        let other = Other { endpoint: endpoint.clone(), asked: Arc::default() };
        let runtime = Runtime::new()?;
        let _entered = runtime.enter();
        let listen = |path: &Path| {
            let _ = fs::remove_file(path);
            UnixListener::bind(path).with_context(|| format!("cannot listen on {}", path.display()))
        };
        let plugin = Server::builder().add_service(DraPluginServer::new(other.clone()));
        runtime.spawn(plugin.serve_with_incoming(UnixListenerStream::new(listen(&endpoint)?)));
        let known = Server::builder().add_service(RegistrationServer::new(other.clone()));
        runtime.spawn(known.serve_with_incoming(UnixListenerStream::new(listen(&registration)?)));
        Ok(Self { other, sockets: [endpoint, registration], _runtime: runtime })
    }
}

fn two_drivers(scene: &Scene<'_>) -> Result<()> {
    let objects = [
        json!({
            "apiVersion": "resource.k8s.io/v1",
            "kind": "DeviceClass",
            "metadata": { "name": OTHER },
            "spec": { "selectors": [{ "cel": { "expression": format!("device.driver == '{OTHER}'") } }] },
        }),
        json!({
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceSlice",
            "metadata": { "name": OTHER },
            "spec": {
                "driver": OTHER,
                "nodeName": scene.cluster.node_name(),
                "pool": { "name": OTHER, "generation": 1, "resourceSliceCount": 1 },
                "devices": [{ "name": "only" }],
            },
        }),
    ];
    let installed = Installed::new(scene.cluster.kubelet_root())?;
    let outcome = ground::clean(scene, || {
        scene.apply(&manifest::list(&objects))?;
        shared(scene, &installed.other)
    });
    let slice = scene.delete(&format!("resourceslice/{OTHER}"));
    let class = scene.delete(&format!("deviceclass/{OTHER}"));
    outcome.and(slice).and(class)
}

fn shared(scene: &Scene<'_>, other: &Other) -> Result<()> {
    other.asked(|asked| asked.refuses = true);
    let both = requests(&[request("slice", SMALL), request("other", OTHER)]);
    scene.apply(&manifest::lone("both", &both))?;
    let uid = wait_until("the other driver has refused", LIMIT, || {
        Ok(other.asked(|asked| asked.refused.pop_last()))
    })?;
    // The kubelet goes to one after the other, in any order, up to the first
    // refusal.
    wait_until("kerf has prepared its part", LIMIT, || {
        Ok(ground::journal(scene)?.contains_key(&uid).then_some(()))
    })?;
    wait_until("the pod is told whose refusal it is", LIMIT, || {
        Ok(scene.events("both")?.contains("not today").then_some(()))
    })?;

    // Given up meanwhile, it leaves nothing with either.
    workload::end(scene, "both")?;
    ground::await_nothing_left(scene, &[])?;

    other.asked(|asked| asked.refuses = false);
    scene.apply(&manifest::lone("both", &both))?;
    scene.await_running("both")?;
    let held = machine::held_by(scene, "both")?;
    let (ours, theirs): (Vec<_>, Vec<_>) = held.into_iter().partition(|held| held.pool != OTHER);
    ensure!(ours.len() == 1 && theirs.len() == 1, "the pod holds {ours:?} and {theirs:?}");
    let (real, seen) = (machine::on_hardware(scene, &ours)?, machine::seen_in(scene, "both", "main")?);
    ensure!(seen == real, "the pod sees {seen:?}, but holds {real:?}");
    let prepared = other.asked(|asked| asked.prepared.pop_last()).context("the other was not asked")?;

    workload::end(scene, "both")?;
    ground::await_nothing_left(scene, &[])?;
    wait_until("the other driver got it back", LIMIT, || {
        Ok(other.asked(|asked| asked.given_back.contains(&prepared)).then_some(()))
    })
}
