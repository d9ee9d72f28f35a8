//! The command line. Every flag of a long-running command can come from the
//! environment too, under the name its help shows.

use std::net::SocketAddr;
use std::path::{Component, Path, PathBuf};

use clap::{Args, Parser, Subcommand};
use kerf_dra_driver::hardware::DriverLink;
use kerf_dra_driver::model::{ForeignPartitions, MigModePolicy, ProfileFilter};
use kerf_dra_driver::names::{DriverName, gpu_pool};
use kerf_gpu::Roots;

/// The longest name that the API takes for a pool, in bytes.
const MAX_POOL_NAME: usize = 253;

/// A Kubernetes DRA driver for NVIDIA GPUs.
#[derive(Debug, Parser)]
#[command(name = "kerf", version)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Serve this node's GPUs: publish them, prepare and unprepare claims.
    Node(Box<NodeArguments>),
    /// Show this node's GPUs, placements and claims, or those of the cluster.
    Status(StatusArguments),
    /// Say what keeps this node from serving GPUs, and what to do about it.
    /// Changes nothing. Exit code 1 where an error was found.
    Doctor(Box<DoctorArguments>),
    /// Give a container that is being made the driver's links, and tell its
    /// loader of the libraries. CDI specs name it; the container runtime calls it.
    CdiHook(CdiHookArguments),
}

/// Where the kubelet keeps plugins, and under which name we are one.
#[derive(Debug, Args)]
pub(crate) struct KubeletArguments {
    /// The driver name: attribute domain, CDI kind, sockets and taint keys follow it.
    #[arg(long, env = "DRIVER_NAME", default_value = DriverName::DEFAULT)]
    pub(crate) driver_name: DriverName,
    /// The kubelet's root folder.
    #[arg(long, env = "KUBELET_ROOT", default_value = "/var/lib/kubelet")]
    pub(crate) kubelet_root: PathBuf,
}

impl KubeletArguments {
    /// Where sockets and state are.
    pub(crate) fn plugin_dir(&self) -> PathBuf {
        self.kubelet_root.join("plugins").join(self.driver_name.as_str())
    }

    /// Where the kubelet looks for registration sockets.
    pub(crate) fn registry_dir(&self) -> PathBuf {
        self.kubelet_root.join("plugins_registry")
    }

    /// Where device plugins have their sockets.
    pub(crate) fn device_plugins_dir(&self) -> PathBuf {
        self.kubelet_root.join("device-plugins")
    }

    /// The socket on which the kubelet says which pods use which devices.
    pub(crate) fn pod_resources_socket(&self) -> PathBuf {
        self.kubelet_root.join("pod-resources").join("kubelet.sock")
    }
}

/// Where the host's trees are.
#[derive(Debug, Args)]
#[expect(clippy::struct_field_names, reason = "a field's name is its flag")]
pub(crate) struct RootArguments {
    /// Where CDI specs are written; a folder that the container runtime reads.
    #[arg(long, env = "CDI_ROOT", default_value = "/var/run/cdi")]
    pub(crate) cdi_root: PathBuf,
    /// Where the NVIDIA driver is installed, as this process sees it.
    #[arg(long, env = "DRIVER_ROOT", default_value = "/")]
    pub(crate) driver_root: PathBuf,
    /// The same folder as the container runtime sees it.
    #[arg(long, env = "HOST_DRIVER_ROOT")]
    pub(crate) host_driver_root: Option<PathBuf>,
    /// Where the device nodes are, as this process sees them.
    #[arg(long, env = "DEV_ROOT", default_value = "/dev")]
    pub(crate) dev_root: PathBuf,
    /// The same folder as the container runtime sees it.
    #[arg(long, env = "HOST_DEV_ROOT")]
    pub(crate) host_dev_root: Option<PathBuf>,
    /// Where procfs is.
    #[arg(long, env = "PROC_ROOT", default_value = "/proc")]
    pub(crate) proc_root: PathBuf,
    /// Where sysfs is.
    #[arg(long, env = "SYS_ROOT", default_value = "/sys")]
    pub(crate) sys_root: PathBuf,
}

impl RootArguments {
    /// What the hardware is found under.
    pub(crate) fn hardware(&self) -> Roots {
        let (driver, dev) = (self.driver_root.clone(), self.dev_root.clone());
        Roots {
            host_driver: self.host_driver_root.clone().unwrap_or_else(|| driver.clone()),
            driver,
            host_dev: self.host_dev_root.clone().unwrap_or_else(|| dev.clone()),
            dev,
            proc: self.proc_root.clone(),
            sys: self.sys_root.clone(),
        }
    }
}

/// Where the CDI hook's program is.
#[derive(Debug, Args)]
pub(crate) struct HookArguments {
    /// Below this folder the program of the CDI hook is put, which the
    /// container runtime starts for each container with a GPU. The path is the
    /// same on the host. The file system must not be mounted `noexec`, and
    /// everybody must be able to pass through the folders: pods with a user
    /// namespace (`hostUsers: false`) start it as nobody. The kubelet's own
    /// folders are closed to others.
    #[arg(long, env = "HOOK_ROOT", default_value = "/var/lib/kerf", value_parser = hook_root)]
    pub(crate) hook_root: PathBuf,
}

impl HookArguments {
    /// Where a driver's copies are.
    pub(crate) fn copies(&self, driver: &DriverName) -> PathBuf {
        self.hook_root.join(driver.as_str())
    }
}

/// Flags of `kerf doctor`.
#[derive(Debug, Args)]
pub(crate) struct DoctorArguments {
    #[command(flatten)]
    pub(crate) kubelet: KubeletArguments,
    #[command(flatten)]
    pub(crate) roots: RootArguments,
    #[command(flatten)]
    pub(crate) hook: HookArguments,
    /// The name of this node's Node object; the API server is asked what it keeps
    /// of its slices.
    #[arg(long, env = "NODE_NAME")]
    pub(crate) node_name: Option<String>,
    /// Where the host's `/etc` is: `containerd/config.toml` and `cdi` are read there.
    #[arg(long, env = "ETC_ROOT", default_value = "/etc")]
    pub(crate) etc_root: PathBuf,
    /// Print the findings as JSON.
    #[arg(long)]
    pub(crate) json: bool,
    /// Look for nothing; print what the GPUs answer, as models of the emulator.
    #[arg(long, conflicts_with = "json")]
    pub(crate) dump_nvml: bool,
}

/// Flags of `kerf status`.
#[derive(Debug, Args)]
pub(crate) struct StatusArguments {
    #[command(flatten)]
    pub(crate) kubelet: KubeletArguments,
    /// Show all nodes' GPUs and who holds them, and why claims wait, as the API
    /// server has it: the cluster of `KUBECONFIG`, of `~/.kube/config`, or of
    /// the pod that this runs in. No folder of the kubelet is looked at.
    #[arg(long)]
    pub(crate) cluster: bool,
    /// Print the status as JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Flags of `kerf cdi-hook`, which reads the container's OCI state on stdin.
#[derive(Debug, Args)]
pub(crate) struct CdiHookArguments {
    /// A link to make: `TARGET::PATH`. May be repeated.
    #[arg(long, value_parser = link)]
    pub(crate) link: Vec<DriverLink>,
    /// A library that the loader must find by its name. May be repeated.
    #[arg(long, value_name = "PATH")]
    pub(crate) library: Vec<String>,
}

fn link(text: &str) -> Result<DriverLink, String> {
    let (target, path) = text
        .split_once("::")
        .filter(|(target, path)| !target.is_empty() && path.starts_with('/'))
        .ok_or("it is not TARGET::PATH with an absolute path")?;
    Ok(DriverLink { target: target.to_owned(), path: path.to_owned() })
}

/// Flags of `kerf node`.
#[derive(Debug, Args)]
pub(crate) struct NodeArguments {
    #[command(flatten)]
    pub(crate) kubelet: KubeletArguments,
    /// The name of this node's Node object.
    #[arg(long, env = "NODE_NAME", value_parser = node_name)]
    pub(crate) node_name: String,
    #[command(flatten)]
    pub(crate) roots: RootArguments,
    #[command(flatten)]
    pub(crate) hook: HookArguments,
    /// What tells this process from others on the node: its pod's UID. The names
    /// of its sockets contain it, so that in a rolling update the former instance
    /// serves until the kubelet knows the new one.
    #[arg(long, env = "POD_UID", value_parser = instance)]
    pub(crate) instance: Option<String>,
    /// Whether kerf changes the MIG mode of GPUs when a claim needs the other
    /// one: `manage` or `keep`. Default: `manage` from Hopper on. Ampere GPUs,
    /// where a change needs a reset, and vGPU guests, where the mode is the
    /// hypervisor's, are always kept.
    #[arg(long, env = "MIG_MODE")]
    pub(crate) mig_mode: Option<MigModePolicy>,
    /// The MIG profiles to publish: `all`, `none`, or names separated by commas.
    #[arg(long, env = "MIG_PROFILES", default_value = "all")]
    pub(crate) mig_profiles: ProfileFilter,
    /// What becomes of GPU instances that kerf did not make: `publish` them as
    /// static devices, or `ignore` them. Neither ever destroys one.
    #[arg(long, env = "FOREIGN_PARTITIONS", default_value = "publish")]
    pub(crate) foreign_partitions: ForeignPartitions,
    /// A file or folder that every container with a device gets, read-only:
    /// `HOST_PATH:CONTAINER_PATH`. May be repeated.
    #[arg(long, env = "EXTRA_MOUNTS", value_delimiter = ',')]
    pub(crate) extra_mount: Vec<String>,
    /// Where `/healthz`, `/readyz` and `/metrics` are served.
    #[arg(long, env = "HTTP_ADDRESS", default_value = "0.0.0.0:9402")]
    pub(crate) http_address: SocketAddr,
    /// What is logged: a level, or a filter such as `info,kerf_controller=debug`.
    #[arg(long, env = "LOG_LEVEL", default_value = "info")]
    pub(crate) log_level: String,
}

/// A folder that a dynamic loader takes as one: it splits lists of folders at `:`
/// and `;`, and replaces what begins with `$`.
fn hook_root(text: &str) -> Result<PathBuf, String> {
    let path = Path::new(text);
    let is_plain = path.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
    if !path.is_absolute() || path.parent().is_none() || !is_plain || text.contains([':', ';', '$']) {
        return Err("it is not an absolute path of a folder without `..`, `:`, `;` and `$`".to_owned());
    }
    Ok(path.to_owned())
}

/// A part of a socket's name.
fn instance(text: &str) -> Result<String, String> {
    let is_good = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    if text.is_empty() || text.len() > 63 || !text.bytes().all(is_good) {
        return Err("it is not 1 to 63 letters, digits and dashes, as a pod's UID is".to_owned());
    }
    Ok(text.to_owned())
}

/// A node name of which a pool's name can be made.
fn node_name(text: &str) -> Result<String, String> {
    let most = MAX_POOL_NAME - gpu_pool("").len();
    match text.len() {
        0 => Err("it is empty; it is the name of this node's Node object".to_owned()),
        length if length > most => Err(format!(
            "it is {length} characters long; at most {most} are possible, since the pool of the node's GPUs is \
             `{}` and the API allows {MAX_POOL_NAME} for that",
            gpu_pool("<node>")
        )),
        _ => Ok(text.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(node: &str) -> Result<Arguments, String> {
        Arguments::try_parse_from(["kerf", "node", "--node-name", node]).map_err(|error| error.to_string())
    }

    #[test]
    fn a_hooks_folder_is_one_that_a_loader_understands() {
        for good in ["/var/lib/kerf", "/home/kubernetes/bin/kerf/", "/with space"] {
            assert!(hook_root(good).is_ok(), "{good}");
        }
        for bad in ["", "/", "rel", "/a/../b", "/a:b", "/a;b", "/$LIB/x"] {
            assert!(hook_root(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_node_whose_name_leaves_no_room_for_a_pools_name_is_refused_at_the_start() {
        assert!(parse(&"n".repeat(249)).is_ok());
        let error = parse(&"n".repeat(250)).expect_err("too long");
        assert!(error.contains("250 characters long; at most 249 are possible"), "{error}");
        let error = parse("").expect_err("no name");
        assert!(error.contains("it is empty"), "{error}");
    }
}
