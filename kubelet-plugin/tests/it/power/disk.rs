//! A disk under power loss: real folders as a running machine sees them, and a
//! ledger of what of them a power cut cannot take any more.
//!
//! A content is kept from `write_synced` on, a name from the next
//! `sync_folder` of its folder on. Of the changes of names that nobody synced a
//! cut keeps the first few, of contents that nobody synced all or nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use kerf_kubelet_plugin::testing::Fuse;
use kerf_kubelet_plugin::{Files, HostFiles};

/// What a cut left: contents by path below the node's root.
pub(crate) type Left = BTreeMap<PathBuf, Vec<u8>>;

/// Whether a file has not got its name yet.
pub(crate) fn is_half_written(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'))
}

/// The folder of CDI specs, which may be in memory.
const CDI: &str = "cdi";

#[derive(Debug)]
pub(crate) struct PowerDisk {
    root: PathBuf,
    ledger: Arc<Mutex<Ledger>>,
    fuse: Arc<Fuse>,
}

/// Files by number, and names of them.
#[derive(Debug, Default)]
struct Ledger {
    contents: Vec<Content>,
    live: BTreeMap<PathBuf, usize>,
    durable: BTreeMap<PathBuf, usize>,
    /// What nobody synced, in order.
    changes: Vec<Change>,
}

#[derive(Debug)]
struct Content {
    bytes: Vec<u8>,
    synced: bool,
}

#[derive(Debug, Clone)]
enum Change {
    Make(PathBuf, usize),
    Rename(PathBuf, PathBuf),
    Remove(PathBuf),
}

impl Change {
    fn paths(&self) -> Vec<&Path> {
        match self {
            Self::Make(path, _) | Self::Remove(path) => vec![path],
            Self::Rename(from, to) => vec![from, to],
        }
    }

    fn is_in(&self, folders: &BTreeSet<PathBuf>) -> bool {
        self.paths().iter().any(|path| path.parent().is_some_and(|folder| folders.contains(folder)))
    }

    fn is_of_cdi(&self) -> bool {
        self.paths().iter().any(|path| path.starts_with(CDI))
    }

    fn apply(&self, names: &mut BTreeMap<PathBuf, usize>) {
        match self {
            Self::Make(path, content) => {
                names.insert(path.clone(), *content);
            }
            Self::Rename(from, to) => {
                let content = names.remove(from).unwrap();
                names.insert(to.clone(), content);
            }
            Self::Remove(path) => {
                names.remove(path).unwrap();
            }
        }
    }
}

impl Ledger {
    fn change(&mut self, change: Change) {
        change.apply(&mut self.live);
        self.changes.push(change);
    }

    fn write(&mut self, path: PathBuf, bytes: &[u8], synced: bool) {
        self.contents.push(Content { bytes: bytes.to_vec(), synced });
        self.change(Change::Make(path, self.contents.len() - 1));
    }

    /// What happened in a folder becomes durable, and before that what it
    /// builds on.
    fn sync(&mut self, folder: PathBuf) {
        let mut folders = BTreeSet::from([folder]);
        let mut kept = vec![false; self.changes.len()];
        for (change, kept) in self.changes.iter().zip(&mut kept).rev() {
            *kept = change.is_in(&folders);
            if *kept {
                folders.extend(change.paths().iter().filter_map(|path| path.parent()).map(Path::to_owned));
            }
        }
        let mut kept = kept.into_iter();
        let durable = &mut self.durable;
        self.changes.retain(|change| {
            let is_kept = kept.next().unwrap();
            if is_kept {
                change.apply(durable);
            }
            !is_kept
        });
    }

    /// What is left of everything but CDI specs, or of these, when some of the
    /// changes were kept.
    fn left(&self, cdi: bool, changes: usize, whole: bool) -> Left {
        let mut names = self.durable.clone();
        for change in self.changes.iter().filter(|change| change.is_of_cdi() == cdi).take(changes) {
            change.apply(&mut names);
        }
        names.retain(|path, _| path.starts_with(CDI) == cdi);
        let content = |number: usize| {
            let content = &self.contents[number];
            if content.synced || whole { content.bytes.clone() } else { Vec::new() }
        };
        names.into_iter().map(|(path, number)| (path, content(number))).collect()
    }

    fn all_left(&self, cdi: bool) -> BTreeSet<Left> {
        let count = self.changes.iter().filter(|change| change.is_of_cdi() == cdi).count();
        let ways = (0..=count).flat_map(|changes| [(changes, false), (changes, true)]);
        ways.map(|(changes, whole)| self.left(cdi, changes, whole)).collect()
    }
}

impl PowerDisk {
    /// The disk of a node, with what it had when the power came back.
    pub(crate) fn new(root: &Path, left: &Left) -> Self {
        let mut ledger = Ledger::default();
        for (path, bytes) in left {
            let file = root.join(path);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, bytes).unwrap();
            ledger.write(path.clone(), bytes, true);
        }
        ledger.durable = ledger.live.clone();
        ledger.changes.clear();
        Self { root: root.to_owned(), ledger: Arc::new(Mutex::new(ledger)), fuse: Fuse::none() }
    }

    /// The same disk for a process that may be killed.
    pub(crate) fn until(&self, fuse: &Arc<Fuse>) -> Self {
        Self { root: self.root.clone(), ledger: Arc::clone(&self.ledger), fuse: Arc::clone(fuse) }
    }

    /// Damages a file.
    pub(crate) fn damage(&self, path: &str) {
        std::fs::write(self.root.join(path), "{").unwrap();
        let mut ledger = self.ledger();
        let number = ledger.live[Path::new(path)];
        ledger.contents[number].bytes = b"{".to_vec();
    }

    /// Everything that a power cut may leave now. CDI specs may be on the disk
    /// or in memory.
    pub(crate) fn cuts(&self) -> BTreeSet<Left> {
        let ledger = self.ledger();
        let mut specs = BTreeSet::from([Left::new()]);
        // What is half written of them is swept like that of the entries.
        specs.extend(ledger.all_left(true).into_iter().map(|mut left| {
            left.retain(|path, _| !is_half_written(path));
            left
        }));
        let all = ledger.all_left(false);
        all.iter()
            .flat_map(|state| {
                specs.iter().map(|specs| state.clone().into_iter().chain(specs.clone()).collect())
            })
            .collect()
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap()
    }

    fn below(&self, path: &Path) -> PathBuf {
        path.strip_prefix(&self.root).unwrap().to_owned()
    }

    fn run<T>(&self, call: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        self.fuse.run(|| io::Error::other("killed"), call)
    }

    fn alive(&self) -> io::Result<()> {
        if self.fuse.is_dead() { Err(io::Error::other("killed")) } else { Ok(()) }
    }
}

impl Files for PowerDisk {
    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        self.alive().and_then(|()| HostFiles.read(path))
    }

    fn list(&self, folder: &Path) -> io::Result<Vec<String>> {
        self.alive().and_then(|()| HostFiles.list(folder))
    }

    fn create_folder(&self, folder: &Path) -> io::Result<()> {
        self.run(|| HostFiles.create_folder(folder))
    }

    fn write(&self, path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
        self.run(|| {
            HostFiles.write(path, content, mode)?;
            self.ledger().write(self.below(path), content, false);
            Ok(())
        })
    }

    fn write_synced(&self, path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
        self.run(|| {
            HostFiles.write(path, content, mode)?;
            self.ledger().write(self.below(path), content, true);
            Ok(())
        })
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.run(|| {
            HostFiles.rename(from, to)?;
            self.ledger().change(Change::Rename(self.below(from), self.below(to)));
            Ok(())
        })
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.run(|| {
            HostFiles.remove(path)?;
            self.ledger().change(Change::Remove(self.below(path)));
            Ok(())
        })
    }

    fn sync_folder(&self, folder: &Path) -> io::Result<()> {
        self.run(|| {
            std::fs::metadata(folder)?;
            self.ledger().sync(self.below(folder));
            Ok(())
        })
    }
}
