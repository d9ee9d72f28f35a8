//! A scheduler that goes by what is published, and by nothing else.

use std::collections::BTreeSet;
use std::time::Duration;

use k8s_openapi::api::resource::v1::ResourceSliceSpec;
use kerf_dra_driver::fixtures::allocator::{devices, offers};
use kerf_dra_driver::inventory::Placement;
use kerf_dra_driver::names::{DeviceName, PciAddress};
use kerf_dra_driver::plan::find_placement;
use kerf_dra_driver::published::GpuRecord;
use kerf_kubelet_plugin::{Channels, Instances, Owner, Stored, chain};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::invariant::ensure;
use crate::scenario::Devices;
use crate::world::{Process, World};

/// Generous: it is reached only by a failure.
const LIMIT: Duration = Duration::from_mins(1);

/// What a process publishes, as its owner of the inventory decides it.
pub(crate) async fn published(world: &World, process: &Process) -> Result<Vec<ResourceSliceSpec>, String> {
    let stored = watch::Sender::new(Stored::default());
    let channels = Channels {
        inventory: process.inventory.clone(),
        layout: watch::Sender::new(None),
        trouble: watch::Sender::new(None),
        rivals: watch::Sender::new(None),
        stored: stored.subscribe(),
    };
    let (mut layout, mut trouble) = (channels.layout.subscribe(), channels.trouble.subscribe());
    let mut instances = Instances::join(&world.node.config().plugin_dir).unwrap();
    let owner = Owner::new(process.plugin.clone(), channels, instances.lead().await.unwrap());
    let owner = owner.map_err(|error| chain(&error))?;
    let cancel = CancellationToken::new();
    let task = tokio::spawn(owner.run(cancel.clone()));
    let said = async {
        tokio::select! {
            biased;
            said = layout.wait_for(Option::is_some) => said.ok()?.clone().map(Ok),
            said = trouble.wait_for(Option::is_some) => said.ok()?.clone().map(Err),
        }
    };
    let said = tokio::time::timeout(LIMIT, said).await;
    cancel.cancel();
    task.await.map_err(|error| error.to_string())?;
    let layout = said.map_err(|_| "nothing is published")?.ok_or("the owner ended")??;
    let slices = layout.slices.iter().map(|slice| slice.unpack().map_err(|error| error.to_string()));
    let slices = slices.collect::<Result<Vec<_>, _>>()?;
    is_recorded(world, &slices)?;
    Ok(slices)
}

/// What is published is in its record, whatever a power cut takes; or there is
/// no record at all, and claims are listed first.
fn is_recorded(world: &World, slices: &[ResourceSliceSpec]) -> Result<(), String> {
    for left in world.disk.cuts() {
        let records: Vec<GpuRecord> = left
            .iter()
            .filter(|(path, _)| path.starts_with("plugin/state/gpus"))
            .filter_map(|(_, bytes)| serde_json::from_slice(bytes).ok())
            .collect();
        let names: BTreeSet<&DeviceName> = records.iter().flat_map(|record| record.devices.keys()).collect();
        let unknown = devices(slices).find(|device| !names.iter().any(|name| name.as_str() == device.name));
        ensure(unknown.is_none() || names.is_empty(), || {
            format!("published and not recorded: {:?}", unknown.map(|device| &device.name))
        })?;
    }
    Ok(())
}

/// A device on the hardware: its GPU, and its memory slices unless it is all of
/// it.
type Place = (PciAddress, Option<Placement>);

fn place(world: &World, name: &str) -> Result<Place, String> {
    let device = DeviceName::parse(name).map_err(|error| error.to_string())?;
    let pci = device.gpu().ok_or_else(|| format!("{name} has no GPU"))?;
    let machine = world.node.machine.lock().unwrap();
    let gpu = machine.inventory.gpu(pci).ok_or_else(|| format!("{name} is on no GPU of the node"))?;
    Ok((pci, find_placement(gpu, &device).map(|(_, _, placement)| placement)))
}

fn overlap(one: Place, other: Place) -> bool {
    one.0 == other.0 && one.1.zip(other.1).is_none_or(|(one, other)| one.overlaps(other))
}

/// Gives claims whatever looks free, of each GPU something, and first of all
/// these devices: nothing of it is another claim's, and all of it can be
/// prepared beside the claims that are prepared.
pub(crate) async fn offer(
    world: &mut World,
    process: &Process,
    live: &[&str],
    first: &Devices,
) -> Result<(), String> {
    let slices = published(world, process).await?;
    let all: BTreeSet<&str> = devices(&slices).map(|device| device.name.as_str()).collect();
    let mut names: Vec<String> = Vec::new();
    let mut random = fastrand::Rng::with_seed(world.seed);
    for bus in 1..=4_u8 {
        let allocated = world.allocated();
        for device in allocated.keys() {
            ensure(all.contains(device.as_str()), || {
                format!("{device} was withdrawn, and a claim holds it")
            })?;
        }
        let free = offers(&slices, &allocated.keys().map(String::as_str).collect());
        for device in &free {
            let here = place(world, &device.name)?;
            for (held, claim) in &allocated {
                let both = overlap(here, place(world, held)?);
                ensure(!both, || format!("{} is offered, and {claim} has {held}", device.name))?;
            }
            for (gpu, instance) in world.foreign.iter().filter(|_| device.consumes_counters.is_some()) {
                let both = overlap(here, (*gpu, Some(instance.placement)));
                ensure(!both, || format!("{} is offered, and {instance:?} is there", device.name))?;
            }
        }
        let on_gpu: Vec<&str> = free
            .iter()
            .map(|device| device.name.as_str())
            .filter(|name| {
                DeviceName::parse(name).is_ok_and(|name| name.gpu() == Some(crate::scenario::pci(bus)))
            })
            .collect();
        let wanted = first.iter().map(|(_, device)| device.as_str()).find(|name| on_gpu.contains(name));
        let Some(pick) = wanted.or_else(|| random.choice(on_gpu.iter().copied())) else { continue };
        let name = format!("next-{bus}");
        let device = DeviceName::parse(pick).map_err(|error| error.to_string())?;
        world.put(&name, kerf_kubelet_plugin::testing::claim(&name, &[("gpu", device)]));
        let prepared = world.prepare(process, &name).await;
        prepared.map_err(|error| format!("{pick} was offered and cannot be prepared: {error}"))?;
        names.push(name);
    }
    let live: Vec<&str> = live.iter().copied().chain(names.iter().map(String::as_str)).collect();
    world.check(process, &live)?;
    for name in names {
        world.unprepare(process, &name).await?;
        world.delete(&name);
    }
    Ok(())
}
