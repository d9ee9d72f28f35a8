//! Writes an OCI image archive: one layer, one platform. The same content gives
//! the same bytes: entries are sorted, times are zero, owners are root.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tar::{Builder, EntryType, Header};

use crate::cluster::programs::hex;
use crate::files;

/// What a path of an image is.
#[derive(Debug, Clone)]
enum Node {
    Folder { mode: u32 },
    File { content: Vec<u8>, mode: u32 },
    Link { target: PathBuf },
}

/// A file system to be made an image of, by paths relative to its root.
#[derive(Debug, Default)]
pub(crate) struct Tree {
    nodes: BTreeMap<PathBuf, Node>,
}

/// How containers of an image are started, unless they say otherwise.
#[derive(Debug, Default)]
pub(crate) struct Start<'a> {
    pub(crate) entrypoint: &'a [&'a str],
    pub(crate) command: &'a [&'a str],
}

impl Tree {
    pub(crate) fn folder(&mut self, path: &str, mode: u32) {
        self.parents(Path::new(path));
        self.nodes.insert(path.into(), Node::Folder { mode });
    }

    pub(crate) fn file(&mut self, path: &str, content: Vec<u8>, mode: u32) {
        self.parents(Path::new(path));
        self.nodes.insert(path.into(), Node::File { content, mode });
    }

    pub(crate) fn link(&mut self, path: &str, target: &str) {
        self.parents(Path::new(path));
        self.nodes.insert(path.into(), Node::Link { target: target.into() });
    }

    /// Adds all below `folder` whose path, relative to it, `wanted` takes.
    pub(crate) fn copy(&mut self, folder: &Path, wanted: &dyn Fn(&Path) -> bool) -> Result<()> {
        self.copy_below(folder, Path::new(""), wanted)
            .with_context(|| format!("cannot read {}", folder.display()))
    }

    fn copy_below(&mut self, root: &Path, at: &Path, wanted: &dyn Fn(&Path) -> bool) -> Result<()> {
        for entry in fs::read_dir(root.join(at))? {
            let entry = entry?;
            let path = at.join(entry.file_name());
            if !wanted(&path) {
                continue;
            }
            let meta = entry.metadata()?;
            let mode = meta.permissions().mode() & 0o7777;
            if meta.is_dir() {
                self.nodes.insert(path.clone(), Node::Folder { mode });
                self.copy_below(root, &path, wanted)?;
            } else if meta.is_symlink() {
                self.nodes.insert(path, Node::Link { target: fs::read_link(entry.path())? });
            } else if meta.is_file() {
                self.nodes.insert(path, Node::File { content: fs::read(entry.path())?, mode });
            } else {
                bail!("{} is neither file, folder nor link", path.display());
            }
        }
        Ok(())
    }

    fn parents(&mut self, path: &Path) {
        for parent in path.ancestors().skip(1).filter(|parent| !parent.as_os_str().is_empty()) {
            self.nodes.entry(parent.to_owned()).or_insert(Node::Folder { mode: 0o755 });
        }
    }

    fn layer(&self) -> Result<Vec<u8>> {
        let mut archive = Builder::new(Vec::new());
        for (path, node) in &self.nodes {
            match node {
                Node::Folder { mode } => {
                    let mut header = header(EntryType::Directory, *mode, 0);
                    archive.append_data(&mut header, path, std::io::empty())?;
                }
                Node::File { content, mode } => {
                    let mut header = header(EntryType::Regular, *mode, content.len() as u64);
                    archive.append_data(&mut header, path, content.as_slice())?;
                }
                Node::Link { target } => {
                    let mut header = header(EntryType::Symlink, 0o777, 0);
                    archive.append_link(&mut header, path, target)?;
                }
            }
        }
        Ok(archive.into_inner()?)
    }

    /// Writes the image `name` to `path`, whole or not at all.
    pub(crate) fn write(&self, path: &Path, name: &str, start: &Start<'_>) -> Result<()> {
        let layer = self.layer()?;
        let config = json!({
            "architecture": architecture()?,
            "os": "linux",
            "config": {
                "Entrypoint": start.entrypoint,
                "Cmd": start.command,
                "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
            },
            "rootfs": { "type": "layers", "diff_ids": [digest(&layer)] },
        });
        let mut blobs = BTreeMap::new();
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": blob(&mut blobs, "application/vnd.oci.image.config.v1+json", serde_json::to_vec(&config)?),
            "layers": [blob(&mut blobs, "application/vnd.oci.image.layer.v1.tar", layer)],
        });
        let mut entry =
            blob(&mut blobs, "application/vnd.oci.image.manifest.v1+json", serde_json::to_vec(&manifest)?);
        let tag = name.rsplit_once(':').map_or("latest", |(_, tag)| tag);
        entry["annotations"] =
            json!({ "io.containerd.image.name": name, "org.opencontainers.image.ref.name": tag });
        let index = json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.index.v1+json",
            "manifests": [entry],
        });
        blobs.insert("oci-layout".to_owned(), br#"{"imageLayoutVersion":"1.0.0"}"#.to_vec());
        blobs.insert("index.json".to_owned(), serde_json::to_vec(&index)?);

        let mut archive = Builder::new(Vec::new());
        for (name, content) in &blobs {
            let mut header = header(EntryType::Regular, 0o644, content.len() as u64);
            archive.append_data(&mut header, name, content.as_slice())?;
        }
        files::replace(path, &archive.into_inner()?)
    }
}

/// Adds a blob and returns its descriptor.
fn blob(blobs: &mut BTreeMap<String, Vec<u8>>, media_type: &str, content: Vec<u8>) -> Value {
    let digest = digest(&content);
    let descriptor = json!({ "mediaType": media_type, "digest": digest, "size": content.len() });
    blobs.insert(format!("blobs/{}", digest.replace(':', "/")), content);
    descriptor
}

fn digest(content: &[u8]) -> String {
    format!("sha256:{}", hex(&Sha256::digest(content)))
}

fn header(kind: EntryType, mode: u32, size: u64) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_size(size);
    header.set_mtime(0);
    header.set_uid(0);
    header.set_gid(0);
    header
}

/// This machine's architecture as images call it.
fn architecture() -> Result<&'static str> {
    match std::env::consts::ARCH {
        "x86_64" => Ok("amd64"),
        "aarch64" => Ok("arm64"),
        other => bail!("images are not made for {other}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_tree_gives_the_same_bytes_whatever_the_order_of_making() {
        let folder = tempfile::tempdir().expect("a folder");
        let write = |name: &str, paths: [&str; 2]| {
            let mut tree = Tree::default();
            for path in paths {
                tree.file(path, path.as_bytes().to_vec(), 0o755);
            }
            let archive = folder.path().join(name);
            tree.write(&archive, "localhost/x:dev", &Start::default()).expect("written");
            fs::read(archive).expect("read back")
        };
        assert_eq!(write("one", ["usr/bin/a", "etc/b"]), write("two", ["etc/b", "usr/bin/a"]));
    }
}
