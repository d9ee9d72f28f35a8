//! The files beside the state that a real driver would show: device nodes,
//! `/proc/driver/nvidia`, `/sys/bus/pci`, the driver's own files. They follow
//! from the state; whoever changes it brings them up to date.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};

use crate::clients::{Clients, Use};
use crate::model::Models;
use crate::state::{Gpu, State};

/// Major number of the GPUs' device nodes.
pub const MAJOR_GPU: u32 = 195;
/// Major number of the unified memory nodes.
pub const MAJOR_UVM: u32 = 510;
/// Major number of the capability nodes.
pub const MAJOR_CAPS: u32 = 511;

/// The number of a GPU instance's capability node. The driver numbers them
/// this way: nine to a GPU instance, fifteen GPU instances to a GPU.
pub fn gpu_instance_capability(gpu_minor: u32, instance: u32) -> u32 {
    3 + gpu_minor * 135 + instance * 9
}

/// The number of a compute instance's capability node.
pub fn compute_instance_capability(gpu_minor: u32, instance: u32, compute: u32) -> u32 {
    gpu_instance_capability(gpu_minor, instance) + 1 + compute
}

/// The files under one root.
#[derive(Debug, Clone)]
pub struct Layout {
    root: PathBuf,
}

impl Layout {
    /// The layout of a root.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// The state folder, mounted into containers at `/run/nvidia-emulator`.
    pub fn state(&self) -> PathBuf {
        self.root.join("state")
    }

    /// The root.
    pub fn root(&self) -> &Path {
        &self.root
    }

    fn proc_driver(&self) -> PathBuf {
        self.root.join("proc/driver/nvidia")
    }

    /// Everything that does not change while the machine runs.
    pub fn create(&self, models: &Models, state: &State) -> io::Result<()> {
        let dev = self.root.join("dev");
        fs::create_dir_all(dev.join("nvidia-caps"))?;
        for (name, major, minor) in [
            ("nvidiactl", MAJOR_GPU, 255),
            ("nvidia-modeset", MAJOR_GPU, 254),
            ("nvidia-uvm", MAJOR_UVM, 0),
            ("nvidia-uvm-tools", MAJOR_UVM, 1),
            ("nvidia-caps/nvidia-cap1", MAJOR_CAPS, 1),
            ("nvidia-caps/nvidia-cap2", MAJOR_CAPS, 2),
        ] {
            node(&dev.join(name), major, minor)?;
        }
        let capabilities = self.proc_driver().join("capabilities/mig");
        write(&capabilities.join("config"), &access(1))?;
        write(&capabilities.join("monitor"), &access(2))?;
        write(
            &self.proc_driver().join("version"),
            &format!(
                "NVRM version: NVIDIA UNIX {} Kernel Module  {}  (emulated)\nGCC version:  gcc version 12.2.0\n",
                std::env::consts::ARCH,
                state.driver_version
            ),
        )?;
        write(
            &self.root.join("proc/devices"),
            &format!(
                "Character devices:\n  1 mem\n{MAJOR_GPU} nvidia-frontend\n{MAJOR_UVM} nvidia-uvm\n{MAJOR_CAPS} nvidia-caps\n\nBlock devices:\n  8 sd\n"
            ),
        )?;
        write(&self.root.join("proc/driver/nvidia-caps/mig-minors"), &mig_minors(state))?;
        self.boot_id(state)?;
        for gpu in &state.gpus {
            node(&dev.join(format!("nvidia{}", gpu.minor)), MAJOR_GPU, gpu.minor)?;
            self.describe(models, gpu)?;
        }
        self.bring_up_to_date(state)
    }

    /// Writes the boot id.
    pub fn boot_id(&self, state: &State) -> io::Result<()> {
        write(&self.root.join("proc/sys/kernel/random/boot_id"), &format!("{}\n", state.boot_id))
    }

    /// What `/proc` and `/sys` say of one GPU.
    fn describe(&self, models: &Models, gpu: &Gpu) -> io::Result<()> {
        let Some(model) = models.get(&gpu.model) else { return Err(io::ErrorKind::NotFound.into()) };
        let information = format!(
            "Model: \t\t {}\nIRQ:   \t\t {}\nGPU UUID: \t {}\nVideo BIOS: \t 96.00.00.00.00\nBus Type: \t PCIe\nDMA Size: \t 52 bits\nDMA Mask: \t 0xfffffffffffff\nBus Location: \t {}\nDevice Minor: \t {}\nGPU Firmware: \t N/A\nGPU Excluded:\t No\n",
            model.name,
            100 + gpu.minor,
            gpu.uuid,
            gpu.pci,
            gpu.minor
        );
        write(&self.proc_driver().join("gpus").join(&gpu.pci).join("information"), &information)?;
        let bridge = format!("{}:01.0", gpu.pci_root.trim_start_matches("pci"));
        let device = PathBuf::from("devices").join(&gpu.pci_root).join(bridge).join(&gpu.pci);
        let folder = self.root.join("sys").join(&device);
        let (subsystem, subvendor) = {
            let packed = model.packed_subsystem_id();
            (packed >> 16, packed & 0xffff)
        };
        for (name, text) in [
            ("numa_node", gpu.numa.to_string()),
            ("vendor", "0x10de".to_owned()),
            ("device", model.pci_device_id.clone()),
            ("class", "0x030200".to_owned()),
            ("subsystem_device", format!("0x{subsystem:04x}")),
            ("subsystem_vendor", format!("0x{subvendor:04x}")),
        ] {
            write(&folder.join(name), &format!("{text}\n"))?;
        }
        let links = self.root.join("sys/bus/pci/devices");
        fs::create_dir_all(&links)?;
        replace_link(&links.join(&gpu.pci), &PathBuf::from("../../../").join(device))
    }

    /// Makes capability files, nodes and client files what the instances of
    /// all GPUs ask for, whatever a killed writer left.
    pub fn bring_up_to_date(&self, state: &State) -> io::Result<()> {
        let clients = Clients::new(&self.state());
        let mut known = BTreeSet::new();
        for gpu in &state.gpus {
            self.capabilities(gpu)?;
            clients.prepare(&gpu.uuid, &[Use::Compute, Use::Events])?;
            known.insert(gpu.uuid.as_str());
            for (_, compute) in gpu.mig_devices() {
                clients.prepare(&compute.uuid, &[Use::Compute])?;
                known.insert(compute.uuid.as_str());
            }
        }
        clients.retain(|uuid| known.contains(uuid))
    }

    /// The same for one GPU, whose files were those of `before`.
    pub fn follow(&self, before: &Gpu, now: &Gpu) -> io::Result<()> {
        let clients = Clients::new(&self.state());
        let devices =
            |gpu: &Gpu| gpu.mig_devices().map(|(_, compute)| compute.uuid.clone()).collect::<BTreeSet<_>>();
        let (old, new) = (devices(before), devices(now));
        for uuid in new.difference(&old) {
            clients.prepare(uuid, &[Use::Compute])?;
        }
        self.capabilities(now)?;
        for uuid in old.difference(&new) {
            clients.remove(uuid)?;
        }
        Ok(())
    }

    fn capabilities(&self, gpu: &Gpu) -> io::Result<()> {
        let caps = self.root.join("dev/nvidia-caps");
        let folder = self.proc_driver().join(format!("capabilities/gpu{}/mig", gpu.minor));
        fs::create_dir_all(&folder)?;
        for (instance, instance_folder) in numbered(&folder, "gi")? {
            let known = gpu.instances.iter().find(|known| known.id == instance);
            for (compute, compute_folder) in numbered(&instance_folder, "ci")? {
                if known.is_none_or(|known| known.compute.iter().all(|known| known.id != compute)) {
                    let number = compute_instance_capability(gpu.minor, instance, compute);
                    remove(&caps.join(format!("nvidia-cap{number}")))?;
                    fs::remove_dir_all(compute_folder)?;
                }
            }
            if known.is_none() {
                let number = gpu_instance_capability(gpu.minor, instance);
                remove(&caps.join(format!("nvidia-cap{number}")))?;
                fs::remove_dir_all(instance_folder)?;
            }
        }
        for instance in &gpu.instances {
            let instance_folder = folder.join(format!("gi{}", instance.id));
            capability(&caps, &instance_folder, gpu_instance_capability(gpu.minor, instance.id))?;
            for compute in &instance.compute {
                let number = compute_instance_capability(gpu.minor, instance.id, compute.id);
                capability(&caps, &instance_folder.join(format!("ci{}", compute.id)), number)?;
            }
        }
        Ok(())
    }
}

/// The node first: who sees the capability file finds it.
fn capability(caps: &Path, folder: &Path, number: u32) -> io::Result<()> {
    let file = folder.join("access");
    if file.exists() {
        return Ok(());
    }
    node(&caps.join(format!("nvidia-cap{number}")), MAJOR_CAPS, number)?;
    write(&file, &access(number))
}

fn access(minor: u32) -> String {
    format!("DeviceFileMinor: {minor}\nDeviceFileMode: 292\nDeviceFileModify: 1\n")
}

fn mig_minors(state: &State) -> String {
    let mut lines = vec!["config 1".to_owned(), "monitor 2".to_owned()];
    for minor in state.gpus.iter().map(|gpu| gpu.minor) {
        for instance in 0..15 {
            lines
                .push(format!("gpu{minor}/gi{instance}/access {}", gpu_instance_capability(minor, instance)));
            lines.extend((0..8).map(|compute| {
                let number = compute_instance_capability(minor, instance, compute);
                format!("gpu{minor}/gi{instance}/ci{compute}/access {number}")
            }));
        }
    }
    lines.join("\n") + "\n"
}

/// Subfolders named by a prefix and a number.
fn numbered(folder: &Path, prefix: &str) -> io::Result<Vec<(u32, PathBuf)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let number = entry.file_name().to_str().and_then(|name| name.strip_prefix(prefix)?.parse().ok());
        found.extend(number.map(|number| (number, entry.path())));
    }
    Ok(found)
}

/// A character device; an ordinary file where the process may not make one.
fn node(path: &Path, major: u32, minor: u32) -> io::Result<()> {
    remove(path)?;
    match mknodat(CWD, path, FileType::CharacterDevice, Mode::from_raw_mode(0o666), makedev(major, minor)) {
        Ok(()) => fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o666)),
        Err(rustix::io::Errno::PERM | rustix::io::Errno::ACCESS) => fs::write(path, ""),
        Err(errno) => Err(errno.into()),
    }
}

/// Writes a file whole, so that nobody reads half of it.
fn write(path: &Path, text: &str) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let temporary = path.with_extension("new");
    fs::write(&temporary, text)?;
    fs::rename(&temporary, path)
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// A symbolic link, in place of one that may be there.
pub(crate) fn replace_link(path: &Path, target: &Path) -> io::Result<()> {
    remove(path)?;
    symlink(target, path)
}
