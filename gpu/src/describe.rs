//! Puts NVML's and sysfs' answers about a GPU together into the plain data
//! that the rest of the driver works with.

use std::sync::Arc;

use kerf_dra_driver::inventory::{Bytes, Gpu, Inventory, Mig, MigMode, Profile, UnreadableGpu};
use kerf_dra_driver::names::PciAddress;

use crate::nvml;
use crate::nvml::{Failure, GpuProfile, GpuProfiles, Session};
use crate::roots::Roots;
use crate::sysfs;

/// Everything that NVML counts. A GPU that cannot be read is listed with the
/// reason and hides no other.
pub(crate) fn inventory(session: &Session, roots: &Roots) -> Result<Inventory, Failure> {
    let mut inventory = Inventory {
        driver_version: session.driver_version()?,
        cuda_version: session.cuda_version().unwrap_or_default(),
        ..Inventory::default()
    };
    for index in 0..session.gpu_count()? {
        match describe(session, roots, index) {
            Ok(gpu) if inventory.gpu(gpu.pci).is_some() => inventory.unreadable.push(UnreadableGpu {
                index,
                pci: Some(gpu.pci),
                error: format!("NVML lists the GPU at {} twice", gpu.pci),
            }),
            Ok(gpu) => inventory.gpus.push(gpu),
            // The driver went away under the listing: what is left would look
            // as if every GPU were lost.
            Err((_, failure)) if failure.driver_is_gone() => return Err(failure),
            Err((pci, failure)) => {
                let error = match pci {
                    Some(pci) => format!("the GPU at {pci} could not be read: {failure}"),
                    None => format!("GPU {index} could not be read: {failure}"),
                };
                inventory.unreadable.push(UnreadableGpu { index, pci, error });
            }
        }
    }
    inventory.gpus.sort_by_key(|gpu| gpu.pci);
    Ok(inventory)
}

fn describe(session: &Session, roots: &Roots, index: u32) -> Result<Gpu, (Option<PciAddress>, Failure)> {
    let handle = session.gpu_by_index(index).map_err(|failure| (None, failure))?;
    let pci = handle.pci().map_err(|failure| (None, failure))?;
    read(session, roots, pci, &handle).map_err(|failure| (Some(pci), failure))
}

fn read(session: &Session, roots: &Roots, pci: PciAddress, gpu: &nvml::Gpu<'_>) -> Result<Gpu, Failure> {
    let memory = gpu.memory()?;
    Ok(Gpu {
        pci,
        minor: gpu.minor()?,
        uuid: gpu.uuid()?,
        product: gpu.name()?,
        brand: gpu.brand().to_owned(),
        architecture: gpu.architecture(),
        compute_capability: gpu.compute_capability()?,
        memory,
        addressing_mode: gpu.addressing_mode().map(str::to_owned),
        numa_node: sysfs::numa_node(&roots.sys, pci),
        pcie_root: sysfs::pcie_root(&roots.sys, pci),
        vgpu_guest: gpu.is_vgpu_guest(),
        mig: mig(session, pci, gpu, memory)?,
    })
}

fn mig(
    session: &Session,
    pci: PciAddress,
    gpu: &nvml::Gpu<'_>,
    board: Bytes,
) -> Result<Option<Mig>, Failure> {
    let (current, pending) = match gpu.mig_mode() {
        Ok(modes) => modes,
        Err(failure) if failure.is_not_supported() => return Ok(None),
        Err(failure) => return Err(failure),
    };
    let profiles = session.read_profiles(pci, gpu)?;
    if profiles.profiles.is_empty() {
        return Ok(None);
    }
    let instances = instances(current, pci, gpu, &profiles)?;
    Ok(Some(Mig { current, pending, profiles: published(pci, &profiles, board), instances }))
}

/// The GPU instances that exist. Without MIG mode there are none, and NVML
/// refuses to be asked.
pub(crate) fn instances(
    current: MigMode,
    pci: PciAddress,
    gpu: &nvml::Gpu<'_>,
    profiles: &Arc<GpuProfiles>,
) -> Result<Vec<kerf_dra_driver::inventory::GpuInstance>, Failure> {
    match current {
        MigMode::Enabled => gpu.gpu_instances(pci, profiles),
        MigMode::Disabled => Ok(Vec::new()),
    }
}

/// The profiles under their names. Devices are named after profiles, so of two
/// with one name the first is kept.
fn published(pci: PciAddress, profiles: &GpuProfiles, board: Bytes) -> Vec<Profile> {
    let memory_slices = profiles
        .profiles
        .iter()
        .flat_map(|profile| &profile.placements)
        .map(|placement| placement.start.saturating_add(placement.size))
        .max()
        .unwrap_or(0);
    let mut named: Vec<Profile> = Vec::with_capacity(profiles.profiles.len());
    for profile in &profiles.profiles {
        let name = profile.name.clone().or_else(|| profile.computed_name(board, memory_slices));
        let Some(name) = name.filter(|name| named.iter().all(|known| known.name != *name)) else {
            tracing::warn!(gpu = %pci, profile = profile.id.0, "a MIG profile has no name of its own and is left out");
            continue;
        };
        let GpuProfile {
            id,
            memory,
            compute_slices,
            multiprocessors,
            copy_engines,
            decoders,
            encoders,
            jpeg_engines,
            ofa_engines,
            max_instances,
            ref placements,
            ..
        } = *profile;
        named.push(Profile {
            id,
            name,
            memory,
            compute_slices,
            multiprocessors,
            copy_engines,
            decoders,
            encoders,
            jpeg_engines,
            ofa_engines,
            max_instances,
            placements: placements.clone(),
        });
    }
    named
}
