//! Why a claim could not be prepared or unprepared: the sentences that end up
//! in a pod's events.

use kerf_dra_driver::claim::ClaimError;
use kerf_dra_driver::hardware::{HardwareError, HardwareErrorKind};
use kerf_dra_driver::names::{NameError, PciAddress};
use kerf_dra_driver::plan::Refusal;

use crate::cdi::CdiError;
use crate::claims::ClaimSourceError;
use crate::effects::StepError;
use crate::hook_program::HookProgramError;
use crate::store::StoreError;

/// Why a claim was not prepared.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    /// The kubelet's UID could not be one.
    #[error(transparent)]
    Name(#[from] NameError),
    /// The API does not let it be prepared.
    #[error(transparent)]
    Claim(#[from] ClaimError),
    /// The API did not answer. The kubelet asks again.
    #[error("the claim cannot be read from the API server now, and the kubelet asks again")]
    Source(#[from] ClaimSourceError),
    /// The GPUs have not been read yet.
    #[error(
        "the node's GPUs have not been read yet: the NVIDIA driver is not there, or does not answer; `kerf \
         doctor` in the node's kerf pod says more"
    )]
    NoInventory,
    /// The node cannot serve it now.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// A GPU may be held by an entry that cannot be read.
    #[error(
        "GPU {gpu} may be in use by a claim whose journal entry cannot be read (`{file}` in quarantine); it is \
         free again when that claim's pod is gone or the file is removed"
    )]
    Quarantined {
        /// The GPU.
        gpu: PciAddress,
        /// The file.
        file: String,
    },
    /// What an earlier prepare left could not be undone.
    #[error("what was prepared for the claim before cannot be undone, and is tried again")]
    Undo(#[from] UndoError),
    /// The hardware did not answer a question.
    #[error(transparent)]
    Hardware(HardwareError),
    /// A step could not be done.
    #[error(transparent)]
    Step(#[from] StepError),
    /// The journal cannot be read or written.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The CDI spec cannot be written.
    #[error(transparent)]
    Cdi(#[from] CdiError),
    /// What the CDI spec would name is not there.
    #[error(transparent)]
    Hook(#[from] HookProgramError),
    /// It could not be worked on, or not to the end.
    #[error(transparent)]
    Work(#[from] WorkError),
}

impl PrepareError {
    /// Whether a hardware call may still take effect.
    pub(crate) fn is_timeout(&self) -> bool {
        match self {
            Self::Step(step) => step.is_timeout(),
            Self::Hardware(source) => source.kind == HardwareErrorKind::Timeout,
            _ => false,
        }
    }
}

/// Why what a claim has here could not be undone.
#[derive(Debug, thiserror::Error)]
pub enum UndoError {
    /// The kubelet's UID could not be one.
    #[error(transparent)]
    Name(#[from] NameError),
    /// A step could not be undone.
    #[error(transparent)]
    Step(#[from] StepError),
    /// The journal cannot be read or written.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The CDI spec cannot be removed.
    #[error(transparent)]
    Cdi(#[from] CdiError),
    /// It could not be worked on, or not to the end.
    #[error(transparent)]
    Work(#[from] WorkError),
}

/// Why work was not begun, or did not come back in time.
#[derive(Debug, thiserror::Error)]
pub enum WorkError {
    /// A lock file cannot be used.
    #[error("the claim or its GPUs cannot be locked (`state/locks` in the plugin's folder must be writable)")]
    Lock(#[from] std::io::Error),
    /// It takes longer than the kubelet waits.
    #[error(
        "not done within {seconds} s: the GPU, or the driver below, is busy or hangs; the work goes on and the \
         kubelet's next attempt finds it where it is"
    )]
    Budget {
        /// How long it was waited.
        seconds: u64,
    },
    /// A defect of this program.
    #[error("an internal error of kerf; the log of its pod on this node has more, and it is tried again")]
    Panicked,
}
