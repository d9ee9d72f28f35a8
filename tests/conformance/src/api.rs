//! The API server's side: reads slices, and makes claims that are allocated by
//! hand, as the scheduler would.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;

use anyhow::{Context as _, Result, bail};
use k8s_openapi::api::core::v1::{Namespace, Node, Pod};
use k8s_openapi::api::resource::v1::{Device, DeviceAttribute, ResourceClaim, ResourceSlice};
use kube::Client;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::profile::{ClaimProfile, Profile};
use crate::proto::dra_v1;

/// The name of the request in every claim.
pub(crate) const REQUEST: &str = "conformance";
/// The name of its only alternative, where it is a list.
const ALTERNATIVE: &str = "first";
/// The name of the second request, where there is one.
pub(crate) const SECOND_REQUEST: &str = "second";
/// Tells the pod's name from those of claims.
const POD: &str = "pod";
/// A driver that nobody has.
pub(crate) const FOREIGN: &str = "conformance.invalid";

/// Labels a Node that was made here, by this or a former run.
const MADE: &str = "conformance.invalid/made";

/// Labels a namespace in which claims may have administrative access.
const ADMIN: &str = "resource.kubernetes.io/admin-access";

/// How many nodes of a driver are named.
const MOST_NODES: usize = 10;

/// A device's place: pool and name.
pub(crate) type Place = (String, String);

/// A claim that was made.
#[derive(Debug, Clone)]
pub(crate) struct Claim {
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) uid: String,
    pub(crate) device: Place,
}

impl Claim {
    pub(crate) fn wire(&self) -> dra_v1::Claim {
        dra_v1::Claim { namespace: self.namespace.clone(), uid: self.uid.clone(), name: self.name.clone() }
    }
}

/// What is unusual about a claim.
#[derive(Debug, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each is a way of its own")]
pub(crate) struct Unusual {
    /// This device, whoever has it.
    pub(crate) device: Option<Place>,
    /// This name.
    pub(crate) name: Option<String>,
    /// Another driver's device and parameters are in it too.
    pub(crate) foreign: bool,
    /// Its request is a list of alternatives.
    pub(crate) alternatives: bool,
    /// Instead of the profile's parameters.
    pub(crate) parameters: Option<Value>,
    /// Nothing is allocated to it.
    pub(crate) unallocated: bool,
    /// Its access is administrative.
    pub(crate) admin: bool,
    /// It gets a share of this id.
    pub(crate) share: Option<String>,
    /// It has a second request, for a device of that kind.
    pub(crate) second: Option<Second>,
}

/// What is allocated to a second request.
#[derive(Debug)]
pub(crate) struct Second {
    pub(crate) profile: ClaimProfile,
    pub(crate) device: Place,
    pub(crate) share: Option<String>,
}

#[derive(Debug)]
pub(crate) struct Cluster {
    pub(crate) slices: Api<ResourceSlice>,
    pub(crate) nodes: Api<Node>,
    claims: Api<ResourceClaim>,
    all_claims: Api<ResourceClaim>,
    pods: Api<Pod>,
    namespaces: Api<Namespace>,
    driver: String,
    node: String,
    namespace: String,
    pod: Option<String>,
    made: u32,
    /// What is to be taken away at the end. Noted before it is made: a check may be
    /// given up at any moment.
    has_node: bool,
    has_pod: bool,
    allows_admin: bool,
    claim: Option<String>,
    strangers: Vec<ResourceSlice>,
}

impl Cluster {
    pub(crate) fn new(client: Client, profile: &Profile) -> Self {
        Self {
            slices: Api::all(client.clone()),
            nodes: Api::all(client.clone()),
            claims: Api::namespaced(client.clone(), &profile.namespace),
            all_claims: Api::all(client.clone()),
            pods: Api::namespaced(client.clone(), &profile.namespace),
            namespaces: Api::all(client),
            driver: profile.driver.clone(),
            node: profile.node.clone(),
            namespace: profile.namespace.clone(),
            pod: None,
            made: 0,
            has_node: false,
            has_pod: false,
            allows_admin: false,
            claim: None,
            strangers: Vec::new(),
        }
    }

    /// The name of an object that is made for this node: of a claim, or of the pod
    /// that all claims are reserved for, which never runs.
    pub(crate) fn named(&self, what: impl Display) -> String {
        format!("dra-conformance-{}-{what}", self.node)
    }

    /// The Node's UID.
    pub(crate) async fn node_uid(&self) -> Result<String> {
        let node = self.nodes.get_opt(&self.node).await?;
        let node = node.with_context(|| format!("there is no Node `{}`", self.node))?;
        node.metadata.uid.context("a Node has a UID")
    }

    /// Makes the Node if there is none.
    pub(crate) async fn ensure_node(&mut self) -> Result<()> {
        if self.nodes.get_opt(&self.node).await?.is_none() {
            self.has_node = true;
            let object = json!({"metadata": {"name": self.node, "labels": {MADE: "true"}}});
            let made = self.nodes.create(&PostParams::default(), &serde_json::from_value(object)?).await;
            made.with_context(|| format!("the Node `{}` cannot be made", self.node))?;
        }
        Ok(())
    }

    /// Whether the Node is nobody else's.
    pub(crate) async fn has_made_node(&self) -> Result<bool> {
        let node = self.nodes.get_opt(&self.node).await?;
        Ok(node.is_some_and(|node| node.metadata.labels.is_some_and(|labels| labels.contains_key(MADE))))
    }

    /// The driver's slices of the node, by name.
    pub(crate) async fn published(&self) -> Result<Vec<ResourceSlice>> {
        let fields = format!("spec.nodeName={},spec.driver={}", self.node, self.driver);
        let mut slices = self.slices.list(&ListParams::default().fields(&fields)).await?.items;
        slices.sort_by(|left, right| left.metadata.name.cmp(&right.metadata.name));
        Ok(slices)
    }

    /// The drivers that have slices, each with its nodes.
    pub(crate) async fn publishers(&self) -> Result<Vec<String>> {
        let mut nodes: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for slice in self.slices.list(&ListParams::default()).await?.items {
            let node = slice.spec.node_name.map_or("no single node".to_owned(), |node| format!("`{node}`"));
            nodes.entry(slice.spec.driver).or_default().insert(node);
        }
        let said = nodes.into_iter().map(|(driver, nodes)| {
            let (count, some) = (nodes.len(), nodes.into_iter().take(MOST_NODES).collect::<Vec<_>>());
            let more = if count > MOST_NODES { ", …" } else { "" };
            format!("`{driver}` on {}{more}", some.join(", "))
        });
        Ok(said.collect())
    }

    pub(crate) async fn delete_slices(&self, slices: &[ResourceSlice]) -> Result<()> {
        for slice in slices {
            let name = slice.metadata.name.as_deref().context("a slice has a name")?;
            match self.slices.delete(name, &DeleteParams::default()).await {
                Err(kube::Error::Api(status)) if status.is_not_found() => {}
                deleted => drop(deleted?),
            }
        }
        Ok(())
    }

    /// Makes slices that are not the driver's, as they must stay.
    pub(crate) async fn create_strangers(&mut self, slices: &[ResourceSlice]) -> Result<Vec<ResourceSlice>> {
        self.delete_slices(slices).await?;
        self.strangers = slices.to_vec();
        let mut made = Vec::new();
        for slice in slices {
            let one = self.slices.create(&PostParams::default(), slice).await;
            made.push(one.context("cannot create a slice")?);
        }
        Ok(made)
    }

    /// Makes a claim as the profile says, allocated and reserved.
    pub(crate) async fn create(&mut self, profile: &ClaimProfile, unusual: Unusual) -> Result<Claim> {
        let name = unusual.name.clone().unwrap_or_else(|| {
            self.made += 1;
            self.named(self.made)
        });
        // Left by a run that was killed.
        self.claims.delete(&name, &DeleteParams::default()).await.ok();
        let device = match &unusual.device {
            Some(device) => device.clone(),
            None => self.pick(profile, &[]).await?,
        };
        let parameters = unusual.parameters.as_ref().or(profile.parameters.as_ref());
        let object = self.object(&name, profile, parameters, &unusual);
        // Of a check that failed before it was allocated.
        if let Some(former) = self.claim.replace(name.clone()) {
            self.claims.delete(&former, &DeleteParams::default()).await.ok();
        }
        let claim = self.claims.create(&PostParams::default(), &serde_json::from_value(object)?).await?;
        let uid = claim.metadata.uid.context("a created claim has a UID")?;
        if !unusual.unallocated {
            let status = self.status(&device, profile, parameters, &unusual).await;
            self.claims.patch_status(&name, &PatchParams::default(), &Patch::Merge(&status)).await?;
        }
        self.claim = None;
        Ok(Claim { namespace: self.namespace.clone(), name, uid, device })
    }

    fn object(
        &self,
        name: &str,
        profile: &ClaimProfile,
        parameters: Option<&Value>,
        unusual: &Unusual,
    ) -> Value {
        let mut exactly = json!({"deviceClassName": profile.device_class});
        if unusual.admin {
            exactly["adminAccess"] = json!(true);
        }
        if unusual.share.is_some() && !profile.capacity.is_empty() {
            exactly["capacity"] = json!({"requests": profile.capacity});
        }
        let mut requests = vec![if unusual.alternatives {
            let alternative = json!({"name": ALTERNATIVE, "deviceClassName": profile.device_class});
            json!({"name": REQUEST, "firstAvailable": [alternative]})
        } else {
            json!({"name": REQUEST, "exactly": exactly})
        }];
        if unusual.foreign {
            requests.push(json!({"name": "foreign", "exactly": exactly}));
        }
        if let Some(Second { profile, .. }) = &unusual.second {
            let exactly = json!({"deviceClassName": profile.device_class});
            requests.push(json!({"name": SECOND_REQUEST, "exactly": exactly}));
        }
        let config = self.config(parameters, unusual);
        json!({"metadata": {"name": name}, "spec": {"devices": {"requests": requests, "config": config}}})
    }

    fn config(&self, parameters: Option<&Value>, unusual: &Unusual) -> Vec<Value> {
        let second = unusual.second.as_ref().and_then(|second| second.profile.parameters.as_ref());
        let ours = [(REQUEST, parameters), (SECOND_REQUEST, second)].map(|(request, parameters)| {
            let opaque = json!({"driver": self.driver, "parameters": parameters?});
            Some(json!({"requests": [request], "opaque": opaque}))
        });
        let theirs = unusual.foreign.then(|| {
            let parameters =
                json!({"apiVersion": "conformance.invalid/v1", "kind": "Foreign", "deep": [[["x"]]]});
            json!({"opaque": {"driver": FOREIGN, "parameters": parameters}})
        });
        ours.into_iter().flatten().chain(theirs).collect()
    }

    async fn status(
        &mut self,
        (pool, device): &Place,
        profile: &ClaimProfile,
        parameters: Option<&Value>,
        unusual: &Unusual,
    ) -> Value {
        let request =
            if unusual.alternatives { format!("{REQUEST}/{ALTERNATIVE}") } else { REQUEST.to_owned() };
        let mut result = json!({"request": request, "driver": self.driver, "pool": pool, "device": device});
        if unusual.admin {
            result["adminAccess"] = json!(true);
        }
        let shared = |mut result: Value, share: &Option<String>, profile: &ClaimProfile| {
            if let Some(share) = share {
                result["shareID"] = json!(share);
                result["consumedCapacity"] = json!(profile.capacity);
            }
            result
        };
        let mut results = vec![shared(result, &unusual.share, profile)];
        if let Some(Second { profile, device: (pool, device), share }) = &unusual.second {
            let second =
                json!({"request": SECOND_REQUEST, "driver": self.driver, "pool": pool, "device": device});
            results.push(shared(second, share, profile));
        }
        if unusual.foreign {
            // First: a driver must look at each result's own driver.
            let theirs =
                json!({"request": "foreign", "driver": FOREIGN, "pool": "foreign", "device": "foreign"});
            results.insert(0, theirs);
        }
        let mut config = self.config(parameters, unusual);
        for entry in &mut config {
            entry["source"] = json!("FromClaim");
        }
        let consumer = json!({"resource": "pods", "name": self.named(POD), "uid": self.pod_uid().await});
        let allocation = json!({"devices": {"results": results, "config": config}});
        json!({"status": {"allocation": allocation, "reservedFor": [consumer]}})
    }

    /// The UID of a pod that nobody schedules. A controller manager takes
    /// reservations of pods away that are not there; where no pod can be made
    /// (no service account), there is no controller manager either.
    async fn pod_uid(&mut self) -> String {
        const NOBODY: &str = "00000000-0000-4000-8000-000000000000";
        if self.pod.is_none() {
            let object = json!({
                "metadata": {"name": self.named(POD)},
                "spec": {
                    "schedulingGates": [{"name": "conformance.invalid/never"}],
                    "containers": [{"name": "none", "image": "none"}],
                },
            });
            self.has_pod = true;
            let made = match serde_json::from_value(object) {
                Ok(pod) => self.pods.create(&PostParams::default(), &pod).await.ok(),
                Err(_) => None,
            };
            let pod = match made {
                Some(pod) => Some(pod),
                None => self.pods.get_opt(&self.named(POD)).await.ok().flatten(),
            };
            self.pod = Some(pod.and_then(|pod| pod.metadata.uid).unwrap_or_else(|| NOBODY.to_owned()));
        }
        self.pod.clone().unwrap_or_default()
    }

    /// Takes a claim away, whether or not it is still the one of its name.
    pub(crate) async fn delete(&self, claim: &Claim) -> Result<()> {
        let released = json!({"status": {"allocation": null, "reservedFor": null}});
        // Without an allocation there is nothing to release.
        self.claims.patch_status(&claim.name, &PatchParams::default(), &Patch::Merge(&released)).await.ok();
        match self.claims.delete(&claim.name, &DeleteParams::default()).await {
            Err(kube::Error::Api(status)) if status.is_not_found() => Ok(()),
            deleted => Ok(deleted.map(drop)?),
        }
    }

    /// Takes away what was made for all checks. Slices go with their Node.
    pub(crate) async fn leave(&mut self) {
        if self.allows_admin {
            self.allow_admin(false).await.ok();
        }
        if let Some(claim) = self.claim.take() {
            self.claims.delete(&claim, &DeleteParams::default()).await.ok();
        }
        self.delete_slices(&self.strangers).await.ok();
        if self.has_node && self.has_made_node().await.unwrap_or(false) {
            self.nodes.delete(&self.node, &DeleteParams::default()).await.ok();
        }
        if self.has_pod {
            self.pods.delete(&self.named(POD), &DeleteParams::default().grace_period(0)).await.ok();
        }
    }

    /// Allows claims of the namespace to have administrative access, or no more.
    /// False where they could already.
    pub(crate) async fn allow_admin(&mut self, allows: bool) -> Result<bool> {
        let namespace = self.namespaces.get(&self.namespace).await?;
        let labels = namespace.metadata.labels.unwrap_or_default();
        if allows && labels.get(ADMIN).is_some_and(|value| value == "true") {
            return Ok(false);
        }
        self.allows_admin |= allows;
        let patch = json!({"metadata": {"labels": {ADMIN: allows.then_some("true")}}});
        self.namespaces.patch(&self.namespace, &PatchParams::default(), &Patch::Merge(&patch)).await?;
        self.allows_admin = allows;
        Ok(true)
    }

    /// The first device in published order that allows shares and matches.
    pub(crate) async fn pick_shared(&self, profile: &ClaimProfile) -> Result<Place> {
        let slices = self.published().await?;
        let mut devices = slices.iter().flat_map(|slice| {
            slice.spec.devices.iter().flatten().map(|device| (slice.spec.pool.name.clone(), device))
        });
        let found = devices.find(|(_, device)| {
            device.allow_multiple_allocations == Some(true)
                && !is_tainted(device)
                && self.matches(device, &profile.matching)
        });
        let (pool, device) = found.context("no published device allows shares and matches")?;
        Ok((pool, device.name.clone()))
    }

    /// The first device in published order that matches, has no taint that
    /// would keep it from being allocated, and is not allocated.
    pub(crate) async fn pick(&self, profile: &ClaimProfile, except: &[Place]) -> Result<Place> {
        let claims = self.all_claims.list(&ListParams::default()).await?.items;
        let results =
            claims.iter().filter_map(|claim| claim.status.as_ref()?.allocation.as_ref()?.devices.as_ref());
        let taken: BTreeSet<(&str, &str)> = results
            .flat_map(|devices| devices.results.iter().flatten())
            .filter(|result| result.driver == self.driver)
            .map(|result| (result.pool.as_str(), result.device.as_str()))
            .collect();
        let slices = self.published().await?;
        let devices = slices.iter().flat_map(|slice| {
            let pool = slice.spec.pool.name.as_str();
            slice.spec.devices.iter().flatten().map(move |device| (pool, device))
        });
        let free = devices
            .filter(|(_, device)| is_plain(device) && self.matches(device, &profile.matching))
            .filter(|(pool, device)| {
                !except.iter().any(|(in_pool, name)| in_pool == pool && *name == device.name)
            })
            .find(|(pool, device)| !taken.contains(&(*pool, device.name.as_str())));
        match free {
            Some((pool, device)) => Ok((pool.to_owned(), device.name.clone())),
            None => bail!(
                "no published device is free that matches {} ({} slices, {} devices are allocated)",
                serde_json::to_string(&profile.matching)?,
                slices.len(),
                taken.len()
            ),
        }
    }

    fn matches(&self, device: &Device, wanted: &BTreeMap<String, Value>) -> bool {
        let attributes = device.attributes.as_ref();
        wanted.iter().all(|(name, value)| {
            let bare = name.strip_prefix(&format!("{}/", self.driver)).unwrap_or(name);
            let full = format!("{}/{bare}", self.driver);
            let attribute =
                attributes.and_then(|all| all.get(name).or_else(|| all.get(bare)).or_else(|| all.get(&full)));
            attribute.is_some_and(|attribute| scalar(attribute) == *value)
        })
    }
}

/// Whether it can be allocated once, as a whole, without a toleration.
fn is_plain(device: &Device) -> bool {
    device.allow_multiple_allocations != Some(true) && !is_tainted(device)
}

fn is_tainted(device: &Device) -> bool {
    device.taints.iter().flatten().any(|taint| taint.effect != "None")
}

fn scalar(attribute: &DeviceAttribute) -> Value {
    let text = attribute.string.as_ref().or(attribute.version.as_ref()).map(|text| json!(text));
    text.or(attribute.int.map(|int| json!(int)))
        .or(attribute.bool.map(|bool| json!(bool)))
        .unwrap_or_default()
}
