//! The journal on disk: `state/claims/<uid>_<pci>_….json`, and
//! `state/quarantine/` for what cannot be read.
//!
//! An entry is of one boot, as the hardware is that it describes: a power cut
//! that brings its former content back, or takes a new entry away, does so to
//! something whose partitions are gone too, and which the kubelet will ask for
//! again. So a write is not waited for beyond its content. A removal is:
//! nobody asks again for what is gone.
//!
//! An entry is written and removed only by who holds the locks of all its
//! GPUs. The picture of the journal that others see is published here, with
//! every change, so it can never tell anything but what was written.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kerf_dra_driver::journal::{Entry, FileName, GpusInName};
use kerf_dra_driver::names::{ClaimUid, PciAddress};
use rustix::io::Errno;
use tokio::sync::watch;
use tracing::{error, info};

use crate::disk::{Disk, Durability, is, is_no_file};
use crate::view::JournalView;

/// The journal's files.
#[derive(Debug)]
pub(crate) struct Store {
    disk: Disk,
    claims: PathBuf,
    quarantine: PathBuf,
    view: watch::Sender<Arc<JournalView>>,
}

/// A journal's file could not be listed, read, written or removed.
#[derive(Debug, thiserror::Error)]
#[error("the journal cannot be {operation} ({})", path.display())]
pub struct StoreError {
    pub(crate) operation: &'static str,
    pub(crate) path: PathBuf,
    #[source]
    pub(crate) source: io::Error,
}

/// What was found in files.
#[derive(Default)]
struct Read {
    entries: Vec<Entry>,
    unreadable: Vec<Unreadable>,
}

struct Unreadable {
    name: String,
    file: FileName,
    reason: String,
    /// The medium's error, where it was that: it may pass.
    fault: Option<io::Error>,
}

impl Store {
    /// The journal below a plugin's folder. The folders are made.
    pub(crate) fn open(disk: Disk, state: &Path) -> Result<Self, StoreError> {
        let store = Self {
            claims: state.join("claims"),
            quarantine: state.join("quarantine"),
            view: watch::Sender::new(Arc::default()),
            disk,
        };
        store.disk.create_folder(&store.claims).map_err(|source| store.failed("made", source))?;
        store.refresh()?;
        Ok(store)
    }

    /// Where the entries are, and those that cannot be read.
    pub(crate) fn folders(&self) -> [PathBuf; 2] {
        [self.claims.clone(), self.quarantine.clone()]
    }

    /// What the journal says, now and whenever it changes.
    pub(crate) fn view(&self) -> &watch::Sender<Arc<JournalView>> {
        &self.view
    }

    /// Reads the whole journal anew: another instance may have written it.
    /// Without locks nothing is set aside: by then a file may be another one.
    pub(crate) fn refresh(&self) -> Result<(), StoreError> {
        loop {
            let revision = self.view.borrow().revision;
            let read = self.read(|_| true)?;
            let entries: BTreeMap<_, _> =
                read.entries.into_iter().map(|entry| (entry.uid.clone(), Arc::new(entry))).collect();
            let mut quarantined: BTreeMap<_, _> = self
                .disk
                .list(&self.quarantine)
                .map_err(|source| self.failed("read", source))?
                .into_iter()
                .filter_map(|name| FileName::parse(&name).map(|file| (name, file)))
                .collect();
            quarantined
                .extend(read.unreadable.into_iter().map(|unreadable| (unreadable.name, unreadable.file)));
            let mut overtaken = false;
            self.view.send_if_modified(|view| {
                // What was written meanwhile is newer than what was read.
                overtaken = view.revision != revision;
                if overtaken || (view.entries == entries && view.quarantined == quarantined) {
                    return false;
                }
                let view = Arc::make_mut(view);
                (view.entries, view.quarantined) = (entries, quarantined);
                view.revision += 1;
                true
            });
            if !overtaken {
                return Ok(());
            }
        }
    }

    /// The entries, as they are on disk, that touch one of some GPUs or are
    /// of a claim. The locks of these are held.
    ///
    /// What cannot be read among them goes into quarantine, and comes back
    /// from there once it can. Where the medium fails for the claim's own, the
    /// call fails that once: to go on as if nothing were there would leave what
    /// a passing error hid to nobody.
    pub(crate) fn touching(
        &self,
        uid: Option<&ClaimUid>,
        gpus: &BTreeSet<PciAddress>,
    ) -> Result<Vec<Entry>, StoreError> {
        self.recall(uid, gpus)?;
        let Read { mut entries, unreadable } =
            self.read(|file| uid == Some(&file.uid) || gpus.iter().any(|gpu| file.gpus.may_include(*gpu)))?;
        self.readmit(&entries);
        let mut failed = None;
        for Unreadable { name, file, reason, fault } in unreadable {
            let is_own = uid == Some(&file.uid);
            // Whoever writes a file holds the locks of its claim or of all its
            // GPUs. Of a file that does not name them, ours may be none.
            if is_own || matches!(file.gpus, GpusInName::These(_)) {
                self.set_aside(&name, file, &reason)?;
                failed = failed.or(fault.filter(|_| is_own));
            } else {
                self.modify(|view| {
                    view.quarantined.insert(name, file);
                });
            }
        }
        if let Some(source) = failed {
            return Err(self.failed("read", source));
        }
        // `<uid>_all.json` tells its GPUs only inside.
        entries.retain(|entry| uid == Some(&entry.uid) || !entry.gpus().is_disjoint(gpus));
        Ok(entries)
    }

    fn read(&self, wanted: impl Fn(&FileName) -> bool) -> Result<Read, StoreError> {
        let mut read = Read::default();
        for name in self.disk.list(&self.claims).map_err(|source| self.failed("read", source))? {
            let Some(file) = FileName::parse(&name).filter(&wanted) else { continue };
            let content = match self.disk.read(&self.claims.join(&name)) {
                // Removed since it was listed.
                Ok(None) => continue,
                Ok(Some(content)) => content,
                Err(source) if is_of_the_file(&source) => {
                    let reason = source.to_string();
                    let fault = Some(source).filter(|source| is(source, Errno::IO));
                    read.unreadable.push(Unreadable { name, file, reason, fault });
                    continue;
                }
                Err(source) => return Err(self.failed("read", source)),
            };
            match decode(&content, &name, &file) {
                Ok(entry) => read.entries.push(entry),
                Err(reason) => read.unreadable.push(Unreadable { name, file, reason, fault: None }),
            }
        }
        Ok(read)
    }

    /// Takes entries out of quarantine that can be read by now: the medium
    /// failed for a while, or another version was here.
    fn recall(&self, uid: Option<&ClaimUid>, gpus: &BTreeSet<PciAddress>) -> Result<(), StoreError> {
        let view = Arc::clone(&self.view.borrow());
        for (name, file) in &view.quarantined {
            let Ok(Some(content)) = self.disk.read(&self.quarantine.join(name)) else { continue };
            let Ok(entry) = decode(&content, name, file) else { continue };
            // As one is put there: whoever works on its claim has all its GPUs.
            let is_of_gpus = matches!(file.gpus, GpusInName::These(_)) && !entry.gpus().is_disjoint(gpus);
            if (uid == Some(&file.uid) || is_of_gpus) && !view.entries.contains_key(&file.uid) {
                let failed = |source| self.failed("written", source);
                self.disk.move_to(&self.quarantine, name, &self.claims).map_err(failed)?;
                self.disk.sync(&self.claims).map_err(failed)?;
                info!(file = name, "a journal entry can be read again and is used");
            }
        }
        Ok(())
    }

    /// Tells of entries that could not be read before where they lie. What
    /// else is in quarantine under such a name waits for its release.
    fn readmit(&self, entries: &[Entry]) {
        let view = Arc::clone(&self.view.borrow());
        for entry in entries {
            let name = entry.file_name();
            if view.quarantined.contains_key(&name)
                && matches!(self.disk.read(&self.quarantine.join(&name)), Ok(None))
            {
                self.modify(|view| {
                    view.quarantined.remove(&name);
                    view.entries.insert(entry.uid.clone(), Arc::new(entry.clone()));
                });
            }
        }
    }

    fn set_aside(&self, name: &str, file: FileName, reason: &str) -> Result<(), StoreError> {
        error!(file = name, reason, "a journal entry cannot be read and is put into quarantine");
        let failed = |source| self.failed("cleaned", source);
        // Whether it can be moved or not, its GPUs are not handed out.
        let moved = self.disk.move_to(&self.claims, name, &self.quarantine);
        self.modify(|view| {
            view.entries.remove(&file.uid);
            view.quarantined.insert(name.to_owned(), file);
        });
        moved.map_err(failed)?;
        self.disk.sync(&self.quarantine).map_err(failed)?;
        self.disk.sync(&self.claims).map_err(failed)
    }

    /// Writes an entry.
    pub(crate) fn write(&self, entry: &Entry) -> Result<(), StoreError> {
        self.disk
            .replace(&self.claims, &entry.file_name(), &entry.encode(), 0o600, Durability::Ordered)
            .map_err(|source| self.failed("written", source))?;
        self.modify(|view| {
            view.entries.insert(entry.uid.clone(), Arc::new(entry.clone()));
        });
        Ok(())
    }

    /// Removes an entry.
    pub(crate) fn remove(&self, entry: &Entry) -> Result<(), StoreError> {
        let failed = |source| self.failed("cleaned", source);
        self.disk.unlink(&self.claims, &entry.file_name()).map_err(failed)?;
        // From here on nobody finds it, whatever becomes of the sync.
        self.modify(|view| {
            view.entries.remove(&entry.uid);
        });
        self.disk.sync(&self.claims).map_err(failed)
    }

    /// Ends the quarantine of a claim's entry: the claim was prepared anew, or
    /// its pods are gone.
    pub(crate) fn release_quarantine(&self, uid: &ClaimUid) -> Result<(), StoreError> {
        let names: Vec<String> = self
            .view
            .borrow()
            .quarantined
            .iter()
            .filter(|(_, file)| file.uid == *uid)
            .map(|(name, _)| name.clone())
            .collect();
        for name in names {
            let failed = |source| self.failed("cleaned", source);
            self.disk.unlink(&self.quarantine, &name).map_err(failed)?;
            self.modify(|view| {
                view.quarantined.remove(&name);
            });
            self.disk.sync(&self.quarantine).map_err(failed)?;
        }
        Ok(())
    }

    /// Returns when nothing that was removed before can come back: whoever
    /// removed it may have been killed, or told of an error, before that was
    /// sure. Whether an entry was removed just now tells that of the entries.
    pub(crate) fn settle_removals(&self, removed: bool) -> Result<(), StoreError> {
        let failed = |source| self.failed("cleaned", source);
        if !removed {
            self.disk.sync(&self.claims).map_err(failed)?;
        }
        // As a rule nothing has changed there, and there is nothing to wait for.
        self.disk.sync(&self.quarantine).map_err(failed)
    }

    /// Removes what a crash left half written. Only before anything writes.
    pub(crate) fn sweep(&self) -> Result<(), StoreError> {
        self.disk.sweep(&self.claims, "").map_err(|source| self.failed("cleaned", source))
    }

    /// Changes what is published beside the entries.
    pub(crate) fn modify(&self, change: impl FnOnce(&mut JournalView)) {
        self.view.send_modify(|view| {
            let view = Arc::make_mut(view);
            change(view);
            view.revision += 1;
        });
    }

    fn failed(&self, operation: &'static str, source: io::Error) -> StoreError {
        StoreError { operation, path: self.claims.clone(), source }
    }
}

/// Whether the one file is at fault, and not the machine: then the others are
/// not kept from being read.
fn is_of_the_file(error: &io::Error) -> bool {
    is_no_file(error) || [Errno::LOOP, Errno::IO, Errno::ACCESS].iter().any(|fault| is(error, *fault))
}

/// The entry of a file, or why it is none.
fn decode(content: &[u8], name: &str, file: &FileName) -> Result<Entry, String> {
    match Entry::decode(content) {
        Ok(entry) if entry.uid == file.uid && entry.file_name() == name => Ok(entry),
        Ok(_) => Err("it is of another claim, or of other GPUs, than its name says".to_owned()),
        Err(reason) => Err(crate::chain(&reason)),
    }
}
