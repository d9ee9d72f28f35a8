//! One case's view of the cluster: its own namespace, and the questions that
//! cases ask.

use std::fmt::Write as _;
use std::io::Write as _;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{Event, Pod, ServiceAccount};
use kube::Resource;
use xtask::cluster::{Cluster, Options};
use xtask::driver::{self, Values};
use xtask::{exec, paths};

use crate::api::{Connection, Kind};
use crate::{LIMIT, wait_until};

/// What cases make that holds devices or makes pods.
const KINDS: &str = "deployments,statefulsets,daemonsets,jobs,pods,resourceclaimtemplates,resourceclaims";

/// A namespace on the cluster, for one case.
#[derive(Debug)]
pub struct Scene<'a> {
    /// The cluster, to be broken as a case likes; it is mended before the next.
    pub cluster: &'a Cluster,
    api: Connection,
    namespace: String,
}

impl<'a> Scene<'a> {
    pub(crate) fn open(cluster: &'a Cluster, namespace: String) -> Result<Self> {
        let scene = Self { cluster, api: Connection::open(cluster)?, namespace };
        // Left by the run before, or by one that was killed.
        let limit = format!("--timeout={}s", LIMIT.as_secs());
        scene.kubectl(&["delete", "namespace", &scene.namespace, "--ignore-not-found", "--wait", &limit])?;
        scene.kubectl(&["create", "namespace", &scene.namespace])?;
        wait_until("the namespace has its account", LIMIT, || scene.get::<ServiceAccount>("default"))?;
        Ok(scene)
    }

    /// Gives back all that the next case could miss. The namespace itself goes
    /// on its own: its controller takes seconds over it.
    pub(crate) fn close(&self) -> Result<()> {
        let limit = format!("--timeout={}s", LIMIT.as_secs());
        self.kubectl(&["delete", KINDS, "--all", "--wait", &limit])?;
        self.kubectl(&["delete", "namespace", &self.namespace, "--wait=false"]).map(drop)
    }

    /// The namespace's name.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Runs `kubectl` in the namespace and returns what it printed.
    pub fn kubectl(&self, arguments: &[&str]) -> Result<String> {
        exec::output(self.kubectl_command().args(arguments))
    }

    fn kubectl_command(&self) -> Command {
        let mut command = self.cluster.kubectl();
        command.args(["--namespace", &self.namespace]);
        command
    }

    /// Runs `kubectl` with `input` as its standard input, for `--filename=-`.
    pub fn kubectl_with_input(&self, arguments: &[&str], input: &str) -> Result<String> {
        let mut child = self
            .kubectl_command()
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("cannot run kubectl")?;
        child.stdin.take().context("kubectl has no input")?.write_all(input.as_bytes())?;
        let output = child.wait_with_output()?;
        if !output.status.success() {
            bail!("kubectl {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(String::from_utf8(output.stdout)?)
    }

    /// Applies manifests, YAML or JSON.
    pub fn apply(&self, manifests: &str) -> Result<()> {
        self.kubectl_with_input(&["apply", "--filename=-"], manifests).map(drop)
    }

    /// Deletes an object without waiting; one that is not there is deleted.
    pub fn delete(&self, object: &str) -> Result<()> {
        self.kubectl(&["delete", object, "--ignore-not-found", "--wait=false"]).map(drop)
    }

    /// One object, or nothing if it is not there.
    pub fn get<K>(&self, name: &str) -> Result<Option<K>>
    where
        K: Kind + Resource<Scope = NamespaceResourceScope>,
    {
        self.api.get(&self.namespace, name)
    }

    /// All objects of a kind in this namespace.
    pub fn list<K: Kind>(&self) -> Result<Vec<K>> {
        self.api.list(Some(&self.namespace), "")
    }

    /// All objects of a kind in kerf's namespace.
    pub fn list_of_driver<K: Kind>(&self) -> Result<Vec<K>> {
        self.api.list(Some(driver::NAMESPACE), "")
    }

    /// All objects of a kind that is in no namespace.
    pub fn list_of_cluster<K: Kind>(&self) -> Result<Vec<K>> {
        self.api.list(None, "")
    }

    /// What the API server answers to a path.
    pub fn text(&self, path: &str) -> Result<String> {
        self.api.text(path)
    }

    /// Waits until a pod's containers run and are ready.
    pub fn await_running(&self, pod: &str) -> Result<Pod> {
        wait_until(&format!("pod {pod} runs"), LIMIT, || {
            let found = self.get::<Pod>(pod)?;
            Ok(found.filter(is_ready))
        })
    }

    /// Waits until no such pod is there.
    pub fn await_gone(&self, pod: &str) -> Result<()> {
        wait_until(&format!("pod {pod} is gone"), LIMIT, || Ok(self.get::<Pod>(pod)?.is_none().then_some(())))
    }

    /// What a container has printed; its name may be left out where a pod has one.
    pub fn logs(&self, pod: &str, container: Option<&str>) -> Result<String> {
        let mut arguments = vec!["logs", pod];
        arguments.extend(container.map(|container| ["--container", container]).iter().flatten());
        self.kubectl(&arguments)
    }

    /// What a command in a container prints.
    pub fn exec(&self, pod: &str, container: Option<&str>, command: &[&str]) -> Result<String> {
        let mut arguments = vec!["exec", pod];
        arguments.extend(container.map(|container| ["--container", container]).iter().flatten());
        arguments.push("--");
        arguments.extend(command);
        self.kubectl(&arguments)
    }

    /// Reasons and messages of a pod's events, oldest first.
    pub fn events(&self, pod: &str) -> Result<String> {
        let fields = format!("involvedObject.kind=Pod,involvedObject.name={pod}");
        let mut events: Vec<Event> = self.api.list(Some(&self.namespace), &fields)?;
        events.sort_by(|one, other| one.metadata.creation_timestamp.cmp(&other.metadata.creation_timestamp));
        let lines = events.into_iter().map(|event| {
            format!("{}: {}\n", event.reason.unwrap_or_default(), event.message.unwrap_or_default())
        });
        Ok(lines.collect())
    }

    /// `nvidia-emulator` on the node's machine, as its administrator.
    pub fn emulator(&self, arguments: &[&str]) -> Result<String> {
        let root = self.cluster.emulator_root().context("the cluster has no emulated GPUs")?;
        let mut command = Command::new(paths::release().join("nvidia-emulator"));
        exec::output(command.arg("--root").arg(root).args(arguments))
    }

    /// What `kerf` prints outside of the cluster, as a user with the cluster's
    /// kubeconfig runs it.
    pub fn kerf(&self, arguments: &[&str]) -> Result<String> {
        let mut command = Command::new(paths::release().join("kerf"));
        exec::output(command.env("KUBECONFIG", self.cluster.kubeconfig()).args(arguments))
    }

    /// Changes the installed chart's values; returns when its pods are ready.
    /// What is not named here is what every case has.
    pub fn configure_driver(&self, values: Values) -> Result<()> {
        driver::install(self.cluster, values)
    }

    /// Starts the components whose feature gates differ from these anew, as
    /// `--feature-gates` of `cargo xtask cluster up` does. The next case finds
    /// every gate as its release has it.
    pub fn set_feature_gates(&self, gates: &str) -> Result<()> {
        let name = self.cluster.name().to_owned();
        Cluster::up(&Options { name, feature_gates: gates.parse()?, ..Options::default() }).map(drop)
    }

    /// All that may tell why a case failed.
    pub(crate) fn describe(&self) -> String {
        let mut text = format!("--- cluster {}\n", self.cluster.name());
        for arguments in [
            ["get", "pods,resourceclaims", "--output=wide"].as_slice(),
            &["describe", "pods"],
            &["get", "resourceclaims", "--output=yaml"],
            &["get", "events", "--sort-by=.metadata.creationTimestamp"],
            &["get", "resourceslices", "--output=wide"],
        ] {
            let answer = self.kubectl(arguments).unwrap_or_else(|error| format!("{error:#}\n"));
            let _ = write!(text, "--- kubectl {}\n{answer}", arguments.join(" "));
        }
        text + "--- logs of kerf\n" + &driver::logs(self.cluster)
    }
}

fn is_ready(pod: &Pod) -> bool {
    pod.status
        .iter()
        .flat_map(|status| status.conditions.iter().flatten())
        .any(|condition| condition.type_ == "Ready" && condition.status == "True")
}
