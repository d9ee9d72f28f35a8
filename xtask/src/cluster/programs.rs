//! Builds the stock programs of a cluster from their published Go modules, and
//! knows whether what lies under `target/` is still what would be built.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context as _, Result, bail};
use sha2::{Digest as _, Sha256};

use crate::{debian, exec, files, paths};

/// What `kubelet --version` reports; the module graph is in `tests/cluster`.
const KUBERNETES: &str = "v1.37.2";
const CONTAINERD: &str = "v2.4.2";
const CRICTL: &str = "v1.37.0";
const HELM: &str = "v4.3.1";
/// Debian's may be too old for user namespaces of pods (1.2 is needed).
const RUNC: &str = "v1.5.3";

/// What a build has made so far is in a folder of its own, named after the
/// process that runs it.
const UNFINISHED: &str = ".unfinished-";

/// One `go` call and the programs it makes.
struct Build {
    name: &'static str,
    version: &'static str,
    /// Empty: the module in `tests/cluster` itself.
    packages: &'static [&'static str],
    programs: &'static [&'static str],
    cold: &'static str,
    /// Whether a part of it is C.
    has_c: bool,
}

const BUILDS: [Build; 5] = [
    Build {
        name: "kubernetes",
        version: KUBERNETES,
        packages: &[],
        programs: &["kubernetes"],
        cold: "10 minutes",
        has_c: false,
    },
    Build {
        name: "containerd",
        version: CONTAINERD,
        packages: &[
            "github.com/containerd/containerd/v2/cmd/containerd",
            "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2",
            "github.com/containerd/containerd/v2/cmd/ctr",
        ],
        programs: &["containerd", "containerd-shim-runc-v2", "ctr"],
        cold: "2 minutes",
        has_c: false,
    },
    Build {
        name: "crictl",
        version: CRICTL,
        packages: &["sigs.k8s.io/cri-tools/cmd/crictl"],
        programs: &["crictl"],
        cold: "1 minute",
        has_c: false,
    },
    Build {
        name: "helm",
        version: HELM,
        packages: &["helm.sh/helm/v4/cmd/helm"],
        programs: &["helm"],
        cold: "3 minutes",
        has_c: false,
    },
    Build {
        name: "runc",
        version: RUNC,
        packages: &["github.com/opencontainers/runc"],
        programs: &["runc"],
        cold: "1 minute",
        // What enters namespaces must be alone in its process: before Go starts.
        has_c: true,
    },
];

/// The folder with all programs, built if they are not there or not current.
///
/// One process builds at a time, another waits for it and finds its work done.
pub fn ensure() -> Result<PathBuf> {
    let folder = paths::cluster_programs();
    fs::create_dir_all(&folder)?;
    let _lock = files::Lock::take(&folder.join(".lock"))?;
    // A compiler whose `xtask` was killed may still write into such a folder.
    for entry in fs::read_dir(&folder)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(UNFINISHED) {
            files::remove(&entry.path())?;
        }
    }
    for build in &BUILDS {
        build.ensure(&folder)?;
    }
    let kubectl = folder.join("kubectl");
    if fs::read_link(&kubectl).is_err() {
        files::remove(&kubectl)?;
        std::os::unix::fs::symlink("kubernetes", &kubectl)?;
    }
    Ok(folder)
}

impl Build {
    fn ensure(&self, folder: &Path) -> Result<()> {
        let key = self.key()?;
        let stamp = folder.join(format!(".{}.key", self.name));
        let there = self.programs.iter().all(|program| folder.join(program).is_file());
        if there && fs::read_to_string(&stamp).is_ok_and(|old| old == key) {
            return Ok(());
        }
        if self.has_c {
            debian::require(&[debian::COMPILER, debian::PKG_CONFIG, debian::SECCOMP])?;
        }
        let started = Instant::now();
        eprintln!("building {} {} (about {} the first time)", self.name, self.version, self.cold);
        let output = folder.join(format!("{UNFINISHED}{}", std::process::id()));
        fs::create_dir_all(&output)?;
        let logs = paths::cluster_logs();
        fs::create_dir_all(&logs)?;
        let log = logs.join(format!("build-{}.log", self.name));
        exec::logged(&format!("building {}", self.name), &mut self.command(&output), &log)?;
        for program in self.programs {
            fs::rename(output.join(program), folder.join(program))
                .with_context(|| format!("the build of {} made no {program}", self.name))?;
        }
        files::remove(&output)?;
        files::replace(&stamp, key.as_bytes())?;
        eprintln!("built {} in {} s", self.name, started.elapsed().as_secs());
        Ok(())
    }

    fn command(&self, output: &Path) -> Command {
        let mut command = Command::new("go");
        command
            .env("CGO_ENABLED", if self.has_c { "1" } else { "0" })
            .env("GOWORK", "off")
            .env("GOBIN", output);
        command.current_dir(paths::cluster_module());
        if self.packages.is_empty() {
            let flags = format!("-s -w -X k8s.io/component-base/version.gitVersion={}", self.version);
            command.args(["build", "-trimpath", "-buildvcs=false", "-ldflags", &flags, "-o"]);
            command.arg(output.join(self.name)).arg(".");
        } else {
            command.args(["install", "-buildvcs=false", "-ldflags", "-s -w"]);
            if self.has_c {
                command.args(["-tags", "seccomp"]);
            }
            command.args(self.packages.iter().map(|package| format!("{package}@{}", self.version)));
        }
        command
    }

    /// All that decides what the programs are, apart from the Go release.
    fn key(&self) -> Result<String> {
        let mut hash = Sha256::new();
        hash.update(self.version);
        for package in self.packages {
            hash.update(package);
        }
        if self.has_c {
            hash.update("seccomp");
        }
        if self.packages.is_empty() {
            for file in ["go.mod", "go.sum", "main.go"] {
                let path = paths::cluster_module().join(file);
                let content = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
                hash.update(content);
            }
        }
        Ok(hex(&hash.finalize()))
    }
}

/// Says what to install when there is no Go at all, before anything else is done.
pub(crate) fn require_go() -> Result<()> {
    if Command::new("go").arg("version").output().is_err() {
        bail!(
            "there is no `go` on the PATH: the cluster's programs are built from source, install Go 1.26 or newer"
        );
    }
    Ok(())
}

/// Bytes as lower-case hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}
