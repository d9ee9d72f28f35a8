//! The claims of a cluster in memory.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use futures::FutureExt;
use futures::future::BoxFuture;
use k8s_openapi::api::resource::v1::{
    AllocationResult, DeviceAllocationResult, DeviceRequestAllocationResult, ResourceClaim,
    ResourceClaimConsumerReference, ResourceClaimStatus,
};
use kerf_dra_driver::claim::ClaimObject;
use kerf_dra_driver::names::{DeviceName, DriverName, gpu_pool};

use super::lock;
use crate::claims::{ClaimSource, ClaimSourceError};

/// Claims in memory.
#[derive(Debug, Default)]
pub struct MemoryClaims {
    claims: Mutex<BTreeMap<(String, String), ResourceClaim>>,
    /// Whether every call fails.
    pub fails: AtomicBool,
    /// The names of claims that cannot be read.
    pub unreadable: Mutex<BTreeSet<String>>,
    /// The names of claims of which nobody gets an answer, nor an error.
    pub silent: Mutex<BTreeSet<String>>,
    /// How often somebody asked.
    pub questions: AtomicUsize,
}

impl MemoryClaims {
    /// Puts a claim there, or another in its place.
    pub fn put(&self, claim: ResourceClaim) {
        let text = |value: &Option<String>| value.clone().unwrap_or_default();
        lock(&self.claims).insert((text(&claim.metadata.namespace), text(&claim.metadata.name)), claim);
    }

    /// Takes a claim away.
    pub fn delete(&self, namespace: &str, name: &str) {
        lock(&self.claims).remove(&(namespace.to_owned(), name.to_owned()));
    }

    fn answer<T>(&self, answer: T) -> Result<T, ClaimSourceError> {
        self.questions.fetch_add(1, Ordering::SeqCst);
        if self.fails.load(Ordering::SeqCst) {
            Err(ClaimSourceError::new("the API is down"))
        } else {
            Ok(answer)
        }
    }
}

impl ClaimSource for MemoryClaims {
    fn get<'a>(
        &'a self,
        namespace: &'a str,
        name: &'a str,
    ) -> BoxFuture<'a, Result<Option<ClaimObject>, ClaimSourceError>> {
        async move {
            if lock(&self.silent).contains(name) {
                self.questions.fetch_add(1, Ordering::SeqCst);
                return std::future::pending().await;
            }
            if lock(&self.unreadable).contains(name) {
                return Err(ClaimSourceError::new("the API does not answer for this one"));
            }
            let claim = lock(&self.claims).get(&(namespace.to_owned(), name.to_owned())).cloned();
            let read = |claim| serde_json::from_str(&serde_json::to_string(&claim)?);
            let object = claim
                .map(read)
                .transpose()
                .map_err(|error| ClaimSourceError::new("the claim cannot be decoded").caused_by(error))?;
            self.answer(object)
        }
        .boxed()
    }

    fn allocated<'a>(
        &'a self,
        driver: &'a DriverName,
        pool: &'a str,
    ) -> BoxFuture<'a, Result<BTreeSet<DeviceName>, ClaimSourceError>> {
        async move {
            let claims: Vec<ResourceClaim> = lock(&self.claims).values().cloned().collect();
            let results =
                claims.into_iter().filter_map(|claim| claim.status?.allocation?.devices?.results).flatten();
            let ours = results.filter(|result| result.driver == driver.as_str() && result.pool == pool);
            self.answer(ours.filter_map(|result| DeviceName::parse(&result.device).ok()).collect())
        }
        .boxed()
    }
}

/// An allocated and reserved claim of namespace `ns`; its UID is `<name>-uid`.
pub fn claim(name: &str, devices: &[(&str, DeviceName)]) -> ResourceClaim {
    let results = devices
        .iter()
        .map(|(request, device)| DeviceRequestAllocationResult {
            request: (*request).to_owned(),
            driver: DriverName::DEFAULT.to_owned(),
            pool: gpu_pool("node"),
            device: device.to_string(),
            ..DeviceRequestAllocationResult::default()
        })
        .collect();
    let mut claim = ResourceClaim::default();
    claim.metadata.namespace = Some("ns".to_owned());
    claim.metadata.name = Some(name.to_owned());
    claim.metadata.uid = Some(format!("{name}-uid"));
    claim.status = Some(ResourceClaimStatus {
        allocation: Some(AllocationResult {
            devices: Some(DeviceAllocationResult { config: None, results: Some(results) }),
            ..AllocationResult::default()
        }),
        reserved_for: Some(vec![ResourceClaimConsumerReference {
            resource: "pods".to_owned(),
            name: "pod".to_owned(),
            uid: "pod-uid".to_owned(),
            ..ResourceClaimConsumerReference::default()
        }]),
        ..ResourceClaimStatus::default()
    });
    claim
}
