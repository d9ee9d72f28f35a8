//! Gives the library its SONAME, and keeps it and the programs loadable in
//! images that have glibc but not `libgcc_s.so.1`.

use std::path::PathBuf;
use std::{env, fs};

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libnvidia-ml.so.1");
    // `-lgcc_s` finds this linker script first: the unwinder is linked in.
    let Some(out) = env::var_os("OUT_DIR").map(PathBuf::from) else { return };
    if fs::write(out.join("libgcc_s.so"), "INPUT(-lgcc_eh -lgcc)\n").is_ok() {
        for kind in ["rustc-cdylib-link-arg", "rustc-link-arg-bins"] {
            println!("cargo:{kind}=-L{}", out.display());
        }
    }
}
