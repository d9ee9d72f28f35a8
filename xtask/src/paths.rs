//! Where things are in a checkout. The only place that knows.

use std::path::PathBuf;

/// The repository's root.
pub fn root() -> PathBuf {
    let mut path = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    path.pop();
    path
}

/// Cargo's target folder, where everything made by `cargo xtask` lies too.
pub fn target() -> PathBuf {
    root().join("target")
}

/// The stock programs a cluster runs, and what was built with which key.
pub fn cluster_programs() -> PathBuf {
    target().join("cluster/bin")
}

/// One folder a running cluster: its whole state but the kubelet's and
/// containerd's, whose paths must be short.
pub fn cluster_state(name: &str) -> PathBuf {
    target().join("cluster/run").join(name)
}

/// What builds and clusters that are gone have logged.
pub fn cluster_logs() -> PathBuf {
    target().join("cluster/logs")
}

/// The Go module from which the control plane is built.
pub fn cluster_module() -> PathBuf {
    root().join("tests/cluster")
}

/// OCI archives made by `cargo xtask image`.
pub fn images() -> PathBuf {
    target().join("images")
}

/// Binaries and libraries as they are shipped.
pub fn release() -> PathBuf {
    target().join("release")
}
