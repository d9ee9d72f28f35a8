//! `kerf cdi-hook` on roots of images: what it leaves there, and what the C
//! library's own programs say to it.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// A bundle: `config.json` beside the root of a container.
struct Bundle(tempfile::TempDir);

impl Bundle {
    fn new(files: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("config.json"), r#"{"root": {"path": "rootfs"}}"#).unwrap();
        fs::create_dir(folder.path().join("rootfs")).unwrap();
        let bundle = Self(folder);
        for file in files {
            bundle.put(file, b"x");
        }
        bundle
    }

    fn root(&self) -> PathBuf {
        self.0.path().join("rootfs")
    }

    fn put(&self, path: &str, content: &[u8]) {
        let path = self.root().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    fn copy(&self, from: &Path) {
        let to = self.root().join(from.strip_prefix("/").unwrap());
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::copy(from, to).unwrap();
    }

    fn state(&self) -> String {
        format!(r#"{{"ociVersion": "1.2.0", "id": "c", "pid": 1, "bundle": "{}"}}"#, self.0.path().display())
    }

    /// Runs the hook as `start` begins a command, the hook's program last.
    fn hook(&self, start: &[&str], arguments: &[&str]) -> Output {
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

    fn hooked(&self, arguments: &[&str]) {
        let output = self.hook(&[], arguments);
        assert!(output.status.success(), "{output:?}");
        assert!(output.stderr.is_empty(), "{output:?}");
    }
}

const CUDA: &[&str] = &[
    "--link=libcuda.so.580.1::/usr/lib64/libcuda.so.1",
    "--link=libcuda.so.1::/usr/lib64/libcuda.so",
    "--library=/usr/lib64/libcuda.so.1",
    "--library=/usr/lib64/libnvidia-tls.so.580.1",
];

fn cached(bundle: &Bundle) -> String {
    let mut command = Command::new("/sbin/ldconfig");
    let output = command.args(["-p", "-C"]).arg(bundle.root().join("etc/ld.so.cache")).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

fn is_root() -> bool {
    let is = fs::read_to_string("/proc/self/status").unwrap().contains("\nUid:\t0\t0");
    if !is {
        eprintln!("skipped: only root may mount and change its root folder");
    }
    is
}

#[test]
fn a_glibc_image_of_any_layout_gets_links_a_cache_and_its_configuration() {
    for libc in ["usr/lib/x86_64-linux-gnu/libc.so.6", "usr/lib64/libc.so.6", "lib64/libc.so.6"] {
        let bundle = Bundle::new(&[libc, "usr/lib64/libcuda.so.580.1"]);
        for _ in 0..2 {
            bundle.hooked(CUDA);
        }
        let links = ["libcuda.so.1", "libcuda.so"].map(|name| {
            fs::read_link(bundle.root().join("usr/lib64").join(name)).unwrap().display().to_string()
        });
        assert_eq!(links, ["libcuda.so.580.1", "libcuda.so.1"]);
        let cached = cached(&bundle);
        assert!(cached.contains("=> /usr/lib64/libcuda.so.1") && cached.contains("2 libs"), "{cached}");
        let configuration = fs::read_to_string(bundle.root().join("etc/ld.so.conf.d/00-kerf.conf")).unwrap();
        assert_eq!(configuration, "/usr/lib64\n");
    }
}

#[test]
fn an_image_without_glibc_gets_links_and_no_cache() {
    let bundle = Bundle::new(&["lib/ld-musl-x86_64.so.1", "usr/lib64/libcuda.so.580.1"]);
    bundle.hooked(CUDA);
    assert!(bundle.root().join("usr/lib64/libcuda.so.1").is_symlink());
    assert!(!bundle.root().join("etc").exists());
}

#[test]
fn a_cache_that_is_none_stays_and_the_container_starts() {
    let bundle = Bundle::new(&["usr/lib64/libc.so.6", "etc/ld.so.cache"]);
    let output = bundle.hook(&[], CUDA);
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("is left as it is"), "{output:?}");
    assert_eq!(fs::read(bundle.root().join("etc/ld.so.cache")).unwrap(), b"x");
}

#[test]
fn a_folder_in_the_place_of_a_link_is_told_to_whoever_waits_for_the_container() {
    let bundle = Bundle::new(&["usr/lib64/libcuda.so.1/a-file"]);
    let output = bundle.hook(&[], CUDA);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && text.contains("/usr/lib64/libcuda.so.1 cannot be made a link"),
        "{text}"
    );
}

#[test]
fn a_loader_finds_by_name_what_lies_in_no_folder_of_its_own() {
    if !is_root() {
        return;
    }
    let bundle = Bundle::new(&[]);
    let mut loader = String::new();
    let listed = Command::new("/usr/bin/ldd").arg("/bin/true").output().unwrap();
    for word in
        String::from_utf8(listed.stdout).unwrap().split_whitespace().filter(|word| word.starts_with('/'))
    {
        bundle.copy(Path::new(word));
        if word.contains("/ld-") {
            word.clone_into(&mut loader);
        }
    }
    bundle.copy(Path::new("/bin/true"));
    // Any library will do; its name is the driver's.
    let libc = fs::canonicalize("/lib/x86_64-linux-gnu/libc.so.6")
        .or_else(|_| fs::canonicalize("/lib64/libc.so.6"))
        .or_else(|_| fs::canonicalize("/lib/aarch64-linux-gnu/libc.so.6"))
        .unwrap();
    bundle.put("opt/driver/libcuda.so.580.1", &fs::read(libc).unwrap());
    let preload = || {
        let mut command = Command::new("chroot");
        command.arg(bundle.root()).args([&loader, "--preload", "libcuda.so.1", "/bin/true"]);
        String::from_utf8(command.output().unwrap().stderr).unwrap()
    };
    let before = preload();
    assert!(before.contains("libcuda.so.1"), "it was found without a cache: {before}");
    bundle
        .hooked(&["--link=libcuda.so.580.1::/opt/driver/libcuda.so.1", "--library=/opt/driver/libcuda.so.1"]);
    assert_eq!(preload(), "");
}

#[test]
fn a_read_only_root_starts_with_a_note() {
    if !is_root() {
        return;
    }
    let bundle = Bundle::new(&[]);
    let root = bundle.root().display().to_string();
    let mount = format!(
        "mount -t tmpfs none {root} && mkdir -p {root}/usr/lib64 && touch {root}/usr/lib64/libc.so.6 && \
         mount -o remount,ro {root} && exec \"$@\""
    );
    let output = bundle.hook(&["unshare", "--mount", "sh", "-c", &mount, "sh"], CUDA);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    assert!(
        text.contains("note: /usr/lib64/libcuda.so.1 is not made a link") && text.contains("Read-only"),
        "{text}"
    );
}

#[test]
fn a_volume_in_the_place_of_etc_is_never_written_to() {
    if !is_root() {
        return;
    }
    let bundle = Bundle::new(&["usr/lib64/libc.so.6", "etc/hostname"]);
    let volume = tempfile::tempdir().unwrap();
    let root = bundle.root().display().to_string();
    let mount = format!("mount --bind {} {root}/etc && exec \"$@\"", volume.path().display());
    let output = bundle.hook(&["unshare", "--mount", "sh", "-c", &mount, "sh"], CUDA);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("the container's loader is not told"), "{text}");
    assert_eq!(fs::read_dir(volume.path()).unwrap().count(), 0);
    assert!(bundle.root().join("usr/lib64/libcuda.so.1").is_symlink());
}
