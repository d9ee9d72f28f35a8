//! Why a call of NVML did not give what was asked, by number.
//!
//! `nvml-wrapper` names the codes up to 22 only; MIG's own
//! (`INSUFFICIENT_RESOURCES` is 23) reach it as unexpected values.

use std::fmt;

use kerf_dra_driver::hardware::{HardwareError, HardwareErrorKind};
use nvml_wrapper::error::NvmlError;
use nvml_wrapper_sys::bindings as sys;

/// An answer of NVML that is not a result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Failure {
    /// An error code.
    Code {
        /// The function that answered.
        call: &'static str,
        /// `nvmlReturn_t`.
        code: u32,
    },
    /// The library is too old for this function.
    Missing {
        /// The function.
        call: &'static str,
    },
    /// A success whose content cannot be true.
    Absurd {
        /// The function that answered.
        call: &'static str,
        /// What it answered.
        answer: String,
    },
    /// Something was made, could not be used and could not be undone: it may
    /// exist.
    Leftover {
        /// The function that made it.
        call: &'static str,
        /// Why it could not be used, and why not undone.
        reason: String,
    },
    /// There is no library, or it cannot be loaded.
    NoLibrary(String),
}

impl Failure {
    /// Takes the wrapper's error of a call. The wrapper's `UnexpectedVariant`
    /// is a code it has no name for (calls that return enums are not made
    /// through this).
    pub(crate) fn of(call: &'static str) -> impl FnOnce(NvmlError) -> Self {
        move |error| match error {
            NvmlError::FailedToLoadSymbol(_) => Self::Missing { call },
            NvmlError::LibloadingError(error) => Self::NoLibrary(error.to_string()),
            error => Self::Code { call, code: u32::from(error) },
        }
    }

    /// Whether the answer is a code.
    pub(crate) fn is(&self, codes: &[u32]) -> bool {
        matches!(self, Self::Code { code, .. } if codes.contains(code))
    }

    /// Whether the GPU or the library does not have what was asked for.
    pub(crate) fn is_not_supported(&self) -> bool {
        self.kind() == HardwareErrorKind::NotSupported
    }

    /// Whether the driver was unloaded or replaced under the library, so that
    /// the library must be opened anew.
    pub(crate) fn driver_is_gone(&self) -> bool {
        self.kind() == HardwareErrorKind::NoDriver
    }

    /// What the caller can decide by.
    pub(crate) fn kind(&self) -> HardwareErrorKind {
        let code = match self {
            Self::NoLibrary(_) => return HardwareErrorKind::NoDriver,
            Self::Missing { .. } => return HardwareErrorKind::NotSupported,
            // The one kind that tells a caller that the change may be there.
            Self::Leftover { .. } => return HardwareErrorKind::Timeout,
            Self::Absurd { .. } => return HardwareErrorKind::Other(sys::nvmlReturn_enum_NVML_ERROR_UNKNOWN),
            Self::Code { code, .. } => *code,
        };
        match code {
            sys::nvmlReturn_enum_NVML_ERROR_UNINITIALIZED
            | sys::nvmlReturn_enum_NVML_ERROR_DRIVER_NOT_LOADED
            | sys::nvmlReturn_enum_NVML_ERROR_LIBRARY_NOT_FOUND
            | sys::nvmlReturn_enum_NVML_ERROR_LIB_RM_VERSION_MISMATCH => HardwareErrorKind::NoDriver,
            sys::nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED
            | sys::nvmlReturn_enum_NVML_ERROR_FUNCTION_NOT_FOUND => HardwareErrorKind::NotSupported,
            sys::nvmlReturn_enum_NVML_ERROR_NO_PERMISSION => HardwareErrorKind::NoPermission,
            sys::nvmlReturn_enum_NVML_ERROR_NOT_FOUND | sys::nvmlReturn_enum_NVML_ERROR_GPU_NOT_FOUND => {
                HardwareErrorKind::NotFound
            }
            sys::nvmlReturn_enum_NVML_ERROR_TIMEOUT => HardwareErrorKind::Timeout,
            sys::nvmlReturn_enum_NVML_ERROR_GPU_IS_LOST | sys::nvmlReturn_enum_NVML_ERROR_RESET_REQUIRED => {
                HardwareErrorKind::Lost
            }
            sys::nvmlReturn_enum_NVML_ERROR_IN_USE => HardwareErrorKind::InUse,
            sys::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_RESOURCES => {
                HardwareErrorKind::InsufficientResources
            }
            other => HardwareErrorKind::Other(other),
        }
    }

    /// The failure as the error of an operation.
    pub(crate) fn during(&self, operation: impl Into<String>) -> HardwareError {
        HardwareError::new(operation, self.kind()).with_detail(self.to_string())
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code { call, code } => match name(*code) {
                Some(name) => write!(f, "{call} answered {name}"),
                None => write!(f, "{call} answered {code}"),
            },
            Self::Missing { call } => write!(f, "the driver library has no {call}"),
            Self::Absurd { call, answer } => write!(f, "{call} answered what cannot be: {answer}"),
            Self::Leftover { call, reason } => write!(f, "what {call} made may still be there: {reason}"),
            Self::NoLibrary(reason) => f.write_str(reason),
        }
    }
}

/// The header's name of a code, without its prefix.
fn name(code: u32) -> Option<&'static str> {
    const NAMES: [&str; 30] = [
        "UNINITIALIZED",
        "INVALID_ARGUMENT",
        "NOT_SUPPORTED",
        "NO_PERMISSION",
        "ALREADY_INITIALIZED",
        "NOT_FOUND",
        "INSUFFICIENT_SIZE",
        "INSUFFICIENT_POWER",
        "DRIVER_NOT_LOADED",
        "TIMEOUT",
        "IRQ_ISSUE",
        "LIBRARY_NOT_FOUND",
        "FUNCTION_NOT_FOUND",
        "CORRUPTED_INFOROM",
        "GPU_IS_LOST",
        "RESET_REQUIRED",
        "OPERATING_SYSTEM",
        "LIB_RM_VERSION_MISMATCH",
        "IN_USE",
        "MEMORY",
        "NO_DATA",
        "VGPU_ECC_NOT_SUPPORTED",
        "INSUFFICIENT_RESOURCES",
        "FREQ_NOT_SUPPORTED",
        "ARGUMENT_VERSION_MISMATCH",
        "DEPRECATED",
        "NOT_READY",
        "GPU_NOT_FOUND",
        "INVALID_STATE",
        "RESET_TYPE_NOT_SUPPORTED",
    ];
    let index = usize::try_from(code).ok()?.checked_sub(1)?;
    NAMES.get(index).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_codes_that_the_wrapper_has_no_name_for_keep_their_meaning() {
        let failure = |code: u32| Failure::of("nvmlX")(NvmlError::from(code));
        assert_eq!(failure(23).kind(), HardwareErrorKind::InsufficientResources);
        assert_eq!(failure(23).to_string(), "nvmlX answered INSUFFICIENT_RESOURCES");
        assert_eq!(failure(28).kind(), HardwareErrorKind::NotFound);
        assert_eq!(failure(30).to_string(), "nvmlX answered RESET_TYPE_NOT_SUPPORTED");
        assert_eq!(failure(19).kind(), HardwareErrorKind::InUse);
        assert_eq!(failure(999).kind(), HardwareErrorKind::Other(999));
        assert_eq!(failure(999).to_string(), "nvmlX answered 999");
        assert_eq!(failure(u32::MAX).kind(), HardwareErrorKind::Other(u32::MAX));
    }

    #[test]
    fn an_unloaded_driver_is_told_from_a_gpu_that_refuses() {
        let failure = |code: u32| Failure::Code { call: "nvmlX", code };
        assert!(failure(9).driver_is_gone() && failure(18).driver_is_gone());
        assert!(!failure(15).driver_is_gone() && !failure(3).driver_is_gone());
    }
}
