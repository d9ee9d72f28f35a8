//! Messages about a node: readiness, status and log.

use std::path::PathBuf;

use kerf_dra_driver::claim::ClaimName;
use kerf_dra_driver::hardware::{HardwareError, HardwareErrorKind};
use kerf_dra_driver::health::Fault;
use kerf_dra_driver::message::Message;
use kerf_dra_driver::messages;
use kerf_dra_driver::names::{DriverName, PciAddress};
use kerf_dra_driver::taint::Condition;
use kerf_kubelet_plugin::{
    ObserveError, OwnerError, PluginError, RecordError, Registration, Rival, RivalKind, ServeError, chain,
};

use crate::node::publishing::Standing;
use crate::node::readiness::{unpublished, unregistered};

use super::GPU;
use super::claims::{denied, full, not_found, read_only};

/// A message that is no value of a type: its source has its words.
pub(super) fn written(source: &str, words: &str, text: &str, [why, remedy]: [&'static str; 2]) -> Message {
    assert!(source.contains(words) && text.contains(words), "nobody says `{words}`");
    Message { text: text.to_owned(), why, remedy }
}

pub(super) fn hardware() -> Vec<Message> {
    use HardwareErrorKind as Kind;
    let said = |kind: &Kind| {
        let operation = match kind {
            Kind::NoDriver => "list the GPUs".to_owned(),
            Kind::NotFound => format!("destroy GPU instance 3 of {GPU}"),
            Kind::NotSupported | Kind::NeedsReset | Kind::NoPermission => format!("enable MIG mode of {GPU}"),
            _ => format!("create a GPU instance of profile 19 on 1 memory slices from 4 of {GPU}"),
        };
        HardwareError::new(operation, kind.clone()).to_string()
    };
    messages!(said, Kind, [],
        Kind::NoDriver => Kind::NoDriver,
            "The driver's library is missing, of another version than the loaded kernel module, or cannot start.",
            "Run `kerf doctor` in the node's kerf pod; kerf tries again by itself.";
        Kind::NotFound => Kind::NotFound,
            "Somebody destroyed the instance by hand, or the driver was loaded anew.",
            "Nothing if the next attempt succeeds; keep other tools off the GPU.";
        Kind::InUse => Kind::InUse,
            "A process has the GPU or the instance open.",
            "Stop the processes that the message or `nvidia-smi` names.";
        Kind::InsufficientResources => Kind::InsufficientResources,
            "Somebody made a GPU instance in this place meanwhile. NVML does not tell that from a full GPU.",
            "Compare `nvidia-smi mig -lgi` with `kerf status`, and destroy what nobody needs.";
        Kind::NotSupported => Kind::NotSupported,
            "The GPU or its driver cannot do it: no MIG, a vGPU guest, or a driver that is too old.",
            "Set `migMode: keep` for such nodes, or upgrade the driver.";
        Kind::NeedsReset => Kind::NeedsReset,
            "The GPU took the new MIG mode for after its next reset, as Ampere does.",
            "Stop what uses the GPU and reset it (`nvidia-smi --gpu-reset -i N`), or reboot the node.";
        Kind::Lost => Kind::Lost,
            "The GPU has fallen off the bus or must be reset.",
            "Look for Xid lines in the kernel log; reset the GPU or reboot the node.";
        Kind::NoPermission => Kind::NoPermission,
            "A device cgroup or missing privileges keep kerf from the GPU.",
            "Run kerf as root in a privileged container, as the chart does.";
        Kind::Timeout => Kind::Timeout,
            "The driver hangs, or works for longer than is waited. What was asked may still happen.",
            "Wait for the next attempt; if it stays, look for Xid lines and reset the GPU.";
        Kind::System => Kind::System,
            "A file or folder of the system could not be used; brackets after it say which.",
            "Act on what stands in the brackets.";
        Kind::Other(_) => Kind::Other(999),
            "NVML answered by a number that kerf has no rule for.",
            "Look up the number in nvml.h, and into the kernel log for NVRM and Xid lines.";
    )
}

/// The taints of devices, beside their GPU in `kerf status`.
pub(super) fn taints() -> Vec<Message> {
    let said = |condition: &Condition| format!("{}/{}", DriverName::DEFAULT, condition.as_str());
    messages!(said, Condition, [],
        Condition::Foreign => Condition::Foreign,
            "A GPU instance that kerf did not make is in the way of this device (`gpu-instance`).",
            "Destroy it when nothing uses it (`nvidia-smi mig -dci`, `-dgi`); kerf never does.";
        Condition::Withheld => Condition::Withheld,
            "The device is about to be withdrawn: it is not offered any more by migProfiles or migMode (`not-offered`), or costs something else now (`cost-changed`). Or a claim holds something of its GPU that cannot be published (`unknown-device-held`), or its place (`place-held`).",
            "Nothing: it is withdrawn, or given out again, 30 s after no claim holds it any more.";
        Condition::Quarantined => Condition::Quarantined,
            "A journal entry that concerns the GPU (`gpu`) or the device (`device`) cannot be read or undone.",
            "Delete the pods of the claim that `kerf status` names. If no pod uses the GPU, remove the file from `state/quarantine/` in the plugin's folder.";
        Condition::ModeStuck => Condition::ModeStuck,
            "The GPU twice did not take the MIG mode that a claim needed (`enabled`, `disabled`).",
            "Stop the processes that the log and `kerf status` name; the taint ends when the mode can change.";
        Condition::Lost => Condition::Lost,
            "The GPU (`gpu`) or a partition that somebody else made (`partition`) does not answer, or is not there any more.",
            "Look for Xid lines in the kernel log; reset the GPU or reboot the node. The taint ends when it answers.";
        Condition::Rival => Condition::Rival,
            "NVIDIA's device plugin (`device-plugin`) or another DRA driver (`driver`) hands out this node's GPUs too, or pods still have what a device plugin gave them.",
            "Keep it off kerf's nodes and end those pods. An event on the Node and readiness tell who it is.";
    )
}

/// The health of devices, in the status of pods and beside their GPU in `kerf
/// status`.
pub(super) fn health() -> Vec<Message> {
    let reason = || "nvmlDeviceGetUUID answered GPU_IS_LOST".to_owned();
    let gpu: PciAddress = GPU.parse().expect("an address");
    messages!(ToString::to_string, Fault, [],
        Fault::Lost { .. } => Fault::Lost { gpu, reason: reason() },
            "The GPU has fallen off the bus or must be reset, or the driver lists it no more.",
            "Delete the pods that use it: what they had on it is lost. Look for Xid lines in the kernel log; reset the GPU or reboot the node. It is healthy again when it answers.";
        Fault::Unread { .. } => Fault::Unread { gpu, reason: "GPU 3 has not answered for 10 s".to_owned() },
            "The GPU hangs, or answers with an error that does not say whether it is lost. Its pods may work on.",
            "Look for Xid lines in the kernel log; reset the GPU or reboot the node if it stays so.";
        Fault::Unanswered { .. } => Fault::Unanswered { reason: "the driver has not answered for 30 s".to_owned() },
            "The driver hangs, is being upgraded, or is not there. Pods may work on.",
            "Run `kerf doctor` in the node's kerf pod; kerf tries again by itself.";
        Fault::Destroyed { .. } => Fault::Destroyed {
                claim: ClaimName { namespace: "team-a".to_owned(), name: "train".to_owned() },
            },
            "Somebody destroyed the partition by hand (`nvidia-smi mig -dci`, `-dgi`), or another tool did.",
            "Delete the pods of the claim; the next pod gets it anew. Keep other tools off the node's GPUs.";
        Fault::Gone => Fault::Gone,
            "Whoever made the partition outside of kerf has destroyed it.",
            "Delete the pods that use it. It is withdrawn when no claim holds it any more.";
    )
}

/// GPUs that cannot be read, beside them in `kerf status`.
pub(super) fn unreadable() -> Vec<Message> {
    let source = include_str!("../../../gpu/src/describe.rs");
    vec![
        written(
            source,
            "has not answered for",
            "GPU 3 has not answered for 10 s",
            [
                "The driver hangs when it is asked for this GPU; the others go on.",
                "Look for Xid lines in the kernel log; reset the GPU or reboot the node.",
            ],
        ),
        written(
            source,
            "could not be read: ",
            "the GPU at 0000:65:00.0 could not be read: nvmlDeviceGetUUID answered GPU_IS_LOST",
            [
                "The GPU is lost, hangs, or must be reset; its devices are not given out.",
                "Look for Xid lines in the kernel log; reset the GPU or reboot the node.",
            ],
        ),
    ]
}

pub(super) fn readiness() -> Vec<Message> {
    let said = |registration: &Registration| unregistered(registration).unwrap_or_default();
    let mut all = messages!(said, Registration, [Registration::Registered],
        Registration::Waiting => Registration::Waiting,
            "The kubelet has not found the plugin's socket, or has just been restarted.",
            "If it stays, the kubelet's --root-dir is another folder: name it with --kubelet-root (chart value kubeletRoot).";
        Registration::Refused(_) => Registration::Refused("plugin gpu.nvidia.com is already registered".to_owned()),
            "After the colon stands the kubelet's own reason.",
            "Act on it; look for another driver of the same name. kerf registers again by itself.";
        Registration::Unserved(_) => Registration::Unserved("the socket /var/lib/kubelet/plugins/gpu.nvidia.com/dra.sock cannot be made: No space left on device (os error 28)".to_owned()),
            "After the colon stands which socket or folder is in the way.",
            "Act on it; kerf tries again by itself.";
    );
    let said = |standing: &Standing| unpublished(*standing, None).unwrap_or_default();
    all.extend(messages!(said, Standing, [Standing::Leading, Standing::Overtaken],
        Standing::Waiting => Standing::Waiting,
            "In a rolling update the former instance publishes until the new one can. More than that needs time only where the former hangs.",
            "Wait some seconds; else end the former pod of the node.";
    ));
    let socket = || PathBuf::from("/var/lib/kubelet/device-plugins/nvidia-gpu.sock");
    let said = |kind: &RivalKind| Rival { kind: *kind, socket: socket() }.to_string();
    all.extend(messages!(said, RivalKind, [],
        RivalKind::SameName => RivalKind::SameName,
            "The kubelet knows one driver of a name; both would prepare each other's claims.",
            "Uninstall the other driver (usually NVIDIA's), or give kerf another --driver-name.";
        RivalKind::OtherDriver => RivalKind::OtherDriver,
            "Two drivers publish the same GPUs: two claims would get one GPU.",
            "Uninstall it, or keep it off kerf's nodes.";
        RivalKind::DevicePlugin => RivalKind::DevicePlugin,
            "A device plugin does not know of claims: two pods would get one GPU.",
            "Keep it off kerf's nodes (node selector; with the GPU operator `devicePlugin.enabled=false`).";
        RivalKind::PluginsPods => RivalKind::PluginsPods,
            "The device plugin is gone, and the pods that it gave GPUs to still run.",
            "Delete those pods: they have `nvidia.com/gpu` in their limits.";
    ));
    let said = |error: &OwnerError| chain(error);
    all.extend(messages!(said, OwnerError, [
        OwnerError::Observe(_), OwnerError::Claims(_), OwnerError::Record(_), OwnerError::Ended(_), OwnerError::Slice(_)
    ],
        OwnerError::Silent => OwnerError::Silent,
            "The driver hangs as a whole; no new claim gets a GPU of this node meanwhile, and prepared ones go on.",
            "Look for Xid and NVRM lines in the kernel log; a hanging driver often needs a reboot.";
    ));
    let gpu = || GPU.parse().expect("an address");
    let said = |error: &RecordError| chain(error);
    all.extend(messages!(said, RecordError, [RecordError::Panicked, RecordError::Remove { .. }],
        RecordError::Write { .. } => RecordError::Write { gpu: gpu(), source: full() },
            "What is published is stored before, in `state/gpus/` of the plugin's folder; until then nothing new is published.",
            "Make room, or see why the disk is read-only; kerf tries again by itself.";
        RecordError::Folder { .. } => RecordError::Folder {
            folder: PathBuf::from("/var/lib/kubelet/plugins/gpu.nvidia.com/state/gpus"),
            source: denied(),
        },
            "kerf does not publish before it has read what was published before.",
            "Make the folder readable and writable for root; kerf tries again by itself.";
    ));
    all.push(written(
        include_str!("../node/api_claims.rs"),
        "which devices claims hold is not known",
        "which devices claims hold is not known: cannot list ResourceClaims: no answer from the API server in 30 s",
        [
            "Before a device is withdrawn, and where no record is left, all claims are asked who holds what.",
            "Act on what stands after the colon; kerf asks again by itself.",
        ],
    ));
    all
}

pub(super) fn observing() -> Vec<Message> {
    let said = |error: &ObserveError| chain(error);
    messages!(said, ObserveError, [ObserveError::Hardware(_), ObserveError::Store(_), ObserveError::Panicked],
        ObserveError::Lock(_) => ObserveError::Lock(read_only()),
            "The plugin's folder cannot be written.",
            "See whether the disk is full or read-only, and whether the kubelet's plugins folder is mounted into kerf's pod.";
        ObserveError::Busy => ObserveError::Busy,
            "A GPU is not read while a claim's work changes it.",
            "Nothing; if it stays, the driver hangs: look for Xid lines in the kernel log.";
    )
}

pub(super) fn starting() -> Vec<Message> {
    let said = |error: &PluginError| chain(error);
    let mut all = messages!(said, PluginError, [PluginError::Store(_), PluginError::Cdi(_)],
        PluginError::BootId { .. } => PluginError::BootId {
            path: PathBuf::from("/proc/sys/kernel/random/boot_id"),
            source: not_found(),
        },
            "Journal entries belong to one boot; without its id nothing can be told of them.",
            "Check --proc-root.";
        PluginError::Locks(_) => PluginError::Locks(full()),
            "The plugin's folder cannot be written.",
            "Make room, or mount the kubelet's plugins folder into kerf's pod, not read-only.";
    );
    let path = || PathBuf::from("/var/lib/kubelet/plugins/gpu.nvidia.com/dra.sock");
    let folder = || PathBuf::from("/var/lib/kubelet/plugins_registry");
    let said = |error: &ServeError| chain(error);
    all.extend(messages!(said, ServeError, [],
        ServeError::Bind { .. } => ServeError::Bind { path: path(), source: full() },
            "The kubelet reaches kerf by this socket.",
            "Make room, or mount the kubelet's folder into kerf's pod, not read-only; kerf tries again by itself.";
        ServeError::Watch { .. } => ServeError::Watch { path: folder(), source: not_found() },
            "The kubelet has not made the folder, it is another one, or the node has too few inotify instances.",
            "Name the kubelet's --root-dir with --kubelet-root (chart value kubeletRoot); raise `fs.inotify.max_user_instances`.";
        ServeError::Ended { .. } => ServeError::Ended { path: path() },
            "The socket was closed under kerf.",
            "Nothing: it is made again. If it comes often, report it with the log.";
        ServeError::Rivals { .. } => ServeError::Rivals {
            path: folder(),
            source: denied(),
        },
            "The sockets of other drivers and device plugins cannot be looked at; what was known of them stays.",
            "Mount the kubelet's plugins_registry, device-plugins and pod-resources folders into kerf's pod, as the chart does.";
        ServeError::Instances { .. } => ServeError::Instances {
            path: PathBuf::from("/var/lib/kubelet/plugins/gpu.nvidia.com/state/instances"),
            source: full(),
        },
            "Which of a node's instances publishes is told by locked files in this folder.",
            "Make room, or see why the disk is read-only; kerf tries again by itself.";
    ));
    let node = include_str!("../node.rs");
    all.push(written(
        node,
        "the API server's address and credentials were not found (run in a pod, or set KUBECONFIG)",
        "the API server's address and credentials were not found (run in a pod, or set KUBECONFIG)",
        [
            "`kerf node` runs outside of a pod, or its service account's token is not mounted.",
            "Leave `automountServiceAccountToken` on, as the chart does.",
        ],
    ));
    all.push(written(
        node,
        " cannot be served (see --http-address)",
        "0.0.0.0:9402 cannot be served (see --http-address): Address already in use (os error 98)",
        ["Something else on the node has the port.", "Choose another --http-address."],
    ));
    all
}
