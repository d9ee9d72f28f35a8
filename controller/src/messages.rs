//! What users read of this crate, for `docs/troubleshooting.md`.

use std::collections::BTreeSet;
use std::time::Duration;

use kerf_dra_driver::message::Message;
use kerf_dra_driver::messages;
use kube::core::Status;
use serde::de::Error as _;

use crate::claims::CLAIMS;
use crate::dropped::Feature;
use crate::pages::ListError;
use crate::publisher::SyncError;
use crate::requests::{RequestError, sentence};
use crate::status::{Phase, PublishStatus};

/// Why nothing is published, as readiness says it.
pub fn messages() -> Vec<Message> {
    [phases(), requests(), syncs(), lists()].concat()
}

fn forbidden(message: &str) -> kube::Error {
    kube::Error::Api(Box::new(Status::failure(message, "Forbidden")))
}

fn phases() -> Vec<Message> {
    let said = |phase: &Phase| {
        let dropped = BTreeSet::from([Feature::PartitionableDevices]);
        let status = PublishStatus { phase: *phase, dropped, ..PublishStatus::default() };
        status.missing().unwrap_or_default()
    };
    let mut all = messages!(said, Phase, [Phase::Stored],
        Phase::Undecided => Phase::Undecided,
            "The GPUs have not been read yet, or who holds them is not known.",
            "Wait some seconds; else act on the reason beside it, or run `kerf doctor` in the pod.";
        Phase::Standby => Phase::Standby,
            "Nothing is published while nobody would prepare claims.",
            "Wait some seconds; else act on the reason that says why the kubelet cannot be served.";
        Phase::Writing => Phase::Writing,
            "The API server does not have all slices yet. After a colon stands what failed at the last attempt.",
            "Nothing while a node starts; else act on what stands after the colon.";
        Phase::Contended => Phase::Contended,
            "Somebody else writes slices of this driver and node, and kerf undoes it at a bounded rate.",
            "Look for a second installation of kerf, or for a controller that edits ResourceSlices.";
        Phase::Withheld => Phase::Withheld,
            "A feature gate is off in the API server, so that what would be published is not what would be stored.",
            "Turn the gate on in the API server, the scheduler and the kubelet, then restart kerf's pods.";
    );
    let rival = PublishStatus { rivals: vec!["node-1".to_owned()], ..PublishStatus::default() };
    all.extend(rival.missing().map(|text| Message {
        text,
        why: "Another driver writes slices under kerf's driver name and this node's name.",
        remedy: "Uninstall the other driver (usually NVIDIA's), or give kerf another --driver-name.",
    }));
    all
}

fn requests() -> Vec<Message> {
    let what = || "create a ResourceSlice".to_owned();
    let said = |error: &RequestError| sentence(error);
    messages!(said, RequestError, [RequestError::List(_)],
        RequestError::Refused { .. } => RequestError::Refused {
            what: what(),
            source: Box::new(forbidden("resourceslices.resource.k8s.io is forbidden: User \"system:serviceaccount:kerf:kerf\" cannot create resource \"resourceslices\"")),
        },
            "The API server refused; after the colon stands its own sentence.",
            "If it is `forbidden`, install the chart's ClusterRole and binding again (`helm upgrade`); kerf tries again by itself.";
        RequestError::TooSlow { .. } => RequestError::TooSlow { what: what(), limit: Duration::from_secs(10) },
            "The API server, or the network to it, is overloaded or away.",
            "Look at the API server and at network policies; kerf tries again by itself.";
        RequestError::NoUid { .. } => RequestError::NoUid { node: "node-1".to_owned() },
            "What answers is no API server, or the Node is just being made.",
            "See whether `kubectl get node NODE -o yaml` has a `uid`.";
    )
}

fn syncs() -> Vec<Message> {
    let said = |error: &SyncError| sentence(error);
    messages!(said, SyncError, [SyncError::Request(_)],
        SyncError::NeverSettles => SyncError::NeverSettles,
            "Somebody else changes this node's slices as fast as kerf writes them.",
            "Look for a second installation of kerf, or for a controller that edits ResourceSlices.";
        SyncError::Unreadable(_) => SyncError::Unreadable(serde_json::Error::custom("expected value at line 1")),
            "A defect of kerf.",
            "Report it with the log.";
    )
}

fn lists() -> Vec<Message> {
    let what = CLAIMS.what;
    let said = |error: &ListError| sentence(error);
    messages!(said, ListError, [],
        ListError::Refused { .. } => ListError::Refused { what, source: Box::new(forbidden("resourceclaims.resource.k8s.io is forbidden: User \"system:serviceaccount:kerf:kerf\" cannot list resource \"resourceclaims\"")) },
            "kerf has to know who holds what before it withdraws a device or begins without records.",
            "If it is `forbidden`, install the chart's ClusterRole and binding again (`helm upgrade`); kerf tries again by itself.";
        ListError::TooSlow { .. } => ListError::TooSlow { what, limit: Duration::from_secs(30) },
            "The API server, or the network to it, is overloaded or away.",
            "Look at the API server and at network policies; kerf tries again by itself.";
        ListError::Expired { .. } => ListError::Expired { what },
            "The cluster has so many claims that the API server forgets the revision before the list ends.",
            "kerf tries again by itself; if it stays, look at the API server's load.";
    )
}
