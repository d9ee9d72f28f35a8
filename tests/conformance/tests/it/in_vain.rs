//! Where nothing can be checked, that is said once, with what to do, and the tool
//! ends with 2.

use std::path::Path;
use std::process::{Command, Output};
use std::time::Instant;

use dra_conformance::{Commands, Context, Launcher, Profile, Verdict};
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::PostParams;
use serde_json::json;

use crate::api::Api;
use crate::driver::{NAME, NODE};

/// What the tool says as an observer, with this kubeconfig.
fn observed(folder: &Path, kubeconfig: &Path, more: &[&str]) -> Output {
    let profile = folder.join("profile.yaml");
    std::fs::write(&profile, format!("driver: {NAME}\nnode: {NODE}\n")).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_dra-conformance"));
    command.arg("run").arg("--profile").arg(profile).arg("--kubeconfig").arg(kubeconfig).args(more);
    command.output().unwrap()
}

fn error(output: &Output) -> String {
    let (out, err) = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text)).into();
    assert_eq!((output.status.code(), &*out), (Some(2), ""), "{err}");
    err.into_owned()
}

/// Where nobody listens.
fn unreachable(folder: &Path) -> std::path::PathBuf {
    let path = folder.join("kubeconfig");
    let text = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
        "users": [{"name": "u", "user": {}}],
    });
    std::fs::write(&path, text.to_string()).unwrap();
    path
}

#[test]
fn an_api_server_that_cannot_be_reached_is_named_before_any_check() {
    let folder = tempfile::tempdir().unwrap();
    let kubeconfig = unreachable(folder.path());
    let said = error(&observed(folder.path(), &kubeconfig, &[]));
    for words in ["http://127.0.0.1:1", &kubeconfig.display().to_string(), "see that it runs", "refused"] {
        assert!(said.contains(words), "{said}");
    }
}

#[test]
fn what_is_no_kubeconfig_is_named_once() {
    let folder = tempfile::tempdir().unwrap();
    let (missing, other, empty) =
        (folder.path().join("missing"), folder.path().join("other"), folder.path().join("empty"));
    std::fs::write(&other, "[1, 2]").unwrap();
    std::fs::write(&empty, "").unwrap();
    for (path, words) in
        [(missing, "cannot be read: No such file"), (other, "is no kubeconfig"), (empty, "is no kubeconfig")]
    {
        let said = error(&observed(folder.path(), &path, &[]));
        assert_eq!(said.matches(&path.display().to_string()).count(), 1, "{said}");
        assert!(said.contains(words), "{said}");
    }
}

#[test]
fn results_that_cannot_be_written_are_told_before_any_check() {
    let folder = tempfile::tempdir().unwrap();
    let nowhere = folder.path().join("missing/results").display().to_string();
    for flag in ["--json", "--junit"] {
        let said = error(&observed(folder.path(), &unreachable(folder.path()), &[flag, &nowhere]));
        assert!(said.contains(&format!("{nowhere} cannot be written")), "{said}");
    }
}

/// Of a wrong `driver` or `node` in the profile.
#[tokio::test(flavor = "multi_thread")]
async fn a_driver_without_slices_is_waited_for_once_and_those_that_have_some_are_named() {
    let api = Api::new();
    let slices: kube::Api<ResourceSlice> = kube::Api::all(api.client());
    let slice = json!({
        "metadata": {"name": "other"},
        "spec": {
            "driver": "other.example.com", "nodeName": "node-7",
            "pool": {"name": "node-7", "generation": 1, "resourceSliceCount": 1},
        },
    });
    slices.create(&PostParams::default(), &serde_json::from_value(slice).unwrap()).await.unwrap();
    let text = format!("driver: {NAME}\nnode: {NODE}\nlimits: {{publish: 0.2}}\n");
    let mut context = Context::new(Profile::parse(&text).unwrap(), api.client(), None);
    context.reach().await.unwrap();
    let said = format!("{:#}", context.look().await.unwrap_err());
    for words in [NAME, NODE, "`other.example.com` on `node-7`", "`driver` and `node` of the profile"] {
        assert!(said.contains(words), "{said}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_ended_is_not_waited_for() {
    let api = Api::new();
    let folder = tempfile::tempdir().unwrap();
    let text = format!(
        "driver: {NAME}\nnode: {NODE}\nregistry: {}\nstart: [\"false\"]\nlimits: {{start: 600, publish: 600}}\n",
        folder.path().display()
    );
    let profile = Profile::parse(&text).unwrap();
    let launcher = Commands::of(&profile, &api.client()).await.unwrap().unwrap();
    let mut context = Context::new(profile, api.client(), Some(Box::new(launcher) as Box<dyn Launcher>));
    let says = "the driver's process (conformance-1) ended: exit status: 1";
    let began = Instant::now();
    let registered = dra_conformance::all().filter(|check| check.id == "REG-001");
    let findings = dra_conformance::run(&mut context, registered, |_| {}).await;
    assert_eq!(findings[0].verdict, Verdict::Fail(says.to_owned()));
    assert_eq!(format!("{:#}", context.look().await.unwrap_err()), says);
    assert!(began.elapsed().as_secs() < 300, "it was waited for");
}
