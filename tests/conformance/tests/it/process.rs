//! The tool and the driver as processes: signals, and what a run leaves or finds.

use std::io::{BufRead as _, BufReader};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{DeleteParams, ListParams};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use rustix::net::sockopt::socket_peercred;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use tempfile::TempDir;

use crate::api::Api;
use crate::driver::{Disk, Instance, NAME, NODE, folders};
use crate::{publisher, services};

const ROOT: &str = "CONFORMANCE_ROOT";
const NAMED: &str = "CONFORMANCE_INSTANCE";

#[tokio::test(flavor = "multi_thread")]
#[ignore = "it is the driver's process of the other tests"]
async fn the_driver() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let root = PathBuf::from(std::env::var_os(ROOT).expect("it is run by another test"));
    let mut disk = Disk::default();
    disk.load(&root);
    let instance = Instance {
        defect: None,
        root,
        name: std::env::var(NAMED).unwrap(),
        process: std::process::id(),
        client: kube::Client::try_default().await.unwrap(),
        disk: Arc::new(disk.into()),
        memory: Arc::default(),
    };
    tokio::spawn(publisher::publish(instance.clone()));
    services::serve(instance).await.unwrap();
}

/// An API server on a port, and the folders of a driver.
struct World {
    root: TempDir,
    api: Api,
}

impl World {
    /// Of a driver that a shell starts with `start`, in which `$0` is its program.
    async fn new(start: &str) -> Self {
        let (root, api) = (tempfile::tempdir().unwrap(), Api::new());
        folders(root.path()).unwrap();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server = format!("http://{}", listener.local_addr().unwrap());
        let router = api.router();
        tokio::spawn(async move { axum::serve(listener, router).await });
        let kubeconfig = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": {"server": server}}],
            "users": [{"name": "u", "user": {}}],
        });
        let world = Self { root, api };
        std::fs::write(world.path("kubeconfig"), kubeconfig.to_string()).unwrap();
        let program = std::env::current_exe().unwrap();
        let profile = json!({
            "driver": NAME, "node": NODE,
            "registry": world.path("registry"), "cdi": [world.path("cdi")], "state": world.path("state"),
            "claims": [{"deviceClass": "example.com", "matching": {"type": "plain"}}],
            "start": ["sh", "-c", format!("{start} & wait"), program],
            "environment": {"KUBECONFIG": "{kubeconfig}", ROOT: world.root.path(), NAMED: "{instance}"},
            "hang": {"begin": ["touch", world.path("hang")], "end": ["rm", world.path("hang")]},
            "limits": {"stop": 2},
        });
        std::fs::write(world.path("profile.yaml"), profile.to_string()).unwrap();
        world
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    fn tool(&self, only: &str) -> Child {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dra-conformance"));
        command.args(["run", "--only", only, "--profile"]).arg(self.path("profile.yaml"));
        command.arg("--kubeconfig").arg(self.path("kubeconfig"));
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    /// The tool's exit code, and all that it says.
    fn ended(&self, only: &str) -> (Option<i32>, String) {
        let output = self.tool(only).wait_with_output().unwrap();
        let said = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8_lossy(&said).into_owned())
    }

    /// Waits until the devices hang with a call that is under way.
    fn await_hang(&self) {
        let began = Instant::now();
        let is_under_way = || {
            let claims = std::fs::read_to_string(self.path("state/claims.json")).unwrap_or_default();
            self.path("hang").exists() && claims.contains("\"is_complete\":false")
        };
        while !is_under_way() {
            assert!(began.elapsed() < Duration::from_mins(2), "no call hangs");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The processes that answer on registration sockets.
    fn drivers(&self) -> Vec<Pid> {
        let sockets = std::fs::read_dir(self.path("registry")).unwrap();
        let answers = sockets.filter_map(|socket| UnixStream::connect(socket.unwrap().path()).ok());
        answers.map(|stream| socket_peercred(stream).unwrap().pid).collect()
    }

    async fn left(&self) -> Vec<String> {
        let client = self.api.client();
        let all = ListParams::default();
        let nodes = kube::Api::<Node>::all(client.clone()).list(&all).await.unwrap();
        let pods = kube::Api::<Pod>::default_namespaced(client.clone()).list(&all).await.unwrap();
        let claims = kube::Api::<ResourceClaim>::default_namespaced(client).list(&all).await.unwrap();
        let names = nodes.into_iter().map(|node| node.metadata.name);
        let names = names.chain(pods.into_iter().map(|pod| pod.metadata.name));
        names.chain(claims.into_iter().map(|claim| claim.metadata.name)).flatten().collect()
    }

    fn mounts(&self) -> usize {
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        mounts.matches(&self.root.path().display().to_string()).count()
    }
}

/// A check in whose first prepare the state is on disk; with a small disk where one
/// can be mounted.
fn first_prepare() -> &'static str {
    let folder = tempfile::tempdir().unwrap();
    match mount("none", folder.path(), "tmpfs", MountFlags::empty(), None) {
        Ok(()) => {
            unmount(folder.path(), UnmountFlags::DETACH).unwrap();
            "DISK-003"
        }
        Err(_) => "PREP-001",
    }
}

fn signal(tool: &Child, signal: Signal) {
    kill_process(Pid::from_child(tool), signal).unwrap();
}

fn remove(path: &Path) {
    std::fs::remove_file(path).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signal_takes_away_all_that_was_made() {
    for (name, number, code) in [("SIGINT", Signal::INT, 130), ("SIGTERM", Signal::TERM, 143)] {
        for check in ["HANG-004", first_prepare()] {
            let world = World::new("$0 --exact process::the_driver --ignored").await;
            let is_ours = !check.starts_with("HANG");
            if is_ours {
                std::fs::write(world.path("hang"), "").unwrap();
            }
            let tool = world.tool(check);
            world.await_hang();
            assert_eq!(world.mounts(), usize::from(check == "DISK-003"));
            assert_eq!(world.left().await.len(), 3);
            signal(&tool, number);
            if is_ours {
                remove(&world.path("hang"));
            }
            let output = tool.wait_with_output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(code), "{check}: {said}");
            assert!(said.contains(&format!("error: ended by {name}")), "{said}");
            assert_eq!(world.left().await, [""; 0], "{check}");
            assert_eq!((world.mounts(), world.drivers()), (0, vec![]), "{check}");
            assert!(!world.path("hang").exists());
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_signal_leaves_all_and_the_next_run_says_what_to_do() {
    let world = World::new("$0 --exact process::the_driver --ignored").await;
    std::fs::write(world.path("hang"), "").unwrap();
    let mut tool = world.tool(first_prepare());
    world.await_hang();
    signal(&tool, Signal::TERM);
    let mut stderr = BufReader::new(tool.stderr.take().unwrap());
    let mut said = String::new();
    while !said.contains("the next signal leaves it all") {
        assert_ne!(stderr.read_line(&mut said).unwrap(), 0, "{said}");
    }
    signal(&tool, Signal::TERM);
    assert_eq!(tool.wait().unwrap().code(), Some(143));
    let left = world.left().await;
    let process = world.drivers()[0];
    let mounts = world.mounts();
    remove(&world.path("hang"));

    let (code, said) = world.ended("REG-001");
    assert_eq!(code, Some(2), "{said}");
    for words in [format!("`kubectl delete node {NODE}`"), format!("the process {process} answers")] {
        assert!(said.contains(&words), "{said}");
    }
    // It took nothing for its own.
    assert_eq!((world.left().await, world.drivers(), world.mounts()), (left, vec![process], mounts));

    kill_process(process, Signal::KILL).unwrap();
    kube::Api::<Node>::all(world.api.client()).delete(NODE, &DeleteParams::default()).await.unwrap();
    let (code, said) = world.ended("REG-001");
    assert_eq!((code, world.mounts()), (Some(0), 0), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_shell_starts_is_killed_with_it() {
    let world = World::new("$0 --exact process::the_driver --ignored").await;
    let (code, said) = world.ended("REG-015");
    assert_eq!((code, world.drivers()), (Some(0), vec![]), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_driver_that_outlives_its_kill_fails_and_is_named() {
    // Not with the tool's standard error, of which it would keep the end from us.
    let world = World::new("setsid $0 --exact process::the_driver --ignored 2>/dev/null").await;
    let (code, said) = world.ended("REG-015");
    let process = world.drivers()[0];
    kill_process(process, Signal::KILL).unwrap();
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains(&format!("the process {process} still answers on")), "{said}");
}
