//! What the publisher says about itself, for readiness, metrics, events and
//! for the order in which devices are withdrawn.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::dropped::Feature;
use crate::pools::DesiredPools;

/// The publisher's state after its last look at the API server.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PublishStatus {
    /// What it is doing.
    pub phase: Phase,
    /// The desired state that was last seen stored as sent; compare with
    /// [`Arc::ptr_eq`] to learn whether a certain one is. None while slices
    /// are known to be different.
    pub stored: Option<Arc<DesiredPools>>,
    /// The highest generation of the stored pools.
    pub generation: i64,
    /// How many slices are stored under our driver and node name.
    pub slices: usize,
    /// Requests since the start that created, updated or deleted a slice.
    pub writes: u64,
    /// Times since the start that changes by others were undone.
    pub repairs: u64,
    /// Features that the API server dropped since the start. If one of them
    /// [guards](Feature::guards), the publisher has withdrawn the slices that
    /// need it; the phase tells whether it still waits for a desired state
    /// that does not.
    pub dropped: BTreeSet<Feature>,
    /// Pools under our driver and node name that somebody else keeps
    /// publishing. They are left alone.
    pub rivals: Vec<String>,
    /// What failed at the last attempt, as a sentence; none if it succeeded.
    pub last_error: Option<String>,
}

impl PublishStatus {
    /// Whether what is desired is stored as it was sent, and nobody else
    /// publishes under our name.
    pub fn is_ready(&self) -> bool {
        self.stored.is_some() && self.phase == Phase::Stored && self.rivals.is_empty()
    }

    /// What is missing until the slices are stored, as a sentence.
    pub fn missing(&self) -> Option<String> {
        if !self.rivals.is_empty() {
            let pools = self.rivals.join(", ");
            return Some(format!("another driver of this name publishes on this node: pool {pools}"));
        }
        let waiting = match self.phase {
            Phase::Stored => return None,
            Phase::Undecided => "nothing to publish is known yet",
            Phase::Standby => "the kubelet's sockets are not served yet",
            Phase::Writing => "ResourceSlices are being written",
            Phase::Contended => "somebody keeps changing the ResourceSlices",
            Phase::Withheld => {
                let gates: Vec<_> = self.dropped.iter().map(|feature| feature.gate()).collect();
                return Some(format!("the API server drops fields that are needed: {}", gates.join(", ")));
            }
        };
        Some(match &self.last_error {
            Some(error) => format!("{waiting}: {error}"),
            None => waiting.to_owned(),
        })
    }
}

/// What the publisher is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Phase {
    /// Nobody has said yet what is desired. Stored slices stay as they are.
    #[default]
    Undecided,
    /// Nothing may be published: nobody would prepare claims on it.
    Standby,
    /// Slices differ, and are being written or written again.
    Writing,
    /// Slices were as desired at the last look.
    Stored,
    /// Slices differ because somebody keeps changing them; they are repaired
    /// at a bounded rate.
    Contended,
    /// Guarding fields were dropped. The slices without them were deleted;
    /// publish a layout that does not need the dropped features.
    Withheld,
}
