//! The NVML back-end through the real FFI: against the emulated library, and
//! against libraries whose answers cannot be believed.

#![expect(
    clippy::expect_used,
    clippy::print_stdout,
    reason = "test support outside test functions; what a test saw is printed"
)]

mod emulated;
mod facts;
mod hostile;
mod machine;
