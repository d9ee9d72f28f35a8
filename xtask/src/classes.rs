//! The chart's `DeviceClass`es, generated from `deviceclasses/`, so that there
//! is one source of them. The chart differs from the manifests in three ways:
//! names and selectors follow the driver name, extended resource names can be
//! left out, and labels are added.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

/// The domain that the manifests' class names end with.
const DOMAIN: &str = "nvidia.com";
/// The driver name in the manifests' selectors.
const DRIVER: &str = "gpu.nvidia.com";
/// What a reader of the generated file must know.
const HEADER: &str = "{{- /* Generated from deviceclasses/ by `cargo xtask codegen`. Do not edit. */}}\n";

/// Writes the chart's template, or with `check` fails if the committed one is
/// not what would be written.
pub fn run(check: bool) -> Result<()> {
    let root = crate::paths::root();
    let target = root.join("charts/kerf/templates/deviceclasses.yaml");
    let wanted = render_classes(&root.join("deviceclasses"))?;
    if !check {
        return std::fs::write(&target, wanted).with_context(|| format!("cannot write {}", target.display()));
    }
    let found =
        std::fs::read_to_string(&target).with_context(|| format!("cannot read {}", target.display()))?;
    ensure!(
        found == wanted,
        "charts/kerf/templates/deviceclasses.yaml is not what deviceclasses/ says: run `cargo xtask codegen`"
    );
    Ok(())
}

/// The template for the manifests of a folder, in the order of their names.
pub fn render_classes(folder: &Path) -> Result<String> {
    let mut paths: Vec<PathBuf> = Vec::new();
    for entry in std::fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "yaml") {
            paths.push(path);
        }
    }
    paths.sort();
    let mut template = format!("{HEADER}{{{{- if .Values.deviceClasses.create }}}}\n");
    for path in paths {
        let context = || format!("in {}", path.display());
        let manifest = std::fs::read_to_string(&path).with_context(context)?;
        let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
        template.push_str(&render_class(stem, &manifest).with_context(context)?);
    }
    template.push_str("{{- end }}\n");
    Ok(template)
}

/// One manifest as a part of the template.
fn render_class(file_stem: &str, manifest: &str) -> Result<String> {
    let class: serde_json::Value = serde_saphyr::from_str(manifest).context("this is not YAML")?;
    ensure!(class["kind"] == "DeviceClass", "only DeviceClasses belong here");
    ensure!(class["apiVersion"] == "resource.k8s.io/v1", "only resource.k8s.io/v1 is known");
    let Some(name) = class["metadata"]["name"].as_str() else { bail!("the class has no name") };
    ensure!(name == file_stem, "the class is called `{name}`, its file `{file_stem}.yaml`");
    let Some(stem) = name.strip_suffix(DOMAIN) else { bail!("`{name}` does not end with `{DOMAIN}`") };
    ensure!(!manifest.contains("{{"), "`{{{{` would be taken for a template");

    let mut out = String::from("---\n");
    for line in manifest.lines() {
        if line == format!("  name: {name}") {
            writeln!(out, "  name: {stem}{{{{ include \"kerf.classDomain\" . }}}}")?;
            out.push_str("  labels:\n    {{- include \"kerf.labels\" . | nindent 4 }}\n");
        } else if line.trim_start().starts_with("extendedResourceName:") {
            writeln!(
                out,
                "  {{{{- if .Values.deviceClasses.extendedResourceNames }}}}\n{line}\n  {{{{- end }}}}"
            )?;
        } else {
            writeln!(out, "{}", line.replace(DRIVER, "{{ .Values.driverName }}"))?;
        }
    }
    ensure!(out.contains("kerf.classDomain"), "the name must stand alone in a line, indented by two");
    Ok(out)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_charts_classes_are_those_of_the_folder() -> Result<()> {
        run(true)
    }

    #[test]
    fn a_class_follows_the_driver_name_and_can_leave_its_extended_resource_out() -> Result<()> {
        let manifest = "apiVersion: resource.k8s.io/v1\nkind: DeviceClass\nmetadata:\n  name: gpu.nvidia.com\n\
                        spec:\n  extendedResourceName: nvidia.com/gpu\n  selectors:\n    - cel:\n        \
                        expression: device.driver == \"gpu.nvidia.com\"\n";
        let rendered = render_class("gpu.nvidia.com", manifest)?;
        let expected = "---\napiVersion: resource.k8s.io/v1\nkind: DeviceClass\nmetadata:\n  name: \
                        gpu.{{ include \"kerf.classDomain\" . }}\n  labels:\n    \
                        {{- include \"kerf.labels\" . | nindent 4 }}\nspec:\n  \
                        {{- if .Values.deviceClasses.extendedResourceNames }}\n  \
                        extendedResourceName: nvidia.com/gpu\n  {{- end }}\n  selectors:\n    - cel:\n        \
                        expression: device.driver == \"{{ .Values.driverName }}\"\n";
        assert_eq!(rendered, expected);
        Ok(())
    }

    #[test]
    fn a_manifest_under_another_name_or_of_another_kind_is_refused() {
        let manifest =
            "apiVersion: resource.k8s.io/v1\nkind: DeviceClass\nmetadata:\n  name: gpu.nvidia.com\n";
        assert!(render_class("mig.nvidia.com", manifest).is_err());
        assert!(render_class("gpu.nvidia.com", &manifest.replace("DeviceClass", "Secret")).is_err());
        assert!(render_class("gpu.nvidia.com", "{").is_err());
    }

    #[test]
    fn no_two_classes_share_an_extended_resource_name_and_each_profile_has_its_own() -> Result<()> {
        let mut names = BTreeSet::new();
        for entry in std::fs::read_dir(crate::paths::root().join("deviceclasses"))? {
            let path = entry?.path();
            if path.extension().is_none_or(|extension| extension != "yaml") {
                continue;
            }
            let class: serde_json::Value = serde_saphyr::from_str(&std::fs::read_to_string(&path)?)?;
            let name = class["metadata"]["name"].as_str().unwrap_or_default();
            let extended = class["spec"]["extendedResourceName"].as_str();
            if let Some(extended) = extended {
                ensure!(names.insert(extended.to_owned()), "{extended} twice");
            }
            if let Some(profile) = name.strip_prefix("mig-").and_then(|name| name.strip_suffix(".nvidia.com"))
            {
                ensure!(
                    extended == Some(format!("nvidia.com/mig-{profile}").as_str()),
                    "{name}: {extended:?}"
                );
                let text = class["spec"]["selectors"][0]["cel"]["expression"].as_str().unwrap_or_default();
                let spelled = profile.replace(".me", "+me");
                ensure!(text.contains(&format!(".profile == \"{spelled}\"")), "{name}: {text}");
            }
        }
        ensure!(names.len() > 10, "only {} classes", names.len());
        Ok(())
    }
}
