//! One GPU, opened for the time of a call: the reads that are not of MIG.

use std::ffi::{c_char, c_uint};

use kerf_dra_driver::inventory::{Architecture, Bytes};
use kerf_dra_driver::names::PciAddress;
use nvml_wrapper::Device;
use nvml_wrapper_sys::bindings as sys;

use super::failure::Failure;
use super::session::{Session, check, symbol};

/// More processes than can use a GPU. A larger count is not believed.
const MAX_PROCESSES: c_uint = 4096;

/// A GPU's handle. It is not kept: NVML's handles do not outlive a reload.
pub(crate) struct Gpu<'s> {
    pub(super) session: &'s Session,
    device: Device<'s>,
}

impl<'s> Gpu<'s> {
    pub(super) fn new(session: &'s Session, device: Device<'s>) -> Self {
        Self { session, device }
    }

    pub(super) fn device(&self) -> &Device<'s> {
        &self.device
    }

    /// The raw handle, for calls that the wrapper does not make.
    pub(super) fn handle(&self) -> sys::nvmlDevice_t {
        // SAFETY: the handle is only passed to functions of the same library,
        // which stays loaded while `session` is borrowed.
        unsafe { self.device.handle() }
    }

    /// The GPU's address.
    pub(crate) fn pci(&self) -> Result<PciAddress, Failure> {
        pci_of(self.session, self.handle())
    }

    /// `GPU-…`.
    pub(crate) fn uuid(&self) -> Result<String, Failure> {
        uuid_of(self.session, self.handle())
    }

    /// The product's name.
    pub(crate) fn name(&self) -> Result<String, Failure> {
        let call = symbol(&self.session.lib().nvmlDeviceGetName, "nvmlDeviceGetName")?;
        fixed_text::<{ sys::NVML_DEVICE_NAME_V2_BUFFER_SIZE as usize }>(
            "nvmlDeviceGetName",
            |buffer, length| {
                // SAFETY: `buffer` has `length` writable bytes; the handle is of
                // this library.
                unsafe { call(self.handle(), buffer, length) }
            },
        )
    }

    /// The number in `/dev/nvidia<minor>`.
    pub(crate) fn minor(&self) -> Result<u32, Failure> {
        self.device.minor_number().map_err(Failure::of("nvmlDeviceGetMinorNumber"))
    }

    /// The chip's generation. A driver that cannot say is no reason to lose a
    /// GPU, but one that fails to is: what becomes of the MIG mode hangs on it.
    pub(crate) fn architecture(&self) -> Result<Architecture, Failure> {
        // The wrapper's call does not tell an error from a newer chip.
        let found = self.number("nvmlDeviceGetArchitecture", &self.session.lib().nvmlDeviceGetArchitecture);
        let Some(number) = supported(found)? else { return Ok(Architecture::Unknown) };
        Ok(match number {
            sys::NVML_DEVICE_ARCH_VOLTA => Architecture::Volta,
            sys::NVML_DEVICE_ARCH_TURING => Architecture::Turing,
            sys::NVML_DEVICE_ARCH_AMPERE => Architecture::Ampere,
            sys::NVML_DEVICE_ARCH_ADA => Architecture::Ada,
            sys::NVML_DEVICE_ARCH_HOPPER => Architecture::Hopper,
            sys::NVML_DEVICE_ARCH_BLACKWELL => Architecture::Blackwell,
            sys::NVML_DEVICE_ARCH_UNKNOWN => Architecture::Unknown,
            newer if newer > sys::NVML_DEVICE_ARCH_BLACKWELL => Architecture::Newer(newer),
            _ => Architecture::Unknown,
        })
    }

    /// CUDA compute capability as major and minor.
    pub(crate) fn compute_capability(&self) -> Result<(u32, u32), Failure> {
        let found = self
            .device
            .cuda_compute_capability()
            .map_err(Failure::of("nvmlDeviceGetCudaComputeCapability"))?;
        Ok((u32::try_from(found.major).unwrap_or(0), u32::try_from(found.minor).unwrap_or(0)))
    }

    /// The board's memory; 0 where it has none of its own (integrated GPUs).
    pub(crate) fn memory(&self) -> Result<Bytes, Failure> {
        let memory = self.device.memory_info().map_err(Failure::of("nvmlDeviceGetMemoryInfo_v2"));
        Ok(Bytes(supported(memory)?.map_or(0, |memory| memory.total)))
    }

    /// Whether this is a vGPU inside a virtual machine. A driver that cannot
    /// say knows none.
    pub(crate) fn is_vgpu_guest(&self) -> Result<bool, Failure> {
        let lib = self.session.lib();
        let mode = self.number("nvmlDeviceGetVirtualizationMode", &lib.nvmlDeviceGetVirtualizationMode);
        Ok(supported(mode)? == Some(sys::nvmlGpuVirtualizationMode_NVML_GPU_VIRTUALIZATION_MODE_VGPU))
    }

    /// The ids of the processes that compute or draw on the GPU or on one of
    /// its instances, each once.
    pub(crate) fn processes(&self) -> Result<Vec<u32>, Failure> {
        let lib = self.session.lib();
        let mut pids = self.process_list(
            "nvmlDeviceGetComputeRunningProcesses_v3",
            &lib.nvmlDeviceGetComputeRunningProcesses_v3,
        )?;
        let drawing = self.process_list(
            "nvmlDeviceGetGraphicsRunningProcesses_v3",
            &lib.nvmlDeviceGetGraphicsRunningProcesses_v3,
        );
        pids.extend(supported(drawing)?.into_iter().flatten());
        pids.sort_unstable();
        pids.dedup();
        Ok(pids)
    }

    fn process_list(
        &self,
        name: &'static str,
        found: &Result<ProcessList, libloading::Error>,
    ) -> Result<Vec<u32>, Failure> {
        let call = symbol(found, name)?;
        let empty =
            sys::nvmlProcessInfo_t { pid: 0, usedGpuMemory: 0, gpuInstanceId: 0, computeInstanceId: 0 };
        // Processes come and go between two calls: the buffer grows until a
        // list fits.
        let mut capacity: c_uint = 64;
        loop {
            let mut infos = vec![empty; capacity as usize];
            let mut count = capacity;
            // SAFETY: `infos` has `count` writable entries; the handle is of
            // this library.
            let code = unsafe { call(self.handle(), &raw mut count, infos.as_mut_ptr()) };
            match check(name, code) {
                Ok(()) if count <= capacity => {
                    infos.truncate(count as usize);
                    return Ok(infos.into_iter().map(|info| info.pid).collect());
                }
                Err(failure) if !failure.is(&[sys::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE]) => {
                    return Err(failure);
                }
                // Too small.
                Ok(()) | Err(_) => {
                    if capacity >= MAX_PROCESSES {
                        return Err(Failure::Absurd { call: name, answer: format!("{count} processes") });
                    }
                    capacity = count.saturating_add(8).clamp(capacity * 2, MAX_PROCESSES);
                }
            }
        }
    }
}

/// An answer, absent where the GPU or the library cannot give it.
pub(super) fn supported<T>(answer: Result<T, Failure>) -> Result<Option<T>, Failure> {
    match answer {
        Ok(value) => Ok(Some(value)),
        Err(failure) if failure.is_not_supported() => Ok(None),
        Err(failure) => Err(failure),
    }
}

type ProcessList =
    unsafe extern "C" fn(sys::nvmlDevice_t, *mut c_uint, *mut sys::nvmlProcessInfo_t) -> sys::nvmlReturn_t;

/// The address behind a handle.
pub(super) fn pci_of(session: &Session, device: sys::nvmlDevice_t) -> Result<PciAddress, Failure> {
    let info = pci_info_of(session, device)?;
    let text = text_of(&info.busId);
    text.parse().map_err(|_| Failure::Absurd { call: PCI_CALL, answer: format!("the address `{text}`") })
}

const PCI_CALL: &str = "nvmlDeviceGetPciInfo_v3";

/// The PCI numbers behind a handle.
pub(super) fn pci_info_of(
    session: &Session,
    device: sys::nvmlDevice_t,
) -> Result<sys::nvmlPciInfo_t, Failure> {
    let call = symbol(&session.lib().nvmlDeviceGetPciInfo_v3, PCI_CALL)?;
    let mut info = sys::nvmlPciInfo_t {
        busIdLegacy: [0; 16],
        domain: 0,
        bus: 0,
        device: 0,
        pciDeviceId: 0,
        pciSubSystemId: 0,
        busId: [0; 32],
    };
    // SAFETY: `info` is writable; the handle is of this library.
    check(PCI_CALL, unsafe { call(device, &raw mut info) })?;
    Ok(info)
}

/// The UUID behind a handle, of a GPU or of a MIG device.
pub(super) fn uuid_of(session: &Session, device: sys::nvmlDevice_t) -> Result<String, Failure> {
    const CALL: &str = "nvmlDeviceGetUUID";
    let call = symbol(&session.lib().nvmlDeviceGetUUID, CALL)?;
    let uuid = fixed_text::<{ sys::NVML_DEVICE_UUID_V2_BUFFER_SIZE as usize }>(CALL, |buffer, length| {
        // SAFETY: `buffer` has `length` writable bytes; the handle is of
        // this library.
        unsafe { call(device, buffer, length) }
    })?;
    if uuid.is_empty() {
        return Err(Failure::Absurd { call: CALL, answer: "an empty UUID".to_owned() });
    }
    Ok(uuid)
}

/// The version field of a versioned struct.
pub(super) fn versioned<T>(version: u32) -> u32 {
    // NVML's structs are far below the 16 MiB that the size field can say.
    u32::try_from(size_of::<T>()).unwrap_or(0) | version << 24
}

/// Calls with a buffer for a text and reads the text.
pub(super) fn fixed_text<const N: usize>(
    call: &'static str,
    fill: impl FnOnce(*mut c_char, c_uint) -> sys::nvmlReturn_t,
) -> Result<String, Failure> {
    let mut buffer: [c_char; N] = [0; N];
    check(call, fill(buffer.as_mut_ptr(), c_uint::try_from(N).unwrap_or(0)))?;
    Ok(text_of(&buffer))
}

/// The text in a buffer: up to its NUL, or all of it where there is none. What
/// is not UTF-8 or not printable is replaced.
pub(super) fn text_of(buffer: &[c_char]) -> String {
    let bytes: Vec<u8> =
        buffer.iter().take_while(|byte| **byte != 0).map(|byte| byte.to_ne_bytes()[0]).collect();
    String::from_utf8_lossy(&bytes)
        .chars()
        .map(|character| if character.is_control() { char::REPLACEMENT_CHARACTER } else { character })
        .collect::<String>()
        .trim()
        .to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_without_an_end_is_cut_at_its_buffer() {
        let buffer =
            |text: &[u8]| -> Vec<c_char> { text.iter().map(|byte| c_char::from_ne_bytes([*byte])).collect() };
        assert_eq!(text_of(&buffer(b"MIG 1g.5gb\0rest")), "MIG 1g.5gb");
        assert_eq!(text_of(&buffer(b"no end")), "no end");
        assert_eq!(text_of(&buffer(b"\xff\n")), "\u{fffd}\u{fffd}");
        assert_eq!(text_of(&[]), "");
    }

    #[test]
    fn a_struct_version_is_its_size_and_its_number() {
        assert_eq!(versioned::<sys::nvmlGpuInstanceProfileInfo_v2_t>(2), 0x0200_0098);
    }
}
