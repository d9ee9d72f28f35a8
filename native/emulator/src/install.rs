//! Makes a machine: chooses addresses, minors and UUIDs for the GPUs asked
//! for, and lays everything out under a root. A seed makes the same machine
//! again.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use uuid::Uuid;

use crate::layout::{Layout, replace_link};
use crate::model::{self, Models};
use crate::state::{Clique, Gpu, State};
use crate::store::Store;

/// Most GPUs of a machine.
pub const GPU_LIMIT: usize = 64;

/// What may stand behind a model's name.
const OPTIONS: &str = "mig=on|off, pci=<address>, numa=<node>, minor=<number>, ecc=on|off, nvlinks=<links that are up>, \
                       clique=<cluster UUID>.<clique> or vgpu=on|off";

/// A GPU to install: `<model>[:key=value,…]` with [`OPTIONS`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Slot {
    /// Key of the model.
    pub model: String,
    /// Whether MIG is on from the beginning.
    pub mig: bool,
    /// PCI address; chosen where absent.
    pub pci: Option<String>,
    /// NUMA node; chosen where absent.
    pub numa: Option<i32>,
    /// Minor number; its place in PCI order where absent.
    pub minor: Option<u32>,
    /// Whether ECC is on; the model's where absent.
    pub ecc: Option<bool>,
    /// NVLinks that are up; all where absent.
    pub nvlinks: Option<u32>,
    /// The NVLink fabric it is registered with.
    pub clique: Option<Clique>,
    /// Whether it is a vGPU in a virtual machine.
    pub vgpu: bool,
}

impl FromStr for Slot {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (model, options) = text.split_once(':').unwrap_or((text, ""));
        let mut slot = Self { model: model.to_owned(), ..Self::default() };
        for option in options.split(',').filter(|option| !option.is_empty()) {
            let wrong = || format!("`{option}` is not {OPTIONS}");
            let (key, value) = option.split_once('=').ok_or_else(wrong)?;
            match (key, value) {
                ("mig", "on" | "off") => slot.mig = value == "on",
                ("vgpu", "on" | "off") => slot.vgpu = value == "on",
                ("ecc", "on" | "off") => slot.ecc = Some(value == "on"),
                ("nvlinks", _) => slot.nvlinks = Some(value.parse().map_err(|_| wrong())?),
                ("clique", _) => slot.clique = Some(clique(value).ok_or_else(wrong)?),
                ("pci", _) if is_pci_address(value) => slot.pci = Some(value.to_ascii_lowercase()),
                ("numa", _) => slot.numa = Some(value.parse().map_err(|_| wrong())?),
                ("minor", _) => slot.minor = Some(value.parse().map_err(|_| wrong())?),
                _ => return Err(wrong()),
            }
        }
        Ok(slot)
    }
}

fn clique(text: &str) -> Option<Clique> {
    let (cluster, id) = text.rsplit_once('.')?;
    Some(Clique { cluster: cluster.parse().ok()?, id: id.parse().ok()? })
}

/// Whether a text is a PCI address as the kernel prints it: `0000:17:00.0`.
fn is_pci_address(text: &str) -> bool {
    text.len() == 12
        && text.char_indices().all(|(at, letter)| match at {
            4 | 7 => letter == ':',
            10 => letter == '.',
            _ => letter.is_ascii_hexdigit(),
        })
}

/// What a machine is made of.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Its GPUs.
    pub gpus: Vec<Slot>,
    /// NUMA nodes over which they are spread.
    pub numa_nodes: u32,
    /// Decides all UUIDs.
    pub seed: String,
    /// The driver's version.
    pub driver_version: String,
    /// The CUDA version, as NVML packs it.
    pub cuda_version: i32,
    /// All known models.
    pub models: Models,
}

impl Plan {
    /// The machine's first state.
    ///
    /// # Errors
    /// A sentence about what cannot be.
    pub fn state(&self) -> Result<State, String> {
        if self.gpus.is_empty() || self.gpus.len() > GPU_LIMIT {
            return Err(format!("a machine has 1 to {GPU_LIMIT} GPUs, not {}", self.gpus.len()));
        }
        let mut gpus = Vec::new();
        for (index, slot) in (0_u32..).zip(&self.gpus) {
            gpus.push(self.gpu(index, slot)?);
        }
        gpus.sort_by(|one, other| one.pci.cmp(&other.pci));
        for (minor, gpu) in (0..).zip(&mut gpus) {
            if gpu.minor == u32::MAX {
                gpu.minor = minor;
            }
        }
        let unique = |values: Vec<String>, what: &str| {
            let count = values.len();
            let set: std::collections::BTreeSet<String> = values.into_iter().collect();
            if set.len() == count { Ok(()) } else { Err(format!("two GPUs have the same {what}")) }
        };
        unique(gpus.iter().map(|gpu| gpu.pci.clone()).collect(), "PCI address")?;
        unique(gpus.iter().map(|gpu| gpu.minor.to_string()).collect(), "minor number")?;
        Ok(State {
            written_ns: 0,
            boot_id: Uuid::new_v4().to_string(),
            driver_version: self.driver_version.clone(),
            cuda_version: self.cuda_version,
            next_serial: 0,
            next_event: 0,
            gpus,
            events: Vec::new(),
            next_fault: 0,
            faults: Vec::new(),
            latency_ms: std::collections::BTreeMap::new(),
        })
    }

    fn gpu(&self, index: u32, slot: &Slot) -> Result<Gpu, String> {
        let model = model::find(&self.models, &slot.model)?;
        if slot.mig && model.mig.is_none() {
            return Err(format!("{} has no MIG", slot.model));
        }
        if slot.ecc.is_some() && model.ecc.is_none() {
            return Err(format!("{} has no ECC", slot.model));
        }
        if slot.nvlinks.is_some_and(|up| up > model.nvlinks) {
            return Err(format!("{} has {} NVLinks", slot.model, model.nvlinks));
        }
        let count = u32::try_from(self.gpus.len()).unwrap_or(1);
        let spread = |index: u32| i32::try_from(index * self.numa_nodes.max(1) / count).unwrap_or(0);
        // Three buses lie between neighbours; two GPUs of a NUMA node share a
        // root complex.
        let pci = slot.pci.clone().unwrap_or_else(|| format!("0000:{:02x}:00.0", 0x17 + 3 * index));
        let first = index & !1;
        let pci_root = match &slot.pci {
            Some(address) => format!("pci{}", address.get(..7).unwrap_or("0000:00")),
            None if spread(first) == spread(index) => format!("pci0000:{:02x}", 0x15 + 3 * first),
            None => format!("pci0000:{:02x}", 0x15 + 3 * index),
        };
        let numa = slot.numa.unwrap_or_else(|| spread(index));
        let namespace = Uuid::new_v5(&Uuid::NAMESPACE_OID, self.seed.as_bytes());
        let uuid = Uuid::new_v5(&namespace, pci.as_bytes());
        Ok(Gpu {
            model: slot.model.clone(),
            pci,
            pci_root,
            minor: slot.minor.unwrap_or(u32::MAX),
            numa,
            uuid: format!("GPU-{uuid}"),
            serial: format!("{:013}", uuid.as_u128() % 10_000_000_000_000),
            ecc: slot.ecc.or(model.ecc),
            nvlinks: slot.nvlinks.unwrap_or(model.nvlinks),
            clique: slot.clique,
            vgpu: slot.vgpu,
            mig_current: slot.mig,
            mig_pending: slot.mig,
            lost: false,
            compute_mode: 0,
            persistence: false,
            instances: Vec::new(),
        })
    }
}

/// Where the files of the driver come from.
#[derive(Debug, Clone)]
pub struct DriverSources {
    /// The emulated `libnvidia-ml.so.1`.
    pub library: PathBuf,
    /// The stand-in `nvidia-smi`.
    pub smi: PathBuf,
}

impl DriverSources {
    /// Those beside the running program, or in `deps` beside it; the newest
    /// library where there are two.
    ///
    /// # Errors
    /// A sentence that names what is missing.
    pub fn beside_program() -> Result<Self, String> {
        let program =
            std::env::current_exe().map_err(|error| format!("cannot find this program: {error}"))?;
        let folder = program.parent().unwrap_or(Path::new("/"));
        let folders = [folder.to_owned(), folder.join("deps"), folder.parent().unwrap_or(folder).to_owned()];
        let newest = |name: &str| {
            let found = folders.iter().map(|folder| folder.join(name)).filter(|path| path.is_file());
            found.max_by_key(|path| fs::metadata(path).and_then(|metadata| metadata.modified()).ok())
        };
        let missing =
            |name: &str, flag: &str| format!("no {name} beside {}; name it with {flag}", program.display());
        Ok(Self {
            library: newest("libkerf_emulator.so")
                .ok_or_else(|| missing("libkerf_emulator.so", "--library"))?,
            smi: newest("nvidia-smi").ok_or_else(|| missing("nvidia-smi", "--smi"))?,
        })
    }
}

/// Whether a root holds a machine.
pub fn is_installed(root: &Path) -> bool {
    root.join("state/state.json").exists()
}

/// Lays a machine out under a root. The state comes last: a root without one
/// is not a machine.
///
/// # Errors
/// A sentence about the file that failed.
pub fn install(root: &Path, plan: &Plan, sources: &DriverSources) -> Result<State, String> {
    let mut state = plan.state()?;
    let mut lay_out = || -> io::Result<()> {
        let layout = Layout::new(root);
        fs::create_dir_all(layout.state())?;
        let _ = fs::remove_file(layout.state().join("state.json"));
        for folder in ["dev", "proc", "sys", "driver", "state/clients"] {
            match fs::remove_dir_all(root.join(folder)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        let used: Models = plan
            .models
            .iter()
            .filter(|(key, _)| state.gpus.iter().any(|gpu| gpu.model == **key))
            .map(|(key, model)| (key.clone(), model.clone()))
            .collect();
        fs::write(layout.state().join("models.json"), serde_json::to_vec(&used)?)?;
        driver_files(root, &state.driver_version, sources)?;
        layout.create(&used, &state)?;
        let store = Store::new(layout.state());
        let lock = store.lock()?;
        store.write(&lock, &mut state)
    };
    lay_out().map_err(|error| format!("cannot install under {}: {error}", root.display()))?;
    Ok(state)
}

/// The driver's files, laid out as Debian does.
fn driver_files(root: &Path, version: &str, sources: &DriverSources) -> io::Result<()> {
    let libraries = root.join(format!("driver/usr/lib/{}-linux-gnu", std::env::consts::ARCH));
    let programs = root.join("driver/usr/bin");
    fs::create_dir_all(&libraries)?;
    fs::create_dir_all(&programs)?;
    let library = format!("libnvidia-ml.so.{version}");
    fs::copy(&sources.library, libraries.join(&library))?;
    replace_link(&libraries.join("libnvidia-ml.so.1"), Path::new(&library))?;
    fs::copy(&sources.smi, programs.join("nvidia-smi"))?;
    Ok(())
}
