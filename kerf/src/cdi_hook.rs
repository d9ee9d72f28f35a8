//! `kerf cdi-hook`: what a container's start calls between mounting and
//! `pivot_root`. It makes the links by which programs know the driver's
//! libraries, and tells the container's dynamic loader where they are.
//!
//! It runs on the host with a root's rights over an image that may be hostile:
//! it starts no program, follows no link out of the container's root, crosses
//! no mount point, so that no volume is ever written to, and opens nothing that
//! is no file. In a pod with `hostUsers: false` the root is that of the pod's
//! user namespace, with rights over little more than the container's root.
//!
//! What becomes of an error is decided by whose doing it is, see [`Blame`].

mod loader_cache;
mod rootfs;

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use rustix::io::Errno;
use serde_json::Value;

use self::loader_cache::Cache;
use self::rootfs::Rootfs;
use crate::arguments::CdiHookArguments;

/// The longest state and config that are read.
const MAX_JSON: u64 = 64 << 20;

/// Where the C library is, and with it all that its loader finds by itself.
/// A container without one has no loader cache: musl, or static programs.
const C_LIBRARIES: &[&str] = &[
    "lib/x86_64-linux-gnu/libc.so.6",
    "lib/aarch64-linux-gnu/libc.so.6",
    "usr/lib/x86_64-linux-gnu/libc.so.6",
    "usr/lib/aarch64-linux-gnu/libc.so.6",
    "lib64/libc.so.6",
    "usr/lib64/libc.so.6",
    "lib/libc.so.6",
    "usr/lib/libc.so.6",
];

const CACHE: &str = "etc/ld.so.cache";
/// Its name sorts first: `ldconfig` in the container keeps the driver's folder
/// before those of the image.
const CONFIGURATION: &str = "etc/ld.so.conf.d/00-kerf.conf";

/// Whose doing it is that something cannot be done. Where a container starts
/// nevertheless, a note on stderr says what it lacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Blame {
    /// A read-only root, or a volume in the place of a folder: the container
    /// starts, since whoever wrote the pod has chosen so.
    Pod,
    /// Something else lies where a folder or a file belongs. Without a link a
    /// library has no name, so the container fails; a loader's cache that is
    /// none is left as it is, and the container starts.
    Image,
    /// The root belongs to users whom the hook's user namespace does not know,
    /// or a security module forbids it. Nobody chose that for the container,
    /// which would start and find no CUDA: it fails.
    Rights,
    /// A full disk and all else: the kubelet's next attempt may go well.
    Node,
}

impl Blame {
    fn of(error: &io::Error) -> Self {
        match Errno::from_io_error(error) {
            Some(Errno::ROFS | Errno::XDEV | Errno::BUSY) => Self::Pod,
            Some(Errno::ACCESS | Errno::PERM | Errno::OVERFLOW) => Self::Rights,
            Some(
                Errno::NOTDIR
                | Errno::ISDIR
                | Errno::NOTEMPTY
                | Errno::NOENT
                | Errno::EXIST
                | Errno::LOOP
                | Errno::NAMETOOLONG,
            ) => Self::Image,
            None if error.kind() == io::ErrorKind::InvalidData => Self::Image,
            _ => Self::Node,
        }
    }
}

/// Does what the arguments say in the container whose state is on stdin.
pub(crate) fn run(arguments: &CdiHookArguments) -> Result<()> {
    let path = root_of(io::stdin().lock())?;
    let rootfs = Rootfs::open(&path).map_err(|error| {
        let hint = hint(&error);
        anyhow::Error::new(error)
            .context(format!("the container's root {} cannot be opened{hint}", path.display()))
    })?;
    for link in &arguments.link {
        let what = format!("{} cannot be made a link to {}", link.path, link.target);
        settle(rootfs.link(Path::new(&link.path), &link.target), &what, &[Blame::Pod])?;
    }
    if arguments.library.is_empty() || !C_LIBRARIES.iter().any(|path| rootfs.has(Path::new(path))) {
        return Ok(());
    }
    let what = format!(
        "/{CACHE} is left as it is, and the container's loader is not told of the driver's libraries"
    );
    if settle(register(&rootfs, &arguments.library), &what, &[Blame::Pod, Blame::Image])? {
        // Only a later `ldconfig` asks for it: nothing of it is worth a failure
        // that another attempt does not mend.
        let what = format!("/{CONFIGURATION} cannot be written");
        let notes = [Blame::Pod, Blame::Image, Blame::Rights];
        settle(configure(&rootfs, &arguments.library), &what, &notes)?;
    }
    Ok(())
}

/// Whether something was done. Errors of some kinds are only told.
pub(crate) fn settle(done: io::Result<()>, what: &str, notes: &[Blame]) -> Result<bool> {
    let Err(error) = done else { return Ok(true) };
    let blame = Blame::of(&error);
    if notes.contains(&blame) {
        eprintln!("kerf: note: {what}: {error}");
        return Ok(false);
    }
    let hint = hint(&error);
    Err(anyhow::Error::new(error).context(format!("{what}{hint}")))
}

/// What to do about an error, as the end of a sentence about it.
fn hint(error: &io::Error) -> &'static str {
    match Blame::of(error) {
        Blame::Rights => {
            ": kerf has no rights over the container's root; with `hostUsers: false`, it must belong to \
             the pod's users (or run the pod with `hostUsers: true`)"
        }
        Blame::Pod | Blame::Image | Blame::Node => "",
    }
}

/// The root of the container whose OCI state is read.
fn root_of(state: impl Read) -> Result<PathBuf> {
    let state: Value = serde_json::from_reader(state.take(MAX_JSON)).context("stdin is no OCI state")?;
    let bundle = state.get("bundle").and_then(Value::as_str).context("the OCI state names no bundle")?;
    let root = Path::new(bundle).join(named_root(Path::new(bundle))?);
    // A container's root is never the host's; whatever says so is mistaken.
    if root.canonicalize().is_ok_and(|root| root == Path::new("/")) {
        bail!("the bundle {bundle} names `/` as the container's root");
    }
    Ok(root)
}

/// The root that a bundle's config names.
fn named_root(bundle: &Path) -> Result<PathBuf> {
    const USUAL: &str = "rootfs";
    let config = bundle.join("config.json");
    let file = match File::open(&config) {
        // The hook of a pod with a user namespace may pass the bundle's folder
        // and yet not read what is in it. containerd has the root here.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied && bundle.join(USUAL).is_dir() => {
            return Ok(USUAL.into());
        }
        file => file.with_context(|| format!("{} cannot be opened", config.display()))?,
    };
    let value: Value = serde_json::from_reader(io::BufReader::new(file.take(MAX_JSON)))
        .with_context(|| format!("{} is no OCI config", config.display()))?;
    match value.pointer("/root/path").and_then(Value::as_str) {
        Some(root) if !root.is_empty() => Ok(root.into()),
        _ => bail!("{} names no root", config.display()),
    }
}

/// Adds libraries to the loader's cache.
fn register(rootfs: &Rootfs, paths: &[String]) -> io::Result<()> {
    let file = rootfs.read(Path::new(CACHE))?.unwrap_or_default();
    let mut cache =
        Cache::decode(&file).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
    drop(file);
    cache.add(paths.iter().map(String::as_str));
    rootfs.write(Path::new(CACHE), &cache.encode())
}

/// Adds the libraries' folders to what a later `ldconfig` looks at.
fn configure(rootfs: &Rootfs, paths: &[String]) -> io::Result<()> {
    let folders: BTreeSet<String> =
        paths.iter().filter_map(|path| Some(Path::new(path).parent()?.display().to_string())).collect();
    let text: String = folders.into_iter().map(|folder| folder + "\n").collect();
    rootfs.write(Path::new(CONFIGURATION), text.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root(config: &str) -> Result<PathBuf, String> {
        let bundle = tempfile::tempdir().expect("a folder");
        std::fs::write(bundle.path().join("config.json"), config).expect("a file");
        let state = serde_json::json!({ "ociVersion": "1.2.0", "bundle": bundle.path() }).to_string();
        root_of(state.as_bytes())
            .map(|root| root.strip_prefix(bundle.path()).map(Path::to_owned).unwrap_or(root))
            .map_err(|error| format!("{error:#}"))
    }

    #[test]
    fn the_root_is_the_bundles_or_absolute_and_never_the_hosts() {
        assert_eq!(root(r#"{"root": {"path": "rootfs", "readonly": true}}"#), Ok("rootfs".into()));
        assert_eq!(root(r#"{"root": {"path": "/run/c/rootfs"}}"#), Ok("/run/c/rootfs".into()));
        for path in ["/", "//", "/usr/..", "../../../../../../../../.."] {
            let error = root(&format!(r#"{{"root": {{"path": "{path}"}}}}"#)).expect_err("the host's root");
            assert!(error.contains("names `/`"), "{error}");
        }
        assert!(root("{}").expect_err("no root").contains("names no root"));
        assert!(root("[").expect_err("no JSON").contains("is no OCI config"));
        assert!(root_of("{}".as_bytes()).is_err());
    }

    #[test]
    fn an_error_is_told_or_fails_the_container_by_whose_doing_it_is() {
        for (errno, blame) in [
            (Errno::ROFS, Blame::Pod),
            (Errno::XDEV, Blame::Pod),
            (Errno::BUSY, Blame::Pod),
            (Errno::ISDIR, Blame::Image),
            (Errno::NOTDIR, Blame::Image),
            (Errno::LOOP, Blame::Image),
            (Errno::EXIST, Blame::Image),
            (Errno::ACCESS, Blame::Rights),
            (Errno::PERM, Blame::Rights),
            (Errno::OVERFLOW, Blame::Rights),
            (Errno::NOSPC, Blame::Node),
            (Errno::IO, Blame::Node),
        ] {
            assert_eq!(Blame::of(&errno.into()), blame, "{errno}");
            let settled = settle(Err(errno.into()), "it cannot be", &[Blame::Pod, Blame::Image]);
            match blame {
                Blame::Pod | Blame::Image => assert!(!settled.expect("a note"), "{errno}"),
                Blame::Rights | Blame::Node => {
                    let text = format!("{:#}", settled.expect_err("a failure"));
                    assert!(text.starts_with("it cannot be"), "{text}");
                    assert_eq!(text.contains("hostUsers"), blame == Blame::Rights, "{text}");
                }
            }
        }
        assert_eq!(Blame::of(&io::ErrorKind::InvalidData.into()), Blame::Image);
        assert_eq!(Blame::of(&io::ErrorKind::Other.into()), Blame::Node);
    }
}
