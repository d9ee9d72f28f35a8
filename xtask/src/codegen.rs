//! Generates what is committed and must follow from its source.
//!
//! protox stands in for `protoc`, so nothing has to be installed.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::paths;

/// The protos of `kubelet-plugin`, each with its package, which names its output.
const PROTOS: [(&str, &str); 6] = [
    ("registration", "pluginregistration"),
    ("dra_v1", "k8s.io.kubelet.pkg.apis.dra.v1"),
    ("dra_v1beta1", "k8s.io.kubelet.pkg.apis.dra.v1beta1"),
    ("podresources", "v1"),
    ("health_v1", "v1"),
    ("health_v1alpha1", "v1alpha1"),
];

/// Regenerates the gRPC code of all protos and the chart's list of MIG profiles,
/// or with `check` fails if what is committed is not what would be generated.
pub fn run(check: bool) -> Result<()> {
    crate::classes::run(check)?;
    let crate_root = paths::root().join("kubelet-plugin");
    for (name, package) in PROTOS {
        let text = generate(&crate_root.join("proto"), name, package)?;
        let path = crate_root.join("src/proto").join(format!("{name}.rs"));
        if check {
            let committed = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
            ensure!(committed == text, "{} is not current: run `cargo xtask codegen`", path.display());
        } else {
            fs::create_dir_all(crate_root.join("src/proto"))?;
            fs::write(&path, text).with_context(|| format!("write {}", path.display()))?;
        }
    }
    Ok(())
}

fn generate(folder: &Path, name: &str, package: &str) -> Result<String> {
    let descriptors = protox::compile([format!("{name}.proto")], [folder])
        .with_context(|| format!("compile {name}.proto"))?;
    let out = tempfile::tempdir()?;
    tonic_prost_build::configure()
        // Answers are byte-equal only if their maps have an order.
        .btree_map(".")
        .emit_rerun_if_changed(false)
        .out_dir(out.path())
        .compile_fds(descriptors)?;
    let generated = out.path().join(format!("{package}.rs"));
    fs::read_to_string(&generated).with_context(|| format!("{name}.proto does not declare package {package}"))
}
