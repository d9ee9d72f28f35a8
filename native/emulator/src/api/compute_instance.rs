//! Compute instances.

use nvml_wrapper_sys::bindings::{
    nvmlComputeInstance_t, nvmlComputeInstanceInfo_t, nvmlComputeInstancePlacement_t,
    nvmlComputeInstanceProfileInfo_t, nvmlComputeInstanceProfileInfo_v2_t,
    nvmlComputeInstanceProfileInfo_v3_t, nvmlGpuInstance_t,
};

use super::argument::text_array;
use super::handle::{Device, Instance, gpu_at};
use super::{In, Out, api, check_version};
use crate::code::Code;
use crate::mig;
use crate::model::{ComputeProfile, Mig, Profile};
use crate::session::Session;
use crate::state::{Gpu, GpuInstance};

/// Largest compute profile enumeration value any driver knows.
const PROFILE_ENUM_LIMIT: u32 = 8;

/// A GPU instance with what its model says of it.
struct Within<'a> {
    of: Instance,
    gpu: &'a Gpu,
    instance: &'a GpuInstance,
    profile: &'a Profile,
    mig: &'a Mig,
}

fn within<T>(
    session: &Session,
    instance: nvmlGpuInstance_t,
    answer: impl FnOnce(Within) -> Result<T, Code>,
) -> Result<T, Code> {
    let of = Instance::from_gpu_instance(instance)?;
    let state = session.state()?;
    let (gpu, model) = gpu_at(&session.machine, &state, of.gpu)?;
    let instance = of.find_gpu_instance(gpu)?;
    let mig = mig::of(model)?;
    let profile = mig.profile(instance.profile).ok_or(Code::UNKNOWN)?;
    answer(Within { of, gpu, instance, profile, mig })
}

impl Within<'_> {
    fn by_enum(&self, number: u32, engines: u32) -> Result<&ComputeProfile, Code> {
        if number > PROFILE_ENUM_LIMIT || engines != 0 {
            return Err(Code::INVALID_ARGUMENT);
        }
        let mut allowed =
            self.mig.compute_profiles.iter().filter(|profile| self.profile.compute.contains(&profile.id));
        allowed.find(|profile| profile.profile == number).ok_or(Code::NOT_SUPPORTED)
    }

    fn info(&self, profile: &ComputeProfile) -> nvmlComputeInstanceProfileInfo_t {
        nvmlComputeInstanceProfileInfo_t {
            id: profile.id,
            sliceCount: profile.slices,
            instanceCount: u32::try_from(profile.starts(self.profile).len()).unwrap_or(0),
            multiprocessorCount: profile.multiprocessors(self.mig, self.profile),
            sharedCopyEngineCount: self.profile.copy_engines,
            sharedDecoderCount: self.profile.decoders,
            sharedEncoderCount: self.profile.encoders,
            sharedJpegCount: self.profile.jpeg_engines,
            sharedOfaCount: self.profile.ofa_engines,
        }
    }

    fn set_versioned(
        &self,
        out: &Out<nvmlComputeInstanceProfileInfo_v2_t>,
        profile: &ComputeProfile,
    ) -> Result<(), Code> {
        let version = out.cast::<u32>().get()?;
        let info = self.info(profile);
        let name = text_array(&format!("MIG {}", profile.name(self.profile)));
        if version >> 24 == 3 {
            check_version::<nvmlComputeInstanceProfileInfo_v3_t>(version, 3)?;
            return out.cast().set(nvmlComputeInstanceProfileInfo_v3_t {
                version,
                id: info.id,
                sliceCount: info.sliceCount,
                instanceCount: info.instanceCount,
                multiprocessorCount: info.multiprocessorCount,
                sharedCopyEngineCount: info.sharedCopyEngineCount,
                sharedDecoderCount: info.sharedDecoderCount,
                sharedEncoderCount: info.sharedEncoderCount,
                sharedJpegCount: info.sharedJpegCount,
                sharedOfaCount: info.sharedOfaCount,
                name,
                capabilities: 0,
            });
        }
        check_version::<nvmlComputeInstanceProfileInfo_v2_t>(version, 2)?;
        out.set(nvmlComputeInstanceProfileInfo_v2_t {
            version,
            id: info.id,
            sliceCount: info.sliceCount,
            instanceCount: info.instanceCount,
            multiprocessorCount: info.multiprocessorCount,
            sharedCopyEngineCount: info.sharedCopyEngineCount,
            sharedDecoderCount: info.sharedDecoderCount,
            sharedEncoderCount: info.sharedEncoderCount,
            sharedJpegCount: info.sharedJpegCount,
            sharedOfaCount: info.sharedOfaCount,
            name,
        })
    }

    /// Handles of the compute instances that a filter takes and this process
    /// sees.
    fn handles(
        &self,
        session: &Session,
        take: impl Fn(&crate::state::ComputeInstance) -> bool,
    ) -> Vec<nvmlComputeInstance_t> {
        let sees = |found: &&crate::state::ComputeInstance| {
            take(found) && session.machine.sees_mig_device(self.gpu, self.instance, found)
        };
        let handle = |found: &crate::state::ComputeInstance| {
            Instance { gpu: self.of.gpu, instance: self.instance.id, compute: found.id, serial: found.serial }
                .to_compute_instance()
        };
        self.instance.compute.iter().filter(sees).map(handle).collect()
    }
}

fn create(
    session: &Session,
    instance: nvmlGpuInstance_t,
    profile: u32,
    placement: Option<(u32, u32)>,
    created: &Out<nvmlComputeInstance_t>,
) -> Result<(), Code> {
    created.check()?;
    let of = within(session, instance, |within| Ok(within.of))?;
    let (compute, serial) =
        session.machine.create_compute_instance(of.gpu, of.instance, profile, placement)?;
    created.set(Instance { compute, serial, ..of }.to_compute_instance())
}

fn info(
    session: &Session,
    compute: nvmlComputeInstance_t,
    info: &Out<nvmlComputeInstanceInfo_t>,
) -> Result<(), Code> {
    let of = Instance::from_compute_instance(compute)?;
    let state = session.state()?;
    let (gpu, _) = gpu_at(&session.machine, &state, of.gpu)?;
    let (instance, compute) = of.find_compute_instance(gpu)?;
    info.set(nvmlComputeInstanceInfo_t {
        device: Device::Gpu(of.gpu).to_handle(),
        gpuInstance: Instance { compute: 0, serial: instance.serial, ..of }.to_gpu_instance(),
        id: compute.id,
        profileId: compute.profile,
        placement: nvmlComputeInstancePlacement_t { start: compute.start, size: compute.size },
    })
}

api! {
    fn nvmlGpuInstanceGetComputeInstanceProfileInfo(
        instance: nvmlGpuInstance_t, profile: u32, engines: u32, out: Out<nvmlComputeInstanceProfileInfo_t>,
    ) |session| {
        within(session, instance, |within| out.set(within.info(within.by_enum(profile, engines)?)))
    }
    fn nvmlGpuInstanceGetComputeInstanceProfileInfoV(
        instance: nvmlGpuInstance_t, profile: u32, engines: u32, out: Out<nvmlComputeInstanceProfileInfo_v2_t>,
    ) |session| {
        within(session, instance, |within| within.set_versioned(&out, within.by_enum(profile, engines)?))
    }
    fn nvmlGpuInstanceGetComputeInstanceRemainingCapacity(
        instance: nvmlGpuInstance_t, profile: u32, count: Out<u32>,
    ) |session| {
        within(session, instance, |within| {
            let profile = mig::compute_profile(within.mig, within.profile, profile)?;
            let free = mig::free_compute_starts(within.instance, within.profile, profile);
            count.set(u32::try_from(free.len()).map_err(|_| Code::UNKNOWN)?)
        })
    }
    fn nvmlGpuInstanceGetComputeInstancePossiblePlacements(
        instance: nvmlGpuInstance_t, profile: u32, places: Out<nvmlComputeInstancePlacement_t>, count: Out<u32>,
    ) |session| {
        within(session, instance, |within| {
            let profile = mig::compute_profile(within.mig, within.profile, profile)?;
            let starts = profile.starts(within.profile).into_iter();
            let all = starts.map(|start| nvmlComputeInstancePlacement_t { start, size: profile.slices });
            places.set_list(&count, &all.collect::<Vec<_>>())
        })
    }
    fn nvmlGpuInstanceCreateComputeInstance(
        instance: nvmlGpuInstance_t, profile: u32, created: Out<nvmlComputeInstance_t>,
    ) |session| { create(session, instance, profile, None, &created) }
    fn nvmlGpuInstanceCreateComputeInstanceWithPlacement(
        instance: nvmlGpuInstance_t, profile: u32, placement: In<nvmlComputeInstancePlacement_t>,
        created: Out<nvmlComputeInstance_t>,
    ) |session| {
        let placement = placement.get()?;
        create(session, instance, profile, Some((placement.start, placement.size)), &created)
    }
    fn nvmlComputeInstanceDestroy(compute: nvmlComputeInstance_t) |session| {
        let of = Instance::from_compute_instance(compute)?;
        gpu_at(&session.machine, session.state()?.as_ref(), of.gpu)?;
        session.machine.destroy_compute_instance(of.gpu, of.instance, of.compute, of.serial)
    }
    fn nvmlGpuInstanceGetComputeInstances(
        instance: nvmlGpuInstance_t, profile: u32, found: Out<nvmlComputeInstance_t>, count: Out<u32>,
    ) |session| {
        within(session, instance, |within| {
            mig::compute_profile(within.mig, within.profile, profile)?;
            found.set_list(&count, &within.handles(session, |compute| compute.profile == profile))
        })
    }
    fn nvmlGpuInstanceGetComputeInstanceById(
        instance: nvmlGpuInstance_t, id: u32, found: Out<nvmlComputeInstance_t>,
    ) |session| {
        within(session, instance, |within| {
            let handles = within.handles(session, |compute| compute.id == id);
            found.set(handles.first().copied().ok_or(Code::NOT_FOUND)?)
        })
    }
    fn nvmlComputeInstanceGetInfo(compute: nvmlComputeInstance_t, out: Out<nvmlComputeInstanceInfo_t>) |session| {
        info(session, compute, &out)
    }
    fn nvmlComputeInstanceGetInfo_v2(compute: nvmlComputeInstance_t, out: Out<nvmlComputeInstanceInfo_t>) |session| {
        info(session, compute, &out)
    }
}
