//! `docs/troubleshooting.md`, made from the errors themselves: what stands on
//! the page is what a value of each error prints. Only tests have this module.

mod claims;
mod cluster;
mod node;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use kerf_dra_driver::message::Message;

/// What the examples are about. Headings leave it out.
const EXAMPLES: &[&str] = &[
    DEVICE,
    "gpu-0000-65-00-0",
    GPU,
    UID,
    "team-a/train",
    "node-1/gpu",
    "node-2/gpu",
    "NVIDIA L4",
    "`slice`",
    "/var/lib/kubelet/plugins/gpu.nvidia.com",
    "/var/lib/kubelet",
    "/var/run/cdi",
    "/var/lib/kerf",
    "580.95.05",
];
const DEVICE: &str = "gpu-0000-65-00-0-mig-1g-10gb-4";
const GPU: &str = "0000:65:00.0";
const UID: &str = "6c6a2883-c84a-48b0-b48f-c045d6ab4684";

const TITLE: &str = "\
# Messages, and what to do

The messages that kerf writes, sorted by their beginnings: search this page for some words of yours. Values are
examples, and `…` in headings. A message may stand in another one, after a colon or in brackets: search for that part too.
Where the driver refused, its own answer follows in brackets: `(nvmlDeviceSetMigMode answered IN_USE)`.

`kerf doctor` has [a page of its own](doctor.md).

<!-- Made from the errors of the code; a test in kerf/src/troubleshooting.rs compares them, and writes the page when
KERF_WRITE_DOCS=1 is set. -->
";

const SCHEDULER: &str = "
## FailedScheduling: the scheduler's own messages

`0/3 nodes are available: 3 cannot allocate all claims`: no node has free devices for all requests of the pod's claims. It is
the same sentence for all of these:

| it is so when | seen by |
| --- | --- |
| all devices that fit are held, or what is held on their GPU leaves too little | `kerf status --cluster`, or `kerf status` in the kerf pod of a node |
| devices that fit have a taint, which says why kerf does not give them out | the same; [the taints](#taints) and what ends them |
| no GPU of the cluster has the profile, or a selector matches nothing | `kubectl get resourceslices -o jsonpath='{..profile.string}'` for the profiles there are; [what a selector can ask](claims.md) |
| the gate `DRAPartitionableDevices` is off in the scheduler | the scheduler's `/metrics`; [the gates](operating.md#feature-gates) |
| kerf publishes nothing on the node | readiness, below |

`device class … does not exist`: the class is not in the cluster: misspelt, of a profile of no known model, or the chart made no classes.
`kubectl get deviceclasses` names all; `mig.nvidia.com` with a selector on `profile` serves any profile.

`Insufficient nvidia.com/…`: no class has that extended resource name, or the API server's gate `DRAExtendedResource` is off.

`waiting for resource claim to be created`, `resourceclaim … not found`, `FailedResourceClaimCreation … resourceclaimtemplate … not found`: the claim or the template of the pod is not there;
that is a matter of the cluster's controller manager and of the pod's manifest.
";

/// The beginnings of a message that may be its heading, shortest first, without
/// its example's values.
fn beginnings(text: &str) -> Vec<String> {
    let mut text = text.to_owned();
    for example in EXAMPLES {
        text = text.replace(&format!("`{example}`"), "…").replace(example, "…");
    }
    let mut ends: Vec<usize> =
        ["; ", " (", ": "].iter().flat_map(|stop| text.match_indices(stop).map(|(at, _)| at)).collect();
    ends.retain(|at| *at > 24);
    ends.push(text.len());
    ends.sort_unstable();
    ends.into_iter().map(|end| text[..end].to_owned()).collect()
}

fn section(page: &mut String, title: &str, about: &str, messages: &[Message]) {
    let _ = write!(page, "\n## {title}\n\n{about}\n");
    let all: Vec<Vec<String>> = messages.iter().map(|message| beginnings(&message.text)).collect();
    let mut sorted = BTreeMap::new();
    for (message, own) in messages.iter().zip(&all) {
        let is_shared = |heading: &String| all.iter().filter(|other| other.contains(heading)).count() > 1;
        let heading = own.iter().find(|heading| !is_shared(heading)).or(own.last()).expect("a heading");
        let known = sorted.insert((heading.to_lowercase(), heading), message);
        assert!(known.is_none(), "{known:?} is on the page twice");
    }
    for ((_, heading), Message { text, why, remedy }) in sorted {
        let _ = write!(page, "\n### {heading}\n");
        if text != heading {
            let _ = write!(page, "\n> {text}\n");
        }
        let _ = write!(page, "\n- Why: {why}\n- What to do: {remedy}\n");
    }
}

fn page() -> String {
    let mut page = String::from(TITLE);
    section(
        &mut page,
        "FailedPrepareDynamicResources: a pod that does not start",
        "The kubelet writes the event on the pod, with kerf's sentence after `NodePrepareResources failed for ResourceClaim …:`; \
         it asks again by itself. `kerf status` on the node lists the same claims.",
        &claims::prepare(),
    );
    section(
        &mut page,
        "A container that does not start: the CDI hook",
        "The container runtime starts `kerf cdi-hook` for each container with a GPU. Where that fails the pod's event has its sentence \
         after `error running createContainer hook … stderr: kerf:`. What only lacks the loader's cache starts, with a note in the \
         runtime's log.",
        &claims::hook(),
    );
    page.push_str(SCHEDULER);
    section(
        &mut page,
        "Taints",
        "A device with a taint is given to no new claim; claims that hold it keep it. `kerf status` counts the tainted devices of each \
         GPU (`3 devices are not given out: gpu.nvidia.com/foreign=gpu-instance`); the value says more. With another driver \
         name the keys begin with that.",
        &node::taints(),
    );
    section(
        &mut page,
        "The health of devices",
        "In the status of pods (`allocatedResourcesStatus`) and, with how many devices it is so of, in `kerf status` beside the GPU. \
         [Where to find it](operating.md#the-health-of-a-pods-devices).",
        &node::health(),
    );
    section(
        &mut page,
        "A pod that does not end",
        "What a claim has is given back when its pod ends. Where that fails the pod stays `Terminating`, and the sentence stands in the \
         log of kerf, in `kerf status` and in the kubelet's log (`NodeUnprepareResources failed …`). It is tried again by itself. \
         The messages of the hardware, the journal and the CDI spec are those below and above.",
        &claims::undo(),
    );
    section(
        &mut page,
        "What the GPU or its driver answers",
        "These stand inside other messages, in `kerf status` beside the GPU, and in the log.",
        &[node::hardware(), node::unreadable(), kerf_gpu::messages::messages()].concat(),
    );
    section(
        &mut page,
        "Not ready: `/readyz`, `kerf status`, the log",
        "What is missing until a node is ready, one reason a line. An event on the Node tells of others who hand out its GPUs \
         (`GPUsHandedOutByOthers`).",
        &[node::readiness(), node::observing(), kerf_controller::messages::messages()].concat(),
    );
    section(
        &mut page,
        "`kerf node` ends, or cannot serve",
        "In the log of kerf's pod (`kubectl logs`, `--previous` where it restarts).",
        &node::starting(),
    );
    section(
        &mut page,
        "`kerf status --cluster`",
        "On the terminal of whoever runs it. Why a claim waits stands in the picture itself.",
        &cluster::reading(),
    );
    page
}

#[test]
fn the_page_says_what_the_errors_say() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/troubleshooting.md");
    if std::env::var_os("KERF_WRITE_DOCS").is_some() {
        std::fs::write(&path, page()).expect("the page");
    }
    assert_eq!(std::fs::read_to_string(&path).expect("the page"), page());
}

#[test]
fn the_page_says_of_every_message_why_and_what_to_do() {
    let page = page();
    let parts = page.split("\n### ").skip(1);
    for part in parts {
        assert!(part.contains("\n- Why: ") && part.contains("\n- What to do: "), "{part}");
    }
}
