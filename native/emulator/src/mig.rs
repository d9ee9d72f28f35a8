//! The rules of MIG as hardware keeps them: what may be created where, which
//! id it gets, what is refused and with which code. Pure functions of a GPU
//! and its model; who may call them and who is told is decided elsewhere.

use crate::code::Code;
use crate::model::{ComputeProfile, Mig, ModeRule, Model, Profile};
use crate::state::{ComputeInstance, Gpu, GpuInstance};

/// What a request for another MIG mode comes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModeChange {
    /// The mode is as wanted.
    Active,
    /// The mode is wanted, and not active for this reason.
    Pending(Code),
}

/// MIG of a model.
///
/// # Errors
/// `NOT_SUPPORTED` for a model without it.
pub fn of(model: &Model) -> Result<&Mig, Code> {
    model.mig.as_ref().ok_or(Code::NOT_SUPPORTED)
}

/// MIG of a GPU whose mode is on.
///
/// # Errors
/// `NOT_SUPPORTED` where it is off, as the header says.
pub fn active<'model>(model: &'model Model, gpu: &Gpu) -> Result<&'model Mig, Code> {
    let mig = of(model)?;
    if gpu.mig_current { Ok(mig) } else { Err(Code::NOT_SUPPORTED) }
}

/// Asks for a mode. `busy`: a process uses the GPU.
///
/// # Errors
/// `IN_USE` while GPU instances exist.
pub fn set_mode(model: &Model, gpu: &mut Gpu, on: bool, busy: bool) -> Result<ModeChange, Code> {
    let mig = of(model)?;
    if !gpu.instances.is_empty() && !on {
        return Err(Code::IN_USE);
    }
    gpu.mig_pending = on;
    if gpu.mig_current == on {
        return Ok(ModeChange::Active);
    }
    if mig.mode == ModeRule::NeedsReset {
        return Ok(ModeChange::Pending(Code::RESET_REQUIRED));
    }
    if busy {
        return Ok(ModeChange::Pending(Code::IN_USE));
    }
    gpu.mig_current = on;
    Ok(ModeChange::Active)
}

/// What a reboot does to a GPU.
pub fn reboot(model: &Model, gpu: &mut Gpu) {
    gpu.instances.clear();
    gpu.lost = false;
    gpu.mig_current =
        gpu.mig_pending && model.mig.as_ref().is_some_and(|mig| mig.mode == ModeRule::NeedsReset);
    gpu.mig_pending = gpu.mig_current;
    gpu.compute_mode = 0;
    gpu.persistence = false;
}

/// The starts at which an instance of a profile can be made now.
pub fn free_starts(mig: &Mig, gpu: &Gpu, profile: &Profile) -> Vec<u32> {
    if !engines_suffice(mig, gpu, profile) {
        return Vec::new();
    }
    let overlaps = |start: u32| {
        gpu.instances
            .iter()
            .any(|other| start < other.start + other.size && other.start < start + profile.size)
    };
    profile.starts.iter().copied().filter(|start| !overlaps(*start)).collect()
}

/// How many more instances of a profile can be made.
pub fn remaining(mig: &Mig, gpu: &Gpu, profile: &Profile) -> u32 {
    let mut trial = gpu.clone();
    let mut count = 0;
    // Placements of one profile have one size, so that taking them from the
    // left finds the largest number.
    while create_at(mig, &mut trial, profile, None, 0).is_ok() {
        count += 1;
    }
    count
}

/// Creates a GPU instance; without a start the first free one is taken.
///
/// # Errors
/// `NOT_SUPPORTED` while MIG is off, `INVALID_ARGUMENT` for an unknown profile
/// or a placement it does not have, `INSUFFICIENT_RESOURCES` where there is no
/// room.
pub fn create_gpu_instance(
    model: &Model,
    gpu: &mut Gpu,
    profile: u32,
    placement: Option<(u32, u32)>,
    serial: u32,
) -> Result<u32, Code> {
    let mig = active(model, gpu)?;
    let profile = mig.profile(profile).ok_or(Code::INVALID_ARGUMENT)?;
    if placement.is_some_and(|(start, size)| size != profile.size || !profile.starts.contains(&start)) {
        return Err(Code::INVALID_ARGUMENT);
    }
    create_at(mig, gpu, profile, placement.map(|(start, _)| start), serial)
}

fn create_at(
    mig: &Mig,
    gpu: &mut Gpu,
    profile: &Profile,
    start: Option<u32>,
    serial: u32,
) -> Result<u32, Code> {
    let free = free_starts(mig, gpu, profile);
    let start = match start {
        Some(start) => free.contains(&start).then_some(start),
        None => free.first().copied(),
    };
    let start = start.ok_or(Code::INSUFFICIENT_RESOURCES)?;
    let (first, last) = profile.instance_ids;
    let id = (first..=last)
        .find(|id| gpu.instances.iter().all(|other| other.id != *id))
        .ok_or(Code::INSUFFICIENT_RESOURCES)?;
    gpu.instances.push(GpuInstance {
        id,
        serial,
        profile: profile.id,
        start,
        size: profile.size,
        compute: Vec::new(),
    });
    gpu.instances.sort_by_key(|instance| instance.id);
    Ok(id)
}

/// Whether one more instance of a profile stays within the GPU's engines, its
/// compute slices and the profile's own limit.
fn engines_suffice(mig: &Mig, gpu: &Gpu, profile: &Profile) -> bool {
    let Some(whole) = mig.whole() else { return false };
    let same = gpu.instances.iter().filter(|instance| instance.profile == profile.id).count();
    let used = |field: fn(&Profile) -> u32| {
        let taken =
            gpu.instances.iter().filter_map(|instance| mig.profile(instance.profile)).map(field).sum::<u32>();
        taken + field(profile) <= field(whole)
    };
    u32::try_from(same).is_ok_and(|same| same < profile.max_instances)
        && used(|profile| profile.slices)
        && used(|profile| profile.multiprocessors)
        && used(|profile| profile.copy_engines)
        && used(|profile| profile.decoders)
        && used(|profile| profile.encoders)
        && used(|profile| profile.jpeg_engines)
        && used(|profile| profile.ofa_engines)
}

/// Destroys a GPU instance.
///
/// # Errors
/// `NOT_FOUND`, or `IN_USE` while it has a compute instance.
pub fn destroy_gpu_instance(gpu: &mut Gpu, id: u32) -> Result<(), Code> {
    let at = gpu.instances.iter().position(|instance| instance.id == id).ok_or(Code::NOT_FOUND)?;
    if gpu.instances.get(at).is_some_and(|instance| !instance.compute.is_empty()) {
        return Err(Code::IN_USE);
    }
    gpu.instances.remove(at);
    Ok(())
}

/// The compute instance profile of an id, where a GPU instance allows it.
///
/// # Errors
/// `INVALID_ARGUMENT` for an unknown one, `NOT_SUPPORTED` for one that the
/// GPU instance does not have.
pub fn compute_profile<'mig>(
    mig: &'mig Mig,
    instance: &Profile,
    id: u32,
) -> Result<&'mig ComputeProfile, Code> {
    let profile = mig.compute_profile(id).ok_or(Code::INVALID_ARGUMENT)?;
    if instance.compute.contains(&id) { Ok(profile) } else { Err(Code::NOT_SUPPORTED) }
}

/// The starts at which a compute instance can be made now.
pub fn free_compute_starts(
    instance: &GpuInstance,
    gpu_profile: &Profile,
    profile: &ComputeProfile,
) -> Vec<u32> {
    let taken = |start: u32| {
        instance
            .compute
            .iter()
            .any(|other| start < other.start + other.size && other.start < start + profile.slices)
    };
    profile.starts(gpu_profile).into_iter().filter(|start| !taken(*start)).collect()
}

/// Creates a compute instance in a GPU instance.
///
/// # Errors
/// `NOT_FOUND`, `INVALID_ARGUMENT`, `NOT_SUPPORTED` or
/// `INSUFFICIENT_RESOURCES`, as for GPU instances.
pub fn create_compute_instance(
    model: &Model,
    gpu: &mut Gpu,
    instance: u32,
    profile: u32,
    placement: Option<(u32, u32)>,
    serial: u32,
) -> Result<u32, Code> {
    let mig = active(model, gpu)?;
    let at = gpu.instances.iter().position(|other| other.id == instance).ok_or(Code::NOT_FOUND)?;
    let found = gpu.instances.get(at).ok_or(Code::NOT_FOUND)?;
    let gpu_profile = mig.profile(found.profile).ok_or(Code::UNKNOWN)?;
    let profile = compute_profile(mig, gpu_profile, profile)?;
    let free = free_compute_starts(found, gpu_profile, profile);
    let start = match placement {
        Some((start, size)) if size != profile.slices || !profile.starts(gpu_profile).contains(&start) => {
            return Err(Code::INVALID_ARGUMENT);
        }
        Some((start, _)) => free.contains(&start).then_some(start),
        None => free.first().copied(),
    };
    let start = start.ok_or(Code::INSUFFICIENT_RESOURCES)?;
    let id = (0..gpu_profile.slices)
        .find(|id| found.compute.iter().all(|other| other.id != *id))
        .ok_or(Code::INSUFFICIENT_RESOURCES)?;
    let uuid = gpu.mig_uuid(found, (id, start));
    let compute = ComputeInstance { id, serial, profile: profile.id, start, size: profile.slices, uuid };
    let found = gpu.instances.get_mut(at).ok_or(Code::NOT_FOUND)?;
    found.compute.push(compute);
    found.compute.sort_by_key(|compute| compute.id);
    Ok(id)
}

/// Destroys a compute instance. Whether a process uses it is the caller's to
/// know.
///
/// # Errors
/// `NOT_FOUND`.
pub fn destroy_compute_instance(gpu: &mut Gpu, instance: u32, compute: u32) -> Result<(), Code> {
    let instance = gpu.instances.iter_mut().find(|other| other.id == instance).ok_or(Code::NOT_FOUND)?;
    let at = instance.compute.iter().position(|other| other.id == compute).ok_or(Code::NOT_FOUND)?;
    instance.compute.remove(at);
    Ok(())
}
