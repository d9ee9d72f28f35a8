//! When a published device may really go.
//!
//! Always in this order: it is tainted, the taint has settled (a scheduler may
//! still allocate from what it saw before), one LIST of all claims that began
//! after that shows nothing allocated to it, and no prepared claim holds it.
//! The journal knows claims that are prepared, the LIST those that are
//! allocated but not prepared yet.
//!
//! This module owns that rule. It makes no LIST and reads no clock. No time
//! that it decides by is ever stored: a clock that was set in between, or a
//! boot, would make another time of it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::names::DeviceName;
use crate::published::GpuRecord;

/// How long after its storing a taint is taken to be seen by all schedulers.
pub const SETTLE: Duration = Duration::from_secs(30);
/// How long a LIST is believed, counted from its beginning, and after which it
/// is made anew where it showed an allocation.
pub const LIST_FRESH: Duration = Duration::from_mins(1);

/// An instant on a clock that nobody can set and that goes on while the node
/// sleeps, in milliseconds since its boot (`CLOCK_BOOTTIME`). It is not the
/// clock of tokio, which stands still meanwhile: claims are allocated then too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(pub u64);

impl Timestamp {
    /// The instant that much later.
    #[must_use]
    pub fn after(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)))
    }
}

/// The answer of a LIST of all claims: paged, with a quorum read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimList {
    /// When its first page was asked for.
    pub began: Timestamp,
    /// The devices of the node's pool that any claim has allocated.
    pub allocated: BTreeSet<DeviceName>,
}

/// Since when the API server is known to hold each device that leaves with its
/// taint. A process that starts begins anew: that is 30 s later, and never too
/// early.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Settling(BTreeMap<DeviceName, Timestamp>);

impl Settling {
    /// Notes that the API server holds these records' slices as laid out: from
    /// now on the settling time of each taint runs.
    pub(crate) fn stored<'a>(&mut self, records: impl IntoIterator<Item = &'a GpuRecord>, now: Timestamp) {
        for (name, _) in records.into_iter().flat_map(GpuRecord::leaving) {
            self.0.entry(name.clone()).or_insert(now);
        }
    }

    /// Forgets what does not leave any more: should it leave again, its taint
    /// is another one.
    pub(crate) fn keep<'a>(&mut self, records: impl IntoIterator<Item = &'a GpuRecord>) {
        let leaving: BTreeSet<&DeviceName> =
            records.into_iter().flat_map(GpuRecord::leaving).map(|(name, _)| name).collect();
        self.0.retain(|name, _| leaving.contains(name));
    }
}

/// What to do about the devices that leave.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Decision {
    /// These stay published with their taint.
    pub keep: Vec<DeviceName>,
    /// These may go now.
    pub withdraw: Vec<DeviceName>,
    /// When a LIST of claims is needed next; it may be at once. Absent where
    /// none is: a held device waits for its release, not for a LIST.
    pub list_at: Option<Timestamp>,
}

/// Decides about all devices that leave, of all GPUs.
///
/// `held` are the devices of journal entries, read after the LIST ended.
pub(crate) fn decide<'a>(
    records: impl IntoIterator<Item = &'a GpuRecord>,
    settling: &Settling,
    held: &BTreeSet<DeviceName>,
    list: Option<&ClaimList>,
    now: Timestamp,
) -> Decision {
    let mut decision = Decision::default();
    for (name, _) in records.into_iter().flat_map(GpuRecord::leaving) {
        let settled = settling.0.get(name).map(|since| since.after(SETTLE));
        match verdict(settled, held.contains(name), list, name, now) {
            Verdict::Withdraw => decision.withdraw.push(name.clone()),
            Verdict::Keep { list_at } => {
                decision.keep.push(name.clone());
                decision.list_at = [decision.list_at, list_at].into_iter().flatten().min();
            }
        }
    }
    decision
}

enum Verdict {
    Withdraw,
    Keep { list_at: Option<Timestamp> },
}

fn verdict(
    settled: Option<Timestamp>,
    held: bool,
    list: Option<&ClaimList>,
    name: &DeviceName,
    now: Timestamp,
) -> Verdict {
    let Some(settled) = settled.filter(|_| !held) else {
        return Verdict::Keep { list_at: None };
    };
    match list.filter(|list| list.began >= settled && list.began <= now) {
        Some(list) if now < list.began.after(LIST_FRESH) => {
            if list.allocated.contains(name) {
                Verdict::Keep { list_at: Some(list.began.after(LIST_FRESH)) }
            } else {
                Verdict::Withdraw
            }
        }
        _ => Verdict::Keep { list_at: Some(settled.max(now)) },
    }
}

#[cfg(test)]
mod tests;
