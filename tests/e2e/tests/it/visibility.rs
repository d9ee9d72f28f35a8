//! What each container sees: exactly what its requests were given.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use kerf_e2e::{LIMIT, Scene, wait_until};
use rustix::fs::{CWD, FileType, Mode, mknodat};

use crate::ground;
use crate::machine::{self, Held};
use crate::manifest::{self, Pod, SMALL, WHOLE, request, requests};

/// The runtime starts the CDI hook as a container's root, which is nobody on the
/// host here: it must reach the hook's program, and the root it works on.
pub(crate) fn in_a_user_namespace(scene: &Scene<'_>) -> Result<()> {
    if Path::new("/proc/driver/nvidia").exists() {
        eprintln!("  skipped: this machine has an NVIDIA driver, whose device nodes would be in the way");
        return Ok(());
    }
    let devices = requests(&[request("gpu", WHOLE), request("slice", SMALL)]);
    let pod = Pod::new("nobody").with_template("claim", "nobody").container("main", &["claim"]);
    scene
        .apply(&manifest::list(&[manifest::template("nobody", &devices), pod.in_user_namespace().json()]))?;
    wait_until("the claim is prepared", LIMIT, || Ok((!ground::cdi_files(scene)?.is_empty()).then_some(())))?;
    let _nodes = HostNodes::of(&scene.cluster.emulator_root().context("no emulated GPUs")?.join("dev"))?;
    scene.await_running("nobody")?;
    let mapped = scene.exec("nobody", None, &["cat", "/proc/self/uid_map"])?;
    let first: Vec<&str> = mapped.split_whitespace().collect();
    ensure!(first.get(..2).is_some_and(|range| range[1] != "0"), "root is the host's root: {mapped}");
    machine::sees_what_it_holds(scene, "nobody")?;
    // What only the hook makes.
    let links = scene.exec("nobody", None, &["sh", "-c", "find / -xdev -name libnvidia-ml.so.1"])?;
    ensure!(!links.trim().is_empty(), "the container has no libnvidia-ml.so.1");
    let cache = scene.exec("nobody", None, &["cat", "/etc/ld.so.conf.d/00-kerf.conf"])?;
    ensure!(!cache.trim().is_empty(), "the container's loader was told nothing");
    Ok(())
}

/// The emulated device nodes, under the paths that they would have on a node
/// with GPUs: in a user namespace a runtime binds them from there, since it may
/// make none. They go with this value.
struct HostNodes(PathBuf);

impl HostNodes {
    fn of(emulated: &Path) -> Result<Self> {
        let nodes = Self(emulated.to_owned());
        // Left by a run that was killed.
        nodes.remove()?;
        fs::create_dir_all("/dev/nvidia-caps")?;
        for (node, number) in nodes.all()? {
            let mode = Mode::from_raw_mode(0o666);
            mknodat(CWD, &node, FileType::CharacterDevice, mode, number)
                .with_context(|| format!("cannot make {}", node.display()))?;
            // The umask took something away.
            fs::set_permissions(&node, fs::Permissions::from_mode(0o666))?;
        }
        Ok(nodes)
    }

    /// The paths on the host and the numbers of devices.
    fn all(&self) -> Result<Vec<(PathBuf, u64)>> {
        let mut nodes = Vec::new();
        for folder in ["", "nvidia-caps"] {
            for entry in fs::read_dir(self.0.join(folder))? {
                let entry = entry?;
                if entry.file_type()?.is_char_device() {
                    let path = Path::new("/dev").join(folder).join(entry.file_name());
                    nodes.push((path, entry.metadata()?.rdev()));
                }
            }
        }
        Ok(nodes)
    }

    fn remove(&self) -> Result<()> {
        for (node, _) in self.all()? {
            if node.symlink_metadata().is_ok() {
                fs::remove_file(&node).with_context(|| format!("cannot remove {}", node.display()))?;
            }
        }
        let _ = fs::remove_dir("/dev/nvidia-caps");
        Ok(())
    }
}

impl Drop for HostNodes {
    fn drop(&mut self) {
        if let Err(error) = self.remove() {
            eprintln!("  device nodes are left in /dev: {error:#}");
        }
    }
}

pub(crate) fn only_its_requests(scene: &Scene<'_>) -> Result<()> {
    let one = requests(&[
        request("gpu", WHOLE),
        request("small", SMALL),
        request("large", "mig-3g.40gb.nvidia.com"),
    ]);
    let two = requests(&[request("slice", SMALL)]);
    let containers: [(&str, &[&str]); 6] = [
        ("gpu", &["one/gpu"]),
        ("small", &["one/small"]),
        ("mixed", &["one/large", "two"]),
        ("all", &["one"]),
        ("second", &["two/slice"]),
        ("none", &[]),
    ];
    let mut pod = Pod::new("pod").with_template("one", "one").with_template("two", "two");
    pod = pod.init_container("first-large", &["one/large"]).init_container("first-gpu", &["one/gpu", "two"]);
    for (name, uses) in containers {
        pod = pod.container(name, uses);
    }
    let neighbour = manifest::lone("neighbour", &requests(&[request("slice", SMALL)]));
    scene.apply(&neighbour)?;
    scene.await_running("neighbour")?;
    scene.apply(&manifest::list(&[
        manifest::template("one", &one),
        manifest::template("two", &two),
        pod.json(),
    ]))?;
    scene.await_running("pod")?;

    let held = machine::held_by(scene, "pod")?;
    let of = |requests: &[&str]| -> Vec<Held> {
        held.iter().filter(|held| requests.contains(&held.request.as_str())).cloned().collect()
    };
    for (container, requests) in [
        ("gpu", ["gpu"].as_slice()),
        ("small", &["small"]),
        ("mixed", &["large", "slice"]),
        ("all", &["gpu", "small", "large"]),
        ("second", &["slice"]),
    ] {
        let held = of(requests);
        ensure!(held.len() == requests.len(), "for {requests:?} the pod holds {held:?}");
        let (real, seen) = (machine::on_hardware(scene, &held)?, machine::seen_in(scene, "pod", container)?);
        ensure!(seen == real, "{container} sees {seen:?}, its requests were given {real:?}");
        has_nodes_of(scene, container, &held)?;
    }
    for (container, requests) in [("first-large", ["large"].as_slice()), ("first-gpu", &["gpu", "slice"])] {
        let real = machine::on_hardware(scene, &of(requests))?;
        let seen = machine::listed(&scene.logs("pod", Some(container))?)?;
        ensure!(seen == real, "{container} saw {seen:?}, its requests were given {real:?}");
    }
    let nodes = nodes_in(scene, "none")?;
    ensure!(nodes.is_empty(), "a container without a device has {nodes:?}");
    ensure!(machine::seen_in(scene, "pod", "none").is_err(), "a container without a device has nvidia-smi");
    machine::sees_what_it_holds(scene, "neighbour").map(drop)
}

/// Makes sure that of GPUs and partitions a container has the nodes of its own
/// alone: what a program may open does not depend on what NVML tells it.
fn has_nodes_of(scene: &Scene<'_>, container: &str, held: &[Held]) -> Result<()> {
    let nodes = nodes_in(scene, container)?;
    let gpus = held.iter().map(Held::pci).collect::<Result<BTreeSet<_>>>()?;
    let whole = |node: &&String| node.strip_prefix("nvidia").is_some_and(|rest| rest.parse::<u32>().is_ok());
    let (found, expected) = (nodes.iter().filter(whole).count(), gpus.len());
    ensure!(found == expected, "{container} has {nodes:?} for {held:?}");
    let partitions = held.iter().filter(|held| held.partition().is_some()).count();
    let capabilities = nodes.iter().filter(|node| node.starts_with("nvidia-cap")).count();
    // One for the GPU instance, one for the compute instance in it.
    ensure!(capabilities == 2 * partitions, "{container} has {nodes:?} for {held:?}");
    Ok(())
}

/// The NVIDIA device nodes in a container, by file name.
fn nodes_in(scene: &Scene<'_>, container: &str) -> Result<Vec<String>> {
    let listing = scene.exec("pod", Some(container), &["find", "/dev", "-type", "c", "-name", "nvidia*"])?;
    let name = |path: &str| path.rsplit('/').next().map(str::to_owned).context("an empty path");
    listing.lines().map(name).collect()
}
