//! The one check: journal = hardware = CDI folder = what the API says, and
//! nothing of anybody else is touched.

use std::collections::BTreeSet;

use kerf_dra_driver::inventory::MigMode;
use kerf_dra_driver::journal::{Device, Entry, Phase};
use kerf_kubelet_plugin::testing::Fuse;
use serde_json::Value;

use crate::world::{Process, World};

/// A failure, in a sentence, unless something holds.
pub(crate) fn ensure(holds: bool, otherwise: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(otherwise()) }
}

/// Checks a node at rest on which exactly these claims are prepared.
pub(crate) fn check(world: &World, process: &Process, live: &BTreeSet<&str>) -> Result<(), String> {
    published_is_on_disk(world, process)?;
    let view = process.plugin.journal().borrow().clone();
    let uids: BTreeSet<String> = view.entries.keys().map(ToString::to_string).collect();
    let wanted: BTreeSet<String> = live.iter().map(|name| format!("{name}-uid")).collect();
    ensure(uids == wanted, || format!("the journal has {uids:?}, the pods {wanted:?}"))?;
    ensure(view.quarantined.is_empty(), || format!("in quarantine: {:?}", view.quarantined))?;
    for folder in ["plugin/state/quarantine", "plugin/state/locks"] {
        let mut files = world.node.files(folder);
        files.retain(|name| folder.ends_with("quarantine") || name.starts_with("claim-"));
        ensure(files.is_empty(), || format!("left in {folder}: {files:?}"))?;
    }
    for entry in view.entries.values() {
        check_entry(world, process, entry).map_err(|what| format!("{}: {what}", entry.claim))?;
    }
    let instances = world.instances();
    for (gpu, instance) in &instances {
        let is_foreign = world.foreign.contains(&(*gpu, instance.clone()));
        let owners =
            view.entries.values().filter(|entry| entry.owns(process.plugin.boot_id(), *gpu, instance));
        let (owners, wanted) = (owners.count(), usize::from(!is_foreign));
        ensure(owners == wanted, || format!("{owners} entries own {instance:?} of {gpu}, not {wanted}"))?;
    }
    for foreign in &world.foreign {
        ensure(instances.contains(foreign), || format!("{foreign:?} was somebody else's, and is gone"))?;
    }
    let mut files = world.node.files("cdi");
    // What is half written is swept by the next start.
    files.retain(|name| !name.starts_with('.'));
    let wanted: Vec<String> =
        wanted.iter().map(|uid| format!("k8s.gpu.nvidia.com-claim_{uid}.json")).collect();
    ensure(files == wanted, || format!("CDI specs are {files:?}, not {wanted:?}"))
}

/// What a process tells of the journal is what another one would read.
pub(crate) fn published_is_on_disk(world: &World, process: &Process) -> Result<(), String> {
    let fresh = world.process(&Fuse::none()).ok_or("a second process cannot start")?;
    let (ours, disk) = (process.plugin.journal(), fresh.plugin.journal());
    let (ours, disk) = (ours.borrow(), disk.borrow());
    ensure(ours.entries == disk.entries && ours.quarantined == disk.quarantined, || {
        format!("published is {ours:?}, on disk {disk:?}")
    })
}

/// An entry at rest, its hardware, its claim in the API and its CDI spec.
fn check_entry(world: &World, process: &Process, entry: &Entry) -> Result<(), String> {
    let is_complete = entry.phase == Phase::Completed && entry.error.is_none();
    ensure(is_complete, || format!("is {} with error {:?}", entry.phase, entry.error))?;
    ensure(entry.boot_id == *process.plugin.boot_id(), || format!("is of {:?}", entry.boot_id))?;
    let allocated = world.allocated();
    let of_claim = allocated.iter().filter(|(_, claim)| **claim == entry.claim.name);
    let of_claim: BTreeSet<&str> = of_claim.map(|(device, _)| device.as_str()).collect();
    let ours: BTreeSet<&str> = entry.allocation.iter().map(|one| one.device.as_str()).collect();
    ensure(of_claim == ours, || format!("has {ours:?}, in the API {of_claim:?}"))?;
    let told: BTreeSet<&str> =
        world.answers.get(&entry.claim.name).into_iter().flatten().map(|one| one.device.as_str()).collect();
    ensure(told == ours, || format!("has {ours:?}, the kubelet was told {told:?}"))?;

    let path = world.node.root.join(format!("cdi/k8s.gpu.nvidia.com-claim_{}.json", entry.uid));
    let text = std::fs::read(&path).map_err(|error| format!("no CDI spec: {error}"))?;
    let spec: Value = serde_json::from_slice(&text).map_err(|error| format!("CDI spec: {error}"))?;
    for (allocated, device) in entry.allocation.iter().zip(&entry.devices) {
        let wanted = nodes(world, entry, device)?;
        let name = format!("{}-{}", entry.uid, allocated.device);
        let in_spec = spec["devices"].as_array().into_iter().flatten().find(|device| device["name"] == name);
        let found: BTreeSet<String> = in_spec
            .and_then(|device| device["containerEdits"]["deviceNodes"].as_array())
            .into_iter()
            .flatten()
            .filter_map(|node| node["path"].as_str().map(str::to_owned))
            .collect();
        ensure(found == wanted, || format!("{name} brings {found:?}, the hardware is {wanted:?}"))?;
    }
    Ok(())
}

/// The device nodes of a device, from the hardware as it is.
fn nodes(world: &World, entry: &Entry, device: &Device) -> Result<BTreeSet<String>, String> {
    let pci = device.gpu().ok_or("a device without a GPU")?;
    let machine = world.node.machine.lock().unwrap();
    let gpu = machine.inventory.gpu(pci).ok_or("a GPU that is not there")?;
    let mig = gpu.mig.as_ref().ok_or("a GPU without MIG")?;
    let instance = match device {
        Device::Whole { .. } => None,
        Device::Fixed { instance, .. } => mig.instances.iter().find(|one| one.id == *instance),
        Device::Partition { placement, .. } => entry.partition(pci, *placement).and_then(|step| {
            mig.instances.iter().find(|one| step.owns(one) && one.compute_instances.len() == 1)
        }),
        Device::Unknown(_) => return Err("a device of an unknown kind".to_owned()),
    };
    let is_partition = !matches!(device, Device::Whole { .. });
    let mode = if is_partition { MigMode::Enabled } else { MigMode::Disabled };
    ensure(mig.current == mode, || format!("{pci} is in mode {:?}", mig.current))?;
    ensure(instance.is_some() == is_partition, || format!("{device:?} is not on the hardware"))?;
    let cap =
        instance.map(|instance| format!("/dev/nvidia-caps/nvidia-cap{}", gpu.minor * 100 + instance.id.0));
    let gpu = [format!("/dev/nvidia{}", gpu.minor), "/dev/nvidiactl".to_owned()];
    Ok(gpu.into_iter().chain(cap).collect())
}
