//! What a GPU tells of its board and NVLinks. Nothing depends on it: what
//! fails, or is not known to a board or driver, hides no GPU.

use kerf_dra_driver::inventory::{BoardFacts, Told};
use nvml_wrapper::enum_wrappers::device::Brand;
use nvml_wrapper_sys::bindings as sys;

use super::failure::Failure;
use super::gpu::{Gpu, fixed_text, supported, versioned};
use super::session::{check, symbol};

/// More links than a GPU has; the header has room for 18.
const MAX_LINKS: u32 = 64;

/// `NVML_GPU_FABRIC_STATE_NOT_SUPPORTED`: the GPU has no fabric.
const NO_FABRIC: u8 = 0;
/// `NVML_GPU_FABRIC_STATE_COMPLETED`: the GPU is registered with its fabric,
/// or could not be. In other states it has not come to that yet.
const COMPLETED: u8 = 3;

impl Gpu<'_> {
    /// What NVML tells of the board.
    pub(crate) fn board_facts(&self) -> BoardFacts {
        BoardFacts {
            serial: told(self.serial()),
            ecc: told(self.ecc().map(Some)),
            nvlinks: told(self.nvlinks()),
            nvlink_clique: told(self.nvlink_clique()),
        }
    }

    /// The brand, as NVIDIA's tools write it.
    pub(crate) fn brand(&self) -> Told<String> {
        // The wrapper's call does not tell an error from a brand it has no
        // name for.
        let found = self.number("nvmlDeviceGetBrand", &self.session.lib().nvmlDeviceGetBrand);
        told(supported(found).map(|number| Some(number.map_or("Unknown", brand_name).to_owned())))
    }

    /// How the GPU reaches the host's pageable memory.
    pub(crate) fn addressing_mode(&self) -> Told<String> {
        told(self.addressing())
    }

    fn addressing(&self) -> Result<Option<String>, Failure> {
        const CALL: &str = "nvmlDeviceGetAddressingMode";
        let call = symbol(&self.session.lib().nvmlDeviceGetAddressingMode, CALL)?;
        let mut mode = sys::nvmlDeviceAddressingMode_t {
            version: versioned::<sys::nvmlDeviceAddressingMode_t>(1),
            value: u32::MAX,
        };
        // SAFETY: `mode` is a writable struct of the announced version; the
        // handle is of this library.
        check(CALL, unsafe { call(self.handle(), &raw mut mode) })?;
        let name = match mode.value {
            sys::nvmlDeviceAddressingModeType_t_NVML_DEVICE_ADDRESSING_MODE_NONE => "None",
            sys::nvmlDeviceAddressingModeType_t_NVML_DEVICE_ADDRESSING_MODE_HMM => "HMM",
            sys::nvmlDeviceAddressingModeType_t_NVML_DEVICE_ADDRESSING_MODE_ATS => "ATS",
            _ => return Ok(None),
        };
        Ok(Some(name.to_owned()))
    }

    fn serial(&self) -> Result<Option<String>, Failure> {
        const CALL: &str = "nvmlDeviceGetSerial";
        let call = symbol(&self.session.lib().nvmlDeviceGetSerial, CALL)?;
        let serial =
            fixed_text::<{ sys::NVML_DEVICE_SERIAL_BUFFER_SIZE as usize }>(CALL, |buffer, length| {
                // SAFETY: `buffer` has `length` writable bytes; the handle is of
                // this library.
                unsafe { call(self.handle(), buffer, length) }
            })?;
        // Zeros are a board without one, and would make all of these one board.
        Ok(Some(serial).filter(|serial| serial.bytes().any(|byte| byte != b'0')))
    }

    fn ecc(&self) -> Result<bool, Failure> {
        const CALL: &str = "nvmlDeviceGetEccMode";
        let call = symbol(&self.session.lib().nvmlDeviceGetEccMode, CALL)?;
        let (mut current, mut pending) = (u32::MAX, u32::MAX);
        // SAFETY: both are writable; the handle is of this library.
        check(CALL, unsafe { call(self.handle(), &raw mut current, &raw mut pending) })?;
        match current {
            sys::nvmlEnableState_enum_NVML_FEATURE_DISABLED => Ok(false),
            sys::nvmlEnableState_enum_NVML_FEATURE_ENABLED => Ok(true),
            odd => Err(Failure::Absurd { call: CALL, answer: format!("the mode {odd}") }),
        }
    }

    /// How many links are up. NVML answers up to the last link that the GPU
    /// has and refuses those beyond.
    fn nvlinks(&self) -> Result<Option<u32>, Failure> {
        const CALL: &str = "nvmlDeviceGetNvLinkState";
        let call = symbol(&self.session.lib().nvmlDeviceGetNvLinkState, CALL)?;
        let mut up = 0;
        for link in 0..MAX_LINKS {
            let mut state = u32::MAX;
            // SAFETY: `state` is writable; the handle is of this library.
            match check(CALL, unsafe { call(self.handle(), link, &raw mut state) }) {
                Ok(()) => up += u32::from(state == sys::nvmlEnableState_enum_NVML_FEATURE_ENABLED),
                Err(failure) if failure.is_not_supported() || failure.is(BEYOND_THE_LAST) => {
                    return Ok((link > 0).then_some(up));
                }
                Err(failure) => return Err(failure),
            }
        }
        Err(Failure::Absurd { call: CALL, answer: format!("more than {MAX_LINKS} links") })
    }

    fn nvlink_clique(&self) -> Result<Option<String>, Failure> {
        const CALL: &str = "nvmlDeviceGetGpuFabricInfoV";
        let call = symbol(&self.session.lib().nvmlDeviceGetGpuFabricInfoV, CALL)?;
        // The second version is known to all drivers that know such fabrics.
        let mut info = sys::nvmlGpuFabricInfoV_t {
            version: versioned::<sys::nvmlGpuFabricInfo_v2_t>(2),
            clusterUuid: [0; 16],
            status: u32::MAX,
            cliqueId: 0,
            state: NO_FABRIC,
            healthMask: 0,
            healthSummary: 0,
        };
        // SAFETY: `info` is writable and larger than the announced version,
        // whose fields are its first ones; the handle is of this library.
        check(CALL, unsafe { call(self.handle(), &raw mut info) })?;
        match info.state {
            NO_FABRIC => Ok(None),
            COMPLETED => {
                let registered = info.status == sys::nvmlReturn_enum_NVML_SUCCESS;
                // A fabric of one node has no id: zeros would be the same on all nodes.
                Ok((registered && info.clusterUuid != [0; 16])
                    .then(|| format!("{}.{}", uuid_text(info.clusterUuid), info.cliqueId)))
            }
            other => Err(Failure::Absurd { call: CALL, answer: format!("the state {other}") }),
        }
    }
}

/// An answer on which nothing depends; nothing where there is no such thing.
fn told<T>(answer: Result<Option<T>, Failure>) -> Told<T> {
    match supported(answer).map(Option::flatten) {
        Ok(Some(value)) => Told::Known(value),
        Ok(None) => Told::HasNone,
        Err(failure) => {
            tracing::debug!(%failure, "what is published of a board cannot be told now and stays");
            Told::NotNow
        }
    }
}

/// `NVML_ERROR_INVALID_ARGUMENT`.
const BEYOND_THE_LAST: &[u32] = &[sys::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT];

/// A brand's name, as NVIDIA's tools write it.
fn brand_name(number: u32) -> &'static str {
    match Brand::try_from(number) {
        Ok(Brand::Quadro) => "Quadro",
        Ok(Brand::Tesla) => "Tesla",
        Ok(Brand::NVS) => "NVS",
        Ok(Brand::GRID) => "Grid",
        Ok(Brand::GeForce) => "GeForce",
        Ok(Brand::Titan) => "Titan",
        Ok(Brand::VApps) => "NvidiaVApps",
        Ok(Brand::VPC) => "NvidiaVPC",
        Ok(Brand::VCS) => "NvidiaVCS",
        Ok(Brand::VWS) => "NvidiaVWS",
        Ok(Brand::CloudGaming | Brand::VGaming) => "NvidiaCloudGaming",
        Ok(Brand::QuadroRTX) => "QuadroRTX",
        Ok(Brand::NvidiaRTX) => "NvidiaRTX",
        Ok(Brand::Nvidia) => "Nvidia",
        Ok(Brand::GeForceRTX) => "GeForceRTX",
        Ok(Brand::TitanRTX) => "TitanRTX",
        Ok(Brand::Unknown) | Err(_) => "Unknown",
    }
}

/// A UUID as it is written.
fn uuid_text(bytes: [u8; 16]) -> String {
    let number = u128::from_be_bytes(bytes);
    let part = |shift: u32, bits: u32| number >> shift & ((1 << bits) - 1);
    let (low, mid, high, clock) = (part(96, 32), part(80, 16), part(64, 16), part(48, 16));
    format!("{low:08x}-{mid:04x}-{high:04x}-{clock:04x}-{:012x}", part(0, 48))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_written_as_everywhere() {
        let bytes = u128::to_be_bytes(0x0019_19ff_8b86_d011_b42d_00cf_4fc9_64ff);
        assert_eq!(uuid_text(bytes), "001919ff-8b86-d011-b42d-00cf4fc964ff");
    }
}
