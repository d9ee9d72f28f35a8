//! What a driver installation is made of, and where distributions put it.
//! Paths are relative to the driver root.

use std::path::PathBuf;

/// Folders of libraries, in the order in which they are searched, and where a
/// container gets what is in them. Of libraries with the same name the first
/// counts: RHEL has 32-bit ones in `usr/lib`, 64-bit ones in `usr/lib64`.
pub(super) const LIBRARY_FOLDERS: &[(&str, &str)] = &[
    // Debian, Ubuntu; with Debian's own packages most of it in `nvidia/current`.
    ("usr/lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu"),
    ("usr/lib/aarch64-linux-gnu", "usr/lib/aarch64-linux-gnu"),
    ("usr/lib/x86_64-linux-gnu/nvidia/current", "usr/lib/x86_64-linux-gnu"),
    ("usr/lib/aarch64-linux-gnu/nvidia/current", "usr/lib/aarch64-linux-gnu"),
    // RHEL, Fedora, SUSE.
    ("usr/lib64", "usr/lib64"),
    // Arch, bare trees.
    ("usr/lib", "usr/lib"),
    ("lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"),
    ("lib/aarch64-linux-gnu", "lib/aarch64-linux-gnu"),
    // Without merged `/usr`; `lib64` is GKE's below its own driver root.
    ("lib64", "lib64"),
    ("lib", "lib"),
    // Talos, before and after it had a C library of its own for them.
    ("usr/local/glibc/usr/lib", "usr/local/glibc/usr/lib"),
    ("usr/local/lib", "usr/local/lib"),
];

/// Libraries that programs open by path and not by name.
pub(super) const VDPAU: &str = "vdpau";

pub(super) const PROGRAM_FOLDERS: &[&str] =
    &["usr/bin", "usr/sbin", "bin", "sbin", "usr/local/bin", "usr/local/sbin"];

/// Where links of the folders above may lead on, and be turned.
const LINK_FOLDERS: &[&str] = &["etc/alternatives"];

/// Libraries of the driver's version that no container needs: the window of
/// `nvidia-settings`, and the switches' management, which is the host's.
pub(super) const NOT_FOR_CONTAINERS: &[&str] =
    &["libnvidia-gtk2", "libnvidia-gtk3", "libnvidia-wayland-client", "libnvidia-nscq", "libnvsdm"];

/// The number at the end of a SONAME, for trees that have no link that says it.
/// A library that is not here has its versioned name for SONAME.
pub(super) const SONAMES: &[(&str, u32)] = &[
    ("libEGL_nvidia", 0),
    ("libGLESv1_CM_nvidia", 1),
    ("libGLESv2_nvidia", 2),
    ("libGLX_nvidia", 0),
    ("libcuda", 1),
    ("libcudadebugger", 1),
    ("libnvcuvid", 1),
    ("libnvidia-allocator", 1),
    ("libnvidia-cfg", 1),
    ("libnvidia-encode", 1),
    ("libnvidia-fbc", 1),
    ("libnvidia-ml", 1),
    ("libnvidia-ngx", 1),
    ("libnvidia-nvvm", 4),
    ("libnvidia-nvvm70", 4),
    ("libnvidia-opencl", 1),
    ("libnvidia-opticalflow", 1),
    ("libnvidia-ptxjitcompiler", 1),
    ("libnvidia-sandboxutils", 1),
    ("libnvidia-vksc-core", 1),
    ("libnvoptix", 1),
    ("libvdpau_nvidia", 1),
];

/// Libraries that come with the driver and have versions of their own.
pub(super) const OF_OWN_VERSION: &[&str] = &[
    "libnvidia-api.so.1",
    "libnvidia-egl-gbm.so.1",
    "libnvidia-egl-wayland.so.1",
    "libnvidia-egl-xcb.so.1",
    "libnvidia-egl-xlib.so.1",
];

/// What programs are linked with, and packages for servers leave out.
pub(super) const DEVELOPMENT_LINKS: &[&str] = &["libcuda"];

/// Libraries without which nothing computes: another version of one of them
/// is no driver.
pub(super) const ESSENTIAL: &[&str] = &["libnvidia-ml", "libcuda", "libnvidia-ptxjitcompiler"];

pub(super) const PROGRAMS: &[&str] = &[
    "nvidia-smi",
    "nvidia-debugdump",
    "nvidia-persistenced",
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
    "nvidia-imex",
    "nvidia-imex-ctl",
];

/// Files by which the loaders of `OpenCL`, EGL and Vulkan find the driver.
pub(super) const CONFIGURATION: &[&str] = &[
    "etc/OpenCL/vendors/nvidia.icd",
    "etc/vulkan/icd.d/nvidia_icd.json",
    "etc/vulkan/implicit_layer.d/nvidia_layers.json",
    "usr/share/egl/egl_external_platform.d/09_nvidia_wayland2.json",
    "usr/share/egl/egl_external_platform.d/10_nvidia_wayland.json",
    "usr/share/egl/egl_external_platform.d/15_nvidia_gbm.json",
    "usr/share/egl/egl_external_platform.d/20_nvidia_xcb.json",
    "usr/share/egl/egl_external_platform.d/20_nvidia_xlib.json",
    "usr/share/glvnd/egl_vendor.d/10_nvidia.json",
    "usr/share/nvidia/nvoptix.bin",
    "usr/share/vulkan/icd.d/nvidia_icd.json",
    "usr/share/vulkan/icd.d/nvidia_icd.x86_64.json",
    "usr/share/vulkan/icd.d/nvidia_icd.aarch64.json",
    "usr/share/vulkan/implicit_layer.d/nvidia_layers.json",
];

/// Sockets of the driver's daemons, where these run.
pub(super) const SOCKETS: &[&str] = &["run/nvidia-persistenced/socket", "run/nvidia-fabricmanager/socket"];

const FIRMWARE_FOLDERS: &[&str] = &["lib/firmware/updates", "lib/firmware", "usr/lib/firmware"];

/// Where a version's firmware may be.
pub(super) fn firmware_folders(version: &str) -> impl Iterator<Item = PathBuf> {
    FIRMWARE_FOLDERS.iter().map(move |folder| PathBuf::from(folder).join("nvidia").join(version))
}

/// Folders in which something may come, go or be replaced.
pub(super) fn folders() -> impl Iterator<Item = PathBuf> {
    let libraries = LIBRARY_FOLDERS.iter().map(|(folder, _)| PathBuf::from(folder));
    let plain = PROGRAM_FOLDERS.iter().chain(LINK_FOLDERS).map(PathBuf::from);
    // Daemons start late.
    libraries.chain(plain).chain(SOCKETS.iter().filter_map(parent))
}

/// Folders from which something may go. What comes to them comes with the
/// driver's libraries.
pub(super) fn folders_beside(version: &str) -> impl Iterator<Item = PathBuf> {
    firmware_folders(version).chain(CONFIGURATION.iter().filter_map(parent))
}

fn parent(file: &&str) -> Option<PathBuf> {
    PathBuf::from(file).parent().map(PathBuf::from)
}
