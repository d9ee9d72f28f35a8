//! Messages about a claim: what the kubelet writes on its pod.

use std::io;
use std::path::PathBuf;

use kerf_api::config::ConfigError;
use kerf_dra_driver::claim::{ClaimError, ClaimName};
use kerf_dra_driver::inventory::MigMode;
use kerf_dra_driver::message::Message;
use kerf_dra_driver::messages;
use kerf_dra_driver::names::{ClaimUid, DeviceName, NameError, PciAddress};
use kerf_dra_driver::plan::Refusal;
use kerf_kubelet_plugin::testing::store_error;
use kerf_kubelet_plugin::{
    CdiError, ClaimSourceError, HookProgramError, PrepareError, StepError, StoreError, UndoError, WorkError,
    chain,
};

use rustix::io::Errno;

use crate::cdi_hook::{Blame, settle};

use super::{DEVICE, GPU, UID};

pub(super) fn full() -> io::Error {
    io::Error::from_raw_os_error(28)
}

pub(super) fn read_only() -> io::Error {
    io::Error::from_raw_os_error(30)
}

pub(super) fn not_found() -> io::Error {
    io::Error::from_raw_os_error(2)
}

pub(super) fn denied() -> io::Error {
    io::Error::from_raw_os_error(13)
}

fn device() -> DeviceName {
    DeviceName::parse(DEVICE).expect("a device name")
}

fn gpu() -> PciAddress {
    GPU.parse().expect("an address")
}

fn uid() -> ClaimUid {
    UID.parse().expect("a UID")
}

pub(super) fn prepare() -> Vec<Message> {
    let said = |error: &PrepareError| chain(error);
    let own = messages!(said, PrepareError, [
        PrepareError::Claim(_), PrepareError::Refused(_), PrepareError::Hardware(_), PrepareError::Step(_),
        PrepareError::Store(_), PrepareError::Cdi(_), PrepareError::Hook(_), PrepareError::Work(_)
    ],
        PrepareError::Name(_) => "a/b".parse::<ClaimUid>().expect_err("no UID").into(),
            "The kubelet names a claim as none can be named.",
            "Nothing to do for users; look at the kubelet's version.";
        PrepareError::Source(_) => ClaimSourceError::new("the API server has not answered for 10 s").into(),
            "kerf reads the claim again before it prepares it, and the API server does not answer.",
            "Look at the API server and the network of this node's pods. If it is `forbidden`, install the chart's ClusterRole again (`helm upgrade`).";
        PrepareError::NoInventory => PrepareError::NoInventory,
            "kerf has just started, or the driver is missing or hangs.",
            "If it stays, run `kerf doctor` in the node's kerf pod.";
        PrepareError::Quarantined { .. } => PrepareError::Quarantined {
            gpu: gpu(),
            file: format!("{UID}_0000-65-00-0.json"),
        },
            "A file of the journal is damaged, or of a version too far away. Which devices its claim holds is not known, so none of the GPU is given out.",
            "Delete the pods of the claim in the file's name. If no pod uses the GPU, remove the file from `state/quarantine/` in the plugin's folder.";
        PrepareError::Undo(_) => UndoError::Store(journal()).into(),
            "An earlier attempt left something that must go before the claim can be prepared anew.",
            "Act on what stands after the colon.";
    );
    [own, claim(), config(), refusal(), step(), files(), work()].concat()
}

pub(super) fn undo() -> Vec<Message> {
    let said = |error: &UndoError| chain(error);
    messages!(said, UndoError, [
        UndoError::Step(_), UndoError::Store(_), UndoError::Cdi(_), UndoError::Work(_)
    ],
        UndoError::Name(_) => "a/b".parse::<ClaimUid>().expect_err("no UID").into(),
            "The kubelet names a claim as none can be named.",
            "Nothing to do for users; look at the kubelet's version.";
    )
}

fn claim() -> Vec<Message> {
    let said = |error: &ClaimError| chain(error);
    messages!(said, ClaimError, [ClaimError::Config(_)],
        ClaimError::NotFound => ClaimError::NotFound,
            "The claim was deleted while its pod was starting.",
            "Delete the pod; a Deployment or Job makes another, and a template another claim.";
        ClaimError::Replaced { .. } => ClaimError::Replaced { found: UID.to_owned() },
            "The claim was deleted and made anew under its name; the pod was placed for the former one.",
            "Delete the pod.";
        ClaimError::BeingDeleted => ClaimError::BeingDeleted,
            "Somebody deletes the claim while its pod is starting.",
            "Delete the pod.";
        ClaimError::NotAllocated => ClaimError::NotAllocated,
            "The claim lost its allocation, or its pod was bound to the node past the scheduler (`nodeName`).",
            "Delete the pod; leave `nodeName` out of it.";
        ClaimError::NotReserved => ClaimError::NotReserved,
            "Whoever allocated the claim did not reserve it for the pod.",
            "Delete the pod.";
        ClaimError::UnknownPool { .. } => ClaimError::UnknownPool {
            device: DEVICE.to_owned(),
            pool: "node-2/gpu".to_owned(),
            expected: "node-1/gpu".to_owned(),
        },
            "The pod runs on another node than its claim was allocated for, or the node was renamed.",
            "Delete the pod; leave `nodeName` out of it.";
        ClaimError::UnknownDevice(_) => ClaimError::UnknownDevice("gpu-0".to_owned()),
            "The claim was allocated from another driver's slices under the same driver name, or by hand.",
            "Delete pod and claim. If it was another driver, see that its slices are gone: `kubectl get resourceslices`.";
        ClaimError::Twice(_) => ClaimError::Twice(DEVICE.to_owned()),
            "The allocation was not made by the scheduler, or by one with a fault.",
            "Delete pod and claim; report it with the claim's YAML.";
        ClaimError::Name(_) => name("GPU 0"),
            "The allocation names a device as none can be named.",
            "Delete pod and claim; report it with the claim's YAML.";
        ClaimError::UnreadableConfig { .. } => ClaimError::UnreadableConfig {
            driver: "gpu.nvidia.com".parse().expect("a driver name"),
            reason: "recursion limit exceeded at line 1 column 128".to_owned(),
        },
            "The `parameters` of an opaque config are nested too deeply, or have a number out of all bounds.",
            "Correct them in the claim, its template or its class, and delete the pod and the claim.";
    )
}

fn name(text: &str) -> ClaimError {
    let error: NameError = DeviceName::parse(text).expect_err("no name");
    error.into()
}

fn config() -> Vec<Message> {
    let said = |error: &ConfigError| chain(error);
    messages!(said, ConfigError, [],
        ConfigError::TooLarge { .. } => ConfigError::TooLarge { bytes: 12_000 },
            "The `parameters` of an opaque config are longer than the API allows.",
            "Correct the claim, its template or its class; an allocated claim keeps its configs, so delete it and its pod.";
        ConfigError::UnknownKind { .. } => ConfigError::UnknownKind {
            api_version: "resource.nvidia.com/v1beta1".to_owned(),
            kind: "MigDeviceConfg".to_owned(),
        },
            "A config for this driver is misspelt, or of a version or kind that kerf does not have.",
            "Correct the claim, its template or its class; an allocated claim keeps its configs, so delete it and its pod.";
        ConfigError::Invalid { .. } => ConfigError::Invalid {
            kind: "GpuConfig".to_owned(),
            reason: "unknown field `sharin`, expected one of `apiVersion`, `kind`, `sharing`".to_owned(),
        },
            "A field of the config is misspelt or has a value of another type; nothing is passed over.",
            "Correct the claim, its template or its class; an allocated claim keeps its configs, so delete it and its pod.";
        ConfigError::SharingNotYet { .. } => ConfigError::SharingNotYet { kind: "GpuConfig" },
            "Time-slicing and MPS are not built yet, and a claim that asks for them is not served without them.",
            "Remove `sharing`, then delete the claim and its pod. Small partitions are a way to share a GPU.";
        ConfigError::WrongTarget { .. } => ConfigError::WrongTarget {
            kind: "GpuConfig",
            wants: "whole GPUs",
            request: "slice".to_owned(),
            device: "a MIG partition",
        },
            "The config names a request whose class gives out devices of the other type.",
            "Correct the config's `requests` or its `kind`; an allocated claim keeps its configs, so delete it and its pod.";
    )
}

fn refusal() -> Vec<Message> {
    let said = |error: &Refusal| chain(error);
    messages!(said, Refusal, [],
        Refusal::NoGpu { .. } => Refusal::NoGpu {
            device: device(),
            gpu: gpu(),
            why: Some("the GPU at 0000:65:00.0 could not be read: nvmlDeviceGetUUID answered GPU_IS_LOST".to_owned()),
        },
            "The GPU has fallen off the bus, hangs, or was taken out after the claim was allocated.",
            "Look for Xid lines in the node's kernel log; reset the GPU or reboot the node. Delete the pod to have it placed elsewhere.";
        Refusal::NoDevice { .. } => Refusal::NoDevice { device: device(), gpu: gpu(), product: "NVIDIA L4".to_owned() },
            "The GPU was replaced by another model after the claim was allocated, or the claim was allocated by hand.",
            "Delete the pod and its claim.";
        Refusal::Held { .. } => Refusal::Held {
            device: device(),
            holder: ClaimName { namespace: "team-a".to_owned(), name: "train".to_owned() },
            uid: uid(),
            error: None,
        },
            "The scheduler gave out what the claim of another pod still has. kerf never gives one device to two claims.",
            "Wait until the pod of the named claim is gone; the kubelet asks again. If the claim has no pod any more, see its error in `kerf status`.";
        Refusal::WithinClaim { .. } => Refusal::WithinClaim {
            device: device(),
            other: DeviceName::parse("gpu-0000-65-00-0").expect("a device name"),
        },
            "The allocation was made without counters: the gate `DRAPartitionableDevices` is off in the scheduler, or somebody allocated by hand.",
            "Turn the gate on; delete the pod and its claim.";
        Refusal::Foreign { .. } => Refusal::Foreign {
            device: device(),
            gpu: gpu(),
            instance: "GPU instance 3 (2g.20gb at 4)".to_owned(),
        },
            "Somebody made a GPU instance by hand, or another tool did (mig-manager, mig-parted). kerf never destroys what it did not make.",
            "Destroy it when nothing uses it (`nvidia-smi mig -dci`, `nvidia-smi mig -dgi`), and keep the other tool off the node.";
        Refusal::ModeKept { .. } => Refusal::ModeKept { device: device(), gpu: gpu(), needed: MigMode::Enabled },
            "On Ampere, on vGPU guests and with `migMode: keep` kerf does not change the MIG mode.",
            "Change it while the GPU is idle: `nvidia-smi -i N -mig 1`, then reset the GPU or reboot. Or delete the pod, so that its claim is allocated elsewhere.";
        Refusal::ModeInUse { .. } => Refusal::ModeInUse {
            device: device(),
            gpu: gpu(),
            needed: MigMode::Disabled,
            holders: vec!["claim team-a/train".to_owned(), "a foreign GPU instance 3 (2g.20gb at 4)".to_owned()],
        },
            "A whole GPU and partitions need different MIG modes, and the mode changes only when nothing is on the GPU.",
            "Wait until the named claims' pods are gone; destroy foreign instances (`nvidia-smi mig -dci`, `-dgi`).";
        Refusal::AdminAccess { .. } => Refusal::AdminAccess { device: device() },
            "Administrative access is not built yet.",
            "Remove `adminAccess` from the request, then delete the claim and its pod.";
        Refusal::Share { .. } => Refusal::Share { device: device() },
            "kerf publishes no device that can be shared, so the claim was allocated by hand or from another driver's slices.",
            "Delete the pod and its claim.";
    )
}

fn step() -> Vec<Message> {
    let said = |error: &StepError| chain(error);
    messages!(said, StepError, [StepError::Store(_)],
        StepError::Hardware { .. } => StepError::Hardware {
            source: kerf_dra_driver::hardware::HardwareError::new(
                "enable MIG mode of 0000:65:00.0",
                kerf_dra_driver::hardware::HardwareErrorKind::InUse,
            ),
            holders: vec!["dcgm (pid 4711)".to_owned()],
        },
            "The driver refused a change of the GPU. Here processes have the GPU open, and the MIG mode changes only when none has.",
            "Stop the named processes; monitors (dcgm, dcgm-exporter) and nvidia-persistenced are the usual ones. Other answers are listed below.";
        StepError::Unknown => StepError::Unknown,
            "kerf was downgraded while a claim was prepared in a way that the older version does not know.",
            "Install the newer version again until the claims of that time are gone.";
    )
}

fn journal() -> StoreError {
    store_error("written", "/var/lib/kubelet/plugins/gpu.nvidia.com/state/claims", full())
}

fn files() -> Vec<Message> {
    let mut all = messages!(|error: &StoreError| chain(error), StoreError, [],
        StoreError { .. } => journal(),
            "Every change of hardware is written down before it is made; where that is not possible, none is made.",
            "Make room on the disk of the plugin's folder, or see why it is read-only.";
    );
    all.extend(messages!(|error: &CdiError| chain(error), CdiError, [],
        CdiError::Io { .. } => CdiError::Io {
            operation: "written",
            path: PathBuf::from("/var/run/cdi"),
            source: read_only(),
        },
            "Containers get their devices by a spec in this folder.",
            "Mount the folder that the container runtime reads (`cdi_spec_dirs`) into kerf's pod, not read-only (chart value cdiRoot).";
        CdiError::Folder { .. } => CdiError::Folder {
            path: PathBuf::from(format!("/var/run/cdi/k8s.gpu.nvidia.com-claim_{UID}.json")),
        },
            "Something made a folder of the spec's name, often a hostPath mount.",
            "Move it away; the kubelet's next attempt goes on.";
    ));
    all.extend(messages!(|error: &HookProgramError| chain(error), HookProgramError, [],
        HookProgramError { .. } => HookProgramError {
            folder: PathBuf::from("/var/lib/kerf/gpu.nvidia.com"),
            source: full(),
        },
            "The container runtime starts kerf's program for each container with a GPU, from the host's file system.",
            "Make room, or name another folder with --hook-root (chart value hookRoot).";
    ));
    all
}

/// Errors of links, which fail the container unless the pod chose them.
pub(super) fn hook() -> Vec<Message> {
    let said = |blame: &Blame| {
        let errno = match blame {
            Blame::Pod | Blame::Image => Errno::ISDIR,
            Blame::Rights => Errno::ACCESS,
            Blame::Node => Errno::NOSPC,
        };
        let what = "/usr/lib64/libcuda.so cannot be made a link to libcuda.so.1";
        format!("{:#}", settle(Err(errno.into()), what, &[Blame::Pod]).expect_err("a failure"))
    };
    messages!(said, Blame, [Blame::Pod],
        Blame::Image => Blame::Image,
            "The image has a folder where the driver's link belongs.",
            "Remove it from the image.";
        Blame::Rights => Blame::Rights,
            "The container's root belongs to users that the hook is not, or a security module forbids it; the container would start and find no CUDA.",
            "See that the root file system of pods with `hostUsers: false` belongs to the pod's users (containerd 2, a file system with id-mapped mounts); look for denials in the node's audit log.";
        Blame::Node => Blame::Node,
            "The disk of the container's root is full, or fails.",
            "Make room on the node; the kubelet's next attempt goes on.";
    )
}

fn work() -> Vec<Message> {
    let said = |error: &WorkError| chain(error);
    messages!(said, WorkError, [],
        WorkError::Lock(_) => WorkError::Lock(read_only()),
            "The plugin's folder cannot be written.",
            "See whether the disk is full or read-only, and whether the kubelet's plugins folder is mounted into kerf's pod.";
        WorkError::Budget { .. } => WorkError::Budget { seconds: 40 },
            "The driver is slow or hangs, or another claim's work on the same GPU takes long. Nothing is lost.",
            "Wait for the next attempt. If it stays, look for Xid lines in the kernel log; reset the GPU or reboot the node.";
        WorkError::Panicked => WorkError::Panicked,
            "A defect of kerf.",
            "Report it with the log.";
    )
}
