//! The C surface, by subject. Each function is declared with `api!`, which
//! wraps its body in the session's path and in the panic guard; bodies are
//! safe code, since pointers arrive as [`Out`] and [`Text`].

mod argument;
mod compute_instance;
mod device;
mod event;
mod gpu_instance;
mod handle;
mod lookup;
mod memory;
mod mig_device;
mod process;
mod session;
mod system;
mod unsupported;

pub(crate) use argument::{In, Out, Text, check_version};

/// Declares functions that run in the open session.
macro_rules! api {
    ($(fn $name:ident($($argument:ident: $type:ty),* $(,)?) |$session:ident| $body:block)*) => {
        $(
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $name($($argument: $type),*) -> u32 {
                crate::session::call(stringify!($name), |$session| -> Result<(), crate::code::Code> { $body })
            }
        )*
        /// The functions declared here.
        pub(super) const CALLS: &[&str] = &[$(stringify!($name)),*];
    };
}
pub(crate) use api;

/// The names of all functions of the library.
pub fn calls() -> impl Iterator<Item = &'static str> {
    [
        session::CALLS,
        system::CALLS,
        lookup::CALLS,
        device::CALLS,
        memory::CALLS,
        process::CALLS,
        gpu_instance::CALLS,
        compute_instance::CALLS,
        mig_device::CALLS,
        event::CALLS,
        unsupported::CALLS,
    ]
    .into_iter()
    .flatten()
    .copied()
}
