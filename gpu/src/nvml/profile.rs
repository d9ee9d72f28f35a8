//! The kinds of GPU instance a GPU can serve.
//!
//! They are asked for by NVML's profile enum, which only serves for asking:
//! a profile is known by the id in the answer. The enum grows with drivers and
//! every entry of it is a kind of its own (`+me`, double memory, `-me`,
//! `+gfx`), so a fixed range is probed beyond what any header names.

use kerf_dra_driver::inventory::{Bytes, Placement, ProfileId};
use kerf_dra_driver::names::ProfileName;
use nvml_wrapper_sys::bindings as sys;

use super::failure::Failure;
use super::gpu::{Gpu, text_of, versioned};
use super::session::{check, symbol};

/// The profile enums probed. Headers name 18 today.
const PROBED: std::ops::RangeInclusive<u32> = 0..=32;

/// More placements than any profile has.
const MAX_PLACEMENTS: u32 = 128;

/// Beyond any board's memory slices (12 at most today). Counters and names are
/// made per slice, so a wild number would not stay inside this crate.
const MAX_MEMORY_SLICES: u32 = 64;

/// The MIG profiles of a GPU, ordered by id.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct GpuProfiles {
    pub profiles: Vec<GpuProfile>,
}

impl GpuProfiles {
    pub(crate) fn get(&self, id: ProfileId) -> Option<&GpuProfile> {
        self.profiles.iter().find(|profile| profile.id == id)
    }

    /// The memory slices that placements count.
    pub(crate) fn memory_slices(&self) -> u32 {
        let placements = self.profiles.iter().flat_map(|profile| &profile.placements);
        placements.map(|placement| placement.start.saturating_add(placement.size)).max().unwrap_or(0)
    }
}

/// One kind of GPU instance, as NVML describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuProfile {
    /// What identifies it on this model.
    pub id: ProfileId,
    /// Absent where the driver is too old to name profiles.
    pub name: Option<ProfileName>,
    /// The memory of an instance.
    pub memory: Bytes,
    /// Compute slices.
    pub compute_slices: u32,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Copy engines.
    pub copy_engines: u32,
    /// NVDEC engines.
    pub decoders: u32,
    /// NVENC engines.
    pub encoders: u32,
    /// NVJPG engines.
    pub jpeg_engines: u32,
    /// Optical flow engines.
    pub ofa_engines: u32,
    /// How many the GPU can hold at once.
    pub max_instances: u32,
    /// Where it can be created, ordered by start.
    pub placements: Vec<Placement>,
    /// The enum it was asked for with.
    pub probe: u32,
}

impl GpuProfile {
    /// What it is called on a board: by the driver, or as a driver that names
    /// no profiles would.
    pub(crate) fn name_on(&self, board: Bytes, memory_slices: u32) -> Option<ProfileName> {
        self.name.clone().or_else(|| self.computed_name(board, memory_slices))
    }

    /// The name a driver without profile names would print: compute slices,
    /// the share of the board's memory in whole GB, and what sets the profile
    /// apart from its siblings.
    fn computed_name(&self, board: Bytes, memory_slices: u32) -> Option<ProfileName> {
        let size = u64::from(self.placements.first()?.size);
        let slices = u64::from(memory_slices.max(1));
        let gibibytes = board.0.div_ceil(1 << 30);
        let share = (gibibytes.saturating_mul(size).saturating_mul(2) + slices) / (slices * 2);
        let attribute = match self.probe {
            sys::NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV1 | sys::NVML_GPU_INSTANCE_PROFILE_2_SLICE_REV1 => {
                "+me"
            }
            10..=12 | 17 => "+gfx",
            13 | 14 => "-me",
            15 | 16 => "+me.all",
            _ => "",
        };
        ProfileName::new(&format!("{}g.{share}gb{attribute}", self.compute_slices)).ok()
    }
}

/// An answer of `nvmlDeviceGetGpuInstanceProfileInfo` in any of its versions.
struct Info {
    fields: sys::nvmlGpuInstanceProfileInfo_t,
    name: String,
}

/// Codes by which a GPU says that it has no profile of this enum.
const NO_SUCH_PROFILE: &[u32] = &[
    sys::nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED,
    sys::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT,
    sys::nvmlReturn_enum_NVML_ERROR_NOT_FOUND,
];

impl Gpu<'_> {
    /// Every MIG profile of the GPU, whatever its mode; none where it has no
    /// MIG.
    pub(crate) fn mig_profiles(&self) -> Result<GpuProfiles, Failure> {
        let mut profiles: Vec<GpuProfile> = Vec::new();
        for probe in PROBED {
            let info = match self.profile_info(probe) {
                Ok(info) => info,
                Err(failure) if failure.is(NO_SUCH_PROFILE) => continue,
                Err(Failure::Missing { .. }) => break,
                Err(failure) => return Err(failure),
            };
            let id = ProfileId(info.fields.id);
            if profiles.iter().any(|known| known.id == id) {
                continue;
            }
            let placements = match self.possible_placements(id) {
                Ok(placements) => placements,
                Err(failure) if failure.is(NO_SUCH_PROFILE) => continue,
                Err(failure) => return Err(failure),
            };
            profiles.push(GpuProfile {
                id,
                name: ProfileName::new(&info.name).ok(),
                memory: Bytes::from_mib(info.fields.memorySizeMB),
                compute_slices: info.fields.sliceCount,
                multiprocessors: info.fields.multiprocessorCount,
                copy_engines: info.fields.copyEngineCount,
                decoders: info.fields.decoderCount,
                encoders: info.fields.encoderCount,
                jpeg_engines: info.fields.jpegCount,
                ofa_engines: info.fields.ofaCount,
                max_instances: info.fields.instanceCount,
                placements,
                probe,
            });
        }
        profiles.sort_by_key(|profile| profile.id);
        Ok(GpuProfiles { profiles })
    }

    /// The newest version of the info that the library answers.
    fn profile_info(&self, probe: u32) -> Result<Info, Failure> {
        match self.profile_info_v3(probe) {
            Err(failure) if !failure.is(VERSION_UNKNOWN) && !is_missing(&failure) => return Err(failure),
            Ok(info) => return Ok(info),
            Err(_) => {}
        }
        match self.profile_info_v2(probe) {
            Err(failure) if !failure.is(VERSION_UNKNOWN) && !is_missing(&failure) => Err(failure),
            Ok(info) => Ok(info),
            Err(_) => self.profile_info_v1(probe),
        }
    }

    fn profile_info_v3(&self, probe: u32) -> Result<Info, Failure> {
        const CALL: &str = "nvmlDeviceGetGpuInstanceProfileInfoV";
        let call = symbol(&self.session.lib().nvmlDeviceGetGpuInstanceProfileInfoV, CALL)?;
        // SAFETY: the struct is of integers only, for which zero is a value.
        let mut info: sys::nvmlGpuInstanceProfileInfo_v3_t = unsafe { std::mem::zeroed() };
        info.version = versioned::<sys::nvmlGpuInstanceProfileInfo_v3_t>(3);
        // SAFETY: the library reads the version first and then writes a struct
        // of that version, which `info` is; the handle is of this library.
        let code = unsafe { call(self.handle(), probe, (&raw mut info).cast()) };
        check(CALL, code)?;
        Ok(Info {
            name: text_of(&info.name),
            fields: sys::nvmlGpuInstanceProfileInfo_t {
                id: info.id,
                isP2pSupported: 0,
                sliceCount: info.sliceCount,
                instanceCount: info.instanceCount,
                multiprocessorCount: info.multiprocessorCount,
                copyEngineCount: info.copyEngineCount,
                decoderCount: info.decoderCount,
                encoderCount: info.encoderCount,
                jpegCount: info.jpegCount,
                ofaCount: info.ofaCount,
                memorySizeMB: info.memorySizeMB,
            },
        })
    }

    fn profile_info_v2(&self, probe: u32) -> Result<Info, Failure> {
        const CALL: &str = "nvmlDeviceGetGpuInstanceProfileInfoV";
        let call = symbol(&self.session.lib().nvmlDeviceGetGpuInstanceProfileInfoV, CALL)?;
        // SAFETY: the struct is of integers only, for which zero is a value.
        let mut info: sys::nvmlGpuInstanceProfileInfo_v2_t = unsafe { std::mem::zeroed() };
        info.version = versioned::<sys::nvmlGpuInstanceProfileInfo_v2_t>(2);
        // SAFETY: `info` is a writable struct of the announced version; the
        // handle is of this library.
        let code = unsafe { call(self.handle(), probe, &raw mut info) };
        check(CALL, code)?;
        Ok(Info {
            name: text_of(&info.name),
            fields: sys::nvmlGpuInstanceProfileInfo_t {
                id: info.id,
                isP2pSupported: info.isP2pSupported,
                sliceCount: info.sliceCount,
                instanceCount: info.instanceCount,
                multiprocessorCount: info.multiprocessorCount,
                copyEngineCount: info.copyEngineCount,
                decoderCount: info.decoderCount,
                encoderCount: info.encoderCount,
                jpegCount: info.jpegCount,
                ofaCount: info.ofaCount,
                memorySizeMB: info.memorySizeMB,
            },
        })
    }

    fn profile_info_v1(&self, probe: u32) -> Result<Info, Failure> {
        const CALL: &str = "nvmlDeviceGetGpuInstanceProfileInfo";
        let call = symbol(&self.session.lib().nvmlDeviceGetGpuInstanceProfileInfo, CALL)?;
        // SAFETY: the struct is of integers only, for which zero is a value.
        let mut fields: sys::nvmlGpuInstanceProfileInfo_t = unsafe { std::mem::zeroed() };
        // SAFETY: `fields` is a writable struct; the handle is of this library.
        let code = unsafe { call(self.handle(), probe, &raw mut fields) };
        check(CALL, code)?;
        Ok(Info { fields, name: String::new() })
    }

    /// Where instances of a profile can be, ordered by start. The answer does
    /// not depend on what exists.
    fn possible_placements(&self, profile: ProfileId) -> Result<Vec<Placement>, Failure> {
        const CALL: &str = "nvmlDeviceGetGpuInstancePossiblePlacements_v2";
        let call = symbol(&self.session.lib().nvmlDeviceGetGpuInstancePossiblePlacements_v2, CALL)?;
        let absurd = |answer: String| Failure::Absurd { call: CALL, answer };

        let mut count = 0;
        // SAFETY: without a buffer the library writes the count only; the
        // handle is of this library.
        let code = unsafe { call(self.handle(), profile.0, std::ptr::null_mut(), &raw mut count) };
        if code != sys::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE {
            check(CALL, code)?;
        }
        if count > MAX_PLACEMENTS {
            return Err(absurd(format!("{count} placements")));
        }
        let capacity = count;
        let mut found = vec![sys::nvmlGpuInstancePlacement_t { start: 0, size: 0 }; capacity as usize];
        if capacity > 0 {
            // SAFETY: `found` has `count` writable entries; the handle is of
            // this library.
            let code = unsafe { call(self.handle(), profile.0, found.as_mut_ptr(), &raw mut count) };
            check(CALL, code)?;
        }
        if count > capacity {
            return Err(absurd(format!("{count} placements in room for {capacity}")));
        }
        found.truncate(count as usize);

        let mut placements: Vec<Placement> = Vec::with_capacity(found.len());
        for sys::nvmlGpuInstancePlacement_t { start, size } in found {
            if size == 0 || start.checked_add(size).is_none_or(|end| end > MAX_MEMORY_SLICES) {
                return Err(absurd(format!("a placement of {size} slices at {start}")));
            }
            placements.push(Placement { start, size });
        }
        placements.sort_unstable();
        placements.dedup();
        Ok(placements)
    }
}

/// Codes by which a library says that it does not know a struct's version.
/// `INVALID_ARGUMENT` is what the first drivers with the function said, and
/// also means that there is no such profile, which the older call then repeats.
const VERSION_UNKNOWN: &[u32] = &[
    sys::nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
    sys::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT,
    sys::nvmlReturn_enum_NVML_ERROR_FUNCTION_NOT_FOUND,
];

fn is_missing(failure: &Failure) -> bool {
    matches!(failure, Failure::Missing { .. })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn profile(probe: u32, compute_slices: u32, size: u32) -> GpuProfile {
        GpuProfile {
            id: ProfileId(probe),
            name: None,
            memory: Bytes(0),
            compute_slices,
            multiprocessors: 0,
            copy_engines: 0,
            decoders: 0,
            encoders: 0,
            jpeg_engines: 0,
            ofa_engines: 0,
            max_instances: 1,
            placements: vec![Placement { start: 0, size }],
            probe,
        }
    }

    #[test]
    fn a_computed_name_is_the_one_that_newer_drivers_print() {
        let name = |board_mib: u64, slices: u32, probe: u32, compute: u32, size: u32| {
            let name = profile(probe, compute, size).computed_name(Bytes::from_mib(board_mib), slices);
            name.expect("a name").to_string()
        };
        assert_eq!(name(40_960, 8, 0, 1, 1), "1g.5gb");
        assert_eq!(name(40_960, 8, 7, 1, 1), "1g.5gb+me");
        assert_eq!(name(81_559, 8, 9, 1, 2), "1g.20gb");
        assert_eq!(name(81_559, 8, 2, 3, 4), "3g.40gb");
        assert_eq!(name(143_771, 8, 0, 1, 1), "1g.18gb");
        assert_eq!(name(143_771, 8, 1, 2, 2), "2g.35gb");
        assert_eq!(name(143_771, 8, 2, 3, 4), "3g.71gb");
        assert_eq!(name(143_771, 8, 4, 7, 8), "7g.141gb");
        assert_eq!(name(24_576, 4, 0, 1, 1), "1g.6gb");
        assert_eq!(name(97_887, 12, 13, 1, 3), "1g.24gb-me");
        assert_eq!(name(97_887, 12, 16, 2, 6), "2g.48gb+me.all");
    }
}
