//! Tests of resolving claims.

use k8s_openapi::api::resource::v1::{
    AllocationResult, DeviceAllocationResult, DeviceRequestAllocationResult, ResourceClaim,
    ResourceClaimConsumerReference, ResourceClaimStatus,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::*;

fn result(request: &str, driver: &str, pool: &str, device: &str) -> DeviceRequestAllocationResult {
    DeviceRequestAllocationResult {
        request: request.to_owned(),
        driver: driver.to_owned(),
        pool: pool.to_owned(),
        device: device.to_owned(),
        ..DeviceRequestAllocationResult::default()
    }
}

fn claim(results: Vec<DeviceRequestAllocationResult>) -> ResourceClaim {
    let mut claim = ResourceClaim::default();
    claim.metadata.uid = Some("uid-1".to_owned());
    claim.metadata.namespace = Some("ns".to_owned());
    claim.metadata.name = Some("c".to_owned());
    claim.status = Some(ResourceClaimStatus {
        allocation: Some(AllocationResult {
            devices: Some(DeviceAllocationResult { config: None, results: Some(results) }),
            ..AllocationResult::default()
        }),
        reserved_for: Some(vec![ResourceClaimConsumerReference::default()]),
        ..ResourceClaimStatus::default()
    });
    claim
}

/// The claim as a node reads it.
fn read(claim: &ResourceClaim) -> ClaimObject {
    let text = serde_json::to_string(claim).expect("encodes");
    serde_json::from_str(&text).expect("decodes")
}

fn resolve(claim: &ResourceClaim) -> Result<Claim, String> {
    let driver = DriverName::DEFAULT.parse().expect("a driver name");
    Claim::resolve(&read(claim), &"uid-1".parse().expect("a uid"), &driver, "node/gpu")
        .map_err(|error| error.to_string())
}

const OURS: &str = DriverName::DEFAULT;

#[test]
fn results_of_other_drivers_are_not_ours() {
    let claim = claim(vec![
        result("a", "other.example.com", "pool", "anything"),
        result("b/sub", OURS, "node/gpu", "gpu-0000-65-00-0"),
    ]);
    let claim = resolve(&claim).expect("resolves");
    assert_eq!(claim.allocation.len(), 1);
    assert_eq!(claim.allocation[0].main_request(), "b");
    assert_eq!(claim.gpus().len(), 1);
}

#[test]
fn a_claim_that_may_not_be_prepared_says_why() {
    let good = || claim(vec![result("a", OURS, "node/gpu", "gpu-0000-65-00-0")]);
    let with = |change: &dyn Fn(&mut ResourceClaim)| {
        let mut claim = good();
        change(&mut claim);
        resolve(&claim).expect_err("cannot be prepared")
    };
    assert!(resolve(&good()).is_ok());
    assert!(with(&|claim| claim.metadata.uid = Some("uid-2".to_owned())).contains("replaced by another"));
    assert!(
        with(
            &|claim| claim.metadata.deletion_timestamp = Some(Time(k8s_openapi::jiff::Timestamp::UNIX_EPOCH))
        )
        .contains("being deleted")
    );
    assert!(with(&|claim| claim.status = None).contains("not allocated"));
    assert!(
        with(&|claim| claim.status.as_mut().expect("status").allocation = None).contains("not allocated")
    );
    assert!(
        with(&|claim| claim.status.as_mut().expect("status").reserved_for = None)
            .contains("reserved for no pod")
    );
    assert!(
        with(&|claim| claim.status.as_mut().expect("status").reserved_for = Some(Vec::new()))
            .contains("reserved for no pod")
    );
}

#[test]
fn a_result_that_cannot_be_this_nodes_is_refused() {
    for (pool, device, expected) in [
        ("other/gpu", "gpu-0000-65-00-0", "is not this node's"),
        ("node/gpu", "gpu-0", "none that this driver publishes"),
        ("node/gpu", "gpu-0000-65-00-0-tpu", "none that this driver publishes"),
        ("node/gpu", "../x", "is not a device name"),
    ] {
        let error = resolve(&claim(vec![result("a", OURS, pool, device)])).expect_err("refused");
        assert!(error.contains(expected), "{error}");
    }
    let twice = result("a", OURS, "node/gpu", "gpu-0000-65-00-0");
    let error = resolve(&claim(vec![twice.clone(), twice])).expect_err("refused");
    assert!(error.contains("allocated twice"), "{error}");
}

#[test]
fn an_allocation_is_the_same_by_its_devices_whatever_its_configs_resolve_to() {
    let claim = claim(vec![result("a", OURS, "node/gpu", "gpu-0000-65-00-0")]);
    let allocation = resolve(&claim).expect("resolves").allocation;
    let driver = OURS.parse().expect("a driver name");
    assert!(is_allocated(&read(&claim), &driver, "node/gpu", &allocation));
    assert!(!is_allocated(&read(&self::claim(vec![])), &driver, "node/gpu", &allocation));
    assert!(!is_allocated(&ClaimObject::default(), &driver, "node/gpu", &allocation));
    let mut other = allocation.clone();
    other[0].config = Some(DeviceConfig::Gpu);
    assert!(other != allocation && is_same(&other, &allocation));
    other[0].request = "b".to_owned();
    assert!(!is_same(&other, &allocation));
}

#[test]
fn a_config_nested_too_deeply_to_be_decoded_fails_its_claim_only_if_it_is_ours() {
    let nested = (0..1_000).fold(serde_json::Value::Null, |inner, _| serde_json::json!({ "a": inner }));
    let with = |driver: &str| {
        let mut claim = claim(vec![result("a", OURS, "node/gpu", "gpu-0000-65-00-0")]);
        let opaque =
            OpaqueDeviceConfiguration { driver: driver.to_owned(), parameters: RawExtension(nested.clone()) };
        let config = DeviceAllocationConfiguration {
            source: "FromClaim".to_owned(),
            requests: None,
            opaque: Some(opaque),
        };
        let allocation = claim.status.as_mut().and_then(|status| status.allocation.as_mut());
        allocation.and_then(|allocation| allocation.devices.as_mut()).expect("devices").config =
            Some(vec![config]);
        resolve(&claim)
    };
    assert!(with("other.example.com").is_ok());
    let error = with(OURS).expect_err("refused");
    assert!(error.contains("device config for `gpu.nvidia.com` cannot be decoded"), "{error}");
}
