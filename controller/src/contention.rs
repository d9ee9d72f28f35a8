//! How to stay polite when somebody else writes to the same slices: pure
//! bookkeeping over instants, no requests and no clock of its own.
//!
//! [`RepairBudget`] bounds how often changes by others are undone.
//! [`Rivals`] finds out whether the pools of a former driver that we delete
//! are being published again, which means that the driver is alive.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;

/// How many repairs may follow each other at once.
const BURST: u32 = 5;
/// After a burst, one repair in this time.
const REFILL: Duration = Duration::from_secs(30);

/// A token bucket for writes that undo what others did. A deleted slice comes
/// back at once; somebody who edits for ever costs two writes a minute.
#[derive(Debug)]
pub struct RepairBudget {
    tokens: u32,
    refilled: Instant,
}

impl RepairBudget {
    /// A full budget.
    pub fn new(now: Instant) -> Self {
        Self { tokens: BURST, refilled: now }
    }

    /// Takes a repair, or says when the next one may be taken.
    pub fn take(&mut self, now: Instant) -> Result<(), Instant> {
        while self.tokens < BURST && now.duration_since(self.refilled) >= REFILL {
            self.tokens += 1;
            self.refilled += REFILL;
        }
        if self.tokens == BURST {
            self.refilled = now;
        }
        match self.tokens.checked_sub(1) {
            Some(left) => {
                self.tokens = left;
                Ok(())
            }
            None => Err(self.refilled + REFILL),
        }
    }
}

/// So many times a deleted pool is published anew before we stop deleting it.
const COMEBACKS: u32 = 3;
/// So long a rival is left alone before it is tried once more, and so long a
/// pool must be gone to be forgotten.
const TRUCE: Duration = Duration::from_mins(10);

/// What to do with a pool that nobody desires here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Left over by a former driver: delete it.
    Leftover,
    /// Somebody publishes it again and again: leave it, and say so.
    Alive,
}

/// Pools under our driver and node name that are not desired, and how often
/// they came back after they were deleted.
#[derive(Debug, Default)]
pub struct Rivals {
    pools: BTreeMap<String, Rival>,
}

/// A pool that was judged once. `uids` are those of its slices that were there
/// at the last judgement; a uid beyond them was created since.
#[derive(Debug)]
struct Rival {
    uids: BTreeSet<String>,
    comebacks: u32,
    last: Instant,
}

impl Rivals {
    /// Judges all pools that are there and not desired. Each pool is given
    /// with the uids of its slices.
    pub fn judge(
        &mut self,
        present: &BTreeMap<String, BTreeSet<String>>,
        now: Instant,
    ) -> BTreeMap<String, Verdict> {
        self.pools.retain(|pool, rival| present.contains_key(pool) || now.duration_since(rival.last) < TRUCE);
        let judge_one = |(pool, uids): (&String, &BTreeSet<String>)| {
            let rival = self.pools.entry(pool.clone()).or_insert_with(|| Rival {
                uids: uids.clone(),
                comebacks: 0,
                last: now,
            });
            if !uids.is_subset(&rival.uids) {
                rival.comebacks += 1;
                rival.last = now;
            }
            rival.uids.clone_from(uids);
            let truce_is_over = now.duration_since(rival.last) >= TRUCE;
            if rival.comebacks >= COMEBACKS && truce_is_over {
                rival.comebacks = COMEBACKS - 1;
                rival.last = now;
            }
            let verdict = if rival.comebacks >= COMEBACKS { Verdict::Alive } else { Verdict::Leftover };
            (pool.clone(), verdict)
        };
        present.iter().map(judge_one).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(count: u64) -> Duration {
        Duration::from_secs(count)
    }

    #[test]
    fn a_burst_of_repairs_is_free_and_endless_editing_costs_two_a_minute() {
        let start = Instant::now();
        let mut budget = RepairBudget::new(start);
        let mut taken = 0;
        for second in 0..600 {
            if budget.take(start + seconds(second)).is_ok() {
                taken += 1;
            }
        }
        assert_eq!(taken, 5 + 19);
    }

    #[test]
    fn an_exhausted_budget_names_the_instant_at_which_it_is_not() {
        let start = Instant::now();
        let mut budget = RepairBudget::new(start);
        while budget.take(start).is_ok() {}
        let next = budget.take(start).expect_err("exhausted");
        assert!(next > start);
        assert!(budget.take(next).is_ok());
    }

    fn present(pool: &str, uid: &str) -> BTreeMap<String, BTreeSet<String>> {
        BTreeMap::from([(pool.to_owned(), BTreeSet::from([uid.to_owned()]))])
    }

    fn verdict(rivals: &mut Rivals, uid: &str, now: Instant) -> Verdict {
        rivals.judge(&present("old", uid), now)["old"]
    }

    #[test]
    fn a_pool_that_cannot_be_deleted_is_no_rival() {
        let start = Instant::now();
        let mut rivals = Rivals::default();
        for second in 0..100 {
            assert_eq!(verdict(&mut rivals, "a", start + seconds(second)), Verdict::Leftover);
        }
    }

    #[test]
    fn a_pool_that_comes_back_thrice_is_alive_and_tried_again_after_a_truce() {
        let start = Instant::now();
        let mut rivals = Rivals::default();
        assert_eq!(verdict(&mut rivals, "a", start), Verdict::Leftover);
        assert_eq!(verdict(&mut rivals, "b", start + seconds(30)), Verdict::Leftover);
        assert_eq!(verdict(&mut rivals, "c", start + seconds(60)), Verdict::Leftover);
        assert_eq!(verdict(&mut rivals, "d", start + seconds(90)), Verdict::Alive);
        assert_eq!(verdict(&mut rivals, "d", start + seconds(600)), Verdict::Alive);
        assert_eq!(verdict(&mut rivals, "d", start + seconds(700)), Verdict::Leftover);
        assert_eq!(verdict(&mut rivals, "e", start + seconds(730)), Verdict::Alive);
    }

    #[test]
    fn a_rival_that_stays_away_is_forgotten() {
        let start = Instant::now();
        let mut rivals = Rivals::default();
        for (uid, second) in [("a", 0), ("b", 30), ("c", 60), ("d", 90)] {
            verdict(&mut rivals, uid, start + seconds(second));
        }
        rivals.judge(&BTreeMap::new(), start + seconds(700));
        assert_eq!(verdict(&mut rivals, "e", start + seconds(701)), Verdict::Leftover);
    }
}
