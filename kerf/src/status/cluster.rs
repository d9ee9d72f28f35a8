//! `kerf status --cluster`: reads slices and claims from the API server, and
//! what the scheduler said of pods that wait.

use std::collections::BTreeSet;
use std::io::Write;

use anyhow::{Context, Result, anyhow};
use k8s_openapi::jiff::Timestamp;
use kerf_controller::claims::CLAIMS;
use kerf_controller::{ListError, Listed, list, sentence};
use kerf_dra_driver::cluster::{
    ClusterStatus, PendingPod, PodEvent, SchedulerEvent, SeenClaim, SeenSlice, SliceKeeper, SliceObject,
};
use kerf_dra_driver::names::DriverName;
use kube::Client;

use crate::arguments::StatusArguments;
use crate::picture;

/// Of how many claims that wait the scheduler's reason is asked, and in how many
/// namespaces for pods, those of the oldest claims first: each costs a request.
const MOST: usize = 50;

/// What could not be listed, and in which namespaces; none where all are meant.
struct Unread {
    error: ListError,
    namespaces: BTreeSet<String>,
}

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
    let mut status = look(&client, driver).await.map_err(|error| explained(&error, &BTreeSet::new()))?;
    // Without these the picture is whole but for the reasons.
    if let Err(Unread { error, namespaces }) = find_pods(&client, &mut status).await {
        status.notes.push(format!("which pods wait is not known: {}", explained(&error, &namespaces)));
    }
    if let Err(Unread { error, namespaces }) = find_reasons(&client, &mut status).await {
        status
            .notes
            .push(format!("what the scheduler says is not known: {}", explained(&error, &namespaces)));
    }
    Ok(status)
}

/// What slices and claims tell.
pub(crate) async fn look(client: &Client, driver: &DriverName) -> Result<ClusterStatus, ListError> {
    let fields = format!("spec.driver={driver}");
    let mut keeper = SliceKeeper::default();
    let slices: Vec<SeenSlice> =
        list(client, Listed::slices(&fields), |slice: SliceObject| Some(keeper.keep(slice))).await?;
    let ours = |claim: SeenClaim| claim.concerns(driver).then_some(claim);
    let claims: Vec<SeenClaim> = list(client, CLAIMS, ours).await?;
    Ok(ClusterStatus::of(driver, env!("CARGO_PKG_VERSION"), &slices, &claims, Timestamp::now()))
}

/// What failed, why, and what to do, in some namespaces or, without any, in all.
pub(crate) fn explained(error: &ListError, namespaces: &BTreeSet<String>) -> anyhow::Error {
    let remedy = match error {
        ListError::Refused { what, source } => match &**source {
            kube::Error::Api(status) if status.code == 403 => {
                let names: Vec<&str> = namespaces.iter().map(String::as_str).collect();
                let place = match names.as_slice() {
                    [] => "all namespaces".to_owned(),
                    [one] => format!("the namespace {one}"),
                    names => format!("the namespaces {}", names.join(", ")),
                };
                format!(
                    "give this user the verb `list` on {} in {place}, or take a kubeconfig of one who has it",
                    what.to_lowercase()
                )
            }
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

/// The pods of claims that none owns: those that name them.
async fn find_pods(client: &Client, status: &mut ClusterStatus) -> Result<(), Unread> {
    let mut namespaces: Vec<String> = Vec::new();
    for waiting in status.waiting.iter().filter(|waiting| !waiting.owned_by_pod) {
        if !namespaces.contains(&waiting.claim.namespace) {
            namespaces.push(waiting.claim.namespace.clone());
        }
    }
    let more = namespaces.len().saturating_sub(MOST);
    if more > 0 {
        status.notes.push(format!(
            "which pods name claims was asked in {MOST} namespaces, those of the oldest claims, not in {more} more"
        ));
    }
    let mut forbidden = Forbidden::default();
    for namespace in namespaces.into_iter().take(MOST) {
        let path = format!("/api/v1/namespaces/{namespace}/pods");
        let listed = Listed { what: "Pods", path: &path, fields: Some("status.phase=Pending") };
        let pods = list(client, listed, |pod: PendingPod| pod.names_some().then_some(pod)).await;
        if let Some(pods) = forbidden.unless(&namespace, pods)? {
            status.name_pods(&namespace, &pods);
        }
    }
    forbidden.end()
}

/// What the scheduler said last of a pod of each claim.
async fn find_reasons(client: &Client, status: &mut ClusterStatus) -> Result<(), Unread> {
    let pod_of = |pods: &Option<Vec<String>>| pods.as_ref()?.first().cloned();
    let more = status.waiting.iter().filter_map(|waiting| pod_of(&waiting.pods)).skip(MOST).count();
    if more > 0 {
        status
            .notes
            .push(format!("what the scheduler says is told of the {MOST} oldest claims, not of {more} more"));
    }
    let mut forbidden = Forbidden::default();
    let with_pods =
        status.waiting.iter_mut().filter_map(|waiting| Some((pod_of(&waiting.pods)?, waiting))).take(MOST);
    for (pod, waiting) in with_pods {
        let namespace = &waiting.claim.namespace;
        if forbidden.namespaces.contains(namespace) {
            continue;
        }
        let path = format!("/api/v1/namespaces/{namespace}/events");
        let fields = format!("involvedObject.kind=Pod,involvedObject.name={pod},reason=FailedScheduling");
        let listed = Listed { what: "Events", path: &path, fields: Some(&fields) };
        let events = list(client, listed, Some::<PodEvent>).await;
        if let Some(events) = forbidden.unless(namespace, events)? {
            waiting.scheduler = SchedulerEvent::last(&pod, events);
        }
    }
    forbidden.end()
}

/// Namespaces in which something may not be listed, while it may in others.
#[derive(Default)]
struct Forbidden {
    namespaces: BTreeSet<String>,
    first: Option<ListError>,
}

impl Forbidden {
    /// What was listed; none where that is forbidden. Another failure ends all:
    /// it would come again, and take its time.
    fn unless<T>(&mut self, namespace: &str, listed: Result<T, ListError>) -> Result<Option<T>, Unread> {
        match listed {
            Ok(listed) => Ok(Some(listed)),
            Err(error) => {
                let is_forbidden = matches!(&error, ListError::Refused { source, .. }
                    if matches!(&**source, kube::Error::Api(status) if status.code == 403));
                if !is_forbidden {
                    return Err(Unread { error, namespaces: BTreeSet::from([namespace.to_owned()]) });
                }
                self.namespaces.insert(namespace.to_owned());
                self.first.get_or_insert(error);
                Ok(None)
            }
        }
    }

    fn end(self) -> Result<(), Unread> {
        let Self { namespaces, first } = self;
        first.map_or(Ok(()), |error| Err(Unread { error, namespaces }))
    }
}

#[cfg(test)]
mod tests;
