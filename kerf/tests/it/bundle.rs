//! The bundle of a container, and the hook on it.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// A bundle: `config.json` beside the root of a container.
pub(crate) struct Bundle(tempfile::TempDir);

impl Bundle {
    pub(crate) fn new(files: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("config.json"), r#"{"root": {"path": "rootfs"}}"#).unwrap();
        fs::create_dir(folder.path().join("rootfs")).unwrap();
        let bundle = Self(folder);
        for file in files {
            bundle.put(file, b"x");
        }
        bundle
    }

    pub(crate) fn root(&self) -> PathBuf {
        self.0.path().join("rootfs")
    }

    pub(crate) fn put(&self, path: &str, content: &[u8]) {
        let path = self.root().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    pub(crate) fn copy(&self, from: &Path) {
        let to = self.root().join(from.strip_prefix("/").unwrap());
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::copy(from, to).unwrap();
    }

    /// The bundle's own folder.
    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    pub(crate) fn state(&self) -> String {
        format!(r#"{{"ociVersion": "1.2.0", "id": "c", "pid": 1, "bundle": "{}"}}"#, self.0.path().display())
    }

    /// Runs the hook as `start` begins a command, the hook's program last.
    pub(crate) fn hook(&self, start: &[&str], arguments: &[&str]) -> Output {
        let command: Vec<&str> =
            start.iter().copied().chain([env!("CARGO_BIN_EXE_kerf"), "cdi-hook"]).collect();
        let mut child = Command::new(command[0])
            .args(&command[1..])
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(self.state().as_bytes()).unwrap();
        child.wait_with_output().unwrap()
    }

    pub(crate) fn hooked(&self, arguments: &[&str]) {
        let output = self.hook(&[], arguments);
        assert!(output.status.success(), "{output:?}");
        assert!(output.stderr.is_empty(), "{output:?}");
    }
}

/// What a CDI spec asks the hook for.
pub(crate) const CUDA: &[&str] = &[
    "--link=libcuda.so.580.1::/usr/lib64/libcuda.so.1",
    "--link=libcuda.so.1::/usr/lib64/libcuda.so",
    "--library=/usr/lib64/libcuda.so.1",
    "--library=/usr/lib64/libnvidia-tls.so.580.1",
];

/// What `ldconfig` reads in the cache of a root.
pub(crate) fn cached(bundle: &Bundle) -> String {
    let mut command = Command::new("/sbin/ldconfig");
    let output = command.args(["-p", "-C"]).arg(bundle.root().join("etc/ld.so.cache")).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

pub(crate) fn is_root() -> bool {
    let is = fs::read_to_string("/proc/self/status").unwrap().contains("\nUid:\t0\t0");
    if !is {
        eprintln!("skipped: only root may mount and change its root folder");
    }
    is
}
