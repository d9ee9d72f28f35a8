//! What sysfs says about a GPU's place in the machine.

use std::fs;
use std::path::{Component, Path, PathBuf};

use kerf_dra_driver::names::PciAddress;

fn device(sys: &Path, gpu: PciAddress) -> PathBuf {
    sys.join("bus/pci/devices").join(gpu.to_string())
}

/// The NUMA node of a GPU; none where the kernel says -1 or nothing.
pub(crate) fn numa_node(sys: &Path, gpu: PciAddress) -> Option<u32> {
    fs::read_to_string(device(sys, gpu).join("numa_node")).ok()?.trim().parse().ok()
}

/// The PCI root complex of a GPU, `pci<domain>:<bus>`: the first component
/// below `devices` of the path that `/sys/bus/pci/devices/<address>` links to.
pub(crate) fn pcie_root(sys: &Path, gpu: PciAddress) -> Option<String> {
    let link = device(sys, gpu).read_link().ok()?;
    let mut names = link.components().filter_map(|component| match component {
        Component::Normal(name) => name.to_str(),
        _ => None,
    });
    names.by_ref().find(|name| *name == "devices")?;
    let root = names.next()?;
    let (domain, bus) = root.strip_prefix("pci")?.split_once(':')?;
    let hexadecimal = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    (hexadecimal(domain) && hexadecimal(bus)).then(|| root.to_owned())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn sys_with(link: &str, numa_node: &str) -> (tempfile::TempDir, PciAddress) {
        let gpu: PciAddress = "0000:65:00.0".parse().expect("an address");
        let sys = tempfile::tempdir().expect("a folder");
        let target = sys.path().join("bus/pci/devices").join(link);
        fs::create_dir_all(sys.path().join("bus/pci/devices")).expect("a folder");
        fs::create_dir_all(sys.path().join("devices/pci0000:64/0000:64:02.0/0000:65:00.0"))
            .expect("a folder");
        symlink(link, device(sys.path(), gpu)).expect("a link");
        if target.exists() {
            fs::write(target.join("numa_node"), numa_node).expect("a file");
        }
        (sys, gpu)
    }

    #[test]
    fn the_root_complex_is_the_first_folder_of_the_device_path() {
        let (sys, gpu) = sys_with("../../../devices/pci0000:64/0000:64:02.0/0000:65:00.0", "1\n");
        assert_eq!(pcie_root(sys.path(), gpu).as_deref(), Some("pci0000:64"));
        assert_eq!(numa_node(sys.path(), gpu), Some(1));
    }

    #[test]
    fn a_node_of_minus_one_is_no_node() {
        let (sys, gpu) = sys_with("../../../devices/pci0000:64/0000:64:02.0/0000:65:00.0", "-1\n");
        assert_eq!(numa_node(sys.path(), gpu), None);
    }

    #[test]
    fn a_path_without_a_root_complex_has_none() {
        let (sys, gpu) = sys_with("../../../devices/platform/gpu", "0\n");
        assert_eq!(pcie_root(sys.path(), gpu), None);
        assert_eq!(pcie_root(Path::new("/nowhere"), gpu), None);
    }
}
