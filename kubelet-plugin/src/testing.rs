//! Stand-ins for tests: a machine with GPUs in memory, claims in memory, a
//! disk and hardware that die at a chosen call.

mod claims;
mod fuse;
mod hardware;
mod pod_resources;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kerf_dra_driver::hardware::Hardware;
use kerf_dra_driver::inventory::Gpu;
use kerf_dra_driver::model::{ForeignPartitions, ProfileFilter, Settings};
use kerf_dra_driver::names::{DriverName, gpu_pool};
use tokio::sync::watch;

use crate::claims::ClaimSource;
use crate::disk::{Files, HostFiles};
use crate::hook_program::HookProgram;
use crate::plugin::{Plugin, PluginConfig, PluginError};
use crate::store::StoreError;

pub use claims::{MemoryClaims, claim};
pub use fuse::{Fuse, Reach, Strike, Struck};
pub use hardware::{Machine, ModelHardware, h100, partition};
pub use pod_resources::pod_resources;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An error of the journal's files.
pub fn store_error(operation: &'static str, path: &str, source: io::Error) -> StoreError {
    StoreError { operation, path: path.into(), source }
}

/// A file or folder as the names of calls tell it: below which folder.
pub fn place(path: &Path) -> String {
    let names: Vec<_> = path.iter().rev().take(2).map(|name| name.to_string_lossy()).collect();
    names.into_iter().rev().collect::<Vec<_>>().join("/")
}

/// The machine's files, reached by a process that may be struck.
#[derive(Debug)]
pub struct MortalFiles(pub Arc<Fuse>);

impl MortalFiles {
    fn run<T>(
        &self,
        reach: Reach,
        (what, path): (&str, &Path),
        call: impl FnOnce() -> io::Result<T>,
    ) -> io::Result<T> {
        self.0.run(reach, || format!("{what} {}", place(path)), |struck| disk_error(reach, struck), call)
    }
}

/// What a caller of a disk is told.
pub fn disk_error(reach: Reach, struck: Struck) -> io::Error {
    use rustix::io::Errno;
    let error = match (struck, reach) {
        (Struck::Killed | Struck::Late, _) => return io::Error::other("killed"),
        (Struck::Failed, Reach::Space) => Errno::NOSPC,
        (Struck::Failed, _) => Errno::IO,
        (Struck::ReadOnly, _) => Errno::ROFS,
        (Struck::NoFiles, _) => Errno::MFILE,
    };
    error.into()
}

impl Files for MortalFiles {
    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        if self.0.is_dead() { Err(io::Error::other("killed")) } else { HostFiles.read(path) }
    }

    fn list(&self, folder: &Path) -> io::Result<Vec<String>> {
        if self.0.is_dead() { Err(io::Error::other("killed")) } else { HostFiles.list(folder) }
    }

    fn create_folder(&self, folder: &Path) -> io::Result<()> {
        self.run(Reach::Space, ("make folder", folder), || HostFiles.create_folder(folder))
    }

    fn write(&self, path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
        self.run(Reach::Space, ("write", path), || HostFiles.write(path, content, mode))
    }

    fn write_synced(&self, path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
        self.run(Reach::Space, ("write and sync", path), || HostFiles.write_synced(path, content, mode))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.run(Reach::Names, ("rename to", to), || HostFiles.rename(from, to))
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.run(Reach::Names, ("remove", path), || HostFiles.remove(path))
    }

    fn sync_folder(&self, folder: &Path) -> io::Result<()> {
        self.run(Reach::Sync, ("sync folder", folder), || HostFiles.sync_folder(folder))
    }
}

/// A node's folders, machine and claims, on which plugins come and go.
#[derive(Debug)]
pub struct Node {
    /// Where everything is.
    pub root: PathBuf,
    /// Its hardware.
    pub machine: Arc<Mutex<Machine>>,
    /// The claims of its cluster.
    pub claims: Arc<MemoryClaims>,
}

impl Node {
    /// A node below a folder.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub fn new(root: &Path, gpus: Vec<Gpu>) -> io::Result<Self> {
        let node = Self { root: root.to_owned(), machine: Machine::new(gpus), claims: Arc::default() };
        node.boot("boot-1")?;
        Ok(node)
    }

    /// Gives the node another boot id.
    pub fn boot(&self, id: &str) -> io::Result<()> {
        let folder = self.root.join("proc/sys/kernel/random");
        std::fs::create_dir_all(&folder)?;
        std::fs::write(folder.join("boot_id"), format!("{id}\n"))
    }

    /// What a plugin of this node is made for.
    pub fn config(&self) -> PluginConfig {
        let driver: DriverName = match DriverName::DEFAULT.parse() {
            Ok(driver) => driver,
            Err(error) => unreachable!("the default name: {error}"),
        };
        PluginConfig {
            settings: Settings {
                driver,
                node: "node".to_owned(),
                mig_mode: None,
                mig_profiles: ProfileFilter::All,
                foreign_partitions: ForeignPartitions::Publish,
            },
            pool: gpu_pool("node"),
            instance: None,
            plugin_dir: self.root.join("plugin"),
            registry_dir: self.root.join("registry"),
            device_plugins_dir: self.root.join("device-plugins"),
            cdi_dir: self.root.join("cdi"),
            pod_resources_socket: self.root.join("pod-resources.sock"),
            extra_mounts: Vec::new(),
            hook: HookProgram::of_nothing(self.root.join("hook")),
            proc_root: self.root.join("proc"),
        }
    }

    /// Starts a process on the node.
    ///
    /// # Errors
    /// As [`Plugin::new`].
    pub fn plugin(&self, fuse: &Arc<Fuse>) -> Result<Plugin, PluginError> {
        self.plugin_with(ModelHardware::new(Arc::clone(&self.machine), Arc::clone(fuse)), fuse)
    }

    /// Starts a process on the node with another configuration.
    ///
    /// # Errors
    /// As [`Plugin::new`].
    pub fn plugin_of(&self, config: PluginConfig, fuse: &Arc<Fuse>) -> Result<Plugin, PluginError> {
        self.start(config, ModelHardware::new(Arc::clone(&self.machine), Arc::clone(fuse)), fuse)
    }

    /// Starts a process on the node that reaches its hardware in its own way.
    ///
    /// # Errors
    /// As [`Plugin::new`].
    pub fn plugin_with(
        &self,
        hardware: impl Hardware + 'static,
        fuse: &Arc<Fuse>,
    ) -> Result<Plugin, PluginError> {
        self.start(self.config(), hardware, fuse)
    }

    fn start(
        &self,
        config: PluginConfig,
        hardware: impl Hardware + 'static,
        fuse: &Arc<Fuse>,
    ) -> Result<Plugin, PluginError> {
        let inventory = lock(&self.machine).inventory.clone();
        Plugin::with_files(
            config,
            Arc::new(hardware),
            Arc::clone(&self.claims) as Arc<dyn ClaimSource>,
            watch::Sender::new(Some(Arc::new(inventory))).subscribe(),
            Arc::new(MortalFiles(Arc::clone(fuse))),
        )
    }

    /// The complete files in one of the node's folders.
    pub fn files(&self, folder: &str) -> Vec<String> {
        let mut names = HostFiles.list(&self.root.join(folder)).unwrap_or_default();
        names.sort();
        names
    }
}
