//! `dra-conformance` run against kerf: on a cluster's API server, with a `kerf
//! node` process that has a node, folders and emulated GPUs of its own, so that
//! no kubelet but the tool calls it.

use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};

use crate::cluster::{self, Cluster, Options, Release};
use crate::{emulator, exec, paths};

/// The Nodes that the tool makes, one a run.
const NODES: [&str; 2] = ["dra-conformance-1", "dra-conformance-2"];

/// What claims ask for first and second. Most checks use the first only.
const ORDERS: [[Kind; 2]; 2] = [[Kind::Partition, Kind::Whole], [Kind::Whole, Kind::Partition]];

/// What a partition's prepare calls, and a whole GPU's does not.
const CREATE: &str = "nvmlDeviceCreateGpuInstanceWithPlacement";

/// The checks that cannot apply to kerf, and why.
const NOT_APPLICABLE: [(&str, &str); 9] = [
    ("HEALTH-005", "it is for drivers without a health service"),
    ("SHARE-001", NO_SHARES),
    ("SHARE-002", NO_SHARES),
    ("SHARE-003", NO_SHARES),
    ("ADMIN-002", "administrative access is refused"),
    ("META-001", NO_METADATA),
    ("META-002", NO_METADATA),
    ("API-006", "no status of a claim is written"),
    ("COLLECT-001", "it takes ten minutes and more, by design; the node plugin's own tests show it"),
];
const NO_SHARES: &str = "no device allows shares";
const NO_METADATA: &str = "containers get no files of device metadata";

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Whole,
    Partition,
}

impl Kind {
    fn profile(self) -> Value {
        match self {
            Self::Whole => json!({"deviceClass": "gpu.nvidia.com", "matching": {"type": "gpu"}}),
            Self::Partition => {
                json!({"deviceClass": "mig.nvidia.com", "matching": {"type": "mig", "profile": "1g.10gb"}})
            }
        }
    }
}

/// An API server alone, with its controllers.
pub(crate) const CLUSTER: &str = "conform";

/// Builds kerf and the emulator as they are shipped, and checks them on the API
/// server of the cluster of that name, or on one of its own.
pub fn of(name: Option<&str>) -> Result<()> {
    emulator::build()?;
    exec::inherit(&mut exec::cargo(&["build", "--release", "--package", "kerf"]))?;
    exec::inherit(&mut exec::cargo(&["build", "--package", "dra-conformance"]))?;
    if let Some(name) = name {
        return run(&Cluster::open(name)?.context("there is no such cluster")?);
    }
    let outcome = alone(None);
    // Whatever came of it.
    outcome.and(cluster::down(CLUSTER))
}

/// As [`run`], on an API server of its own, which is left.
pub(crate) fn alone(kubernetes: Option<Release>) -> Result<()> {
    let options = Options { name: CLUSTER.to_owned(), kubernetes, ..Options::default() };
    run(&Cluster::without_node(&options)?)
}

/// Runs all checks on the cluster's API server, in both orders at the same time, for
/// they wait nearly always; one that fails is an error. kerf and the emulator must
/// be built as they are shipped; the tool is built by its own tests.
fn run(cluster: &Cluster) -> Result<()> {
    let kubeconfig = &cluster.kubeconfig();
    thread::scope(|scope| {
        let runs: Vec<_> =
            (0..ORDERS.len()).map(|index| scope.spawn(move || in_order(index, kubeconfig))).collect();
        let ended = runs.into_iter().map(|run| run.join().unwrap_or_else(|_| bail!("a run panicked")));
        ended.fold(Ok(()), Result::and)
    })
}

fn in_order(index: usize, kubeconfig: &Path) -> Result<()> {
    // Not below the checkout: paths of sockets must be short.
    let root = tempfile::Builder::new().prefix("kerf").tempdir()?;
    emulator::make(&root.path().join("emulator"), &["h100-80".to_owned(), "h100-80".to_owned()])?;
    let profile = root.path().join("profile.yaml");
    std::fs::write(&profile, profile_of_kerf(root.path(), NODES[index], ORDERS[index])?)?;
    let results = paths::target().join("conformance");
    std::fs::create_dir_all(&results)?;
    let mut command = Command::new(paths::target().join("debug/dra-conformance"));
    command.arg("run").arg("--profile").arg(profile).arg("--kubeconfig").arg(kubeconfig);
    if index > 0 {
        // What claims ask for makes no difference to the others. Of a namespace only
        // one run may say whether administrative access is allowed there.
        command.args(
            ["PREP", "UNPREP", "CDI", "RESTART", "OUTAGE", "STATE", "DISK", "HANG", "UPDATE"]
                .iter()
                .flat_map(|area| ["--only", area]),
        );
        // The emulated call that is made slow is one of partitions; a whole GPU in
        // its mode is given back without a word to it.
        command.args(["--skip", "HANG-004", "--skip", "HANG-005"]);
    }
    command.arg("--junit").arg(results.join(format!("junit-{index}.xml")));
    let json = results.join(format!("results-{index}.json"));
    command.arg("--json").arg(&json);
    let output = command.stdin(Stdio::null()).output().context("cannot run dra-conformance")?;
    // As a whole, for the other order's run says something too.
    let said =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
    eprintln!("{said}");
    ensure!(output.status.success(), "dra-conformance failed ({})", output.status);
    let passed_over = passed_over(&std::fs::read_to_string(json)?)?;
    let unexpected: Vec<&String> =
        passed_over.iter().filter(|id| !NOT_APPLICABLE.iter().any(|(known, _)| known == id)).collect();
    ensure!(unexpected.is_empty(), "these checks apply to kerf, and were passed over: {unexpected:?}");
    Ok(())
}

/// The ids of checks that did not apply.
fn passed_over(results: &str) -> Result<Vec<String>> {
    let results: Value = serde_json::from_str(results)?;
    let checks = results["checks"].as_array().context("the results have no checks")?;
    let other = checks.iter().filter(|check| check["result"] == "not-applicable");
    other.map(|check| Ok(check["id"].as_str().context("a check has no id")?.to_owned())).collect()
}

/// JSON is YAML too.
fn profile_of_kerf(root: &Path, node: &str, order: [Kind; 2]) -> Result<String> {
    for folder in ["plugins_registry", "plugins", "cdi"] {
        std::fs::create_dir(root.join(folder)).with_context(|| format!("cannot make {folder}"))?;
    }
    let machine = root.join("emulator");
    let text = |path: &Path| path.display().to_string();
    let kerf = text(&paths::release().join("kerf"));
    let mut start = vec![kerf, "node".to_owned()];
    start.extend(["--node-name", node, "--instance", "{instance}"].map(str::to_owned));
    start.extend(["--http-address", "127.0.0.1:0", "--log-level", "error"].map(str::to_owned));
    for (flag, path) in [
        ("--kubelet-root", root.to_owned()),
        ("--cdi-root", root.join("cdi")),
        ("--hook-root", root.join("hook")),
        ("--driver-root", machine.join("driver")),
        ("--dev-root", machine.join("dev")),
        ("--proc-root", machine.join("proc")),
        ("--sys-root", machine.join("sys")),
    ] {
        start.extend([flag.to_owned(), text(&path)]);
    }
    let emulator = text(&paths::release().join("nvidia-emulator"));
    let profile = json!({
        "driver": "gpu.nvidia.com",
        "node": node,
        "registry": text(&root.join("plugins_registry")),
        "cdi": [text(&root.join("cdi"))],
        "claims": order.map(Kind::profile),
        "state": text(&root.join("plugins/gpu.nvidia.com/state")),
        "start": start,
        "environment": {"KUBECONFIG": "{kubeconfig}"},
        // kerf writes at once, but for withdrawals, which come 30 s later: the default
        // of 10 s would see no more of these.
        "limits": {"quiet": 3},
        "reboot": [emulator, "--root", &text(&machine), "reboot"],
        "hang": {
            "begin": [emulator, "--root", &text(&machine), "latency", "set", "all", "2000"],
            "end": [emulator, "--root", &text(&machine), "latency", "set", "all", "0"],
        },
        "slow": {
            "begin": [emulator, "--root", &text(&machine), "latency", "set", CREATE, "10000"],
            "end": [emulator, "--root", &text(&machine), "latency", "set", CREATE, "0"],
        },
    });
    Ok(format!("{profile:#}"))
}
