//! NVML's return codes: one table of number, name and sentence.

use std::fmt;

/// Why a call was refused. Never `NVML_SUCCESS`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Code(u32);

macro_rules! codes {
    ($($name:ident = $number:literal, $text:literal;)*) => {
        impl Code {
            $(#[doc = concat!("`NVML_ERROR_", stringify!($name), "`.")]
            pub const $name: Self = Self($number);)*
        }
        const TABLE: &[(u32, &str, &std::ffi::CStr)] = &[$(($number, stringify!($name), $text)),*];
    };
}

codes! {
    UNINITIALIZED = 1, c"Uninitialized";
    INVALID_ARGUMENT = 2, c"Invalid Argument";
    NOT_SUPPORTED = 3, c"Not Supported";
    NO_PERMISSION = 4, c"Insufficient Permissions";
    ALREADY_INITIALIZED = 5, c"Already Initialized";
    NOT_FOUND = 6, c"Not Found";
    INSUFFICIENT_SIZE = 7, c"Insufficient Size";
    INSUFFICIENT_POWER = 8, c"Insufficient External Power";
    DRIVER_NOT_LOADED = 9, c"Driver Not Loaded";
    TIMEOUT = 10, c"Timeout";
    IRQ_ISSUE = 11, c"Interrupt Request Issue";
    LIBRARY_NOT_FOUND = 12, c"NVML Shared Library Not Found";
    FUNCTION_NOT_FOUND = 13, c"Function Not Found";
    CORRUPTED_INFOROM = 14, c"Corrupted infoROM";
    GPU_IS_LOST = 15, c"GPU is lost";
    RESET_REQUIRED = 16, c"GPU requires reset";
    OPERATING_SYSTEM = 17, c"The operating system has blocked the request.";
    LIB_RM_VERSION_MISMATCH = 18, c"RM has detected an NVML/RM version mismatch.";
    IN_USE = 19, c"In use by another client";
    MEMORY = 20, c"Insufficient Memory";
    NO_DATA = 21, c"No data";
    VGPU_ECC_NOT_SUPPORTED = 22, c"vGPU operation not available, ECC enabled";
    INSUFFICIENT_RESOURCES = 23, c"Insufficient Resources";
    FREQ_NOT_SUPPORTED = 24, c"Requested frequency not supported";
    ARGUMENT_VERSION_MISMATCH = 25, c"Argument version mismatch";
    DEPRECATED = 26, c"Deprecated";
    NOT_READY = 27, c"Not Ready";
    GPU_NOT_FOUND = 28, c"GPU not found";
    INVALID_STATE = 29, c"Invalid state";
    RESET_TYPE_NOT_SUPPORTED = 30, c"Reset type not supported";
    UNKNOWN = 999, c"Unknown Error";
}

impl Code {
    /// The number NVML gives it.
    pub fn number(self) -> u32 {
        self.0
    }

    /// A code from its name (`IN_USE`, `NVML_ERROR_IN_USE`) or number.
    pub fn parse(text: &str) -> Option<Self> {
        let name = text.trim_start_matches("NVML_ERROR_");
        let number = name.parse::<u32>().ok();
        let found = TABLE.iter().find(|(code, known, _)| *known == name || Some(*code) == number);
        found.map(|(code, ..)| Self(*code))
    }

    /// The sentence `nvmlErrorString` answers for any number.
    pub fn sentence(number: u32) -> &'static std::ffi::CStr {
        if number == 0 {
            return c"Success";
        }
        TABLE.iter().find(|(code, ..)| *code == number).map_or(c"Unknown Error", |(.., text)| text)
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = TABLE.iter().find(|(code, ..)| *code == self.0).map_or("UNKNOWN", |(_, name, _)| name);
        f.write_str(name)
    }
}

impl std::error::Error for Code {}

/// A file of the emulated machine could not be read or written.
impl From<std::io::Error> for Code {
    fn from(error: std::io::Error) -> Self {
        match error.kind() {
            std::io::ErrorKind::PermissionDenied | std::io::ErrorKind::ReadOnlyFilesystem => {
                Self::NO_PERMISSION
            }
            _ => Self::OPERATING_SYSTEM,
        }
    }
}
