//! CDI specs, as a container runtime reads them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

/// A spec file.
#[derive(Debug, Clone)]
pub(crate) struct Spec {
    pub(crate) path: PathBuf,
    pub(crate) value: Value,
}

/// A mount of a spec.
#[derive(Debug)]
pub(crate) struct Mount {
    pub(crate) host: PathBuf,
    pub(crate) container: PathBuf,
    pub(crate) is_read_only: bool,
}

/// All specs of the folders. A folder that is not there has none.
pub(crate) fn read(folders: &[PathBuf]) -> Result<Vec<Spec>> {
    let mut specs = Vec::new();
    for folder in folders {
        let Ok(entries) = std::fs::read_dir(folder) else { continue };
        for entry in entries {
            let path = entry?.path();
            let parsed = match path.extension().and_then(|extension| extension.to_str()) {
                Some("json") => parse(&path, |text| Ok(serde_json::from_str(text)?)),
                Some("yaml") => parse(&path, |text| Ok(serde_saphyr::from_str(text)?)),
                _ => continue,
            };
            specs.push(Spec { value: parsed?, path });
        }
    }
    specs.sort_by(|left, right| left.path.cmp(&right.path));
    Ok(specs)
}

fn parse(path: &Path, decode: impl Fn(&str) -> Result<Value>) -> Result<Value> {
    let text = std::fs::read_to_string(path).with_context(|| format!("{} cannot be read", path.display()))?;
    decode(&text).with_context(|| format!("{} cannot be parsed", path.display()))
}

/// Files in the folders that are no specs, such as drafts that were left.
pub(crate) fn others(folders: &[PathBuf]) -> Vec<PathBuf> {
    let entries = folders.iter().filter_map(|folder| std::fs::read_dir(folder).ok()).flatten().flatten();
    let is_spec =
        |path: &PathBuf| path.extension().is_some_and(|extension| extension == "json" || extension == "yaml");
    entries.map(|entry| entry.path()).filter(|path| path.is_file() && !is_spec(path)).collect()
}

impl Spec {
    fn list<'a>(value: &'a Value, key: &str) -> impl Iterator<Item = &'a Value> {
        value[key].as_array().into_iter().flatten()
    }

    /// The fully qualified names of its devices.
    pub(crate) fn ids(&self) -> Vec<String> {
        let kind = self.value["kind"].as_str().unwrap_or_default();
        let names =
            Self::list(&self.value, "devices").map(|device| device["name"].as_str().unwrap_or_default());
        names.map(|name| format!("{kind}={name}")).collect()
    }

    /// The edits of the whole spec and of each device.
    fn edits(&self) -> Vec<&Value> {
        let own = Self::list(&self.value, "devices").map(|device| &device["containerEdits"]);
        std::iter::once(&self.value["containerEdits"]).chain(own).collect()
    }

    /// What it mounts.
    pub(crate) fn mounts(&self) -> Vec<Mount> {
        let all = self.edits().into_iter().flat_map(|edits| Self::list(edits, "mounts"));
        let path = |value: &Value| PathBuf::from(value.as_str().unwrap_or_default());
        let mount = |mount: &Value| Mount {
            host: path(&mount["hostPath"]),
            container: path(&mount["containerPath"]),
            is_read_only: Self::list(mount, "options").any(|option| option == "ro"),
        };
        all.map(mount).collect()
    }

    /// Paths of the host that a container with one of its devices needs.
    pub(crate) fn host_paths(&self) -> Vec<PathBuf> {
        let nodes = self
            .edits()
            .into_iter()
            .flat_map(|edits| Self::list(edits, "deviceNodes"))
            .map(|node| node["hostPath"].as_str().or(node["path"].as_str()).unwrap_or_default());
        let hooks = self
            .edits()
            .into_iter()
            .flat_map(|edits| Self::list(edits, "hooks"))
            .map(|hook| hook["path"].as_str().unwrap_or_default());
        // What is mounted of a kind (`tmpfs`) has no path of the host.
        let mounts = self.mounts().into_iter().map(|mount| mount.host);
        let all = nodes.map(PathBuf::from).chain(mounts).chain(hooks.map(PathBuf::from));
        all.filter(|path| path.is_absolute()).collect()
    }

    /// What is wrong with it, after the CDI specification.
    pub(crate) fn valid(&self) -> Result<()> {
        let text = |key: &str| self.value[key].as_str().unwrap_or_default();
        let version: Vec<&str> = text("cdiVersion").split('.').collect();
        let is_version = version.len() == 3 && version.iter().all(|part| part.parse::<u32>().is_ok());
        ensure!(is_version, "cdiVersion is `{}`", text("cdiVersion"));
        ensure!(is_kind(text("kind")), "kind is `{}`, not vendor/class", text("kind"));
        let devices: Vec<&Value> = Self::list(&self.value, "devices").collect();
        ensure!(!devices.is_empty(), "it has no devices");
        let mut names = Vec::new();
        for device in devices {
            let name = device["name"].as_str().unwrap_or_default();
            ensure!(is_device(name), "a device has the name `{name}`");
            ensure!(!names.contains(&name), "two devices have the name `{name}`");
            names.push(name);
            let edits = device["containerEdits"].as_object();
            ensure!(
                edits.is_some_and(|edits| !edits.is_empty()),
                "the device `{name}` has no containerEdits"
            );
        }
        self.edits().into_iter().try_for_each(valid_edits)
    }
}

fn valid_edits(edits: &Value) -> Result<()> {
    for variable in Spec::list(edits, "env") {
        let name = variable.as_str().and_then(|text| text.split_once('=')).map(|(name, _)| name);
        ensure!(name.is_some_and(|name| !name.is_empty()), "the environment has {variable}, not NAME=value");
    }
    for node in Spec::list(edits, "deviceNodes") {
        ensure!(is_absolute(&node["path"]), "a device node has the path {}", node["path"]);
    }
    for mount in Spec::list(edits, "mounts") {
        ensure!(
            is_absolute(&mount["containerPath"]),
            "a mount has the containerPath {}",
            mount["containerPath"]
        );
        ensure!(mount["hostPath"].as_str().is_some_and(|path| !path.is_empty()), "a mount has no hostPath");
    }
    for hook in Spec::list(edits, "hooks") {
        const NAMES: [&str; 6] =
            ["prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop"];
        let name = hook["hookName"].as_str().unwrap_or_default();
        ensure!(NAMES.contains(&name), "a hook is called `{name}`");
        ensure!(is_absolute(&hook["path"]), "a hook has the path {}", hook["path"]);
    }
    Ok(())
}

fn is_absolute(path: &Value) -> bool {
    path.as_str().is_some_and(|path| path.starts_with('/'))
}

/// Letters, digits and some more, with a letter or digit at both ends.
fn is_word(text: &str, inner: &[u8]) -> bool {
    let ends = [text.bytes().next(), text.bytes().last()];
    ends.into_iter().all(|end| end.is_some_and(|byte| byte.is_ascii_alphanumeric()))
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || inner.contains(&byte))
}

fn is_kind(kind: &str) -> bool {
    let letter = |text: &str| text.starts_with(|first: char| first.is_ascii_alphabetic());
    kind.split_once('/').is_some_and(|(vendor, class)| {
        letter(vendor) && letter(class) && is_word(vendor, b"_-.") && is_word(class, b"_-.")
    })
}

fn is_device(name: &str) -> bool {
    is_word(name, b"_-.:")
}

/// Whether it is a fully qualified name: vendor/class=name.
pub(crate) fn is_id(id: &str) -> bool {
    id.split_once('=').is_some_and(|(kind, name)| is_kind(kind) && is_device(name))
}

/// The files in which each device is.
pub(crate) fn index(specs: &[Spec]) -> BTreeMap<String, Vec<&Spec>> {
    let mut index: BTreeMap<String, Vec<&Spec>> = BTreeMap::new();
    for spec in specs {
        for id in spec.ids() {
            index.entry(id).or_default().push(spec);
        }
    }
    index
}

#[cfg(test)]
mod tests;
