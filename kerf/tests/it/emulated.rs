//! An emulated machine and what of kerf runs on it: the NVML back-end through
//! the real FFI, the plugin with its journal and CDI folder, the layout.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use futures::future::join_all;
use k8s_openapi::api::resource::v1::ResourceSliceSpec;
use kerf_dra_driver::hardware::Hardware;
use kerf_dra_driver::inventory::Inventory;
use kerf_dra_driver::model::Settings;
use kerf_dra_driver::names::DeviceName;
use kerf_dra_driver::publication::{Knowledge, Publication};
use kerf_dra_driver::taint::Conditions;
use kerf_dra_driver::withdraw::Timestamp;
use kerf_emulator::install::{DriverSources, Plan, install};
use kerf_emulator::model::{Model, Models, built_in};
use kerf_emulator::state::State;
use kerf_gpu::{NvmlHardware, Roots};
use kerf_kubelet_plugin::testing::{Fuse, Node, claim};
use kerf_kubelet_plugin::{ClaimRequest, Plugin, chain};

pub(crate) const VERSION: &str = "580.95.05";

/// Lays out a machine with these GPUs under a root.
pub(crate) fn install_on(root: &Path, gpus: &[impl AsRef<str>]) {
    let library = std::env::current_exe().unwrap().with_file_name("libkerf_emulator.so");
    // Where the stand-in is not built, nobody runs what lies in its place.
    let sources = DriverSources { smi: smi().unwrap_or_else(|| library.clone()), library };
    let plan = Plan {
        gpus: gpus.iter().map(|gpu| gpu.as_ref().parse().unwrap()).collect(),
        numa_nodes: 1,
        seed: "kerf".to_owned(),
        driver_version: VERSION.to_owned(),
        cuda_version: 13_000,
        models: built_in().unwrap(),
    };
    install(root, &plan, &sources).unwrap();
}

/// The stand-in `nvidia-smi`, which is built with the emulator's own tests.
pub(crate) fn smi() -> Option<PathBuf> {
    let path = std::env::current_exe().unwrap().parent()?.with_file_name("nvidia-smi");
    path.is_file().then_some(path)
}

/// The machines that are made of one model: where a GPU keeps its MIG mode, one
/// for each mode.
pub(crate) fn machines_of_every_model() -> Vec<(Model, String)> {
    let models: Models = built_in().unwrap();
    let machines = models.into_iter().flat_map(|(key, model)| {
        use kerf_emulator::model::ModeRule;
        let is_kept = model.mig.as_ref().is_some_and(|mig| mig.mode == ModeRule::NeedsReset);
        let on = is_kept.then(|| (model.clone(), format!("{key}:mig=on")));
        std::iter::once((model, key)).chain(on)
    });
    machines.collect()
}

/// A machine and the folders of its node, gone when it is dropped.
pub(crate) struct Emulated {
    root: tempfile::TempDir,
    pub(crate) node: Node,
}

impl Emulated {
    pub(crate) fn new(gpus: &[impl AsRef<str>]) -> Self {
        // Syncs cost nothing there, and what they are for is tested elsewhere.
        let memory = Path::new("/dev/shm");
        let root = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.unwrap();
        install_on(root.path(), gpus);
        let gpus = NvmlHardware::new(roots(root.path())).inventory().unwrap().gpus;
        let node = Node::new(&root.path().join("node"), gpus).unwrap();
        Self { root, node }
    }

    pub(crate) fn path(&self, path: &str) -> PathBuf {
        self.root.path().join(path)
    }

    pub(crate) fn hardware(&self) -> NvmlHardware {
        NvmlHardware::new(roots(self.root.path()))
    }

    /// The machine from the side of its control command.
    pub(crate) fn control(&self) -> kerf_emulator::machine::Machine {
        kerf_emulator::machine::Machine::host(self.root.path()).unwrap()
    }

    pub(crate) fn state(&self) -> State {
        State::clone(&self.control().state().unwrap())
    }

    pub(crate) fn inventory(&self) -> Inventory {
        self.node.machine.lock().unwrap().inventory.clone()
    }

    pub(crate) fn settings(&self) -> Settings {
        self.node.config().settings
    }

    /// Why claims cannot be prepared here, where that is so: the driver has no
    /// device nodes for whom the kernel lets make none.
    pub(crate) fn lacks_nodes(&self) -> bool {
        let gpu = self.inventory().gpus[0].pci;
        let lacks = self
            .hardware()
            .device_nodes(gpu, None)
            .is_err_and(|error| error.to_string().contains("not a character device"));
        if lacks {
            eprintln!("skipped: this user may not make device nodes (CAP_MKNOD)");
        }
        lacks
    }

    /// Starts a process on the node, as after a restart: it settles what it
    /// finds.
    pub(crate) async fn plugin(&self) -> Plugin {
        self.node.machine.lock().unwrap().inventory = self.hardware().inventory().unwrap();
        let plugin = self.node.plugin_with(self.hardware(), &Fuse::none()).unwrap();
        plugin.start().await.unwrap();
        plugin
    }

    /// What the node publishes under these conditions, after what it published
    /// before.
    pub(crate) async fn publish(
        &self,
        plugin: &Plugin,
        publication: &mut Publication,
        conditions: &Conditions,
    ) -> Vec<ResourceSliceSpec> {
        let observed = plugin.observe().await.unwrap();
        let view = plugin.journal().borrow().clone();
        let held: BTreeSet<DeviceName> = view.held().map(|(device, _)| device.clone()).collect();
        let next = publication.next(Knowledge {
            settings: &self.settings(),
            inventory: &observed.inventory,
            foreign: &observed.foreign,
            held: &held,
            list: None,
            conditions,
            is_stored: true,
            counters: true,
            now: Timestamp(0),
        });
        publication.take(next)
    }

    /// Prepares claims of these devices at once, as a kubelet does.
    pub(crate) async fn prepare(
        &self,
        plugin: &Plugin,
        claims: &BTreeMap<String, Vec<DeviceName>>,
    ) -> Result<(), String> {
        let prepared = join_all(claims.iter().map(|(name, devices)| {
            let requests: Vec<String> = (0..devices.len()).map(|at| format!("r{at}")).collect();
            let results: Vec<_> = requests.iter().map(String::as_str).zip(devices.iter().cloned()).collect();
            self.node.claims.put(claim(name, &results));
            let (namespace, uid) = ("ns".to_owned(), format!("{name}-uid"));
            plugin.prepare(ClaimRequest { namespace, name: name.clone(), uid })
        }));
        for ((name, devices), prepared) in claims.iter().zip(prepared.await) {
            let prepared = prepared.map_err(|error| format!("{name} of {devices:?}: {}", chain(&error)))?;
            let names: Vec<String> = prepared.into_iter().map(|device| device.device).collect();
            assert_eq!(names, devices.iter().map(ToString::to_string).collect::<Vec<_>>());
        }
        Ok(())
    }

    /// Gives a claim back, and takes it out of the API.
    pub(crate) async fn unprepare(&self, plugin: &Plugin, name: &str) -> Result<(), String> {
        plugin
            .unprepare(format!("{name}-uid"))
            .await
            .map_err(|error| format!("{name}: {}", chain(&error)))?;
        self.node.claims.delete("ns", name);
        Ok(())
    }

    /// The GPU instances that there are, by address, profile id and start.
    pub(crate) fn instances(&self) -> BTreeSet<(String, u32, u32)> {
        let of = |gpu: kerf_emulator::state::Gpu| {
            gpu.instances.into_iter().map(move |found| (gpu.pci.clone(), found.profile, found.start))
        };
        self.state().gpus.into_iter().flat_map(of).collect()
    }

    /// All files that claims have on the node: entries, specs, what could not be
    /// read, and what is only half written.
    pub(crate) fn files_of_claims(&self) -> Vec<String> {
        let folders = ["plugin/state/claims", "plugin/state/quarantine", "cdi"];
        // Some are made when they are needed.
        let files = |folder: &str| fs::read_dir(self.node.root.join(folder)).into_iter().flatten();
        let names = folders.into_iter().flat_map(files).map(|file| file.unwrap().file_name());
        names.map(|name| name.into_string().unwrap()).collect()
    }
}

fn roots(root: &Path) -> Roots {
    Roots {
        driver: root.join("driver"),
        host_driver: root.join("driver"),
        dev: root.join("dev"),
        host_dev: root.join("dev"),
        proc: root.join("proc"),
        sys: root.join("sys"),
    }
}
