//! The claim reader's promises.

use std::collections::BTreeSet;

use k8s_openapi::api::resource::v1::ResourceClaim;
use kerf_controller::claims::{CLAIMS, allocated_devices};
use kerf_controller::{ListError, list};
use kerf_dra_driver::cluster::SeenClaim;
use kerf_dra_driver::names::DeviceName;
use serde_json::json;

use crate::fake_api::FakeApi;

fn claim(number: usize, driver: &str, pool: &str, device: &str) -> ResourceClaim {
    serde_json::from_value(json!({
        "metadata": {"name": format!("claim-{number}"), "namespace": "demo", "uid": format!("uid-{number}")},
        "spec": {},
        "status": {
            "allocation": {"devices": {"results": [
                {"request": "gpu", "driver": driver, "pool": pool, "device": device},
                {"request": "nic", "driver": "nic.example.com", "pool": pool, "device": "nic-0"},
            ]}},
            "reservedFor": [{"resource": "pods", "name": "pod", "uid": "pod-uid"}],
        },
    }))
    .unwrap()
}

fn pools() -> BTreeSet<String> {
    BTreeSet::from(["node-1/gpu".to_owned()])
}

fn api_with_claims() -> FakeApi {
    let api = FakeApi::new();
    api.with(|store| {
        let driver = "gpu.nvidia.com";
        store.claims = (0..1200).map(|number| claim(number, driver, "node-2/gpu", "gpu-0")).collect();
        store.claims.insert(0, claim(5000, driver, "node-1/gpu", "gpu-a"));
        store.claims.push(claim(5001, driver, "node-1/gpu", "gpu-b"));
        store.claims.push(claim(5002, "other.example.com", "node-1/gpu", "gpu-c"));
        store.claims.push(ResourceClaim::default());
    });
    api
}

#[tokio::test]
async fn all_pages_are_read_and_only_our_devices_in_our_pools_are_held() {
    let api = api_with_claims();
    let driver = "gpu.nvidia.com".parse().unwrap();
    let held = allocated_devices(api.client(), &driver, &pools()).await.unwrap();
    let names: Vec<_> = held.iter().map(DeviceName::as_str).collect();
    assert_eq!(names, ["gpu-a", "gpu-b"]);
    // 1203 claims, 50 a page.
    api.with(|store| assert_eq!(store.requests.len(), 25));
}

#[tokio::test]
async fn an_expired_list_begins_anew_and_is_never_taken_for_complete() {
    let driver = "gpu.nvidia.com".parse().unwrap();
    let api = api_with_claims();
    api.with(|store| store.expire_pages = 2);
    let held = allocated_devices(api.client(), &driver, &pools()).await.unwrap();
    assert_eq!(held.len(), 2);
    api.with(|store| store.expire_pages = 2);
    let claims: Vec<SeenClaim> = list(&api.client(), CLAIMS, Some).await.unwrap();
    assert_eq!(claims.len(), 1204, "what an expired list told is told twice");
    api.with(|store| store.expire_pages = 3);
    let error = allocated_devices(api.client(), &driver, &pools()).await.unwrap_err();
    assert!(matches!(error, ListError::Expired { .. }), "{error}");
}
