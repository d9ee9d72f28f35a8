//! Builds the stock programs of a cluster from their published Go modules, and
//! knows whether what lies under `target/` is still what would be built.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context as _, Result, bail};
use sha2::{Digest as _, Sha256};

use super::release::Release;
use crate::{debian, exec, files, paths};

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
    /// How its packages are found.
    source: Source,
    programs: &'static [&'static str],
    cold: &'static str,
    /// Whether a part of it is C.
    has_c: bool,
}

enum Source {
    /// The module in `tests/cluster` itself, with the module graph of this name.
    Module(&'static str),
    /// Packages of others' modules.
    Packages(&'static [&'static str]),
}

/// What every release of Kubernetes runs with.
const SHARED: [Build; 4] = [
    Build {
        name: "containerd",
        version: CONTAINERD,
        source: Source::Packages(&[
            "github.com/containerd/containerd/v2/cmd/containerd",
            "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2",
            "github.com/containerd/containerd/v2/cmd/ctr",
        ]),
        programs: &["containerd", "containerd-shim-runc-v2", "ctr"],
        cold: "2 minutes",
        has_c: false,
    },
    Build {
        name: "crictl",
        version: CRICTL,
        source: Source::Packages(&["sigs.k8s.io/cri-tools/cmd/crictl"]),
        programs: &["crictl"],
        cold: "1 minute",
        has_c: false,
    },
    Build {
        name: "helm",
        version: HELM,
        source: Source::Packages(&["helm.sh/helm/v4/cmd/helm"]),
        programs: &["helm"],
        cold: "3 minutes",
        has_c: false,
    },
    Build {
        name: "runc",
        version: RUNC,
        source: Source::Packages(&["github.com/opencontainers/runc"]),
        programs: &["runc"],
        cold: "1 minute",
        // What enters namespaces must be alone in its process: before Go starts.
        has_c: true,
    },
];

const fn kubernetes(release: Release) -> Build {
    Build {
        name: "kubernetes",
        version: release.tag(),
        source: Source::Module(release.module()),
        programs: &["kubernetes"],
        cold: "10 minutes",
        has_c: false,
    }
}

/// Where a cluster's programs are.
#[derive(Debug, Clone)]
pub struct Programs {
    shared: PathBuf,
    kubernetes: PathBuf,
}

impl Programs {
    /// Where those of a release are once they are built.
    pub(crate) fn of(release: Release) -> Self {
        let shared = paths::cluster_programs();
        let kubernetes = match release {
            Release::Newest => shared.clone(),
            Release::Oldest => shared.join(release.version()),
        };
        Self { shared, kubernetes }
    }

    /// One of them, by its name.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        let folder = if matches!(name, "kubernetes" | "kubectl") { &self.kubernetes } else { &self.shared };
        folder.join(name)
    }
}

/// All programs for a release, built if they are not there or not current.
///
/// One process builds at a time, another waits for it and finds its work done.
pub fn ensure(release: Release) -> Result<Programs> {
    let programs = Programs::of(release);
    fs::create_dir_all(&programs.kubernetes)?;
    let _lock = files::Lock::take(&programs.shared.join(".lock"))?;
    // A compiler whose `xtask` was killed may still write into such a folder.
    for entry in fs::read_dir(&programs.shared)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(UNFINISHED) {
            files::remove(&entry.path())?;
        }
    }
    kubernetes(release).ensure(&programs.kubernetes)?;
    for build in &SHARED {
        build.ensure(&programs.shared)?;
    }
    let kubectl = programs.path("kubectl");
    if fs::read_link(&kubectl).is_err() {
        files::remove(&kubectl)?;
        std::os::unix::fs::symlink("kubernetes", &kubectl)?;
    }
    Ok(programs)
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
        let output = paths::cluster_programs().join(format!("{UNFINISHED}{}", std::process::id()));
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
        match self.source {
            Source::Module(graph) => {
                let flags = format!("-s -w -X k8s.io/component-base/version.gitVersion={}", self.version);
                command.args(["build", "-trimpath", "-buildvcs=false", "-ldflags", &flags]);
                command.arg(format!("-modfile={graph}"));
                command.arg("-o").arg(output.join(self.name)).arg(".");
            }
            Source::Packages(packages) => {
                command.args(["install", "-buildvcs=false", "-ldflags", "-s -w"]);
                if self.has_c {
                    command.args(["-tags", "seccomp"]);
                }
                command.args(packages.iter().map(|package| format!("{package}@{}", self.version)));
            }
        }
        command
    }

    /// All that decides what the programs are, apart from the Go release.
    fn key(&self) -> Result<String> {
        let mut hash = Sha256::new();
        hash.update(self.version);
        if self.has_c {
            hash.update("seccomp");
        }
        match self.source {
            Source::Packages(packages) => packages.iter().for_each(|package| hash.update(package)),
            Source::Module(graph) => {
                let sums = Path::new(graph).with_extension("sum");
                for file in [Path::new(graph), &sums, Path::new("main.go")] {
                    let path = paths::cluster_module().join(file);
                    let content =
                        fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
                    hash.update(content);
                }
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
