//! Every path and name of one cluster, derived from its name alone, so that
//! `down` can take away what an `up` made that died before it wrote anything.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

use crate::paths;

/// The kernel limits an interface's name to 15 bytes, of which `kerf-` takes 5.
const MAX_NAME: usize = 10;

/// The paths and names of one cluster.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    pub(crate) name: String,
    /// All state but that of the folders below.
    pub(crate) state: PathBuf,
    /// The kubelet's root. Not below `state`: a plugin's socket there, with a
    /// pod's UID in its name, must fit into the 107 bytes of a socket address.
    /// Not below `/run`: that is often mounted `noexec,nodev`.
    pub(crate) kubelet_root: PathBuf,
    /// Where drivers put programs that containers' users must reach; neither the
    /// kubelet's folders nor those of a checkout are open to everybody.
    pub(crate) hook_root: PathBuf,
    /// containerd's sockets and run-time state, short for the same reason.
    pub(crate) run: PathBuf,
}

impl Layout {
    /// Where a folder a cluster is, for all checkouts of the machine.
    pub(crate) const RUN: &str = "/run";
    /// How those folders' names begin.
    pub(crate) const PREFIX: &str = "kerf-";
    /// File in such a folder, with the number of the cluster's network.
    pub(crate) const NETWORK_CLAIM: &str = "network";

    /// No dashes: the name must not be the beginning of another cluster's
    /// `kerf-<name>-…`.
    pub(crate) fn new(name: &str) -> Result<Self> {
        let first = name.bytes().next().is_some_and(|byte| byte.is_ascii_lowercase());
        let all = name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
        if !first || !all || name.len() > MAX_NAME {
            bail!(
                "{name:?} cannot name a cluster: at most {MAX_NAME} lower-case letters and digits, a letter first"
            );
        }
        Ok(Self {
            name: name.to_owned(),
            state: paths::cluster_state(name),
            kubelet_root: Path::new("/var/lib").join(format!("{}{name}", Self::PREFIX)),
            hook_root: Path::new("/var/lib").join(format!("{}{name}-hook", Self::PREFIX)),
            run: Path::new(Self::RUN).join(format!("{}{name}", Self::PREFIX)),
        })
    }

    /// Name of the node, the bridge, the CNI network and the cgroup.
    pub(crate) fn node(&self) -> String {
        format!("{}{}", Self::PREFIX, self.name)
    }

    /// Held by whoever brings the cluster up or down.
    pub(crate) fn lock(&self) -> PathBuf {
        self.state.with_extension("lock")
    }

    /// Which checkout's cluster this is: names are unique on a machine.
    pub(crate) fn owner(&self) -> PathBuf {
        self.run.join("owner")
    }

    pub(crate) fn network_claim(&self) -> PathBuf {
        self.run.join(Self::NETWORK_CLAIM)
    }

    pub(crate) fn settings(&self) -> PathBuf {
        self.state.join("settings.json")
    }

    pub(crate) fn pki(&self) -> PathBuf {
        self.state.join("pki")
    }

    pub(crate) fn kubeconfig(&self, user: &str) -> PathBuf {
        self.state.join(format!("{user}.kubeconfig"))
    }

    pub(crate) fn config(&self, file: &str) -> PathBuf {
        self.state.join("config").join(file)
    }

    pub(crate) fn log(&self, component: &str) -> PathBuf {
        self.state.join("logs").join(format!("{component}.log"))
    }

    pub(crate) fn record(&self, component: &str) -> PathBuf {
        self.state.join("processes").join(format!("{component}.json"))
    }

    pub(crate) fn etcd(&self) -> PathBuf {
        self.state.join("etcd")
    }

    pub(crate) fn containerd_root(&self) -> PathBuf {
        self.state.join("containerd")
    }

    pub(crate) fn containerd_socket(&self) -> PathBuf {
        self.run.join("containerd.sock")
    }

    pub(crate) fn cdi(&self) -> PathBuf {
        self.state.join("cdi")
    }

    pub(crate) fn cni(&self) -> PathBuf {
        self.state.join("cni")
    }

    pub(crate) fn pod_logs(&self) -> PathBuf {
        self.state.join("pods")
    }

    pub(crate) fn emulator(&self) -> PathBuf {
        self.state.join("nvidia")
    }

    /// The folders under which all that belongs to the cluster lies.
    pub(crate) fn folders(&self) -> [&Path; 4] {
        [&self.run, &self.kubelet_root, &self.hook_root, &self.state]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_plugin_socket_fits_into_a_socket_address() {
        let layout = Layout::new("abcdefghij").expect("ten letters are a name");
        let uid = "0f2c8f0e-5a43-4d5f-9c57-2b9d6f2f4f0d";
        let socket =
            layout.kubelet_root.join("plugins_registry").join(format!("gpu.nvidia.com@{uid}-reg.sock"));
        assert!(socket.as_os_str().len() <= 107, "{}", socket.display());
    }

    #[test]
    fn a_name_that_could_leave_its_folder_or_prefix_another_is_refused() {
        for name in ["", "a-b", "../x", "A", "1a", "a.b", "abcdefghijk"] {
            assert!(Layout::new(name).is_err(), "{name:?} was taken");
        }
    }
}
