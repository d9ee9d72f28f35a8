//! The driver's slices: one of counters, two of devices. At each change of
//! anything all are listed, compared and set right.

use std::time::Duration;

use anyhow::Result;
use futures::StreamExt as _;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::{Api, DeleteParams, ListParams, PostParams, WatchParams};
use serde_json::{Value, json};

use crate::driver::{Defect, Instance, NAME, NODE, SHARED, devices, pool};

/// How long the API server may take.
const PATIENCE: Duration = Duration::from_millis(100);

pub(crate) async fn publish(instance: Instance) {
    let slices: Api<ResourceSlice> = Api::all(instance.client.clone());
    let mut state = State::default();
    let mut events = None;
    loop {
        let looked = tokio::time::timeout(PATIENCE, look(&instance, &mut state)).await;
        match looked {
            Ok(Ok(())) => {}
            Err(_) if instance.has(Defect::EndsPublishing) => return,
            Ok(Err(error)) if does_end(&instance, &error) => return,
            // No answer, or a conflict with another instance.
            _ => {
                tokio::time::sleep(Duration::from_millis(10)).await;
                continue;
            }
        }
        if events.is_none() {
            match slices.watch(&WatchParams::default(), "0").await {
                Ok(watch) => events = Some(watch.boxed()),
                Err(_) if instance.has(Defect::EndsWatching) => return,
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
        let Some(watch) = &mut events else { continue };
        let next = async { watch.next().await.is_some_and(|event| event.is_ok()) };
        // A prepare is no news of the API server.
        let goes_on = if instance.has(Defect::WritesAlways) || instance.has(Defect::HidesHeld) {
            tokio::time::timeout(Duration::from_millis(50), next).await.unwrap_or(true)
        } else {
            next.await
        };
        if !goes_on {
            events = None;
        }
    }
}

/// Whether a wrong driver takes an answer for the last word.
fn does_end(instance: &Instance, error: &anyhow::Error) -> bool {
    let code = match error.downcast_ref() {
        Some(kube::Error::Api(status)) => status.code,
        _ => 0,
    };
    instance.has(Defect::EndsOnConflict) && code == 409
        || instance.has(Defect::EndsOnForbidden) && code == 403
        || instance.has(Defect::EndsOnTooMany) && code == 429
}

#[derive(Default)]
struct State {
    owner: Option<String>,
    is_published: bool,
    is_reversed: bool,
    looks: u32,
    /// The API server has dropped counters.
    is_uncounted: bool,
}

pub(crate) async fn withdraw(client: &kube::Client) -> Result<()> {
    let slices: Api<ResourceSlice> = Api::all(client.clone());
    for slice in slices.list(&ListParams::default()).await?.items {
        slices.delete(&slice.metadata.name.unwrap(), &DeleteParams::default()).await?;
    }
    Ok(())
}

async fn look(instance: &Instance, state: &mut State) -> Result<()> {
    let nodes: Api<Node> = Api::all(instance.client.clone());
    let owner = match &state.owner {
        Some(owner) if instance.has(Defect::OldOwner) => owner.clone(),
        _ => nodes.get(NODE).await?.metadata.uid.unwrap(),
    };
    state.owner = Some(owner.clone());
    state.looks += 1;
    let slices: Api<ResourceSlice> = Api::all(instance.client.clone());
    let fields = format!("spec.nodeName={NODE},spec.driver={NAME}");
    let listed = slices.list(&ListParams::default().fields(&fields)).await?.items;
    if instance.has(Defect::DeletesOthers) {
        for other in slices.list(&ListParams::default()).await?.items {
            if other.spec.driver != NAME {
                slices.delete(&other.metadata.name.unwrap(), &DeleteParams::default()).await?;
            }
        }
    }
    let is_restoring = state.is_published && listed.len() < 3;
    if instance.has(Defect::NothingRestored) && is_restoring {
        return Ok(());
    }
    state.is_reversed |= instance.has(Defect::Fights) && instance.process > 1
        || instance.has(Defect::ReversedWhenRestored) && is_restoring;
    let wanted = wanted(instance, &owner, state);
    let newest = listed.iter().map(|slice| slice.spec.pool.generation).max().unwrap_or(0);
    let known: Vec<Option<&ResourceSlice>> = wanted
        .iter()
        .map(|slice| listed.iter().find(|listed| listed.metadata.name == slice.metadata.name))
        .collect();
    let is_missing = known.iter().any(Option::is_none);
    let is_wanted =
        |slice: &ResourceSlice| wanted.iter().any(|wanted| wanted.metadata.name == slice.metadata.name);
    for left in listed.iter().filter(|slice| !is_wanted(slice) && !instance.has(Defect::LeftBehind)) {
        slices.delete(left.metadata.name.as_ref().unwrap(), &DeleteParams::default()).await?;
    }
    if instance.has(Defect::OneNotRestored) && state.is_published && is_missing {
        return Ok(());
    }
    let is_right = |wanted: &ResourceSlice, known: &ResourceSlice| {
        let (mut wanted, mut known) = (wanted.clone(), known.clone());
        if instance.has(Defect::EditsKept) {
            wanted.spec.devices = None;
            known.spec.devices = None;
        }
        let generation = known.spec.pool.generation;
        wanted.spec.pool.generation = generation;
        known.spec == wanted.spec
            && (generation == newest || instance.has(Defect::OldGenerationLeft))
            && known.metadata.owner_references == wanted.metadata.owner_references
    };
    let changed = wanted
        .iter()
        .zip(&known)
        .filter(|(wanted, known)| known.is_none_or(|known| !is_right(wanted, known)));
    let changed = changed.count();
    let at_start = instance.has(Defect::WritesAtItsStart) && state.looks == 1;
    let always = instance.has(Defect::WritesAlways);
    if changed == 0 && !at_start && !always {
        state.is_published = true;
        return Ok(());
    }
    let generation = match newest {
        _ if instance.has(Defect::GenerationFalls) => 1,
        newest if is_missing || changed > 1 => newest + 1,
        newest => newest,
    };
    for (mut slice, known) in wanted.into_iter().zip(known) {
        slice.spec.pool.generation = generation;
        if instance.has(Defect::OldGenerationLeft) && slice.metadata.name.as_deref() == Some("00003-left") {
            slice.spec.pool.generation = generation - 1;
        }
        let stored = match known {
            None => slices.create(&PostParams::default(), &slice).await?,
            Some(known) => {
                slice.metadata.resource_version = known.metadata.resource_version.clone();
                let name = slice.metadata.name.clone().unwrap();
                slices.replace(&name, &PostParams::default(), &slice).await?
            }
        };
        state.is_uncounted |= stored.spec != slice.spec && !instance.has(Defect::WritesDropped);
    }
    state.is_published = true;
    Ok(())
}

fn wanted(instance: &Instance, owner: &str, state: &State) -> Vec<ResourceSlice> {
    let mut names = devices(instance.defect);
    if instance.has(Defect::HidesHeld) {
        let disk = instance.disk.lock().unwrap();
        names.retain(|name| !disk.claims.values().any(|entry| entry.device == *name));
    }
    let mut all: Vec<Value> = names.iter().map(|name| device(instance, name)).collect();
    if instance.has(Defect::NameTwice) {
        all.push(device(instance, "device-0"));
    }
    if state.is_reversed {
        all.reverse();
    }
    // Two slices, so that a pool can be incomplete.
    let second = if instance.has(Defect::Crowded) { vec![] } else { all.split_off(2.min(all.len())) };
    let counters = json!([{"name": "set", "counters": {"memory": {"value": "100Mi"}}}]);
    let mut contents =
        vec![json!({"sharedCounters": counters}), json!({"devices": all}), json!({"devices": second})];
    if state.is_uncounted {
        contents = uncounted(instance, contents);
    }
    let mut count = contents.len();
    if instance.has(Defect::OldGenerationLeft) {
        contents.push(json!({"devices": []}));
    }
    if instance.has(Defect::WrongCount) {
        count += 1;
    }
    let owners =
        json!([{"apiVersion": "v1", "kind": "Node", "name": NODE, "uid": owner, "controller": true}]);
    let slice = |(index, mut spec): (usize, Value)| {
        let name = if index == 3 { "left" } else { NODE };
        spec["driver"] = json!(NAME);
        spec["nodeName"] = json!(NODE);
        spec["pool"] = json!({"name": pool(), "generation": 0, "resourceSliceCount": count});
        let mut metadata = json!({"name": format!("{index:05}-{name}")});
        if !instance.has(Defect::NoOwner) {
            metadata["ownerReferences"] = owners.clone();
        }
        serde_json::from_value(json!({"metadata": metadata, "spec": spec})).unwrap()
    };
    contents.into_iter().enumerate().map(slice).collect()
}

/// Without counters only as many devices as fit beside each other.
fn uncounted(instance: &Instance, mut contents: Vec<Value>) -> Vec<Value> {
    let mut contents = contents.split_off(1);
    if !instance.has(Defect::KeepsUncounted) {
        contents.truncate(1);
    }
    for device in contents.iter_mut().flat_map(|slice| slice["devices"].as_array_mut().unwrap()) {
        for field in ["consumesCounters", "allowMultipleAllocations"] {
            device.as_object_mut().unwrap().remove(field);
        }
    }
    contents
}

fn device(instance: &Instance, name: &str) -> Value {
    let counter = if instance.has(Defect::MissingCounter) { "missing" } else { "memory" };
    let address = if instance.has(Defect::BadPciAddress) { "0000:3B:00.0" } else { "0000:3b:00.0" };
    let mut attributes = json!({
        "type": {"string": if name == SHARED { "shared" } else { "plain" }},
        "resource.kubernetes.io/pciBusID": {"string": address},
        "resource.kubernetes.io/pcieRoot": {"string": "pci0000:3a"},
        "resource.kubernetes.io/numaNode": {"int": 0},
    });
    if instance.has(Defect::BadAttribute) {
        attributes["not-an-identifier"] = json!({"int": 1});
    }
    if instance.has(Defect::ManyAttributes) {
        for index in 0..30 {
            attributes[format!("attribute{index}")] = json!({"int": 1});
        }
    }
    if name == SHARED {
        return json!({
            "name": name,
            "attributes": attributes,
            "allowMultipleAllocations": true,
            "capacity": {"memory": {"value": "1Gi"}},
        });
    }
    json!({
        "name": name,
        "attributes": attributes,
        "consumesCounters": [{"counterSet": "set", "counters": {counter: {"value": "50Mi"}}}],
    })
}
