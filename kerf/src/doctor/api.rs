//! The API server's side: whether it is of a release that serves what kerf
//! publishes, lets kerf do what it must, and keeps what it is sent.
//!
//! Nothing is stored: slices are written as a dry run.

use std::future::Future;
use std::time::Duration;

use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec,
};
use k8s_openapi::api::resource::v1::{
    Counter, Device, DeviceCounterConsumption, DeviceTaint, ResourcePool, ResourceSlice, ResourceSliceSpec,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kerf_controller::dropped::dropped;
use kerf_controller::sentence;
use kube::Client;
use kube::api::{Api, PostParams};

use super::Report;
use super::finding::Kind;
use crate::arguments::DoctorArguments;
use crate::status::cluster;

/// How long the API server has for one answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long a claim may wait, in seconds: a scheduler that has much to do takes
/// some.
const WAITING: u64 = 30;
/// The first minor release of Kubernetes 1 with `resource.k8s.io/v1`.
const OLDEST: u32 = 34;

/// What `kerf node` asks for: group, resource, verbs.
const NEEDED: [(&str, &str, &[&str]); 4] = [
    ("", "nodes", &["get"]),
    ("resource.k8s.io", "resourceslices", &["list", "watch", "create", "update", "delete"]),
    ("resource.k8s.io", "resourceclaims", &["get", "list"]),
    ("events.k8s.io", "events", &["create"]),
];

pub(super) fn examine(report: &mut Report, arguments: &DoctorArguments) {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return report.skipped(format!("the API server: no runtime: {error}")),
    };
    runtime.block_on(ask(report, arguments));
}

async fn ask(report: &mut Report, arguments: &DoctorArguments) {
    let client = match Client::try_default().await {
        Ok(client) => client,
        Err(error) => {
            let error = kerf_kubelet_plugin::chain(&error);
            return report.skipped(format!("the API server: no address and credentials were found: {error}"));
        }
    };
    match answer(client.apiserver_version()).await {
        Err(error) => return report.found(Kind::ApiServerUnreachable, error),
        Ok(version) => {
            // Some providers write `34+`.
            let digits: String = version.minor.chars().take_while(char::is_ascii_digit).collect();
            if version.major == "1" && digits.parse::<u32>().is_ok_and(|minor| minor < OLDEST) {
                return report.found(Kind::ApiServerTooOld, version.git_version);
            }
        }
    }
    for (group, resource, verbs) in NEEDED {
        for verb in verbs {
            match answer(may(&client, group, resource, verb)).await {
                Ok(true) => {}
                Ok(false) => report.found(Kind::PermissionMissing, format!("{verb} {resource}.{group}")),
                Err(error) => report.skipped(format!("whether kerf may {verb} {resource}: {error}")),
            }
        }
    }
    let Some(node) = &arguments.node_name else {
        return report
            .skipped("what the API server keeps of a slice: the node's name is not given (--node-name)");
    };
    let slice = probe(arguments.kubelet.driver_name.as_str(), node);
    let dry = PostParams { dry_run: true, ..PostParams::default() };
    let slices: Api<ResourceSlice> = Api::all(client.clone());
    match answer(slices.create(&dry, &slice)).await {
        Ok(kept) => {
            for feature in dropped(&slice.spec, &kept.spec) {
                report.found(Kind::ApiServerDropsFields, format!("the feature gate {feature} is off"));
            }
        }
        Err(error) => report.skipped(format!("what the API server keeps of a slice: {error}")),
    }
    let look = cluster::look(&client, &arguments.kubelet.driver_name);
    match tokio::time::timeout(PATIENCE, look).await {
        Ok(Ok(status)) => {
            let names: Vec<String> =
                status.waiting_beside_free(WAITING).map(|waiting| waiting.claim.to_string()).collect();
            if let [first, others @ ..] = names.as_slice() {
                report.found(Kind::ClaimsWaitBesideFree, format!("{first} and {} others", others.len()));
            }
        }
        Ok(Err(error)) => report.skipped(format!("whether claims wait: {}", sentence(&error))),
        Err(_) => {
            report.skipped(format!("whether claims wait: no answer in {} s", PATIENCE.as_secs()));
        }
    }
}

async fn answer<T>(request: impl Future<Output = Result<T, kube::Error>>) -> Result<T, String> {
    match tokio::time::timeout(PATIENCE, request).await {
        Ok(answer) => answer.map_err(|error| kerf_kubelet_plugin::chain(&error)),
        Err(_) => Err(format!("no answer in {} s", PATIENCE.as_secs())),
    }
}

async fn may(client: &Client, group: &str, resource: &str, verb: &str) -> Result<bool, kube::Error> {
    let attributes = ResourceAttributes {
        group: Some(group.to_owned()),
        resource: Some(resource.to_owned()),
        verb: Some(verb.to_owned()),
        ..ResourceAttributes::default()
    };
    let review = SelfSubjectAccessReview {
        spec: SelfSubjectAccessReviewSpec {
            resource_attributes: Some(attributes),
            ..SelfSubjectAccessReviewSpec::default()
        },
        ..SelfSubjectAccessReview::default()
    };
    let reviews: Api<SelfSubjectAccessReview> = Api::all(client.clone());
    let answer = reviews.create(&PostParams::default(), &review).await?;
    Ok(answer.status.is_some_and(|status| status.allowed))
}

/// A slice with one of everything that must be kept: a device that takes of a
/// shared counter, and a taint. The counters would be in another slice.
fn probe(driver: &str, node: &str) -> ResourceSlice {
    let one = Counter { value: Quantity("1".to_owned()) };
    let consumed = DeviceCounterConsumption {
        counter_set: "probe".to_owned(),
        counters: [("units".to_owned(), one)].into_iter().collect(),
        ..DeviceCounterConsumption::default()
    };
    let taint = DeviceTaint {
        key: format!("{driver}/probe"),
        value: None,
        effect: "NoSchedule".to_owned(),
        time_added: None,
    };
    let device = Device {
        name: "probe".to_owned(),
        consumes_counters: Some(vec![consumed]),
        taints: Some(vec![taint]),
        ..Device::default()
    };
    let name = format!("{node}/kerf-doctor");
    let mut slice = ResourceSlice::default();
    slice.metadata.generate_name = Some("kerf-doctor-".to_owned());
    slice.spec = ResourceSliceSpec {
        driver: driver.to_owned(),
        node_name: Some(node.to_owned()),
        pool: ResourcePool { name, generation: 1, resource_slice_count: 2 },
        devices: Some(vec![device]),
        ..ResourceSliceSpec::default()
    };
    slice
}
