//! The last failure of each claim that was asked for and is not prepared, for
//! those who look at the node: the kubelet's events are gone after an hour.
//! In memory only; the kubelet asks again after a restart.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use k8s_openapi::jiff::Timestamp;
use kerf_dra_driver::claim::ClaimName;
use kerf_dra_driver::status::FailedPrepare;

/// How many are kept, the newest. A claim that is gone without an unprepare
/// leaves one behind.
const MOST: usize = 64;

/// The failures, oldest first, at most one a claim.
#[derive(Debug, Default)]
pub(crate) struct Failures(Mutex<VecDeque<FailedPrepare>>);

impl Failures {
    /// A prepare of a claim failed.
    pub(crate) fn note(&self, claim: ClaimName, uid: &str, error: String) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|failed| failed.uid != uid);
        all.push_back(FailedPrepare { claim, uid: uid.to_owned(), error, at: now() });
        if all.len() > MOST {
            all.pop_front();
        }
    }

    /// A claim was prepared, or nothing of it is here any more.
    pub(crate) fn forget(&self, uid: &str) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).retain(|failed| failed.uid != uid);
    }

    /// All of them, oldest first.
    pub(crate) fn all(&self) -> Vec<FailedPrepare> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }
}

/// The time to the second, as RFC 3339 writes it.
fn now() -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let seconds = i64::try_from(since.as_secs()).unwrap_or(i64::MAX);
    Timestamp::from_second(seconds).unwrap_or_default().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(failures: &Failures, uid: &str, error: &str) {
        let claim = ClaimName { namespace: "ns".to_owned(), name: uid.to_owned() };
        failures.note(claim, uid, error.to_owned());
    }

    #[test]
    fn the_last_failure_of_each_claim_is_kept_and_only_the_newest_claims() {
        let failures = Failures::default();
        note(&failures, "first", "a");
        for number in 1..MOST {
            note(&failures, &format!("claim-{number}"), "b");
        }
        note(&failures, "first", "again");
        let all = failures.all();
        assert_eq!((all.len(), all.last().map(|last| last.error.as_str())), (MOST, Some("again")));
        note(&failures, "one-more", "c");
        let all = failures.all();
        assert_eq!(all.len(), MOST);
        assert!(all.iter().all(|failed| failed.uid != "claim-1"), "the oldest goes");
        failures.forget("first");
        assert!(failures.all().iter().all(|failed| failed.uid != "first"));
        assert!(all.iter().all(|failed| failed.at.ends_with('Z') && failed.at.len() == 20), "{:?}", all[0]);
    }
}
