//! The character devices a container needs: found under the dev root, or made
//! there where the driver has not made them yet.
//!
//! Without an X server or `nvidia-modprobe` nobody makes `nvidia-uvm` or the
//! capability nodes. A node of the right name with another number is left over
//! from a former load of the driver, whose dynamic majors differ; it is
//! replaced, as `nvidia-modprobe` does.

use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::Path;

use kerf_dra_driver::hardware::DeviceNode;
use kerf_dra_driver::inventory::{ComputeInstanceId, GpuInstanceId};
use rustix::fs::{FileType, Mode, major, makedev, minor, mknodat};

use crate::examine::NodeTrouble;
use crate::procfs::{self, CharacterDevices};
use crate::roots::Roots;

/// The major of `nvidia<N>` and `nvidiactl`, which the driver registers
/// statically under either name.
const FRONTEND: &[&str] = &["nvidia-frontend", "nvidia"];
const UVM: &[&str] = &["nvidia-uvm"];
const CAPABILITIES: &[&str] = &["nvidia-caps"];

const CONTROL_MINOR: u32 = 255;
const MODESET_MINOR: u32 = 254;

/// Why a container cannot get a device node.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NodeError {
    /// Neither the node nor the number it would have is known.
    #[error("`{path}` is not there and {proc} does not list its driver: load the kernel module ({module})")]
    Unknown { path: String, proc: String, module: &'static str },
    /// The driver knows no such MIG instance, or does not tell.
    #[error("no capability of the MIG instance could be read from `{path}`")]
    NoCapability { path: String },
    /// Something else stands under the node's name.
    #[error("`{path}` is not a character device")]
    NotADevice { path: String },
    /// The node could not be looked at or made.
    #[error("`{path}` could not be made: {source}")]
    Io { path: String, source: io::Error },
}

/// The nodes for a whole GPU, and for a partition of it where one is named.
pub(crate) fn device_nodes(
    roots: &Roots,
    gpu_minor: u32,
    partition: Option<(GpuInstanceId, ComputeInstanceId)>,
) -> Result<Vec<DeviceNode>, NodeError> {
    let devices = CharacterDevices::read(&roots.proc);
    let mut nodes = wanted(&devices, &[gpu_minor])
        .into_iter()
        .map(|Wanted { name, number, module }| required(roots, &name, number, 0o666, module))
        .collect::<Result<Vec<_>, _>>()?;
    nodes.extend(optional(roots, "nvidia-uvm-tools", number(devices.major(UVM), 1))?);
    nodes.extend(optional(roots, "nvidia-modeset", number(devices.major(FRONTEND), MODESET_MINOR))?);

    if let Some((instance, compute_instance)) = partition {
        let major = devices.major(CAPABILITIES);
        for compute_instance in [None, Some(compute_instance)] {
            let path = procfs::capability_path(&roots.proc, gpu_minor, instance, compute_instance);
            let capability = procfs::capability(&path)
                .ok_or_else(|| NodeError::NoCapability { path: path.display().to_string() })?;
            let name = format!("nvidia-caps/nvidia-cap{}", capability.minor);
            nodes.push(required(roots, &name, number(major, capability.minor), capability.mode, "nvidia")?);
        }
    }
    Ok(nodes)
}

/// What would keep containers from getting nodes. Nothing is made, unlike by
/// [`device_nodes`].
pub(crate) fn troubles(roots: &Roots, gpu_minors: &[u32], partitions: bool) -> Vec<NodeTrouble> {
    let devices = CharacterDevices::read(&roots.proc);
    let mut troubles: Vec<NodeTrouble> = wanted(&devices, gpu_minors)
        .into_iter()
        .filter_map(|Wanted { name, number, module }| {
            let path = roots.dev.join(name);
            let text = path.display().to_string();
            match (number_of(&path), number) {
                (Err(error), _) => Some(NodeTrouble::Unusable(error.to_string())),
                (Ok(None), None) => Some(NodeTrouble::Unknown { path: text, module }),
                (Ok(Some(found)), Some(expected)) if found != expected => {
                    Some(NodeTrouble::Outdated { path: text, found, expected })
                }
                (Ok(_), _) => None,
            }
        })
        .collect();
    if partitions && devices.major(CAPABILITIES).is_none() {
        let path = roots.dev.join("nvidia-caps").display().to_string();
        troubles.push(NodeTrouble::Unknown { path, module: "nvidia-caps" });
    }
    troubles
}

/// A node that no container can do without.
struct Wanted {
    name: String,
    /// Its number, where the kernel lists its driver.
    number: Option<(u32, u32)>,
    /// The kernel module that makes the kernel list it.
    module: &'static str,
}

/// The nodes that containers with these GPUs need, whatever they get of them.
fn wanted(devices: &CharacterDevices, gpu_minors: &[u32]) -> Vec<Wanted> {
    let (frontend, uvm) = (devices.major(FRONTEND), devices.major(UVM));
    let gpus = gpu_minors.iter().map(|minor| (format!("nvidia{minor}"), number(frontend, *minor), "nvidia"));
    let control = ("nvidiactl".to_owned(), number(frontend, CONTROL_MINOR), "nvidia");
    let memory = ("nvidia-uvm".to_owned(), number(uvm, 0), "nvidia-uvm");
    gpus.chain([control, memory]).map(|(name, number, module)| Wanted { name, number, module }).collect()
}

fn number(major: Option<u32>, minor: u32) -> Option<(u32, u32)> {
    major.map(|major| (major, minor))
}

/// A node that must be there. It is made where its number is known.
fn required(
    roots: &Roots,
    name: &str,
    expected: Option<(u32, u32)>,
    mode: u32,
    module: &'static str,
) -> Result<DeviceNode, NodeError> {
    let path = roots.dev.join(name);
    let found = number_of(&path)?;
    let number = match (found, expected) {
        (Some(found), None) => found,
        (Some(found), Some(expected)) if found == expected => found,
        (_, Some(expected)) => {
            make(&path, expected, mode)
                .map_err(|source| NodeError::Io { path: path.display().to_string(), source })?;
            tracing::info!(path = %path.display(), major = expected.0, minor = expected.1, "device node made");
            expected
        }
        (None, None) => {
            return Err(NodeError::Unknown {
                path: path.display().to_string(),
                proc: roots.proc.join("devices").display().to_string(),
                module,
            });
        }
    };
    Ok(node(roots, name, number))
}

/// A node that containers get where it is there, and is not out of date.
fn optional(
    roots: &Roots,
    name: &str,
    expected: Option<(u32, u32)>,
) -> Result<Option<DeviceNode>, NodeError> {
    let found = number_of(&roots.dev.join(name))?;
    let current = found.filter(|found| expected.is_none_or(|expected| *found == expected));
    Ok(current.map(|number| node(roots, name, number)))
}

fn node(roots: &Roots, name: &str, (major, minor): (u32, u32)) -> DeviceNode {
    DeviceNode {
        path: format!("/dev/{name}"),
        host_path: roots.host_dev.join(name).display().to_string(),
        major,
        minor,
    }
}

/// The device number under a path; none where nothing is there.
fn number_of(path: &Path) -> Result<Option<(u32, u32)>, NodeError> {
    let text = || path.display().to_string();
    match fs::metadata(path) {
        Ok(metadata) if metadata.file_type().is_char_device() => {
            Ok(Some((major(metadata.rdev()), minor(metadata.rdev()))))
        }
        Ok(_) => Err(NodeError::NotADevice { path: text() }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(NodeError::Io { path: text(), source }),
    }
}

/// Makes a node under another name and renames it, so that no reader ever
/// finds it half made or gone.
fn make(path: &Path, (major, minor): (u32, u32), mode: u32) -> io::Result<()> {
    let (Some(folder), Some(name)) = (path.parent(), path.file_name().and_then(|name| name.to_str())) else {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    };
    fs::create_dir_all(folder)?;
    // Threads and processes may make the same node at once: each its own file.
    let thread = format!("{:?}", std::thread::current().id());
    let thread: String = thread.chars().filter(char::is_ascii_digit).collect();
    let draft_name = format!(".{name}.{}-{thread}", std::process::id());
    let draft = folder.join(&draft_name);
    let directory = File::open(folder)?;
    let permissions = Mode::from_raw_mode(mode);
    let make_draft =
        || mknodat(&directory, &draft_name, FileType::CharacterDevice, permissions, makedev(major, minor));
    match make_draft() {
        Err(rustix::io::Errno::EXIST) => {
            fs::remove_file(&draft)?;
            make_draft()?;
        }
        outcome => outcome?,
    }
    // mknod's mode passes through the umask.
    fs::set_permissions(&draft, Permissions::from_mode(mode))
        .and_then(|()| fs::rename(&draft, path))
        .inspect_err(|_| {
            let _ = fs::remove_file(&draft);
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEVICES: &str =
        "Character devices:\n195 nvidia\n510 nvidia-uvm\n511 nvidia-caps\n\nBlock devices:\n";

    fn tree(devices: &str) -> (tempfile::TempDir, Roots) {
        let root = tempfile::tempdir().expect("a folder");
        let roots = Roots { host_dev: "/on/host/dev".into(), ..Roots::under(root.path()) };
        fs::create_dir_all(&roots.dev).expect("a folder");
        fs::create_dir_all(&roots.proc).expect("a folder");
        fs::write(roots.proc.join("devices"), devices).expect("a file");
        (root, roots)
    }

    fn may_make_nodes(roots: &Roots) -> bool {
        let allowed = make(&roots.dev.join("probe"), (1, 3), 0o666).is_ok();
        if !allowed {
            eprintln!("skipped: this user may not make device nodes (CAP_MKNOD)");
        }
        allowed
    }

    fn numbers(nodes: &[DeviceNode]) -> Vec<(&str, u32, u32)> {
        nodes.iter().map(|node| (node.path.as_str(), node.major, node.minor)).collect()
    }

    #[test]
    fn nodes_the_driver_has_not_made_are_made_with_its_numbers() {
        let (_root, roots) = tree(DEVICES);
        if !may_make_nodes(&roots) {
            return;
        }
        for (path, minor) in [("gi9", 84), ("gi9/ci0", 85)] {
            let folder = roots.proc.join("driver/nvidia/capabilities/gpu2/mig").join(path);
            fs::create_dir_all(&folder).expect("a folder");
            let text = format!("DeviceFileMinor: {minor}\nDeviceFileMode: 292\nDeviceFileModify: 1\n");
            fs::write(folder.join("access"), text).expect("a file");
        }
        let partition = Some((GpuInstanceId(9), ComputeInstanceId(0)));
        let nodes = device_nodes(&roots, 2, partition).expect("nodes");
        let expected = [
            ("/dev/nvidia2", 195, 2),
            ("/dev/nvidiactl", 195, 255),
            ("/dev/nvidia-uvm", 510, 0),
            ("/dev/nvidia-caps/nvidia-cap84", 511, 84),
            ("/dev/nvidia-caps/nvidia-cap85", 511, 85),
        ];
        assert_eq!(numbers(&nodes), expected);
        assert_eq!(nodes[4].host_path, "/on/host/dev/nvidia-caps/nvidia-cap85");
        for (node, mode) in [("nvidia2", 0o666), ("nvidia-caps/nvidia-cap85", 0o444)] {
            let metadata = fs::metadata(roots.dev.join(node)).expect("a node");
            assert_eq!(metadata.permissions().mode() & 0o777, mode, "{node}");
        }
        assert_eq!(device_nodes(&roots, 2, partition).expect("nodes"), nodes);
    }

    #[test]
    fn a_node_of_a_former_driver_load_is_replaced() {
        let (_root, roots) = tree(DEVICES);
        if !may_make_nodes(&roots) {
            return;
        }
        make(&roots.dev.join("nvidia-uvm"), (499, 0), 0o666).expect("a node");
        make(&roots.dev.join("nvidia-uvm-tools"), (499, 1), 0o666).expect("a node");
        let nodes = device_nodes(&roots, 0, None).expect("nodes");
        assert!(numbers(&nodes).contains(&("/dev/nvidia-uvm", 510, 0)), "{nodes:?}");
        assert!(nodes.iter().all(|node| node.path != "/dev/nvidia-uvm-tools"), "{nodes:?}");
        assert_eq!(number_of(&roots.dev.join("nvidia-uvm")).expect("a node"), Some((510, 0)));
    }

    #[test]
    fn a_missing_kernel_module_is_named() {
        let (_root, roots) = tree("Character devices:\n195 nvidia-frontend\n");
        if !may_make_nodes(&roots) {
            return;
        }
        let error = device_nodes(&roots, 0, None).expect_err("no uvm").to_string();
        assert!(error.contains("nvidia-uvm` is not there") && error.contains("(nvidia-uvm)"), "{error}");
    }

    #[test]
    fn a_file_in_the_place_of_a_node_is_an_error_and_stays() {
        let (_root, roots) = tree(DEVICES);
        fs::write(roots.dev.join("nvidia0"), "mine").expect("a file");
        let error = device_nodes(&roots, 0, None).expect_err("no node").to_string();
        assert!(error.contains("not a character device"), "{error}");
        assert_eq!(fs::read_to_string(roots.dev.join("nvidia0")).expect("a file"), "mine");
    }
}
