//! Questions to the API server over one connection. Cases ask all the time, and
//! `kubectl` would be a process, a handshake and a look at all kinds a question.

use std::fmt::{self, Debug};

use anyhow::{Context as _, Result};
use http::Request;
use k8s_openapi::NamespaceResourceScope;
use kube::api::ObjectList;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config, Resource};
use serde::de::DeserializeOwned;
use tokio::runtime::{Builder, Runtime};
use xtask::cluster::Cluster;

/// What can be read: a kind of the API.
pub trait Kind: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug {}

impl<K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug> Kind for K {}

/// A connection as the cluster's administrator.
pub(crate) struct Connection {
    runtime: Runtime,
    client: Client,
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").finish_non_exhaustive()
    }
}

impl Connection {
    pub(crate) fn open(cluster: &Cluster) -> Result<Self> {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let client = runtime.block_on(async {
            let file = Kubeconfig::read_from(cluster.kubeconfig())?;
            let mut config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await?;
            // The cluster is on this machine, whatever the way to others.
            config.proxy_url = None;
            anyhow::Ok(Client::try_from(config)?)
        });
        Ok(Self { runtime, client: client.context("cannot use the cluster's kubeconfig")? })
    }

    pub(crate) fn get<K>(&self, namespace: &str, name: &str) -> Result<Option<K>>
    where
        K: Kind + Resource<Scope = NamespaceResourceScope>,
    {
        let api = Api::<K>::namespaced(self.client.clone(), namespace);
        let object = self.runtime.block_on(api.get_opt(name));
        object.with_context(|| format!("cannot read {} {name}", K::kind(&())))
    }

    /// All objects of a kind, in the namespace where one is given.
    pub(crate) fn list<K: Kind>(&self, namespace: Option<&str>, fields: &str) -> Result<Vec<K>> {
        let path = format!("{}?fieldSelector={fields}", K::url_path(&(), namespace));
        let list = self.runtime.block_on(self.client.request::<ObjectList<K>>(request(&path)?));
        Ok(list.with_context(|| format!("cannot read {path}"))?.items)
    }

    pub(crate) fn text(&self, path: &str) -> Result<String> {
        self.runtime
            .block_on(self.client.request_text(request(path)?))
            .with_context(|| format!("cannot read {path}"))
    }
}

fn request(path: &str) -> Result<Request<Vec<u8>>> {
    Ok(Request::get(path).body(Vec::new())?)
}
