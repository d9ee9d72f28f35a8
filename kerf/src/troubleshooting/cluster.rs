//! Messages of `kerf status --cluster`.

use std::collections::BTreeSet;
use std::time::Duration;

use kerf_controller::{ListError, sentence};
use kerf_dra_driver::message::Message;
use kerf_dra_driver::messages;
use kube::core::Status;

use super::node::written;
use crate::status::cluster::explained;

fn refused(code: u16, message: &str) -> ListError {
    let status = Status { code, ..Status::failure(message, "") };
    ListError::Refused { what: "ResourceSlices", source: Box::new(kube::Error::Api(Box::new(status))) }
}

pub(super) fn reading() -> Vec<Message> {
    let said = |error: &ListError| explained(error, &BTreeSet::new()).to_string();
    let what = "ResourceSlices";
    let mut all = messages!(said, ListError, [],
        ListError::Refused { .. } => refused(403, "resourceslices.resource.k8s.io is forbidden: User \"jane\" cannot list resource \"resourceslices\""),
            "ResourceSlices and the ResourceClaims of all namespaces are read; Pods and Events only in the namespaces of claims that wait, and without them the picture says that it lacks them.",
            "Bind a ClusterRole with `list` on the first two to the user ([which](operating.md#the-whole-cluster)).";
        ListError::TooSlow { .. } => ListError::TooSlow { what, limit: Duration::from_secs(30) },
            "The API server, or the network to it, is overloaded or away.",
            "Try again; see whether `kubectl get nodes` answers.";
        ListError::Expired { .. } => ListError::Expired { what },
            "The cluster has so many objects that the API server forgets the revision before the list ends.",
            "Try again.";
    );
    let mut refused = |code, message: &str, why, remedy| {
        all.push(Message { text: said(&refused(code, message)), why, remedy });
    };
    refused(
        401,
        "Unauthorized",
        "The kubeconfig's credentials have expired, or are of another cluster.",
        "Log in again, as for kubectl; `kubectl auth whoami` tells who you are.",
    );
    refused(
        404,
        "the server could not find the requested resource",
        "The API server is older than 1.34, or `resource.k8s.io/v1` is switched off in it.",
        "Upgrade the cluster; kerf needs 1.36 for partitions beside whole GPUs.",
    );
    let broken = kube::Error::Service("tcp connect error: Connection refused (os error 111)".into());
    let broken = ListError::Refused { what, source: Box::new(broken) };
    assert!(sentence(&broken).contains("os error 111"));
    all.push(Message {
        text: said(&broken),
        why: "Nothing answers at the address of the kubeconfig.",
        remedy: "Check the kubeconfig's `server` and the network to it (VPN, proxy).",
    });
    let source = include_str!("../status/cluster.rs");
    all.push(written(
        source,
        "no cluster to ask: ",
        "no cluster to ask: neither a kubeconfig that can be used nor a pod's service account was found; set \
         KUBECONFIG to one, as for kubectl: …",
        [
            "There is no `KUBECONFIG`, no `~/.kube/config` and no service account, or the file cannot be read.",
            "Name a kubeconfig: `KUBECONFIG=… kerf status --cluster`.",
        ],
    ));
    for (words, text) in [
        ("which pods wait is not known: ", "which pods wait is not known: cannot list Pods: …"),
        (
            "what the scheduler says is not known: ",
            "what the scheduler says is not known: cannot list Events: …",
        ),
    ] {
        all.push(written(
            source,
            words,
            text,
            [
                "The user may list slices and claims, but not this; the rest of the picture is whole.",
                "Give the user the verb `list` on what is named, in the namespaces that are named; `kubectl describe pod` tells the scheduler's reason too.",
            ],
        ));
    }
    all
}
