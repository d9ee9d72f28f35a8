//! CDI specs: what a container gets, one file for each claim.
//!
//! A spec is the projection of a completed journal entry and of the driver's
//! files; it can be made anew at any time and then has the same bytes. The
//! entry itself travels along as an annotation of the file, because the two
//! lie in different folders: with the journal lost, the spec proves which
//! partitions were made here.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;

use kerf_dra_driver::hardware::{DeviceNode, DriverFiles};
use kerf_dra_driver::journal::Entry;
use kerf_dra_driver::names::{ClaimUid, DriverName};
use serde::{Deserialize, Serialize};

use crate::disk::{Disk, Durability, is_no_file};
use crate::hook_program::{self, HookProgram};

/// The oldest version that has what is used here: annotations came with 0.6.0,
/// host paths of device nodes with 0.5.0.
const VERSION: &str = "0.6.0";

const ENTRY: &str = "gpu.kerf.dev/journal-entry";

/// A file or folder that containers get beside the driver's own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExtraMount {
    /// Where it is on the host.
    pub host_path: String,
    /// Where containers see it, read-only.
    pub container_path: String,
}

/// A CDI spec, as far as it is used here. Field order is that of the file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Spec {
    cdi_version: String,
    kind: String,
    annotations: BTreeMap<String, String>,
    devices: Vec<SpecDevice>,
    container_edits: Edits,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct SpecDevice {
    name: String,
    container_edits: Edits,
}

#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Edits {
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    env: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    device_nodes: Vec<SpecNode>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    mounts: Vec<SpecMount>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    hooks: Vec<SpecHook>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct SpecNode {
    path: String,
    host_path: String,
    r#type: String,
    major: u32,
    minor: u32,
    permissions: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct SpecMount {
    host_path: String,
    container_path: String,
    options: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct SpecHook {
    hook_name: String,
    path: String,
    args: Vec<String>,
}

/// The name of a claim's device within its CDI kind.
pub(crate) fn device_name(uid: &ClaimUid, local_name: &str) -> String {
    format!("{uid}-{local_name}")
}

/// Makes the spec of an entry. `nodes` are those of its devices, in order.
pub(crate) fn project(
    driver: &DriverName,
    entry: &Entry,
    nodes: Vec<Vec<DeviceNode>>,
    files: &DriverFiles,
    extra: &[ExtraMount],
    program: &HookProgram,
) -> Spec {
    let mut devices: Vec<SpecDevice> = entry
        .allocation
        .iter()
        .zip(nodes)
        .map(|(allocated, nodes)| SpecDevice {
            name: device_name(&entry.uid, &allocated.local_name()),
            container_edits: Edits {
                device_nodes: nodes.into_iter().map(node).collect(),
                ..Edits::default()
            },
        })
        .collect();
    devices.sort_by(|one, other| one.name.cmp(&other.name));
    devices.dedup_by(|one, other| one.name == other.name);
    let driver_files = files.mounts.iter().map(|file| mount(&file.host_path, &file.container_path));
    let extra = extra.iter().map(|extra| mount(&extra.host_path, &extra.container_path));
    Spec {
        cdi_version: VERSION.to_owned(),
        kind: driver.cdi_kind(),
        annotations: BTreeMap::from([(
            ENTRY.to_owned(),
            String::from_utf8(entry.encode()).unwrap_or_default(),
        )]),
        devices,
        container_edits: Edits {
            // The container toolkit's own hook would add every GPU otherwise.
            env: vec!["NVIDIA_VISIBLE_DEVICES=void".to_owned()],
            device_nodes: Vec::new(),
            mounts: driver_files.chain(extra).collect(),
            hooks: hook(program, files).into_iter().collect(),
        },
    }
}

fn node(node: DeviceNode) -> SpecNode {
    SpecNode {
        path: node.path,
        host_path: node.host_path,
        r#type: "c".to_owned(),
        major: node.major,
        minor: node.minor,
        permissions: "rw".to_owned(),
    }
}

fn mount(host_path: &str, container_path: &str) -> SpecMount {
    SpecMount {
        host_path: host_path.to_owned(),
        container_path: container_path.to_owned(),
        options: ["ro", "nosuid", "nodev", "rbind", "rprivate"].map(str::to_owned).to_vec(),
    }
}

/// The hook that makes a driver's links, where it has any: after the mounts,
/// before the container's root becomes its root.
fn hook(program: &HookProgram, files: &DriverFiles) -> Option<SpecHook> {
    if files.links.is_empty() && files.libraries.is_empty() {
        return None;
    }
    let links = files.links.iter().map(|link| format!("--link={}::{}", link.target, link.path));
    let libraries = files.libraries.iter().map(|path| format!("--library={path}"));
    Some(SpecHook {
        hook_name: "createContainer".to_owned(),
        path: program.path.clone(),
        args: program.arguments.iter().cloned().chain(links).chain(libraries).collect(),
    })
}

/// The folder of CDI specs, and which of them are this driver's.
#[derive(Debug)]
pub(crate) struct Folder {
    disk: Disk,
    path: PathBuf,
    prefix: String,
}

/// Why a claim's CDI spec is not as it should be.
#[derive(Debug, thiserror::Error)]
pub enum CdiError {
    /// It could not be written, checked or removed.
    #[error("the claim's CDI spec cannot be {operation} ({})", path.display())]
    Io {
        /// What was tried.
        operation: &'static str,
        /// The folder of specs.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Somebody's folder has its name.
    #[error(
        "a folder that is not empty stands where the claim's CDI spec belongs ({}); move it away and the next \
         attempt goes on",
        path.display()
    )]
    Folder {
        /// The folder.
        path: PathBuf,
    },
}

impl Folder {
    pub(crate) fn new(disk: Disk, path: PathBuf, driver: &DriverName) -> Self {
        // Slashes of the kind become dashes in the file's name.
        Self { disk, path, prefix: format!("k8s.{driver}-claim_") }
    }

    fn file_name(&self, uid: &ClaimUid) -> String {
        format!("{}{uid}.json", self.prefix)
    }

    /// Makes a claim's file say what a spec says; whether it had to be written.
    ///
    /// It is read back: a runtime that finds another content than was written
    /// would start the container with the wrong devices.
    pub(crate) fn ensure(&self, uid: &ClaimUid, spec: &Spec) -> Result<bool, CdiError> {
        let content = serde_json::to_vec(spec).map_err(|error| self.failed("made", error.into()))?;
        let name = self.file_name(uid);
        let path = self.path.join(&name);
        let read = || match self.disk.read(&path) {
            // A folder is no spec: one that is empty is replaced.
            Err(error) if is_no_file(&error) => Ok(None),
            content => content.map_err(|source| self.failed("read", source)),
        };
        if read()?.as_ref() == Some(&content) {
            return Ok(false);
        }
        // `/var/run` is empty after a reboot.
        self.disk.create_folder(&self.path).map_err(|source| self.failed("written", source))?;
        // After a power cut the spec is made anew from the entry; on most
        // systems the folder is in memory anyway.
        self.disk.replace(&self.path, &name, &content, 0o644, Durability::Derived).map_err(|source| {
            match source.kind() {
                io::ErrorKind::DirectoryNotEmpty => CdiError::Folder { path: path.clone() },
                _ => self.failed("written", source),
            }
        })?;
        if read()?.as_ref() == Some(&content) {
            Ok(true)
        } else {
            Err(self.failed("read back as it was written", io::ErrorKind::InvalidData.into()))
        }
    }

    /// Removes a claim's file; whether there was one.
    pub(crate) fn remove(&self, uid: &ClaimUid) -> Result<bool, CdiError> {
        match self.disk.remove(&self.path, &self.file_name(uid), Durability::Derived) {
            // Somebody's folder: no runtime reads it, so it must not keep a
            // claim's devices from being given back.
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(false),
            removed => removed.map_err(|source| self.failed("removed", source)),
        }
    }

    /// The claims that have a file.
    pub(crate) fn claims(&self) -> Result<Vec<ClaimUid>, CdiError> {
        let names = self.disk.list(&self.path).map_err(|source| self.failed("listed", source))?;
        Ok(names
            .iter()
            .filter_map(|name| name.strip_prefix(&self.prefix)?.strip_suffix(".json")?.parse().ok())
            .collect())
    }

    /// Removes copies of the hook's program that no spec names any more; none
    /// where a spec cannot be read.
    pub(crate) fn sweep_programs(&self, program: &HookProgram) -> Result<(), CdiError> {
        let mut texts = Vec::new();
        for uid in self.claims()? {
            match self.disk.read(&self.path.join(self.file_name(&uid))) {
                Ok(text) => texts.extend(text),
                Err(_) => return Ok(()),
            }
        }
        let named = hook_program::named(&texts);
        program.sweep(|name| named.contains(name));
        Ok(())
    }

    /// The journal entry that a claim's file was made from, where it is intact.
    ///
    /// A file that cannot be read now may be intact: that is an error, for it
    /// may be all that tells what is there.
    pub(crate) fn entry(&self, uid: &ClaimUid) -> Result<Option<Entry>, CdiError> {
        let content = match self.disk.read(&self.path.join(self.file_name(uid))) {
            Err(error) if is_no_file(&error) => None,
            content => content.map_err(|source| self.failed("read", source))?,
        };
        let decoded = content.and_then(|content| {
            let spec: Spec = serde_json::from_slice(&content).ok()?;
            Entry::decode(spec.annotations.get(ENTRY)?.as_bytes()).ok()
        });
        Ok(decoded.filter(|entry| entry.uid == *uid))
    }

    /// Removes what a crash left half written. Only before anything writes.
    pub(crate) fn sweep(&self) -> Result<(), CdiError> {
        self.disk.sweep(&self.path, &self.prefix).map_err(|source| self.failed("removed", source))
    }

    fn failed(&self, operation: &'static str, source: io::Error) -> CdiError {
        CdiError::Io { operation, path: self.path.clone(), source }
    }
}
