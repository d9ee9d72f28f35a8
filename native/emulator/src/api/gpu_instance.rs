//! MIG mode and GPU instances.

use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlGpuInstance_t, nvmlGpuInstanceInfo_t, nvmlGpuInstancePlacement_t,
    nvmlGpuInstanceProfileInfo_t, nvmlGpuInstanceProfileInfo_v2_t, nvmlGpuInstanceProfileInfo_v3_t,
};

use super::argument::text_array;
use super::handle::{Device, Instance, gpu_at, with_gpu, writable_gpu};
use super::{In, Out, api, check_version};
use crate::code::Code;
use crate::mig::{self, ModeChange};
use crate::model::{Mig, Profile};
use crate::session::Session;
use crate::state::Gpu;

/// Largest profile enumeration value any driver knows.
const PROFILE_ENUM_LIMIT: u32 = 17;

fn by_enum(mig: &Mig, number: u32) -> Result<&Profile, Code> {
    if number > PROFILE_ENUM_LIMIT {
        return Err(Code::INVALID_ARGUMENT);
    }
    mig.profiles.iter().find(|profile| profile.profile == number).ok_or(Code::NOT_SUPPORTED)
}

fn by_id(mig: &Mig, id: u32) -> Result<&Profile, Code> {
    mig.profile(id).ok_or(Code::INVALID_ARGUMENT)
}

/// Fills whichever version of the struct the caller brought.
fn set_versioned(info: &Out<nvmlGpuInstanceProfileInfo_v2_t>, profile: &Profile) -> Result<(), Code> {
    let version = info.cast::<u32>().get()?;
    let name = text_array(&format!("MIG {}", profile.name));
    if version >> 24 == 3 {
        check_version::<nvmlGpuInstanceProfileInfo_v3_t>(version, 3)?;
        return info.cast().set(nvmlGpuInstanceProfileInfo_v3_t {
            version,
            id: profile.id,
            sliceCount: profile.slices,
            instanceCount: profile.max_instances,
            multiprocessorCount: profile.multiprocessors,
            copyEngineCount: profile.copy_engines,
            decoderCount: profile.decoders,
            encoderCount: profile.encoders,
            jpegCount: profile.jpeg_engines,
            ofaCount: profile.ofa_engines,
            memorySizeMB: profile.memory_mib,
            name,
            capabilities: 0,
        });
    }
    check_version::<nvmlGpuInstanceProfileInfo_v2_t>(version, 2)?;
    info.set(nvmlGpuInstanceProfileInfo_v2_t {
        version,
        id: profile.id,
        isP2pSupported: 0,
        sliceCount: profile.slices,
        instanceCount: profile.max_instances,
        multiprocessorCount: profile.multiprocessors,
        copyEngineCount: profile.copy_engines,
        decoderCount: profile.decoders,
        encoderCount: profile.encoders,
        jpegCount: profile.jpeg_engines,
        ofaCount: profile.ofa_engines,
        memorySizeMB: profile.memory_mib,
        name,
    })
}

fn placements(
    session: &Session,
    device: nvmlDevice_t,
    profile: u32,
    places: &Out<nvmlGpuInstancePlacement_t>,
    count: &Out<u32>,
) -> Result<(), Code> {
    with_gpu(session, device, |_, model| {
        let profile = by_id(mig::of(model)?, profile)?;
        let all = profile
            .starts
            .iter()
            .map(|start| nvmlGpuInstancePlacement_t { start: *start, size: profile.size });
        places.set_list(count, &all.collect::<Vec<_>>())
    })
}

/// Refuses what only the hypervisor may do: a vGPU's mode and GPU instances
/// are its own. What the control command does is the hypervisor's doing.
fn not_a_guest(session: &Session, gpu: usize) -> Result<(), Code> {
    let state = session.state()?;
    if state.gpus.get(gpu).is_some_and(|gpu| gpu.vgpu) { Err(Code::NOT_SUPPORTED) } else { Ok(()) }
}

fn create(
    session: &Session,
    device: nvmlDevice_t,
    profile: u32,
    placement: Option<(u32, u32)>,
    created: &Out<nvmlGpuInstance_t>,
) -> Result<(), Code> {
    created.check()?;
    let gpu = writable_gpu(session, device)?;
    not_a_guest(session, gpu)?;
    let (instance, serial) = session.machine.create_gpu_instance(gpu, profile, placement)?;
    created.set(Instance { gpu, instance, compute: 0, serial }.to_gpu_instance())
}

/// Handles of the GPU instances that a filter takes and this process sees.
fn handles(
    session: &Session,
    device: nvmlDevice_t,
    take: impl Fn(&crate::state::GpuInstance) -> bool,
    check: impl FnOnce(&Gpu, &crate::model::Model) -> Result<(), Code>,
) -> Result<Vec<nvmlGpuInstance_t>, Code> {
    let position = Device::from_handle(device)?.gpu();
    with_gpu(session, device, |gpu, model| {
        check(gpu, model)?;
        let seen =
            gpu.instances.iter().filter(|found| take(found) && session.machine.sees_instance(gpu, found));
        let handle = |found: &crate::state::GpuInstance| {
            Instance { gpu: position, instance: found.id, compute: 0, serial: found.serial }.to_gpu_instance()
        };
        Ok(seen.map(handle).collect())
    })
}

api! {
    fn nvmlDeviceGetMigMode(device: nvmlDevice_t, current: Out<u32>, pending: Out<u32>) |session| {
        with_gpu(session, device, |gpu, model| {
            mig::of(model)?;
            current.set(u32::from(gpu.mig_current))?;
            pending.set(u32::from(gpu.mig_pending))
        })
    }
    fn nvmlDeviceSetMigMode(device: nvmlDevice_t, mode: u32, activation: Out<u32>) |session| {
        activation.check()?;
        if mode > 1 {
            return Err(Code::INVALID_ARGUMENT);
        }
        with_gpu(session, device, |_, model| mig::of(model).map(|_| ()))?;
        let gpu = writable_gpu(session, device)?;
        not_a_guest(session, gpu)?;
        match session.machine.set_mig_mode(gpu, mode == 1) {
            Ok(ModeChange::Active) => activation.set(0),
            Ok(ModeChange::Pending(why)) => activation.set(why.number()),
            Err(code) => {
                activation.set(code.number())?;
                Err(code)
            }
        }
    }
    fn nvmlDeviceGetGpuInstanceProfileInfo(
        device: nvmlDevice_t, profile: u32, info: Out<nvmlGpuInstanceProfileInfo_t>,
    ) |session| {
        with_gpu(session, device, |_, model| {
            let profile = by_enum(mig::of(model)?, profile)?;
            info.set(nvmlGpuInstanceProfileInfo_t {
                id: profile.id,
                isP2pSupported: 0,
                sliceCount: profile.slices,
                instanceCount: profile.max_instances,
                multiprocessorCount: profile.multiprocessors,
                copyEngineCount: profile.copy_engines,
                decoderCount: profile.decoders,
                encoderCount: profile.encoders,
                jpegCount: profile.jpeg_engines,
                ofaCount: profile.ofa_engines,
                memorySizeMB: profile.memory_mib,
            })
        })
    }
    fn nvmlDeviceGetGpuInstanceProfileInfoV(
        device: nvmlDevice_t, profile: u32, info: Out<nvmlGpuInstanceProfileInfo_v2_t>,
    ) |session| {
        with_gpu(session, device, |_, model| set_versioned(&info, by_enum(mig::of(model)?, profile)?))
    }
    fn nvmlDeviceGetGpuInstanceProfileInfoByIdV(
        device: nvmlDevice_t, profile: u32, info: Out<nvmlGpuInstanceProfileInfo_v2_t>,
    ) |session| {
        with_gpu(session, device, |gpu, model| set_versioned(&info, by_id(mig::active(model, gpu)?, profile)?))
    }
    fn nvmlDeviceGetGpuInstancePossiblePlacements(
        device: nvmlDevice_t, profile: u32, places: Out<nvmlGpuInstancePlacement_t>, count: Out<u32>,
    ) |session| { placements(session, device, profile, &places, &count) }
    fn nvmlDeviceGetGpuInstancePossiblePlacements_v2(
        device: nvmlDevice_t, profile: u32, places: Out<nvmlGpuInstancePlacement_t>, count: Out<u32>,
    ) |session| { placements(session, device, profile, &places, &count) }
    fn nvmlDeviceGetGpuInstanceRemainingCapacity(device: nvmlDevice_t, profile: u32, count: Out<u32>) |session| {
        with_gpu(session, device, |gpu, model| {
            let mig = mig::active(model, gpu)?;
            count.set(mig::remaining(mig, gpu, by_id(mig, profile)?))
        })
    }
    fn nvmlDeviceCreateGpuInstance(device: nvmlDevice_t, profile: u32, created: Out<nvmlGpuInstance_t>) |session| {
        create(session, device, profile, None, &created)
    }
    fn nvmlDeviceCreateGpuInstanceWithPlacement(
        device: nvmlDevice_t, profile: u32, placement: In<nvmlGpuInstancePlacement_t>, created: Out<nvmlGpuInstance_t>,
    ) |session| {
        let placement = placement.get()?;
        create(session, device, profile, Some((placement.start, placement.size)), &created)
    }
    fn nvmlGpuInstanceDestroy(instance: nvmlGpuInstance_t) |session| {
        let of = Instance::from_gpu_instance(instance)?;
        gpu_at(&session.machine, session.state()?.as_ref(), of.gpu)?;
        not_a_guest(session, of.gpu)?;
        session.machine.destroy_gpu_instance(of.gpu, of.instance, of.serial)
    }
    fn nvmlDeviceGetGpuInstances(
        device: nvmlDevice_t, profile: u32, instances: Out<nvmlGpuInstance_t>, count: Out<u32>,
    ) |session| {
        let check = |gpu: &Gpu, model: &crate::model::Model| by_id(mig::active(model, gpu)?, profile).map(|_| ());
        let found = handles(session, device, |found| found.profile == profile, check)?;
        instances.set_list(&count, &found)
    }
    fn nvmlDeviceGetGpuInstanceById(device: nvmlDevice_t, id: u32, instance: Out<nvmlGpuInstance_t>) |session| {
        let check = |gpu: &Gpu, model: &crate::model::Model| mig::active(model, gpu).map(|_| ());
        let found = handles(session, device, |found| found.id == id, check)?;
        instance.set(found.first().copied().ok_or(Code::NOT_FOUND)?)
    }
    fn nvmlGpuInstanceGetInfo(instance: nvmlGpuInstance_t, info: Out<nvmlGpuInstanceInfo_t>) |session| {
        let of = Instance::from_gpu_instance(instance)?;
        let state = session.state()?;
        let (gpu, _) = gpu_at(&session.machine, &state, of.gpu)?;
        let found = of.find_gpu_instance(gpu)?;
        info.set(nvmlGpuInstanceInfo_t {
            device: Device::Gpu(of.gpu).to_handle(),
            id: found.id,
            profileId: found.profile,
            placement: nvmlGpuInstancePlacement_t { start: found.start, size: found.size },
        })
    }
}
