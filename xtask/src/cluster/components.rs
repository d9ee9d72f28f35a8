//! The six programs of a cluster and how each is started. Why a setting is
//! there stands beside it when its absence cost somebody time.

use anyhow::{Context as _, Result};
use serde_json::json;

use super::layout::Layout;
use super::network;
use super::process::Launch;
use super::programs::Programs;
use super::settings::Settings;
use crate::image::PAUSE;
use crate::{debian, files};

/// A program of the cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Component {
    /// The store.
    Etcd,
    /// The API server.
    ApiServer,
    /// All built-in controllers.
    ControllerManager,
    /// The scheduler.
    Scheduler,
    /// The container runtime.
    Containerd,
    /// The node agent.
    Kubelet,
}

impl Component {
    /// All, in the order of starting.
    pub const ALL: [Self; 6] = [
        Self::Etcd,
        Self::Containerd,
        Self::ApiServer,
        Self::ControllerManager,
        Self::Scheduler,
        Self::Kubelet,
    ];

    /// As it is called on the command line and in logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Etcd => "etcd",
            Self::ApiServer => "kube-apiserver",
            Self::ControllerManager => "kube-controller-manager",
            Self::Scheduler => "kube-scheduler",
            Self::Containerd => "containerd",
            Self::Kubelet => "kubelet",
        }
    }

    /// How it is started. Writes its configuration files first.
    pub(crate) fn launch(self, layout: &Layout, settings: &Settings, programs: &Programs) -> Result<Launch> {
        let mut inputs = Vec::new();
        let mut arguments = match self {
            Self::Etcd => etcd(layout, settings),
            Self::ApiServer => api_server(layout, settings),
            Self::ControllerManager => controller_manager(layout, settings),
            Self::Scheduler => scheduler(layout, settings),
            Self::Containerd => {
                let config = layout.config("containerd.toml");
                files::replace(&config, containerd(layout)?.as_bytes())?;
                let arguments = vec![format!("--config={}", config.display())];
                inputs.push(config);
                arguments
            }
            Self::Kubelet => {
                let config = layout.config("kubelet.json");
                files::replace(&config, &serde_json::to_vec_pretty(&kubelet(layout, settings))?)?;
                let arguments = vec![
                    format!("--config={}", config.display()),
                    format!("--kubeconfig={}", layout.kubeconfig("kubelet").display()),
                    format!("--root-dir={}", layout.kubelet_root.display()),
                    format!("--cert-dir={}", layout.kubelet_root.join("pki").display()),
                    format!("--hostname-override={}", layout.node()),
                    format!("--node-ip={}", settings.node_address()),
                ];
                inputs.push(config);
                arguments
            }
        };
        arguments.extend(settings.feature_gates.argument(self));
        let program = programs.path(if self == Self::Containerd { "containerd" } else { "kubernetes" });
        Ok(Launch { name: self.name(), program, arguments, inputs })
    }
}

fn etcd(layout: &Layout, settings: &Settings) -> Vec<String> {
    let client = format!("http://127.0.0.1:{}", settings.ports.etcd);
    let peer = format!("http://127.0.0.1:{}", settings.ports.etcd_peer);
    vec![
        "--name=etcd".to_owned(),
        format!("--data-dir={}", layout.etcd().display()),
        format!("--listen-client-urls={client}"),
        format!("--advertise-client-urls={client}"),
        format!("--listen-peer-urls={peer}"),
        format!("--initial-advertise-peer-urls={peer}"),
        format!("--initial-cluster=etcd={peer}"),
        // A test cluster need not outlive the machine, but it must outlive a kill.
        "--unsafe-no-fsync".to_owned(),
        "--log-level=warn".to_owned(),
    ]
}

fn api_server(layout: &Layout, settings: &Settings) -> Vec<String> {
    let pki = layout.pki();
    let file = |name: &str| pki.join(name).display().to_string();
    vec![
        format!("--etcd-servers=http://127.0.0.1:{}", settings.ports.etcd),
        format!("--bind-address={}", settings.service_address()),
        "--secure-port=443".to_owned(),
        format!("--advertise-address={}", settings.service_address()),
        // Else it writes itself as the endpoint, and waits for that on its way out.
        "--endpoint-reconciler-type=none".to_owned(),
        format!("--service-cluster-ip-range={}", settings.service_range()),
        "--authorization-mode=Node,RBAC".to_owned(),
        "--enable-admission-plugins=NodeRestriction".to_owned(),
        "--allow-privileged=true".to_owned(),
        format!("--client-ca-file={}", file("ca.crt")),
        format!("--tls-cert-file={}", file("apiserver.crt")),
        format!("--tls-private-key-file={}", file("apiserver.key")),
        "--service-account-issuer=https://kubernetes.default.svc".to_owned(),
        format!("--service-account-key-file={}", file("service-accounts.pub")),
        format!("--service-account-signing-key-file={}", file("service-accounts.key")),
        format!("--kubelet-client-certificate={}", file("apiserver-kubelet-client.crt")),
        format!("--kubelet-client-key={}", file("apiserver-kubelet-client.key")),
        // Else `kubectl logs` looks the node's name up.
        "--kubelet-preferred-address-types=InternalIP".to_owned(),
    ]
}

fn controller_manager(layout: &Layout, settings: &Settings) -> Vec<String> {
    let kubeconfig = layout.kubeconfig("controller-manager").display().to_string();
    vec![
        format!("--kubeconfig={kubeconfig}"),
        format!("--authentication-kubeconfig={kubeconfig}"),
        format!("--authorization-kubeconfig={kubeconfig}"),
        "--bind-address=127.0.0.1".to_owned(),
        format!("--secure-port={}", settings.ports.controller_manager),
        "--leader-elect=false".to_owned(),
        "--use-service-account-credentials=true".to_owned(),
        format!("--root-ca-file={}", layout.pki().join("ca.crt").display()),
        format!("--service-account-private-key-file={}", layout.pki().join("service-accounts.key").display()),
    ]
}

fn scheduler(layout: &Layout, settings: &Settings) -> Vec<String> {
    let kubeconfig = layout.kubeconfig("scheduler").display().to_string();
    vec![
        format!("--kubeconfig={kubeconfig}"),
        format!("--authentication-kubeconfig={kubeconfig}"),
        format!("--authorization-kubeconfig={kubeconfig}"),
        "--bind-address=127.0.0.1".to_owned(),
        format!("--secure-port={}", settings.ports.scheduler),
        "--leader-elect=false".to_owned(),
    ]
}

/// `restrict_oom_score_adj`: without it no sandbox starts where
/// `CAP_SYS_RESOURCE` is missing. `use_internal_loopback`: the CNI plugin for it
/// leaves a file a pod in a folder of the machine. `netns_mounts_under_state_dir`,
/// `socket_dir`, `Root` and the disabled NRI socket keep everything inside the
/// cluster's folders.
fn containerd(layout: &Layout) -> Result<String> {
    let plugins = debian::cni_folder().context("there is no folder with CNI plugins")?;
    Ok(format!(
        r#"version = 3
root = "{root}"
state = "{run}/state"
disabled_plugins = ["io.containerd.internal.v1.opt"]

[grpc]
address = "{socket}"

[plugins.'io.containerd.shim.v1.manager']
socket_dir = "{run}/shims"

[plugins.'io.containerd.nri.v1.nri']
disable = true

[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = "{PAUSE}"

[plugins.'io.containerd.cri.v1.runtime']
restrict_oom_score_adj = true
netns_mounts_under_state_dir = true
cdi_spec_dirs = ["{cdi}"]

[plugins.'io.containerd.cri.v1.runtime'.cni]
bin_dirs = ["{plugins}"]
conf_dir = "{networks}"
use_internal_loopback = true

[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
SystemdCgroup = false
Root = "{run}/runc"
"#,
        root = layout.containerd_root().display(),
        run = layout.run.display(),
        socket = layout.containerd_socket().display(),
        cdi = layout.cdi().display(),
        networks = network::configuration(layout).display(),
    ))
}

fn kubelet(layout: &Layout, settings: &Settings) -> serde_json::Value {
    let service = settings.service_address().octets();
    let dns = std::net::Ipv4Addr::new(service[0], service[1], service[2], 10);
    json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": settings.node_address(),
        "port": settings.ports.kubelet,
        "readOnlyPort": 0,
        "healthzBindAddress": "127.0.0.1",
        "healthzPort": settings.ports.kubelet_health,
        "containerRuntimeEndpoint": format!("unix://{}", layout.containerd_socket().display()),
        "podLogsDir": layout.pod_logs(),
        "volumePluginDir": layout.kubelet_root.join("volume-plugins"),
        "authentication": {
            "anonymous": { "enabled": false },
            "webhook": { "enabled": true },
            "x509": { "clientCAFile": layout.pki().join("ca.crt") },
        },
        "authorization": { "mode": "Webhook" },
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": format!("/{}", layout.node()),
        "failCgroupV1": false,
        "failSwapOn": false,
        "enforceNodeAllocatable": [],
        // The packet filter is not ours to write.
        "makeIPTablesUtilChains": false,
        // There is no such server, but without an address each pod gets a warning.
        "clusterDNS": [dns],
        "clusterDomain": "cluster.local",
        // Images are imported and could not be pulled again.
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {
            "memory.available": "50Mi",
            "nodefs.available": "1%",
            "nodefs.inodesFree": "1%",
            "imagefs.available": "1%",
        },
        // Tests kill containers and wait for the next ones.
        "crashLoopBackOff": { "maxContainerRestartPeriod": "2s" },
        // A claim that could not be prepared is tried again only with the next
        // look at its pod; a minute and a half by default.
        "syncFrequency": "5s",
    })
}
