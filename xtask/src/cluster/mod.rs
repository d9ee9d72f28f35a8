//! A stock one-node Kubernetes cluster without Docker: etcd, the control plane,
//! containerd and a kubelet as plain processes of this machine.
//!
//! Everything it makes lies in three folders, one bridge and one control group,
//! all named after the cluster, so that `down` works whatever `up` came to.
//! `up` looks at each thing and makes what is missing or differs; it may be
//! killed at any point and run again.

mod cgroups;
mod components;
mod gates;
mod layout;
pub(crate) mod mounts;
mod network;
mod pki;
mod process;
pub mod programs;
mod release;
mod settings;
mod teardown;

use std::ffi::OsStr;
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

pub use components::Component;
pub use gates::FeatureGates;
use layout::Layout;
use process::Record;
use programs::Programs;
pub use release::Release;
use settings::Settings;
pub use teardown::down;

use crate::{debian, emulator, exec, files, image};

/// How long a component may take to serve. Only a hang takes this long.
const START_LIMIT: Duration = Duration::from_mins(5);

/// How long a component may take to end when it is restarted.
const GRACE: Duration = Duration::from_secs(20);

/// What a cluster is to be.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Distinguishes clusters of one machine.
    pub name: String,
    /// Models for `nvidia-emulator init --gpu`; none: no emulated driver. A
    /// cluster that exists keeps its GPUs.
    pub gpus: Vec<String>,
    /// None: what it was made with, or the default.
    pub kubernetes: Option<Release>,
    /// None set: every gate is as the release has it, whatever it was before.
    pub feature_gates: FeatureGates,
}

/// A cluster that was brought up.
#[derive(Debug)]
pub struct Cluster {
    layout: Layout,
    settings: Settings,
    programs: Programs,
}

impl Cluster {
    /// Brings the cluster up, from nothing or from whatever is left of it, and
    /// returns when its node is ready and pods may be made.
    pub fn up(options: &Options) -> Result<Self> {
        let started = Instant::now();
        let pause = image::pause()?;
        let cluster = Self::with(options, &Component::ALL)?;
        cluster.import(&pause)?;
        cluster.await_node()?;
        eprintln!("cluster {} is up after {:.1} s", cluster.name(), started.elapsed().as_secs_f64());
        Ok(cluster)
    }

    /// Brings up one without a node: an API server with its controllers.
    pub fn without_node(options: &Options) -> Result<Self> {
        let cluster =
            Self::with(options, &[Component::Etcd, Component::ApiServer, Component::ControllerManager])?;
        cluster.await_account()?;
        Ok(cluster)
    }

    fn with(options: &Options, components: &[Component]) -> Result<Self> {
        let layout = Layout::new(&options.name)?;
        emulator::check(&options.gpus)?;
        require_root()?;
        debian::require(&[debian::CNI, debian::IPROUTE])?;
        let release = Settings::release(&layout, options.kubernetes)?;
        let programs = programs::ensure(release)?;
        let _lock = files::Lock::take(&layout.lock())?;
        take_name(&layout)?;
        for folder in [
            layout.state.join("config"),
            layout.state.join("logs"),
            layout.state.join("processes"),
            layout.kubelet_root.clone(),
            layout.cdi(),
            layout.pod_logs(),
        ] {
            fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        }
        let mut settings = Settings::load_or_choose(&layout, options, release)?;
        if !Component::ALL.iter().any(|component| is_running(&layout, *component)) {
            settings.renew_taken_ports(&layout)?;
        }
        pki::ensure(&layout, &settings)?;
        network::ensure(&layout, &settings)?;
        cgroups::ensure(&layout)?;
        if !settings.gpus.is_empty() {
            emulator::ensure(&layout.emulator(), &settings.gpus)?;
        }

        let cluster = Self { layout, settings, programs };
        // Both take a moment to serve; nothing they need is made by the other.
        for component in [Component::Etcd, Component::Containerd] {
            if components.contains(&component) {
                cluster.launch(component)?;
            }
        }
        for component in components {
            cluster.start(*component)?;
        }
        Ok(cluster)
    }

    /// A cluster that was brought up before, in whatever state it is now.
    pub fn open(name: &str) -> Result<Option<Self>> {
        let layout = Layout::new(name)?;
        let settings = Settings::load(&layout)?;
        Ok(settings.map(|settings| {
            let programs = Programs::of(settings.kubernetes);
            Self { layout, settings, programs }
        }))
    }

    /// The cluster's name.
    pub fn name(&self) -> &str {
        &self.layout.name
    }

    /// The name of its only node.
    pub fn node_name(&self) -> String {
        self.layout.node()
    }

    /// A kubeconfig that may do everything.
    pub fn kubeconfig(&self) -> PathBuf {
        self.layout.kubeconfig("admin")
    }

    /// containerd's socket.
    pub fn containerd_socket(&self) -> PathBuf {
        self.layout.containerd_socket()
    }

    /// The kubelet's root folder, with `plugins` and `plugins_registry`.
    pub fn kubelet_root(&self) -> &Path {
        &self.layout.kubelet_root
    }

    /// Where a driver may put the programs of its hooks.
    pub fn hook_root(&self) -> &Path {
        &self.layout.hook_root
    }

    /// Where containerd looks for CDI specifications, and nowhere else.
    pub fn cdi_dir(&self) -> PathBuf {
        self.layout.cdi()
    }

    /// The emulated driver's root, if the cluster has GPUs.
    pub fn emulator_root(&self) -> Option<PathBuf> {
        (!self.settings.gpus.is_empty()).then(|| self.layout.emulator())
    }

    /// What a component has logged.
    pub fn log(&self, component: Component) -> PathBuf {
        self.layout.log(component.name())
    }

    /// `kubectl` as administrator, to be given arguments.
    pub fn kubectl(&self) -> Command {
        self.client("kubectl")
    }

    /// `helm` as administrator, its own files inside the cluster's folder.
    pub fn helm(&self) -> Command {
        let mut command = self.client("helm");
        let folder = self.layout.state.join("helm");
        command.env("HELM_CACHE_HOME", folder.join("cache"));
        command.env("HELM_CONFIG_HOME", folder.join("config"));
        command.env("HELM_DATA_HOME", folder.join("data"));
        command
    }

    /// `crictl` on this cluster's containerd.
    pub fn crictl(&self) -> Command {
        let mut command = Command::new(self.programs.path("crictl"));
        let endpoint = format!("unix://{}", self.containerd_socket().display());
        command.args(["--runtime-endpoint", &endpoint, "--image-endpoint", &endpoint]);
        // It gives up a call after two seconds, which a loaded machine may take.
        command.args(["--timeout", "60s"]);
        command
    }

    /// `ctr` in the namespace of the kubelet's containers and images.
    pub fn ctr(&self) -> Command {
        let mut command = Command::new(self.programs.path("ctr"));
        command.arg("--address").arg(self.containerd_socket()).args(["--namespace", "k8s.io"]);
        command
    }

    /// Makes the images of an OCI archive known to the node.
    pub fn import(&self, archive: &Path) -> Result<()> {
        exec::output(self.ctr().args(["images", "import"]).arg(archive)).map(drop)
    }

    /// Gives an image of the node another name.
    pub fn tag(&self, image: &str, name: &str) -> Result<()> {
        exec::output(self.ctr().args(["images", "tag", "--force", image, name])).map(drop)
    }

    /// Starts a component unless it runs as it should, and waits until it serves.
    pub fn start(&self, component: Component) -> Result<()> {
        self.launch(component)?;
        self.await_serving(component)
    }

    /// Ends a component as an orderly stop would.
    pub fn stop(&self, component: Component) -> Result<()> {
        self.end(component, GRACE)
    }

    /// Ends a component as a crash would.
    pub fn kill(&self, component: Component) -> Result<()> {
        self.end(component, Duration::ZERO)
    }

    /// Stops and starts the kubelet; returns when the node is ready again.
    pub fn restart_kubelet(&self) -> Result<()> {
        self.stop(Component::Kubelet)?;
        self.start(Component::Kubelet)?;
        self.await_node()
    }

    fn end(&self, component: Component, grace: Duration) -> Result<()> {
        if let Some(record) = Record::load(&self.layout.record(component.name())) {
            record.end(grace)?;
        }
        process::end_marked(&self.layout.run, Some(component.name()), grace)
    }

    fn launch(&self, component: Component) -> Result<()> {
        let launch = component.launch(&self.layout, &self.settings, &self.programs)?;
        let record = self.layout.record(component.name());
        let fingerprint = launch.fingerprint()?;
        if Record::load(&record).is_some_and(|record| record.runs(&fingerprint)) {
            return Ok(());
        }
        self.end(component, GRACE)?;
        launch.start(&self.layout.run, &record, &self.log(component)).map(drop)
    }

    fn await_serving(&self, component: Component) -> Result<()> {
        let started = Instant::now();
        loop {
            // An answer counts only if ours is alive after it: another program
            // may have the port.
            let answer = self.probe(component);
            let log = self.log(component);
            if !is_running(&self.layout, component) {
                bail!(
                    "{} ended while it started; {}:\n{}",
                    component.name(),
                    log.display(),
                    exec::tail(&log, 20)
                );
            }
            let Err(reason) = answer else { return Ok(()) };
            if started.elapsed() > START_LIMIT {
                return Err(reason.context(format!(
                    "{} does not serve after {} s; {}:\n{}",
                    component.name(),
                    START_LIMIT.as_secs(),
                    log.display(),
                    exec::tail(&log, 20)
                )));
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// One question to a component; an answer means that it serves.
    fn probe(&self, component: Component) -> Result<()> {
        match component {
            Component::Etcd => answers(self.settings.ports.etcd, "/health"),
            Component::ApiServer => {
                exec::output(self.kubectl().args(["get", "--raw=/readyz", "--request-timeout=10s"])).map(drop)
            }
            Component::Containerd => exec::output(self.crictl().arg("version")).map(drop),
            Component::Kubelet => answers(self.settings.ports.kubelet_health, "/healthz"),
            // What they do is awaited where it is needed: accounts, pods.
            Component::ControllerManager | Component::Scheduler => Ok(()),
        }
    }

    /// Waits until pods may be made: the node is ready, the account is there.
    fn await_node(&self) -> Result<()> {
        let node = format!("node/{}", self.node_name());
        for condition in ["create", "condition=Ready"] {
            self.wait_for(&node, condition).with_context(|| {
                let log = self.log(Component::Kubelet);
                format!("the node does not become ready; {}:\n{}", log.display(), exec::tail(&log, 20))
            })?;
        }
        self.await_account()
    }

    fn await_account(&self) -> Result<()> {
        self.wait_for("serviceaccount/default", "create").context("there is no account for pods")
    }

    fn wait_for(&self, object: &str, condition: &str) -> Result<()> {
        let limit = format!("--timeout={}s", START_LIMIT.as_secs());
        let condition = format!("--for={condition}");
        exec::output(self.kubectl().args(["wait", object, &condition, &limit])).map(drop)
    }

    fn client(&self, program: &str) -> Command {
        let mut command = Command::new(self.programs.path(program));
        command.env("KUBECONFIG", self.kubeconfig());
        // The cluster is on this machine, whatever the way to others.
        for variable in ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"] {
            command.env_remove(variable);
        }
        command
    }
}

/// Prints what there is of a cluster.
pub fn status(name: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    let Some(cluster) = Cluster::open(name)? else {
        writeln!(out, "cluster {name}: not up")?;
        return Ok(());
    };
    let ready = exec::output(cluster.kubectl().args([
        "get",
        "node",
        &cluster.node_name(),
        "--request-timeout=5s",
        "--output=jsonpath={.status.conditions[?(@.type==\"Ready\")].reason}",
    ]));
    let ready = ready.unwrap_or_else(|_| "unknown".to_owned());
    writeln!(out, "cluster {name}: node {} ({ready})", cluster.node_name())?;
    for component in Component::ALL {
        let record = Record::load(&cluster.layout.record(component.name()));
        match record.filter(Record::alive) {
            Some(record) => writeln!(out, "  {:<24} pid {}", component.name(), record.pid)?,
            None => writeln!(out, "  {:<24} not running", component.name())?,
        }
    }
    writeln!(out, "  {:<24} {}", "Kubernetes", cluster.settings.kubernetes)?;
    if !cluster.settings.feature_gates.is_empty() {
        writeln!(out, "  {:<24} {}", "feature gates", cluster.settings.feature_gates)?;
    }
    if !cluster.settings.gpus.is_empty() {
        writeln!(out, "  {:<24} {}", "emulated GPUs", cluster.settings.gpus.join(" "))?;
    }
    writeln!(out, "  {:<24} {}", "kubeconfig", cluster.kubeconfig().display())?;
    writeln!(out, "  {:<24} {}", "containerd", cluster.containerd_socket().display())?;
    writeln!(out, "  {:<24} {}", "kubelet root", cluster.kubelet_root().display())?;
    writeln!(out, "  {:<24} {}", "kubectl", cluster.programs.path("kubectl").display())?;
    Ok(())
}

/// The cluster that is meant where none is named: the only one of this
/// checkout, or else the one that `up` makes by default.
///
/// # Errors
/// There are several; the sentence names them.
pub fn unnamed() -> Result<String> {
    the_only(&crate::paths::cluster_state(""))
}

/// The default name of a cluster.
pub const DEFAULT_NAME: &str = "dev";

fn the_only(folder: &Path) -> Result<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    // Beside each cluster's folder is its lock.
    let folders = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    let mut names: Vec<String> = folders.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort_unstable();
    match names.as_slice() {
        [] => Ok(DEFAULT_NAME.to_owned()),
        [only] => Ok(only.clone()),
        several => bail!("there are the clusters {}: say which with --name", several.join(", ")),
    }
}

fn is_running(layout: &Layout, component: Component) -> bool {
    Record::load(&layout.record(component.name())).is_some_and(|record| record.alive())
}

fn require_root() -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        bail!("a cluster runs a kubelet and containers, which takes root: run this command as root");
    }
    Ok(())
}

/// A name stands for a bridge and folders of the machine, so it has one owner.
fn take_name(layout: &Layout) -> Result<()> {
    check_owner(layout)?;
    fs::create_dir_all(&layout.run)?;
    files::replace(&layout.owner(), layout.state.as_os_str().as_encoded_bytes())
}

fn check_owner(layout: &Layout) -> Result<()> {
    match fs::read(layout.owner()) {
        Ok(owner) => {
            let owner = Path::new(OsStr::from_bytes(&owner));
            // The checkout may have been deleted; what it left is anybody's to remove.
            if owner != layout.state && owner.exists() {
                bail!(
                    "the cluster {} of this machine belongs to another checkout: its state is {}",
                    layout.name,
                    owner.display()
                );
            }
            Ok(())
        }
        Err(_) => Ok(()),
    }
}

/// Whether an HTTP server on the loopback address answers a path with 200.
fn answers(port: u16, path: &str) -> Result<()> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    stream.write_all(format!("GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n").as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let status = answer.lines().next().unwrap_or_default();
    if status.split(' ').nth(1) != Some("200") {
        bail!("{path} answers {status:?}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_that_there_is_not_is_refused_before_anything_is_remembered() {
        let options = Options {
            name: "unmade".to_owned(),
            gpus: vec!["nope".to_owned()],
            kubernetes: None,
            feature_gates: FeatureGates::default(),
        };
        let error = Cluster::up(&options).expect_err("no model").to_string();
        assert!(error.contains("no model `nope`; known: "), "{error}");
        let layout = Layout::new("unmade").expect("a name");
        assert!(!layout.settings().exists() && !layout.owner().exists());
    }

    #[test]
    fn without_a_name_the_only_cluster_is_meant_and_several_are_named() {
        let folder = tempfile::tempdir().expect("a folder");
        let the_only = || the_only(folder.path()).map_err(|error| error.to_string());
        assert_eq!(the_only().as_deref(), Ok("dev"));
        fs::create_dir(folder.path().join("one")).expect("a cluster");
        fs::write(folder.path().join("gone.lock"), "").expect("a lock");
        assert_eq!(the_only().as_deref(), Ok("one"));
        fs::create_dir(folder.path().join("another")).expect("a cluster");
        assert_eq!(
            the_only().expect_err("two"),
            "there are the clusters another, one: say which with --name"
        );
    }
}
