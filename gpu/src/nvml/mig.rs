//! MIG instances: created, listed, destroyed. `nvml-wrapper` has none of it.
//!
//! A GPU instance without a compute instance has no MIG device, so GPU
//! instances are listed by profile and never by MIG device.

use std::ffi::c_uint;
use std::ptr;
use std::sync::Arc;

use kerf_dra_driver::inventory::{
    ComputeInstance, ComputeInstanceId, GpuInstance, GpuInstanceId, MigMode, Placement, ProfileId,
};
use kerf_dra_driver::names::PciAddress;
use nvml_wrapper_sys::bindings as sys;

use super::failure::Failure;
use super::gpu::Gpu;
use super::mig_device::MigDevices;
use super::profile::GpuProfiles;
use super::session::{check, symbol};

/// The compute instance profile enums probed. Headers name 9 today.
const PROBED: std::ops::RangeInclusive<u32> = 0..=16;

/// Room for instances of one profile; no GPU holds more than 8 in all.
const MAX_INSTANCES: usize = 64;

/// How often a listing is begun anew because an instance vanished under it.
const LISTINGS: usize = 4;

/// Codes by which NVML says that a handle or an id is of nothing that exists.
const GONE: &[u32] =
    &[sys::nvmlReturn_enum_NVML_ERROR_NOT_FOUND, sys::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT];

/// A kind of compute instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ComputeProfile {
    /// The id that create calls take.
    pub id: u32,
    /// The enum it was asked for with.
    pub probe: u32,
    /// Compute slices.
    pub compute_slices: u32,
}

/// A raw handle of a GPU instance; never null.
#[derive(Clone, Copy)]
struct GpuInstanceHandle(sys::nvmlGpuInstance_t);

/// A raw handle of a compute instance; never null.
#[derive(Clone, Copy)]
struct ComputeInstanceHandle(sys::nvmlComputeInstance_t);

impl Gpu<'_> {
    /// The current and the pending MIG mode.
    pub(crate) fn mig_mode(&self) -> Result<(MigMode, MigMode), Failure> {
        const CALL: &str = "nvmlDeviceGetMigMode";
        let mode = |value: u32| match value {
            sys::NVML_DEVICE_MIG_DISABLE => Ok(MigMode::Disabled),
            sys::NVML_DEVICE_MIG_ENABLE => Ok(MigMode::Enabled),
            other => Err(Failure::Absurd { call: CALL, answer: format!("the mode {other}") }),
        };
        let found = self.device().mig_mode().map_err(Failure::of(CALL))?;
        Ok((mode(found.current)?, mode(found.pending)?))
    }

    /// Asks for a MIG mode. The failure is the call's or, where the call
    /// succeeds and the mode does not become active, the activation's.
    pub(crate) fn set_mig_mode(&self, mode: MigMode) -> Result<(), Failure> {
        const CALL: &str = "nvmlDeviceSetMigMode";
        let status = self.device().set_mig_mode(mode == MigMode::Enabled).map_err(Failure::of(CALL))?;
        check(CALL, status)
    }

    /// The GPU instances that exist, ordered by id. `profiles` are the GPU's.
    pub(crate) fn gpu_instances(
        &self,
        pci: PciAddress,
        profiles: &GpuProfiles,
    ) -> Result<Vec<GpuInstance>, Failure> {
        let mut listing = self.list_once(pci, profiles);
        for _ in 1..LISTINGS {
            match &listing {
                Err(failure) if failure.is(GONE) => listing = self.list_once(pci, profiles),
                _ => break,
            }
        }
        listing
    }

    fn list_once(&self, pci: PciAddress, profiles: &GpuProfiles) -> Result<Vec<GpuInstance>, Failure> {
        let devices = MigDevices::of(self);
        let mut instances: Vec<GpuInstance> = Vec::new();
        for profile in &profiles.profiles {
            for handle in self.gpu_instance_handles(profile.id)? {
                let (id, profile, placement) = self.gpu_instance_info(handle)?;
                if instances.iter().any(|known| known.id == id) {
                    continue;
                }
                let compute_instances =
                    self.compute_instances(pci, handle, id, profile, profiles, &devices)?;
                instances.push(GpuInstance { id, profile, placement, compute_instances });
            }
        }
        instances.sort_by_key(|instance| instance.id);
        Ok(instances)
    }

    fn gpu_instance_handles(&self, profile: ProfileId) -> Result<Vec<GpuInstanceHandle>, Failure> {
        const CALL: &str = "nvmlDeviceGetGpuInstances";
        let call = symbol(&self.session.lib().nvmlDeviceGetGpuInstances, CALL)?;
        let listed = list(CALL, |handles, count| {
            // SAFETY: `handles` has `count` writable entries, more than the
            // GPU can hold instances; the device handle is of this library.
            unsafe { call(self.handle(), profile.0, handles, count) }
        });
        match listed {
            Ok(handles) => Ok(handles.into_iter().map(GpuInstanceHandle).collect()),
            // The mode was switched off meanwhile, or the profile is one that
            // the GPU only describes.
            Err(failure) if failure.is(&[sys::nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED]) => Ok(Vec::new()),
            Err(failure) => Err(failure),
        }
    }

    fn gpu_instance_info(
        &self,
        handle: GpuInstanceHandle,
    ) -> Result<(GpuInstanceId, ProfileId, Placement), Failure> {
        const CALL: &str = "nvmlGpuInstanceGetInfo";
        let call = symbol(&self.session.lib().nvmlGpuInstanceGetInfo, CALL)?;
        let mut info = sys::nvmlGpuInstanceInfo_t {
            device: ptr::null_mut(),
            id: 0,
            profileId: 0,
            placement: sys::nvmlGpuInstancePlacement_t { start: 0, size: 0 },
        };
        // SAFETY: `info` is writable; the handle is one this library gave.
        check(CALL, unsafe { call(handle.0, &raw mut info) })?;
        let placement = Placement { start: info.placement.start, size: info.placement.size };
        Ok((GpuInstanceId(info.id), ProfileId(info.profileId), placement))
    }

    /// Creates a GPU instance of a profile exactly at a placement.
    ///
    /// The instance is destroyed again where it is not what was asked for.
    pub(crate) fn create_gpu_instance(
        &self,
        profile: ProfileId,
        placement: Placement,
    ) -> Result<GpuInstanceId, Failure> {
        const CALL: &str = "nvmlDeviceCreateGpuInstanceWithPlacement";
        let call = symbol(&self.session.lib().nvmlDeviceCreateGpuInstanceWithPlacement, CALL)?;
        let wanted = sys::nvmlGpuInstancePlacement_t { start: placement.start, size: placement.size };
        let mut raw = ptr::null_mut();
        // SAFETY: `wanted` is readable and `raw` writable; the device handle
        // is of this library.
        check(CALL, unsafe { call(self.handle(), profile.0, &raw const wanted, &raw mut raw) })?;
        let handle = GpuInstanceHandle(not_null(CALL, raw)?);
        let found = self.gpu_instance_info(handle).and_then(|(id, found_profile, found_placement)| {
            if (found_profile, found_placement) == (profile, placement) {
                return Ok(id);
            }
            let answer = format!(
                "profile {} at {} instead of {} at {}",
                found_profile.0, found_placement.start, profile.0, placement.start
            );
            Err(Failure::Absurd { call: CALL, answer })
        });
        found.map_err(|failure| undone(CALL, failure, self.destroy_gpu_instance_handle(handle)))
    }

    /// Destroys a GPU instance that has no compute instance.
    pub(crate) fn destroy_gpu_instance(&self, instance: GpuInstanceId) -> Result<(), Failure> {
        self.destroy_gpu_instance_handle(self.gpu_instance_by_id(instance)?)
    }

    fn destroy_gpu_instance_handle(&self, handle: GpuInstanceHandle) -> Result<(), Failure> {
        const CALL: &str = "nvmlGpuInstanceDestroy";
        let call = symbol(&self.session.lib().nvmlGpuInstanceDestroy, CALL)?;
        // SAFETY: the handle is one this library gave and is not used again.
        check(CALL, unsafe { call(handle.0) })
    }

    fn gpu_instance_by_id(&self, instance: GpuInstanceId) -> Result<GpuInstanceHandle, Failure> {
        const CALL: &str = "nvmlDeviceGetGpuInstanceById";
        let call = symbol(&self.session.lib().nvmlDeviceGetGpuInstanceById, CALL)?;
        let mut raw = ptr::null_mut();
        // SAFETY: `raw` is writable; the device handle is of this library.
        let code = unsafe { call(self.handle(), instance.0, &raw mut raw) };
        check(CALL, code).map_err(|failure| self.gone_with_the_mode(failure))?;
        Ok(GpuInstanceHandle(not_null(CALL, raw)?))
    }

    /// Without MIG mode NVML does not look instances up at all; then there are
    /// none.
    fn gone_with_the_mode(&self, failure: Failure) -> Failure {
        match failure {
            Failure::Code { call, code: sys::nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED }
                if matches!(self.mig_mode(), Ok((MigMode::Disabled, _))) =>
            {
                Failure::Code { call, code: sys::nvmlReturn_enum_NVML_ERROR_NOT_FOUND }
            }
            other => other,
        }
    }

    /// Creates the compute instance that spans a whole GPU instance.
    ///
    /// The instance is destroyed again where its UUID cannot be read.
    pub(crate) fn create_compute_instance(
        &self,
        pci: PciAddress,
        instance: GpuInstanceId,
        profiles: &GpuProfiles,
    ) -> Result<ComputeInstance, Failure> {
        const CALL: &str = "nvmlGpuInstanceCreateComputeInstance";
        let call = symbol(&self.session.lib().nvmlGpuInstanceCreateComputeInstance, CALL)?;
        let parent = self.gpu_instance_by_id(instance)?;
        let (_, profile, _) = self.gpu_instance_info(parent)?;
        let full = self.full_profile(pci, parent, profile, profiles)?;
        let mut raw = ptr::null_mut();
        // SAFETY: `raw` is writable; the parent is a handle of this library.
        check(CALL, unsafe { call(parent.0, full, &raw mut raw) })?;
        let handle = ComputeInstanceHandle(not_null(CALL, raw)?);
        let read = self.compute_instance_info(handle).and_then(|info| {
            let uuid = MigDevices::of(self).uuid(info.device, instance.0, info.id)?;
            Ok(ComputeInstance { id: ComputeInstanceId(info.id), full: true, uuid })
        });
        read.map_err(|failure| undone(CALL, failure, self.destroy_compute_instance_handle(handle)))
    }

    /// Destroys a compute instance.
    pub(crate) fn destroy_compute_instance(
        &self,
        instance: GpuInstanceId,
        compute_instance: ComputeInstanceId,
    ) -> Result<(), Failure> {
        const CALL: &str = "nvmlGpuInstanceGetComputeInstanceById";
        let call = symbol(&self.session.lib().nvmlGpuInstanceGetComputeInstanceById, CALL)?;
        let parent = self.gpu_instance_by_id(instance)?;
        let mut raw = ptr::null_mut();
        // SAFETY: `raw` is writable; the parent is a handle of this library.
        check(CALL, unsafe { call(parent.0, compute_instance.0, &raw mut raw) })?;
        self.destroy_compute_instance_handle(ComputeInstanceHandle(not_null(CALL, raw)?))
    }

    fn destroy_compute_instance_handle(&self, handle: ComputeInstanceHandle) -> Result<(), Failure> {
        const CALL: &str = "nvmlComputeInstanceDestroy";
        let call = symbol(&self.session.lib().nvmlComputeInstanceDestroy, CALL)?;
        // SAFETY: the handle is one this library gave and is not used again.
        check(CALL, unsafe { call(handle.0) })
    }

    fn compute_instances(
        &self,
        pci: PciAddress,
        parent: GpuInstanceHandle,
        parent_id: GpuInstanceId,
        profile: ProfileId,
        profiles: &GpuProfiles,
        devices: &MigDevices<'_, '_>,
    ) -> Result<Vec<ComputeInstance>, Failure> {
        const CALL: &str = "nvmlGpuInstanceGetComputeInstances";
        let call = symbol(&self.session.lib().nvmlGpuInstanceGetComputeInstances, CALL)?;
        let kinds = self.session.compute_profiles(pci, profile, || self.probe_compute_profiles(parent))?;
        let whole = profiles.get(profile).map(|profile| profile.compute_slices);
        let mut instances: Vec<ComputeInstance> = Vec::new();
        for kind in kinds.iter() {
            let handles = list(CALL, |handles, count| {
                // SAFETY: `handles` has `count` writable entries, more than a
                // GPU instance can hold; the parent is a handle of this library.
                unsafe { call(parent.0, kind.id, handles, count) }
            })?;
            for handle in handles {
                let info = self.compute_instance_info(ComputeInstanceHandle(handle))?;
                let id = ComputeInstanceId(info.id);
                if instances.iter().any(|known| known.id == id) {
                    continue;
                }
                let full = Some(kind.compute_slices) == whole;
                let uuid = devices.uuid(info.device, parent_id.0, info.id)?;
                instances.push(ComputeInstance { id, full, uuid });
            }
        }
        instances.sort_by_key(|instance| instance.id);
        Ok(instances)
    }

    fn compute_instance_info(
        &self,
        handle: ComputeInstanceHandle,
    ) -> Result<sys::nvmlComputeInstanceInfo_t, Failure> {
        const CALL: &str = "nvmlComputeInstanceGetInfo_v2";
        let call = symbol(&self.session.lib().nvmlComputeInstanceGetInfo_v2, CALL)?;
        let mut info = sys::nvmlComputeInstanceInfo_t {
            device: ptr::null_mut(),
            gpuInstance: ptr::null_mut(),
            id: 0,
            profileId: 0,
            placement: sys::nvmlComputeInstancePlacement_t { start: 0, size: 0 },
        };
        // SAFETY: `info` is writable; the handle is one this library gave.
        check(CALL, unsafe { call(handle.0, &raw mut info) })?;
        Ok(info)
    }

    /// The profile of the compute instance that has all of its GPU instance's
    /// compute slices. It is found by that count: profile enums of GPU and
    /// compute instances do not correspond.
    fn full_profile(
        &self,
        pci: PciAddress,
        parent: GpuInstanceHandle,
        profile: ProfileId,
        profiles: &GpuProfiles,
    ) -> Result<u32, Failure> {
        let kinds: Arc<[ComputeProfile]> =
            self.session.compute_profiles(pci, profile, || self.probe_compute_profiles(parent))?;
        let whole = profiles.get(profile).map(|profile| profile.compute_slices);
        kinds.iter().find(|kind| Some(kind.compute_slices) == whole).map(|kind| kind.id).ok_or_else(|| {
            Failure::Absurd {
                call: "nvmlGpuInstanceGetComputeInstanceProfileInfo",
                answer: format!("no compute instance profile spans GPU instance profile {}", profile.0),
            }
        })
    }

    /// The compute instance profiles of a GPU instance that exists.
    pub(crate) fn compute_profiles_of(
        &self,
        instance: GpuInstanceId,
    ) -> Result<Vec<ComputeProfile>, Failure> {
        self.probe_compute_profiles(self.gpu_instance_by_id(instance)?)
    }

    /// The compute instance profiles of a GPU instance. Where two have equally
    /// many slices (the second revision of one, the NVLink variant), the first
    /// is the plain one.
    fn probe_compute_profiles(&self, parent: GpuInstanceHandle) -> Result<Vec<ComputeProfile>, Failure> {
        const CALL: &str = "nvmlGpuInstanceGetComputeInstanceProfileInfo";
        let call = symbol(&self.session.lib().nvmlGpuInstanceGetComputeInstanceProfileInfo, CALL)?;
        let mut kinds: Vec<ComputeProfile> = Vec::new();
        for probe in PROBED {
            // SAFETY: the struct is of integers only, for which zero is a value.
            let mut info: sys::nvmlComputeInstanceProfileInfo_t = unsafe { std::mem::zeroed() };
            let engines = sys::NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED;
            // SAFETY: `info` is writable; the parent is a handle of this library.
            let code = unsafe { call(parent.0, probe, engines, &raw mut info) };
            match check(CALL, code) {
                Ok(()) => {}
                Err(failure) if failure.is_not_supported() || failure.is(GONE) => continue,
                Err(failure) => return Err(failure),
            }
            let kind = ComputeProfile { id: info.id, probe, compute_slices: info.sliceCount };
            if kinds.iter().all(|known| known.id != kind.id) {
                kinds.push(kind);
            }
        }
        Ok(kinds)
    }
}

/// Calls with room for a list of handles and a count, and reads the list.
fn list<T>(
    call: &'static str,
    fill: impl FnOnce(*mut *mut T, *mut c_uint) -> sys::nvmlReturn_t,
) -> Result<Vec<*mut T>, Failure> {
    let mut handles: [*mut T; MAX_INSTANCES] = [ptr::null_mut(); MAX_INSTANCES];
    let mut count = c_uint::try_from(MAX_INSTANCES).unwrap_or(0);
    check(call, fill(handles.as_mut_ptr(), &raw mut count))?;
    let count = usize::try_from(count).unwrap_or(usize::MAX);
    let found = handles
        .get(..count)
        .ok_or_else(|| Failure::Absurd { call, answer: format!("{count} instances of one profile") })?;
    found.iter().map(|handle| not_null(call, *handle)).collect()
}

/// The failure of something that was made, could not be used, and was tried to
/// be destroyed again.
fn undone(call: &'static str, failure: Failure, destroyed: Result<(), Failure>) -> Failure {
    match destroyed {
        Ok(()) => failure,
        Err(destroy) => Failure::Leftover { call, reason: format!("{failure}; {destroy}") },
    }
}

fn not_null<T>(call: &'static str, handle: *mut T) -> Result<*mut T, Failure> {
    if handle.is_null() {
        return Err(Failure::Absurd { call, answer: "a null handle".to_owned() });
    }
    Ok(handle)
}
