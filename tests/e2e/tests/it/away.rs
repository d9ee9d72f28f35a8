//! kerf is away from its node for a while, and the kerf that comes back is the
//! version before.

use std::collections::BTreeSet;
use std::fs;

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::Pod as PodObject;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kerf_dra_driver::journal::{Entry, VERSION};
use kerf_e2e::{Case, LIMIT, Needs, Scene, Values, wait_until};
use serde_json::json;

use crate::aftermath;
use crate::ground::{self, DRIVER};
use crate::machine;
use crate::manifest::{self, Pod, SMALL, WHOLE, request, requests};
use crate::workload::{self, Workload};

/// The cases of this file.
pub(crate) const CASES: &[Case] = &[Case {
    name: "when kerf comes back as the version before, pods ran on, and what went or came meanwhile is right",
    needs: Needs::Driver,
    seconds: 50,
    run: away,
}];

/// They run all the time, prepared by the version after this one.
const LASTING: [Workload<'_>; 2] = [Workload::new("whole", WHOLE), Workload::new("partition", SMALL)];

/// What the version after this one would have written of them.
const LATER: &str = "ofALaterVersion";

fn away(scene: &Scene<'_>) -> Result<()> {
    ground::clean_values(scene, || {
        for pod in LASTING {
            pod.run(scene)?;
        }
        let forced = Workload::new("forced", "mig-1g.5gb.nvidia.com");
        forced.run(scene)?;
        let forced = workload::claim_of(scene, "forced")?;
        scene.apply(&manifest::list(&[named_claim(), set()]))?;
        scene.await_running("set-0")?;
        let before = identities(scene)?;

        let first = make_anew(scene)?;
        let second = wait_until("the set's next pod has the next claim", LIMIT, || {
            ensure!(machine::sees_what_it_holds(scene, "set-0")?.len() == 1, "it holds nothing");
            Ok(Some(machine::uid_of(scene, "named")?))
        })?;
        ensure!(first != second, "the claim was not made anew");

        // As an administrator keeps it off a node.
        scene.configure_driver(Values::from_iter([("nodeSelector".to_owned(), json!({ "no": "node" }))]))?;
        wait_until("kerf is away", LIMIT, || {
            Ok(scene.list_of_driver::<PodObject>()?.is_empty().then_some(()))
        })?;
        later_version_wrote(scene)?;
        scene.kubectl(&["delete", "pod", "forced", "--force", "--grace-period=0"])?;
        await_claim_gone(scene, &forced)?;
        make_anew(scene)?;
        wait_until("the set's next pod waits for kerf", LIMIT, || {
            Ok(scene.events("set-0")?.contains(&format!("{DRIVER} is not registered")).then_some(()))
        })?;
        ensure!(identities(scene)? == before, "pods noticed that kerf is away");

        scene.configure_driver(Values::new())?;
        scene.await_running("set-0")?;
        let held = machine::sees_what_it_holds(scene, "set-0")?;
        ensure!(held.len() == 1, "the set's pod holds {held:?}");
        let now = machine::uid_of(scene, "named")?;
        ensure!(now != second, "the claim was not made anew");
        let mut expected = BTreeSet::from([now]);
        for pod in LASTING {
            expected.insert(machine::uid_of(scene, &workload::claim_of(scene, pod.name)?)?);
        }
        wait_until("nothing is left of the claims that went", LIMIT, || {
            let entries: BTreeSet<String> = ground::journal(scene)?.into_keys().collect();
            ensure!(entries == expected, "the journal has {entries:?}");
            ground::agree(scene, &[]).map(Some)
        })?;
        // It asks for every claim once more.
        scene.cluster.restart_kubelet()?;
        ground::driver_serves(scene)?;
        Workload::new("new", SMALL).run(scene)?;
        workload::end(scene, "new")?;
        ensure!(identities(scene)? == before, "the pods of the later version noticed this one");
        wait_until("what it does not know is there for the way up again", LIMIT, || {
            let entries = ground::journal(scene)?;
            let kept = entries.values().filter(|entry| entry.get(LATER) == Some(&json!(true))).count();
            Ok((kept == LASTING.len()).then_some(()))
        })?;
        aftermath::all_is_given_out(scene, &["whole", "partition", "set-0"])?;

        for pod in LASTING {
            workload::end(scene, pod.name)?;
        }
        scene.kubectl(&["delete", "statefulset/set", "resourceclaim/named", "--wait"])?;
        ground::await_nothing_left(scene, &[])
    })
}

fn named_claim() -> serde_json::Value {
    manifest::claim("named", &requests(&[request("slice", "mig-1g.6gb.nvidia.com")]))
}

/// A set whose only pod has a claim by its name.
fn set() -> serde_json::Value {
    let labels = json!({ "app": "set" });
    let pod = Pod::new("unused").with_claim("claim", "named").container("main", &["claim"]);
    json!({
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": { "name": "set" },
        "spec": {
            "serviceName": "set",
            "replicas": 1,
            "selector": { "matchLabels": labels },
            "template": { "metadata": { "labels": labels }, "spec": pod.spec() },
        },
    })
}

/// Deletes the set's pod, by force, and its claim; makes the claim once more
/// and returns the UID of the former one.
fn make_anew(scene: &Scene<'_>) -> Result<String> {
    let former = machine::uid_of(scene, "named")?;
    scene.delete("resourceclaim/named")?;
    scene.kubectl(&["delete", "pod", "set-0", "--force", "--grace-period=0"])?;
    await_claim_gone(scene, "named")?;
    scene.apply(&named_claim().to_string())?;
    Ok(former)
}

fn await_claim_gone(scene: &Scene<'_>, name: &str) -> Result<()> {
    wait_until(&format!("the claim {name} is gone"), LIMIT, || {
        Ok(scene.get::<ResourceClaim>(name)?.is_none().then_some(()))
    })
}

fn identities(scene: &Scene<'_>) -> Result<Vec<(Vec<String>, Vec<String>)>> {
    LASTING.iter().map(|pod| workload::identity(scene, pod.name)).collect()
}

/// Makes the entries of the lasting pods those of the next version.
fn later_version_wrote(scene: &Scene<'_>) -> Result<()> {
    let folder = scene.cluster.kubelet_root().join("plugins").join(DRIVER).join("state/claims");
    for pod in LASTING {
        let uid = machine::uid_of(scene, &workload::claim_of(scene, pod.name)?)?;
        let files = fs::read_dir(&folder)?.collect::<std::io::Result<Vec<_>>>()?;
        let file = files.iter().find(|file| file.file_name().to_string_lossy().starts_with(&uid));
        let path = file.with_context(|| format!("there is no entry of {}", pod.name))?.path();
        let mut entry = Entry::decode(&fs::read(&path)?)?;
        entry.version = VERSION + 1;
        entry.unknown.insert(LATER.to_owned(), json!(true));
        fs::write(&path, entry.encode())?;
    }
    Ok(())
}
