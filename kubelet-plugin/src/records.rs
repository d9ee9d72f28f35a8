//! The records of what was published, `state/gpus/<pci>.json`: one file a GPU.
//!
//! Only the instance that leads reads and writes them. What a record says is
//! the brain's matter (`dra-driver/src/published.rs`), when it is written the
//! owner's.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kerf_dra_driver::names::PciAddress;
use kerf_dra_driver::published::GpuRecord;
use tracing::warn;

use crate::disk::{Disk, Durability};
use crate::instances::Lead;

/// The files of the records.
#[derive(Debug, Clone)]
pub(crate) struct Records {
    disk: Disk,
    folder: PathBuf,
    /// Also of a write that goes on in its thread: no other instance may read
    /// the records before that has ended.
    _lead: Arc<Lead>,
}

/// Why records are not on disk as they should be.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// Their folder cannot be made, read or swept: the owner cannot begin.
    #[error("the records of what was published cannot be read ({})", folder.display())]
    Folder {
        /// The folder.
        folder: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// One cannot be written: what it says is not published, and it is tried
    /// again.
    #[error("what is published of GPU {gpu} cannot be stored")]
    Write {
        /// The GPU.
        gpu: PciAddress,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// One of a GPU that is withdrawn cannot be removed: it stays, and says
    /// nothing.
    #[error("the record of GPU {gpu}, which is withdrawn, cannot be removed")]
    Remove {
        /// The GPU.
        gpu: PciAddress,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A defect of this program.
    #[error("an internal error of kerf; the log of its pod on this node has more, and it is tried again")]
    Panicked,
}

impl Records {
    /// The records below a plugin's folder of state.
    pub(crate) fn new(disk: Disk, state: &Path, lead: Lead) -> Self {
        Self { disk, folder: state.join("gpus"), _lead: Arc::new(lead) }
    }

    fn file_name(pci: PciAddress) -> String {
        format!("{}.json", pci.dashed())
    }

    /// The records, and whether these are all: one that cannot be read is left
    /// out, and the API server asked who holds what.
    pub(crate) fn load(&self) -> Result<(Vec<GpuRecord>, bool), RecordError> {
        let (mut records, mut complete) = (Vec::new(), true);
        for name in
            self.names().map_err(|source| RecordError::Folder { folder: self.folder.clone(), source })?
        {
            let content = match self.disk.read(&self.folder.join(&name)) {
                Ok(Some(content)) => content,
                Ok(None) => continue,
                Err(error) => {
                    complete = false;
                    warn!(file = name, %error, "a record cannot be read and is not used");
                    continue;
                }
            };
            match serde_json::from_slice::<GpuRecord>(&content) {
                Ok(record) if name == Self::file_name(record.pci) => records.push(record),
                Ok(_) => {
                    complete = false;
                    warn!(file = name, "a record is of another GPU than its name says and is not used");
                }
                Err(error) => {
                    complete = false;
                    warn!(file = name, %error, "a record cannot be read and is not used");
                }
            }
        }
        Ok((records, complete))
    }

    fn names(&self) -> io::Result<Vec<String>> {
        self.disk.create_folder(&self.folder)?;
        self.disk.sweep(&self.folder, "")?;
        // What is read here counts as stored, and who wrote it may have been
        // killed before it was.
        self.disk.sync(&self.folder)?;
        self.disk.list(&self.folder)
    }

    /// Writes records, and returns when they cannot be lost any more.
    pub(crate) async fn write_all(&self, records: Vec<GpuRecord>) -> Result<(), RecordError> {
        if records.is_empty() {
            return Ok(());
        }
        let files = self.clone();
        let write = move || records.iter().try_for_each(|record| files.write(record));
        tokio::task::spawn_blocking(write).await.map_err(|_| RecordError::Panicked)?
    }

    fn write(&self, record: &GpuRecord) -> Result<(), RecordError> {
        let gpu = record.pci;
        let replace = |content: Vec<u8>| {
            self.disk.replace(&self.folder, &Self::file_name(gpu), &content, 0o600, Durability::Durable)
        };
        let written = serde_json::to_vec(record).map_err(io::Error::other).and_then(replace);
        written.map_err(|source| RecordError::Write { gpu, source })
    }

    /// Removes the record of a GPU.
    pub(crate) async fn remove(&self, gpu: PciAddress) -> Result<(), RecordError> {
        let files = self.clone();
        let remove =
            move || files.disk.remove(&files.folder, &Self::file_name(gpu), Durability::Durable).map(drop);
        let removed = tokio::task::spawn_blocking(remove).await.map_err(|_| RecordError::Panicked)?;
        removed.map_err(|source| RecordError::Remove { gpu, source })
    }
}
