//! Manifests as users of NVIDIA's driver, its device plugin and `InstaSlice` have
//! them, unchanged. Each says in its head what is to come of it.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use k8s_openapi::api::core::v1::Pod;
use kerf_e2e::{Case, LIMIT, Needs, Scene, wait_until};
use xtask::paths;

use crate::ground;
use crate::machine::{self, Seen};

/// The cases of this file.
pub(crate) const CASES: &[Case] = &[Case {
    name: "the manifests of docs/compatibility.md run unchanged, or are refused as it says",
    needs: Needs::Driver,
    seconds: 120,
    run: run_unchanged,
}];

/// The image that the manifests name, and what stands in for it here.
const IMAGES: (&str, &str) = ("docker.io/library/ubuntu:24.04", "localhost/cuda-stub:dev");

/// A line of a manifest's head.
#[derive(Debug)]
enum Outcome {
    /// What a container lists, of so many pods.
    Expect { pods: Pods, container: String, gpus: usize, partitions: usize },
    /// What a pod's event says.
    Refuse { pod: String, says: String },
}

#[derive(Debug)]
enum Pods {
    Named(String),
    Labelled(String, usize),
}

fn run_unchanged(scene: &Scene<'_>) -> Result<()> {
    scene.cluster.tag(IMAGES.1, IMAGES.0)?;
    let page = fs::read_to_string(paths::root().join("docs/compatibility.md"))?;
    ground::clean(scene, || {
        let manifests = manifests()?;
        ensure!(manifests.len() >= 20, "there are {} manifests", manifests.len());
        for (name, path) in manifests {
            ensure!(page.contains(&format!("`{name}`")), "docs/compatibility.md does not tell of {name}");
            run_one(scene, &path).with_context(|| name)?;
        }
        ground::await_nothing_left(scene, &[])
    })
}

fn manifests() -> Result<BTreeMap<String, PathBuf>> {
    let folder = paths::root().join("tests/e2e/manifests/compatibility");
    let mut manifests = BTreeMap::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_stem().and_then(|name| name.to_str()).context("a name")?.to_owned();
        manifests.insert(name, path);
    }
    Ok(manifests)
}

fn run_one(scene: &Scene<'_>, path: &Path) -> Result<()> {
    let text = fs::read_to_string(path)?;
    let outcomes = outcomes(&text)?;
    ensure!(!outcomes.is_empty(), "it says nothing of its outcome");
    scene.apply(&text)?;
    for outcome in outcomes {
        match outcome {
            Outcome::Refuse { pod, says } => {
                wait_until(&format!("an event of {pod} says {says:?}"), LIMIT, || {
                    let events = scene.events(&pod)?;
                    let is_told =
                        events.lines().any(|line| line.starts_with("Failed") && line.contains(&says));
                    Ok(is_told.then_some(()))
                })?;
            }
            Outcome::Expect { pods, container, gpus, partitions } => {
                for pod in running(scene, &pods)? {
                    let seen = machine::seen_in(scene, &pod, &container)?;
                    let whole = seen.iter().filter(|seen| matches!(seen, Seen::Whole(_))).count();
                    let counts = (whole, seen.len() - whole);
                    ensure!(counts == (gpus, partitions), "{pod}/{container} sees {seen:?}");
                }
            }
        }
    }
    let file = path.to_str().context("a path of text")?;
    scene.kubectl(&["delete", "--filename", file, "--wait=false"])?;
    // What comes next needs the GPUs.
    wait_until("its pods are gone", LIMIT, || Ok(scene.list::<Pod>()?.is_empty().then_some(())))
}

/// Waits until pods run; their names.
fn running(scene: &Scene<'_>, pods: &Pods) -> Result<Vec<String>> {
    let (app, count) = match pods {
        Pods::Named(name) => {
            scene.await_running(name)?;
            return Ok(vec![name.clone()]);
        }
        Pods::Labelled(app, count) => (app, *count),
    };
    let names = wait_until(&format!("{count} pods of {app} are there"), LIMIT, || {
        let of_app =
            |pod: &Pod| pod.metadata.labels.as_ref().and_then(|labels| labels.get("app")) == Some(app);
        let pods = scene.list::<Pod>()?.into_iter().filter(of_app);
        let names: Vec<String> = pods.filter_map(|pod| pod.metadata.name).collect();
        Ok((names.len() == count).then_some(names))
    })?;
    for name in &names {
        scene.await_running(name)?;
    }
    Ok(names)
}

fn outcomes(manifest: &str) -> Result<Vec<Outcome>> {
    let mut outcomes = Vec::new();
    for line in manifest.lines().map_while(|line| line.strip_prefix("# ")) {
        let Some((kind, fields)) =
            line.split_once(": ").filter(|(kind, _)| ["expect", "refuse"].contains(kind))
        else {
            continue;
        };
        let mut fields: BTreeMap<&str, &str> =
            fields.split(' ').filter_map(|field| field.split_once('=')).collect();
        let mut take = |field: &str| fields.remove(field).map(str::to_owned);
        let number = |text: Option<String>| -> Result<usize> { Ok(text.map_or(Ok(0), |text| text.parse())?) };
        let outcome = if kind == "refuse" {
            Outcome::Refuse {
                pod: take("pod").context(line.to_owned())?,
                says: take("says").context("says=")?,
            }
        } else {
            let pods = match (take("pod"), take("app")) {
                (Some(pod), None) => Pods::Named(pod),
                (None, Some(app)) => Pods::Labelled(app, number(take("pods"))?),
                _ => bail!("`{line}` names neither a pod nor an app"),
            };
            Outcome::Expect {
                pods,
                container: take("container").context("container=")?,
                gpus: number(take("gpus"))?,
                partitions: number(take("migs"))?,
            }
        };
        ensure!(fields.is_empty(), "`{line}` says {fields:?}, which nothing reads");
        outcomes.push(outcome);
    }
    Ok(outcomes)
}
