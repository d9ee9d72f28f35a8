//! `kerf status --cluster`: reads slices and claims from the API server, and
//! what the scheduler said of pods that wait.

use std::collections::BTreeSet;
use std::io::Write;

use anyhow::{Context, Result, anyhow};
use k8s_openapi::api::resource::v1::ResourceSlice;
use k8s_openapi::jiff::Timestamp;
use kerf_controller::claims::CLAIMS;
use kerf_controller::{ListError, Listed, list, sentence};
use kerf_dra_driver::cluster::{ClusterStatus, PendingPod, PodEvent, SchedulerEvent, SeenClaim};
use kerf_dra_driver::names::DriverName;
use kube::Client;

use crate::arguments::StatusArguments;
use crate::picture;

/// Of how many claims that wait the scheduler's reason is asked, oldest first:
/// each costs a request.
const MOST: usize = 50;

/// Prints the cluster's status.
pub(crate) fn run(arguments: &StatusArguments) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("the runtime cannot be made")?;
    let status = runtime.block_on(read(&arguments.kubelet.driver_name))?;
    let text =
        if arguments.json { serde_json::to_string(&status)? + "\n" } else { picture::draw_cluster(&status) };
    std::io::stdout().lock().write_all(text.as_bytes())?;
    Ok(())
}

async fn read(driver: &DriverName) -> Result<ClusterStatus> {
    let client = Client::try_default().await.map_err(|error| {
        anyhow!(
            "no cluster to ask: neither a kubeconfig that can be used nor a pod's service account was found; set \
             KUBECONFIG to one, as for kubectl: {}",
            sentence(&error)
        )
    })?;
    let mut status = look(&client, driver).await.map_err(|error| explained(&error))?;
    // Without these the picture is whole but for the reasons.
    if let Err(error) = find_pods(&client, &mut status).await {
        status.notes.push(format!("which pods wait is not known: {}", explained(&error)));
    }
    if let Err(error) = find_reasons(&client, &mut status).await {
        status.notes.push(format!("what the scheduler says is not known: {}", explained(&error)));
    }
    Ok(status)
}

/// What slices and claims tell.
pub(crate) async fn look(client: &Client, driver: &DriverName) -> Result<ClusterStatus, ListError> {
    let fields = format!("spec.driver={driver}");
    let path = "/apis/resource.k8s.io/v1/resourceslices";
    let listed = Listed { what: "ResourceSlices", path, fields: Some(&fields) };
    let slices: Vec<ResourceSlice> = list(client, listed, Some).await?;
    let claims: Vec<SeenClaim> = list(client, CLAIMS, Some).await?;
    Ok(ClusterStatus::of(driver, env!("CARGO_PKG_VERSION"), &slices, &claims, Timestamp::now()))
}

/// What failed, why, and what to do.
pub(crate) fn explained(error: &ListError) -> anyhow::Error {
    let remedy = match error {
        ListError::Refused { what, source } => match &**source {
            kube::Error::Api(status) if status.code == 403 => format!(
                "give this user the verb `list` on {} in all namespaces, or take a kubeconfig of one who has it",
                what.to_lowercase()
            ),
            kube::Error::Api(status) if status.code == 401 => "log in again, as for kubectl".to_owned(),
            kube::Error::Api(status) if status.code == 404 => {
                "the API server has no resource.k8s.io/v1, which came with Kubernetes 1.34; upgrade it"
                    .to_owned()
            }
            _ => "see whether `kubectl get nodes` works with the same kubeconfig".to_owned(),
        },
        ListError::TooSlow { .. } | ListError::Expired { .. } => {
            "the API server or the way to it is overloaded; try again".to_owned()
        }
    };
    anyhow!("{}; {remedy}", sentence(error))
}

/// The pods of claims that were not made from a template: those that name them.
async fn find_pods(client: &Client, status: &mut ClusterStatus) -> Result<(), ListError> {
    let named = status.waiting.iter().filter(|waiting| !waiting.from_template);
    let namespaces: BTreeSet<String> = named.map(|waiting| waiting.claim.namespace.clone()).collect();
    for namespace in namespaces {
        let path = format!("/api/v1/namespaces/{namespace}/pods");
        let listed = Listed { what: "Pods", path: &path, fields: Some("status.phase=Pending") };
        let pods: Vec<PendingPod> = list(client, listed, Some).await?;
        status.name_pods(&namespace, &pods);
    }
    Ok(())
}

/// What the scheduler said last of a pod of each claim.
async fn find_reasons(client: &Client, status: &mut ClusterStatus) -> Result<(), ListError> {
    let more = status.waiting.len().saturating_sub(MOST);
    if more > 0 {
        status
            .notes
            .push(format!("what the scheduler says is told of the {MOST} oldest claims, not of {more} more"));
    }
    for waiting in status.waiting.iter_mut().take(MOST) {
        let Some(pod) = waiting.pods.first() else { continue };
        let path = format!("/api/v1/namespaces/{}/events", waiting.claim.namespace);
        let fields = format!("involvedObject.kind=Pod,involvedObject.name={pod},reason=FailedScheduling");
        let listed = Listed { what: "Events", path: &path, fields: Some(&fields) };
        let events: Vec<PodEvent> = list(client, listed, Some).await?;
        waiting.scheduler = SchedulerEvent::last(pod, events);
    }
    Ok(())
}
