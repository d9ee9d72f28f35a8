//! What a GPU tells of its board and NVLinks. Nothing depends on it: what
//! fails, or is not known to a board or driver, is absent and hides no GPU.

use kerf_dra_driver::inventory::BoardFacts;
use nvml_wrapper_sys::bindings as sys;

use super::gpu::{Gpu, fixed_text, versioned};
use super::session::{check, symbol};

/// More links than a GPU has; the header has room for 18.
const MAX_LINKS: u32 = 64;

/// `NVML_GPU_FABRIC_STATE_COMPLETED`: the GPU is registered with its fabric.
const REGISTERED: u8 = 3;

impl Gpu<'_> {
    /// What NVML tells of the board.
    pub(crate) fn board_facts(&self) -> BoardFacts {
        BoardFacts {
            serial: self.serial(),
            ecc: self.ecc(),
            nvlinks: self.nvlinks(),
            nvlink_clique: self.nvlink_clique(),
        }
    }

    fn serial(&self) -> Option<String> {
        const CALL: &str = "nvmlDeviceGetSerial";
        let call = symbol(&self.session.lib().nvmlDeviceGetSerial, CALL).ok()?;
        let serial =
            fixed_text::<{ sys::NVML_DEVICE_SERIAL_BUFFER_SIZE as usize }>(CALL, |buffer, length| {
                // SAFETY: `buffer` has `length` writable bytes; the handle is of
                // this library.
                unsafe { call(self.handle(), buffer, length) }
            });
        // Zeros are a board without one, and would make all of these one board.
        serial.ok().filter(|serial| serial.bytes().any(|byte| byte != b'0'))
    }

    fn ecc(&self) -> Option<bool> {
        const CALL: &str = "nvmlDeviceGetEccMode";
        let call = symbol(&self.session.lib().nvmlDeviceGetEccMode, CALL).ok()?;
        let (mut current, mut pending) = (u32::MAX, u32::MAX);
        // SAFETY: both are writable; the handle is of this library.
        check(CALL, unsafe { call(self.handle(), &raw mut current, &raw mut pending) }).ok()?;
        match current {
            sys::nvmlEnableState_enum_NVML_FEATURE_DISABLED => Some(false),
            sys::nvmlEnableState_enum_NVML_FEATURE_ENABLED => Some(true),
            _ => None,
        }
    }

    /// How many links are up. NVML answers up to the last link that the GPU
    /// has and refuses those beyond.
    fn nvlinks(&self) -> Option<u32> {
        const CALL: &str = "nvmlDeviceGetNvLinkState";
        let call = symbol(&self.session.lib().nvmlDeviceGetNvLinkState, CALL).ok()?;
        let mut up = 0;
        for link in 0..MAX_LINKS {
            let mut state = u32::MAX;
            // SAFETY: `state` is writable; the handle is of this library.
            let answer = check(CALL, unsafe { call(self.handle(), link, &raw mut state) });
            match answer {
                Ok(()) => up += u32::from(state == sys::nvmlEnableState_enum_NVML_FEATURE_ENABLED),
                Err(failure) if link > 0 && (failure.is_not_supported() || failure.is(BEYOND_THE_LAST)) => {
                    return Some(up);
                }
                Err(_) => return None,
            }
        }
        None
    }

    fn nvlink_clique(&self) -> Option<String> {
        const CALL: &str = "nvmlDeviceGetGpuFabricInfoV";
        let call = symbol(&self.session.lib().nvmlDeviceGetGpuFabricInfoV, CALL).ok()?;
        // The second version is known to all drivers that know such fabrics.
        let mut info = sys::nvmlGpuFabricInfoV_t {
            version: versioned::<sys::nvmlGpuFabricInfo_v2_t>(2),
            clusterUuid: [0; 16],
            status: u32::MAX,
            cliqueId: 0,
            state: 0,
            healthMask: 0,
            healthSummary: 0,
        };
        // SAFETY: `info` is writable and larger than the announced version,
        // whose fields are its first ones; the handle is of this library.
        check(CALL, unsafe { call(self.handle(), &raw mut info) }).ok()?;
        let registered = info.state == REGISTERED && info.status == sys::nvmlReturn_enum_NVML_SUCCESS;
        // A fabric of one node has no id: zeros would be the same on all nodes.
        (registered && info.clusterUuid != [0; 16])
            .then(|| format!("{}.{}", uuid_text(info.clusterUuid), info.cliqueId))
    }
}

/// `NVML_ERROR_INVALID_ARGUMENT`.
const BEYOND_THE_LAST: &[u32] = &[sys::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT];

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
