//! Init, shutdown, error texts.

use std::ffi::c_char;

use crate::code::Code;
use crate::session;

/// The functions declared here.
pub(super) const CALLS: &[&str] =
    &["nvmlInit", "nvmlInit_v2", "nvmlInitWithFlags", "nvmlShutdown", "nvmlErrorString"];

#[unsafe(no_mangle)]
extern "C" fn nvmlInit() -> u32 {
    session::open("nvmlInit")
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInit_v2() -> u32 {
    session::open("nvmlInit_v2")
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInitWithFlags(_flags: u32) -> u32 {
    session::open("nvmlInitWithFlags")
}

#[unsafe(no_mangle)]
extern "C" fn nvmlShutdown() -> u32 {
    session::close("nvmlShutdown")
}

#[unsafe(no_mangle)]
extern "C" fn nvmlErrorString(code: u32) -> *const c_char {
    Code::sentence(code).as_ptr()
}
