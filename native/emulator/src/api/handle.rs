//! Handles. They are numbers, not addresses: kind, GPU, ids, and the serial
//! number of the instance, so that a handle of something gone never means what
//! came after it under the same id.

use std::ptr;

use crate::code::Code;
use crate::machine::Machine;
use crate::model::Model;
use crate::session::Session;
use crate::state::{ComputeInstance, Gpu, GpuInstance, State};

const GPU: u64 = 1;
const MIG_DEVICE: u64 = 2;
const GPU_INSTANCE: u64 = 3;
const COMPUTE_INSTANCE: u64 = 4;

/// What an `nvmlDevice_t` means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Device {
    Gpu(usize),
    Mig(Instance),
}

/// A GPU instance, or a compute instance in it.
#[expect(clippy::struct_field_names, reason = "the fields are ids in NVML's words")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Instance {
    pub(super) gpu: usize,
    pub(super) instance: u32,
    pub(super) compute: u32,
    pub(super) serial: u32,
}

fn encode<T>(kind: u64, of: Instance) -> *mut T {
    let gpu = u64::try_from(of.gpu).unwrap_or(u64::MAX) & 0xff;
    let ids = u64::from(of.instance & 0xff) << 40 | u64::from(of.compute & 0xff) << 32;
    let bits = kind << 56 | gpu << 48 | ids | u64::from(of.serial);
    ptr::without_provenance_mut(usize::try_from(bits).unwrap_or(0))
}

fn decode<T>(handle: *mut T) -> Result<(u64, Instance), Code> {
    let bits = u64::try_from(handle.addr()).map_err(|_| Code::INVALID_ARGUMENT)?;
    let byte = |shift: u32| u32::try_from(bits >> shift & 0xff).unwrap_or(0);
    let of = Instance {
        gpu: usize::try_from(bits >> 48 & 0xff).map_err(|_| Code::INVALID_ARGUMENT)?,
        instance: byte(40),
        compute: byte(32),
        serial: u32::try_from(bits & 0xffff_ffff).unwrap_or(0),
    };
    Ok((bits >> 56, of))
}

impl Device {
    pub(super) fn to_handle<T>(self) -> *mut T {
        match self {
            Self::Gpu(gpu) => encode(GPU, Instance { gpu, instance: 0, compute: 0, serial: 0 }),
            Self::Mig(of) => encode(MIG_DEVICE, of),
        }
    }

    pub(super) fn from_handle<T>(handle: *mut T) -> Result<Self, Code> {
        match decode(handle)? {
            (GPU, of) => Ok(Self::Gpu(of.gpu)),
            (MIG_DEVICE, of) => Ok(Self::Mig(of)),
            _ => Err(Code::INVALID_ARGUMENT),
        }
    }

    /// The position of the GPU, or of a MIG device's GPU.
    pub(super) fn gpu(self) -> usize {
        match self {
            Self::Gpu(gpu) => gpu,
            Self::Mig(of) => of.gpu,
        }
    }
}

impl Instance {
    pub(super) fn to_gpu_instance<T>(self) -> *mut T {
        encode(GPU_INSTANCE, self)
    }

    pub(super) fn to_compute_instance<T>(self) -> *mut T {
        encode(COMPUTE_INSTANCE, self)
    }

    pub(super) fn from_gpu_instance<T>(handle: *mut T) -> Result<Self, Code> {
        match decode(handle)? {
            (GPU_INSTANCE, of) => Ok(of),
            _ => Err(Code::INVALID_ARGUMENT),
        }
    }

    pub(super) fn from_compute_instance<T>(handle: *mut T) -> Result<Self, Code> {
        match decode(handle)? {
            (COMPUTE_INSTANCE, of) => Ok(of),
            _ => Err(Code::INVALID_ARGUMENT),
        }
    }

    /// The GPU instance this is, if it still exists.
    pub(super) fn find_gpu_instance<'state>(&self, gpu: &'state Gpu) -> Result<&'state GpuInstance, Code> {
        let found =
            gpu.instances.iter().find(|other| other.id == self.instance && other.serial == self.serial);
        found.ok_or(Code::NOT_FOUND)
    }

    /// The compute instance this is, if it still exists.
    pub(super) fn find_compute_instance<'state>(
        &self,
        gpu: &'state Gpu,
    ) -> Result<(&'state GpuInstance, &'state ComputeInstance), Code> {
        let mut all = gpu.mig_devices();
        let same = |(of, compute): &(&GpuInstance, &ComputeInstance)| {
            of.id == self.instance && compute.id == self.compute && compute.serial == self.serial
        };
        all.find(same).ok_or(Code::NOT_FOUND)
    }
}

/// A GPU of the state that answers.
pub(super) fn gpu_at<'state>(
    machine: &'state Machine,
    state: &'state State,
    index: usize,
) -> Result<(&'state Gpu, &'state Model), Code> {
    let gpu = state.gpus.get(index).filter(|gpu| machine.sees(gpu)).ok_or(Code::INVALID_ARGUMENT)?;
    if gpu.lost {
        return Err(Code::GPU_IS_LOST);
    }
    Ok((gpu, machine.model(gpu)?))
}

/// Answers about a whole GPU; a MIG device has no such property.
pub(super) fn with_gpu<H, T>(
    session: &Session,
    handle: *mut H,
    answer: impl FnOnce(&Gpu, &Model) -> Result<T, Code>,
) -> Result<T, Code> {
    match Device::from_handle(handle)? {
        Device::Gpu(index) => {
            let state = session.state()?;
            let (gpu, model) = gpu_at(&session.machine, &state, index)?;
            answer(gpu, model)
        }
        Device::Mig(_) => Err(Code::NOT_SUPPORTED),
    }
}

/// The position of a GPU that answers, for what changes it.
pub(super) fn writable_gpu<H>(session: &Session, handle: *mut H) -> Result<usize, Code> {
    match Device::from_handle(handle)? {
        Device::Gpu(index) => {
            gpu_at(&session.machine, session.state()?.as_ref(), index)?;
            if session.machine.writable() { Ok(index) } else { Err(Code::NO_PERMISSION) }
        }
        Device::Mig(_) => Err(Code::NOT_SUPPORTED),
    }
}
