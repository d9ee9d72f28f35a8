//! `kerf cdi-hook`: what a container's start calls between mounting and
//! `pivot_root`. It makes the links by which programs know the driver's
//! libraries, and tells the container's dynamic loader where they are.
//!
//! It runs on the host with a root's rights over an image that may be hostile:
//! it starts no program, follows no link out of the container's root and
//! crosses no mount point, so that no volume is ever written to. What an image
//! makes impossible (a read-only root, a volume in the place of `/etc`) is a
//! note on stderr; the container starts.

mod loader_cache;
mod rootfs;

use std::collections::BTreeSet;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use self::loader_cache::{Cache, Library};
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

/// Does what the arguments say in the container whose state is on stdin.
pub(crate) fn run(arguments: &CdiHookArguments) -> Result<()> {
    let path = root_of(io::stdin().lock())?;
    let rootfs = Rootfs::open(&path)
        .with_context(|| format!("the container's root {} cannot be opened", path.display()))?;
    for link in &arguments.link {
        rootfs
            .link(Path::new(&link.path), &link.target)
            .or_else(|error| note(&format!("{} is not made a link to {}", link.path, link.target), error))
            .with_context(|| format!("{} cannot be made a link to {}", link.path, link.target))?;
    }
    register(&rootfs, &arguments.library)
        .or_else(|error| note("the container's loader is not told of the driver's libraries", error))
        .context("the container's loader cannot be told of the driver's libraries")
}

/// Lets a container start in which something cannot be done, and says what.
fn note(what: &str, error: io::Error) -> io::Result<()> {
    match error.kind() {
        io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::CrossesDevices | io::ErrorKind::ResourceBusy => {
            eprintln!("kerf: note: {what}: {error}");
            Ok(())
        }
        _ => Err(error),
    }
}

/// The root of the container whose OCI state is read.
fn root_of(state: impl Read) -> Result<PathBuf> {
    let state: Value = serde_json::from_reader(state.take(MAX_JSON)).context("stdin is no OCI state")?;
    let bundle = state.get("bundle").and_then(Value::as_str).context("the OCI state names no bundle")?;
    let config = Path::new(bundle).join("config.json");
    let file =
        std::fs::File::open(&config).with_context(|| format!("{} cannot be opened", config.display()))?;
    let value: Value = serde_json::from_reader(io::BufReader::new(file.take(MAX_JSON)))
        .with_context(|| format!("{} is no OCI config", config.display()))?;
    let root = value.pointer("/root/path").and_then(Value::as_str).unwrap_or_default();
    if root.is_empty() {
        bail!("{} names no root", config.display());
    }
    let root = Path::new(bundle).join(root);
    // A container's root is never the host's; whatever says so is mistaken.
    if root.canonicalize().is_ok_and(|root| root == Path::new("/")) {
        bail!("{} names `/` as the container's root", config.display());
    }
    Ok(root)
}

/// Adds libraries to the loader's cache of a container that has a C library,
/// and their folders to what a later `ldconfig` looks at.
fn register(rootfs: &Rootfs, paths: &[String]) -> io::Result<()> {
    if paths.is_empty() || !C_LIBRARIES.iter().any(|path| rootfs.has(Path::new(path))) {
        return Ok(());
    }
    let mut cache = match rootfs.read(Path::new(CACHE))? {
        Some(bytes) => match Cache::decode(&bytes) {
            Ok(cache) => cache,
            Err(error) => {
                eprintln!("kerf: note: /{CACHE} is left as it is: {error}");
                return Ok(());
            }
        },
        None => Cache::default(),
    };
    cache.add(paths.iter().filter_map(|path| Library::at(path)));
    rootfs.write(Path::new(CACHE), &cache.encode())?;
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
}
