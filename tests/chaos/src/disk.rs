//! A disk under power loss: real folders as a running machine sees them, and a
//! ledger of what of them a power cut cannot take any more.
//!
//! A content is kept from `write_synced` on, a name, also that of a folder,
//! from the next `sync_folder` of its folder on; without the folder nothing of
//! what is in it. Of the changes of names that nobody synced a
//! cut keeps the first few, of contents that nobody synced all or nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use kerf_kubelet_plugin::testing::{Fuse, Reach, disk_error};
use kerf_kubelet_plugin::{Files, HostFiles};

/// What a cut left: contents by path below the node's root, which they call
/// [`ROOT`].
pub(crate) type Left = BTreeMap<PathBuf, Vec<u8>>;

/// Whether a file has not got its name yet.
fn is_half_written(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'))
}

/// CDI specs name files of the node, and each node here is in another folder.
const ROOT: &str = "/root-of-the-node";

/// The folder of CDI specs, which may be in memory.
const CDI: &str = "cdi";

#[derive(Debug)]
pub(crate) struct PowerDisk {
    root: PathBuf,
    ledger: Arc<Mutex<Ledger>>,
    fuse: Arc<Fuse>,
    /// Whether it says that names are synced and forgets to do so.
    lies: bool,
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
    Folder(PathBuf),
    Make(PathBuf, usize),
    Rename(PathBuf, PathBuf),
    Remove(PathBuf),
}

impl Change {
    fn paths(&self) -> Vec<&Path> {
        match self {
            Self::Folder(path) | Self::Make(path, _) | Self::Remove(path) => vec![path],
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
            Self::Folder(_) => {}
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
        let mut own = self.changes.iter().filter(|change| change.is_of_cdi() == cdi);
        own.by_ref().take(changes).for_each(|change| change.apply(&mut names));
        // Whatever was synced in a folder, without the folder it is not there.
        let gone: Vec<&PathBuf> = own
            .filter_map(|change| if let Change::Folder(path) = change { Some(path) } else { None })
            .collect();
        names.retain(|path, _| {
            path.starts_with(CDI) == cdi && !gone.iter().any(|gone| path.starts_with(gone))
        });
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

/// A text with another name for a folder.
fn renamed(bytes: &[u8], from: &str, to: &str) -> Vec<u8> {
    String::from_utf8_lossy(bytes).replace(from, to).into_bytes()
}

impl PowerDisk {
    /// The disk of a node, with what it had when the power came back.
    pub(crate) fn new(root: &Path, left: &Left) -> Self {
        let mut ledger = Ledger::default();
        for (path, bytes) in left {
            let file = root.join(path);
            let bytes = renamed(bytes, ROOT, &root.display().to_string());
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, &bytes).unwrap();
            ledger.write(path.clone(), &bytes, true);
        }
        ledger.durable = ledger.live.clone();
        ledger.changes.clear();
        let ledger = Arc::new(Mutex::new(ledger));
        Self { root: root.to_owned(), ledger, fuse: Fuse::none(), lies: false }
    }

    /// The same disk for a process that may be struck.
    pub(crate) fn until(&self, fuse: &Arc<Fuse>) -> Self {
        let (root, ledger) = (self.root.clone(), Arc::clone(&self.ledger));
        Self { root, ledger, fuse: Arc::clone(fuse), lies: self.lies }
    }

    /// The same disk, on which syncing names has no effect.
    pub(crate) fn lying(self) -> Self {
        Self { lies: true, ..self }
    }

    /// Everything is on the medium: time has passed.
    pub(crate) fn settle(&self) {
        let mut ledger = self.ledger();
        ledger.durable = ledger.live.clone();
        ledger.changes.clear();
        ledger.contents.iter_mut().for_each(|content| content.synced = true);
    }

    /// What is on the medium.
    pub(crate) fn durable(&self) -> Left {
        let ledger = self.ledger();
        let content =
            |(path, number): (&PathBuf, &usize)| (path.clone(), ledger.contents[*number].bytes.clone());
        self.anywhere(ledger.durable.iter().map(content).collect())
    }

    /// Puts another content into a file.
    pub(crate) fn damage(&self, path: &str, content: &[u8]) {
        std::fs::write(self.root.join(path), content).unwrap();
        let mut ledger = self.ledger();
        let number = ledger.live[Path::new(path)];
        ledger.contents[number].bytes = content.to_vec();
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
        let specs: Vec<Left> = specs.into_iter().map(|left| self.anywhere(left)).collect();
        let all = ledger.all_left(false);
        all.iter()
            .flat_map(|state| {
                specs.iter().map(|specs| state.clone().into_iter().chain(specs.clone()).collect())
            })
            .collect()
    }

    /// What does not tell where this node is.
    fn anywhere(&self, left: Left) -> Left {
        let root = self.root.display().to_string();
        left.into_iter().map(|(path, bytes)| (path, renamed(&bytes, &root, ROOT))).collect()
    }

    /// The complete files of claims that a power cut may leave now.
    pub(crate) fn may_be_left(&self) -> BTreeSet<PathBuf> {
        let is_of_claim = |path: &PathBuf| {
            ["plugin/state/claims", "plugin/state/quarantine"].iter().any(|folder| path.starts_with(folder))
                && !is_half_written(path)
        };
        self.ledger().all_left(false).into_iter().flat_map(Left::into_keys).filter(is_of_claim).collect()
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap()
    }

    fn below(&self, path: &Path) -> PathBuf {
        path.strip_prefix(&self.root).unwrap().to_owned()
    }

    fn run<T>(
        &self,
        reach: Reach,
        (what, path): (&str, &Path),
        call: impl FnOnce() -> io::Result<T>,
    ) -> io::Result<T> {
        let name = || format!("{what} {}", self.below(path).display());
        let volume = if self.below(path).starts_with(CDI) { CDI } else { "plugin" };
        self.fuse.run_on(volume, reach, name, |struck| disk_error(reach, struck), call)
    }

    fn written(&self, path: &Path, content: &[u8], mode: u32, synced: bool) -> io::Result<()> {
        HostFiles.write(path, content, mode)?;
        self.ledger().write(self.below(path), content, synced);
        Ok(())
    }
}

impl Files for PowerDisk {
    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        self.run(Reach::Content, ("read", path), || HostFiles.read(path))
    }

    fn list(&self, folder: &Path) -> io::Result<Vec<String>> {
        self.run(Reach::Content, ("list", folder), || HostFiles.list(folder))
    }

    fn create_folder(&self, folder: &Path) -> io::Result<()> {
        if folder.exists() {
            return if self.fuse.is_dead() { Err(io::Error::other("killed")) } else { Ok(()) };
        }
        self.run(Reach::Space, ("make folder", folder), || {
            let made: Vec<&Path> = folder.ancestors().take_while(|folder| !folder.exists()).collect();
            HostFiles.create_folder(folder)?;
            let mut ledger = self.ledger();
            made.iter().rev().for_each(|folder| ledger.change(Change::Folder(self.below(folder))));
            Ok(())
        })
    }

    fn write(&self, path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
        self.run(Reach::Space, ("write", path), || self.written(path, content, mode, false))
    }

    fn write_synced(&self, path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
        let synced =
            self.run(Reach::Space, ("write and sync", path), || self.written(path, content, mode, true));
        if synced.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::StorageFull) {
            // A part of it is there.
            self.written(path, &content[..content.len() / 2], mode, false)?;
        }
        synced
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.run(Reach::Names, ("rename to", to), || {
            HostFiles.rename(from, to)?;
            self.ledger().change(Change::Rename(self.below(from), self.below(to)));
            Ok(())
        })
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.run(Reach::Names, ("remove", path), || {
            HostFiles.remove(path)?;
            self.ledger().change(Change::Remove(self.below(path)));
            Ok(())
        })
    }

    fn sync_folder(&self, folder: &Path) -> io::Result<()> {
        self.run(Reach::Sync, ("sync folder", folder), || {
            std::fs::metadata(folder)?;
            if !self.lies {
                self.ledger().sync(self.below(folder));
            }
            Ok(())
        })
    }
}
