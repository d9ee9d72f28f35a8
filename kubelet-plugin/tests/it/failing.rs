//! Every call of the disk fails in turn, once or from then on: the kubelet gets
//! a reason, what is published is what is on disk, and on a disk that works
//! again the next attempt ends as if nothing had been.

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use kerf_kubelet_plugin::testing::{Fuse, Node, claim};
use kerf_kubelet_plugin::{ClaimRequest, Files, Plugin, chain};

use super::crash::{instances, scenarios};
use super::power::disk::{Left, PowerDisk, is_half_written};
use super::power::{Devices, plugin};
use super::{node, pci, prepare, unprepare};

/// What of a disk fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Broken {
    /// Names cannot be synced.
    Sync,
    /// Nothing can be written: it is full.
    Full,
    /// Nothing can be renamed or removed.
    Names,
}

/// A disk of which some calls fail.
#[derive(Debug)]
struct FailingDisk {
    disk: PowerDisk,
    broken: Broken,
    fault: Arc<Fault>,
}

#[derive(Debug)]
struct Fault {
    /// Which call of that kind fails.
    at: usize,
    /// Whether those after it fail too.
    stays: bool,
    calls: AtomicUsize,
    healed: AtomicBool,
    /// What failed.
    failed: Mutex<Vec<String>>,
}

impl FailingDisk {
    fn run<T>(&self, kind: Broken, what: &str, call: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        let fault = &self.fault;
        if kind == self.broken && !fault.healed.load(Ordering::SeqCst) {
            let number = fault.calls.fetch_add(1, Ordering::SeqCst);
            if number == fault.at || (fault.stays && number > fault.at) {
                fault.failed.lock().unwrap().push(what.to_owned());
                let full = kind == Broken::Full;
                return Err(if full {
                    io::ErrorKind::StorageFull.into()
                } else {
                    io::Error::from_raw_os_error(5)
                });
            }
        }
        call()
    }
}

impl Files for FailingDisk {
    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        self.disk.read(path)
    }

    fn list(&self, folder: &Path) -> io::Result<Vec<String>> {
        self.disk.list(folder)
    }

    fn create_folder(&self, folder: &Path) -> io::Result<()> {
        if folder.exists() {
            return Ok(());
        }
        self.run(Broken::Full, "create_folder", || self.disk.create_folder(folder))
    }

    fn write(&self, path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
        self.run(Broken::Full, "write", || self.disk.write(path, content, mode))
    }

    fn write_synced(&self, path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
        // A part of it is there.
        let written = self.run(Broken::Full, "write_synced", || self.disk.write_synced(path, content, mode));
        if written.is_err() {
            self.disk.write(path, &content[..content.len() / 2], mode)?;
        }
        written
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.run(Broken::Names, "rename", || self.disk.rename(from, to))
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.run(Broken::Names, "remove", || self.disk.remove(path))
    }

    fn sync_folder(&self, folder: &Path) -> io::Result<()> {
        self.run(Broken::Sync, "sync_folder", || self.disk.sync_folder(folder))
    }
}

/// What is done while the disk fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Work {
    Prepare,
    Unprepare,
    /// The claim has other devices than before.
    Moved,
    /// The claim's entry cannot be read, and nothing else proves it.
    PrepareDamaged,
    UnprepareDamaged,
}

const WORKS: [Work; 5] =
    [Work::Prepare, Work::Unprepare, Work::Moved, Work::PrepareDamaged, Work::UnprepareDamaged];

/// Whether the plugin says what a new one would read.
fn assert_published(plugin_here: &Plugin, node: &Node, what: &str) {
    let fresh = node.plugin(&Fuse::none()).unwrap();
    let (ours, disk) = (plugin_here.journal(), fresh.journal());
    let (ours, disk) = (ours.borrow(), disk.borrow());
    assert_eq!(ours.entries, disk.entries, "{what}: what is published is what is on disk");
    assert_eq!(ours.quarantined, disk.quarantined, "{what}");
}

/// The files of claims, but for those that are half written.
fn complete(node: &Node) -> Vec<String> {
    let folders = ["plugin/state/claims", "plugin/state/quarantine", "cdi"];
    folders.iter().flat_map(|folder| node.files(folder)).filter(|name| !name.starts_with('.')).collect()
}

async fn attempt(plugin: &Plugin, work: Work) -> Result<(), String> {
    let uid = "c-uid".to_owned();
    match work {
        Work::Unprepare | Work::UnprepareDamaged => {
            plugin.unprepare(uid).await.map_err(|error| chain(&error))
        }
        Work::Prepare | Work::Moved | Work::PrepareDamaged => {
            let request = ClaimRequest { namespace: "ns".to_owned(), name: "c".to_owned(), uid };
            plugin.prepare(request).await.map(|_| ()).map_err(|error| chain(&error))
        }
    }
}

/// One attempt on a disk that fails; whether it failed at all.
async fn fails_once(devices: &Devices, work: Work, broken: Broken, at: usize, stays: bool) -> bool {
    let root = super::in_memory();
    let node = node(&root);
    let disk = PowerDisk::new(&node.root, &Left::new());
    let before = plugin(&node, disk.until(&Fuse::none()), &Fuse::none()).unwrap();
    if work != Work::Prepare {
        let former = if work == Work::Moved { super::power::elsewhere(devices) } else { devices.clone() };
        node.claims.put(claim("c", &former));
        prepare(&before, "c").await.unwrap();
    }
    node.claims.put(claim("c", devices));
    drop(before);
    let foreign = {
        let mut machine = node.machine.lock().unwrap();
        machine.make_foreign(pci(1), 19, 6, true);
        let mut instances = machine.instances(pci(1));
        instances.retain(|instance| instance.placement.start == 6);
        instances
    };
    let fault = Arc::new(Fault {
        at,
        stays,
        calls: AtomicUsize::new(0),
        healed: AtomicBool::new(false),
        failed: Mutex::default(),
    });
    let failing = FailingDisk { disk: disk.until(&Fuse::none()), broken, fault: Arc::clone(&fault) };
    let plugin = plugin(&node, failing, &Fuse::none()).unwrap();
    let is_damaged = matches!(work, Work::PrepareDamaged | Work::UnprepareDamaged);
    if is_damaged {
        // While it runs: at a start this would be seen without any work.
        let [name] = node.files("plugin/state/claims").try_into().unwrap();
        disk.damage(&format!("plugin/state/claims/{name}"));
        disk.remove(&root.path().join("cdi/k8s.gpu.nvidia.com-claim_c-uid.json")).unwrap();
    }
    let result = attempt(&plugin, work).await;
    let failed = fault.failed.lock().unwrap().clone();
    let what = format!("{devices:?} {work:?} {broken:?} at {at}, stays {stays}: {failed:?} {result:?}");
    if let Err(error) = &result {
        let cause = if broken == Broken::Full { "no storage space" } else { "Input/output error" };
        assert!(error.contains(cause), "{what}");
        assert!(!failed.is_empty(), "{what}");
    }
    assert_published(&plugin, &node, &what);

    fault.healed.store(true, Ordering::SeqCst);
    attempt(&plugin, work).await.unwrap_or_else(|error| panic!("{what}: then {error}"));
    assert_published(&plugin, &node, &what);
    unprepare(&plugin, "c").await.unwrap_or_else(|error| panic!("{what}: then {error}"));
    assert_published(&plugin, &node, &what);
    // A new process removes what is half written; the other files are gone.
    drop(plugin);
    assert_eq!(complete(&node), Vec::<String>::new(), "{what}");
    let next = super::power::plugin(&node, disk.until(&Fuse::none()), &Fuse::none()).unwrap();
    next.start().await.unwrap();
    for folder in ["plugin/state/claims", "plugin/state/quarantine", "cdi"] {
        assert_eq!(node.files(folder), Vec::<String>::new(), "{what}: {folder}");
    }
    if !is_damaged {
        // Of a damaged entry nobody knows what it made.
        assert_eq!(instances(&node), foreign, "{what}");
    }
    for left in disk.cuts() {
        let name = left.keys().find(|path| path.starts_with("plugin/state") && !is_half_written(path));
        assert_eq!(name, None, "{what}: what was unprepared does not come back");
    }
    !failed.is_empty()
}

async fn fails_everywhere(broken: Broken) {
    let mut failures = 0;
    for (_, devices) in scenarios() {
        for work in WORKS {
            for stays in [false, true] {
                for at in 0.. {
                    if !fails_once(&devices, work, broken, at, stays).await {
                        break;
                    }
                    failures += 1;
                }
            }
        }
    }
    assert!(failures > 20, "the disk failed only {failures} times");
}

#[tokio::test]
async fn a_folder_that_cannot_be_synced_costs_an_attempt_and_nothing_else() {
    fails_everywhere(Broken::Sync).await;
}

#[tokio::test]
async fn a_full_disk_costs_an_attempt_and_nothing_else() {
    fails_everywhere(Broken::Full).await;
}

#[tokio::test]
async fn names_that_cannot_change_cost_an_attempt_and_nothing_else() {
    fails_everywhere(Broken::Names).await;
}
