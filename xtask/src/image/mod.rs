//! Container images without Docker and without a registry: OCI archives made
//! from a few files, to be imported into containerd.

mod archive;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use self::archive::{Start, Tree};
use crate::{debian, exec, files, paths};

/// The driver itself.
pub const KERF: &str = "localhost/kerf:dev";
/// A shell and the C library, as a container of a CUDA program has them.
pub const CUDA_STUB: &str = "localhost/cuda-stub:dev";
/// The sandbox of every pod.
pub const PAUSE: &str = "localhost/pause:dev";

/// Packages without which no program that was linked to the C library runs.
/// NVIDIA's library wants `libdl`, `libpthread` and `librt` too, which are in
/// the first.
const RUNTIME: [&str; 2] = ["libc6", "libgcc-s1"];

/// Makes all images and prints where they are.
pub fn all() -> Result<()> {
    for archive in [pause()?, cuda_stub()?, kerf()?] {
        eprintln!("{}", archive.display());
    }
    Ok(())
}

/// The driver's image: its release binary and the C library it was linked to.
pub fn kerf() -> Result<PathBuf> {
    exec::inherit(&mut exec::cargo(&["build", "--release", "--package", "kerf"]))?;
    let mut tree = Tree::default();
    runtime(&mut tree)?;
    program(&mut tree, "usr/bin/kerf", &paths::release().join("kerf"))?;
    write(&tree, "kerf", KERF, &Start { entrypoint: &["/usr/bin/kerf"], command: &[] })
}

/// The image of test pods, in which injected libraries and programs run.
pub fn cuda_stub() -> Result<PathBuf> {
    debian::require(&[debian::BUSYBOX])?;
    let busybox = debian::static_busybox().context("there is no statically linked busybox")?;
    let mut tree = Tree::default();
    runtime(&mut tree)?;
    program(&mut tree, "bin/busybox", &busybox)?;
    let applets = exec::output(Command::new(&busybox).arg("--list"))?;
    for applet in applets.lines().filter(|applet| !applet.is_empty() && *applet != "busybox") {
        tree.link(&format!("bin/{applet}"), "busybox");
    }
    write(&tree, "cuda-stub", CUDA_STUB, &Start { entrypoint: &[], command: &["/bin/sh"] })
}

/// The sandbox image: one static program of a few lines.
pub fn pause() -> Result<PathBuf> {
    debian::require(&[debian::COMPILER, debian::LIBC])?;
    let folder = tempfile::tempdir()?;
    let program_path = folder.path().join("pause");
    let source = paths::root().join("xtask/src/image/pause.c");
    let mut compiler = Command::new("gcc");
    compiler.args(["-static", "-Os", "-s", "-Wall", "-Werror", "-o"]).arg(&program_path).arg(source);
    exec::output(&mut compiler)?;
    let mut tree = Tree::default();
    program(&mut tree, "pause", &program_path)?;
    write(&tree, "pause", PAUSE, &Start { entrypoint: &["/pause"], command: &[] })
}

fn write(tree: &Tree, file: &str, name: &str, start: &Start<'_>) -> Result<PathBuf> {
    let folder = paths::images();
    fs::create_dir_all(&folder)?;
    // Clusters that come up at the same time make the same image.
    let _lock = files::Lock::take(&folder)?;
    let path = folder.join(format!("{file}.tar"));
    tree.write(&path, name, start)?;
    Ok(path)
}

fn program(tree: &mut Tree, path: &str, source: &Path) -> Result<()> {
    let content = fs::read(source).with_context(|| format!("cannot read {}", source.display()))?;
    tree.file(path, content, 0o755);
    Ok(())
}

/// The C library's files, and the few that programs expect in any image.
fn runtime(tree: &mut Tree) -> Result<()> {
    let folder = paths::images().join("debian");
    let packages = debian::fetch(&RUNTIME, &folder)?;
    let unpacked = tempfile::tempdir()?;
    for package in packages {
        exec::output(Command::new("dpkg-deb").arg("--extract").arg(&package).arg(unpacked.path()))?;
    }
    // Character set conversions are half of the library and used by nothing here.
    let wanted = |path: &Path| {
        !path.starts_with("usr/share") && !path.components().any(|part| part.as_os_str() == "gconv")
    };
    tree.copy(unpacked.path(), &wanted)?;
    tree.folder("tmp", 0o1777);
    tree.file("etc/passwd", b"root:x:0:0:root:/:/bin/sh\n".to_vec(), 0o644);
    tree.file("etc/group", b"root:x:0:\n".to_vec(), 0o644);
    Ok(())
}
