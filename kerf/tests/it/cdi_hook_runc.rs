//! `kerf cdi-hook` as runc calls it, in containers that a static program makes
//! up. What the hook does to images of a real cluster's pods needs no more.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Value, json};

use crate::bundle::{Bundle, CUDA, cached, is_root};

const BUSYBOX: &str = "/bin/busybox";
/// The root of the containers' user namespaces, as the host knows it.
const MAPPED: u32 = 200_000;

/// A container that runc can run, whose program says that it started and what
/// a link is to.
struct Container {
    bundle: Bundle,
    /// The hook's program, where every user may run it.
    program: PathBuf,
    config: Value,
}

impl Container {
    /// None where this machine cannot run it, and why is said.
    fn new(files: &[&str]) -> Option<Self> {
        if !is_root() {
            return None;
        }
        let bundle = Bundle::new(files);
        for folder in ["bin", "proc", "dev"] {
            fs::create_dir_all(bundle.root().join(folder)).unwrap();
        }
        if let Err(error) = fs::copy(BUSYBOX, bundle.root().join("bin/busybox")) {
            eprintln!("skipped: there is no {BUSYBOX} to run in a container ({error})");
            return None;
        }
        let program = bundle.path().join("kerf");
        fs::copy(env!("CARGO_BIN_EXE_kerf"), &program).unwrap();
        fs::set_permissions(bundle.path(), fs::Permissions::from_mode(0o711)).unwrap();
        let script = "echo started; busybox readlink /usr/lib64/libcuda.so.1; true";
        let config = json!({
            "ociVersion": "1.0.2",
            "process": {
                "user": {"uid": 0, "gid": 0},
                "args": ["busybox", "sh", "-c", script],
                "env": ["PATH=/bin"],
                "cwd": "/",
            },
            "root": {"path": "rootfs"},
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
            ],
            "linux": {"namespaces": [{"type": "pid"}, {"type": "mount"}]},
        });
        let container = Self { bundle, program, config };
        let output = match container.run(&[]) {
            Ok(output) => output,
            Err(error) => {
                eprintln!("skipped: there is no runc ({error})");
                return None;
            }
        };
        if !output.status.success() {
            eprintln!("skipped: runc runs no container here: {}", String::from_utf8_lossy(&output.stderr));
            return None;
        }
        Some(container)
    }

    /// Puts the hook into the container's config.
    fn hooked(&mut self) {
        let arguments: Vec<&str> = ["kerf", "cdi-hook"].iter().chain(CUDA).copied().collect();
        self.config["hooks"] = json!({"createContainer": [{"path": self.program, "args": arguments}]});
    }

    /// Runs it, in a user namespace of its own.
    fn in_user_namespace(&mut self) {
        let mapping = json!([{"containerID": 0, "hostID": MAPPED, "size": 65_536}]);
        let linux = &mut self.config["linux"];
        linux["uidMappings"] = mapping.clone();
        linux["gidMappings"] = mapping;
        linux["namespaces"].as_array_mut().unwrap().push(json!({"type": "user"}));
    }

    /// Runs runc as `start` begins a command.
    fn run(&self, start: &[&str]) -> std::io::Result<Output> {
        let config = self.bundle.path().join("config.json");
        fs::write(&config, self.config.to_string()).unwrap();
        let runc = self.bundle.path().join("runc").display().to_string();
        let name = self.bundle.path().file_name().unwrap().to_string_lossy().replace('.', "");
        let bundle = self.bundle.path().display().to_string();
        let command: Vec<&str> =
            start.iter().copied().chain(["runc", "--root", &runc, "run", "-b", &bundle, &name]).collect();
        Command::new(command[0]).args(&command[1..]).stdin(std::process::Stdio::null()).output()
    }

    /// What the container's program printed.
    fn started(&self, start: &[&str]) -> String {
        let output = self.run(start).unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn root(&self) -> PathBuf {
        self.bundle.root()
    }
}

/// Gives all that is in a folder to the containers' root.
fn give_away(path: &Path) {
    std::os::unix::fs::lchown(path, Some(MAPPED), Some(MAPPED)).unwrap();
    if path.is_dir() && !path.is_symlink() {
        for entry in fs::read_dir(path).unwrap() {
            give_away(&entry.unwrap().path());
        }
    }
}

/// A container of an image with a cache: this machine's, or one of nothing.
fn with_glibc() -> Option<Container> {
    let container = Container::new(&["usr/lib64/libc.so.6", "usr/lib64/libcuda.so.580.1"])?;
    container.bundle.put("etc/ld.so.cache", &image_cache());
    Some(container)
}

fn image_cache() -> Vec<u8> {
    fs::read("/etc/ld.so.cache").unwrap_or_default()
}

#[test]
fn a_container_of_glibc_starts_with_links_and_a_cache() {
    let Some(mut container) = with_glibc() else { return };
    container.hooked();
    // A root that runc makes read-only is so after the hook.
    container.config["root"]["readonly"] = json!(true);
    assert_eq!(container.started(&[]), "started\nlibcuda.so.580.1\n");
    let cached = cached(&container.bundle);
    assert!(cached.contains("=> /usr/lib64/libcuda.so.1"), "{cached}");
}

#[test]
fn a_container_of_musl_starts_with_links_alone() {
    let Some(mut container) = Container::new(&["lib/ld-musl-x86_64.so.1"]) else { return };
    container.hooked();
    assert_eq!(container.started(&[]), "started\nlibcuda.so.580.1\n");
    assert!(!container.root().join("etc").exists());
}

#[test]
fn a_container_starts_on_a_file_system_that_is_read_only() {
    let Some(mut container) = with_glibc() else { return };
    container.hooked();
    let root = container.root().display().to_string();
    let mount = format!("mount --bind {root} {root} && mount -o remount,bind,ro {root} && exec \"$@\"");
    assert_eq!(container.started(&["unshare", "--mount", "sh", "-c", &mount, "sh"]), "started\n");
    assert_eq!(fs::read(container.root().join("etc/ld.so.cache")).unwrap(), image_cache());
}

#[test]
fn a_container_in_a_user_namespace_starts_with_links_and_a_cache() {
    let Some(mut container) = with_glibc() else { return };
    container.hooked();
    container.in_user_namespace();
    // As containerd: the bundle's folder is the mapped group's to pass.
    give_away(&container.root());
    chown(container.bundle.path(), None, Some(MAPPED)).unwrap();
    fs::set_permissions(container.bundle.path(), fs::Permissions::from_mode(0o710)).unwrap();
    let config = container.bundle.path().join("config.json");
    for mode in [0o644, 0o600] {
        fs::set_permissions(&config, fs::Permissions::from_mode(mode)).unwrap();
        assert_eq!(container.started(&[]), "started\nlibcuda.so.580.1\n", "{mode:o}");
        for path in ["usr/lib64/libcuda.so.1", "etc/ld.so.cache", "etc/ld.so.conf.d/00-kerf.conf"] {
            let path = container.root().join(path);
            assert_eq!(fs::symlink_metadata(&path).unwrap().uid(), MAPPED, "{}", path.display());
        }
        assert!(cached(&container.bundle).contains("=> /usr/lib64/libcuda.so.1"));
        fs::remove_file(container.root().join("usr/lib64/libcuda.so.1")).unwrap();
        container.bundle.put("etc/ld.so.cache", &image_cache());
    }
}

#[test]
fn a_root_of_users_that_a_namespace_does_not_know_fails_with_what_to_do() {
    let Some(mut container) = with_glibc() else { return };
    container.in_user_namespace();
    let output = container.run(&[]).unwrap();
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        return eprintln!("skipped: runc runs no container of another's root: {text}");
    }
    container.hooked();
    let output = container.run(&[]).unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && output.stdout.is_empty(), "{output:?}");
    assert!(
        text.contains("/usr/lib64/libcuda.so.1 cannot be made a link") && text.contains("hostUsers"),
        "{text}"
    );
    // What is there already needs no right.
    symlink("libcuda.so.580.1", container.root().join("usr/lib64/libcuda.so.1")).unwrap();
    symlink("libcuda.so.1", container.root().join("usr/lib64/libcuda.so")).unwrap();
    let output = container.run(&[]).unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("loader is not told") && text.contains("hostUsers"), "{text}");
}
