//! Keeps the `ResourceSlice`s of one driver on one node as they are desired.
//!
//! The actual state is never remembered from what was written: each look is a
//! live list, a pure plan, the writes, and another list. The watch only says
//! *when* to look: an event of a later revision than the last list is news. So
//! the publisher's own writes, which a list follows, cause no loop, and a
//! kubelet that wipes a slice right after its update is noticed. Every few
//! minutes it looks without being told.
//!
//! Idle, it costs the API server one watch of metadata.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::resource::v1::ResourceSlice;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::contention::{RepairBudget, Rivals, Verdict};
use crate::diff::{self, PoolPlan};
use crate::dropped::{Feature, dropped};
use crate::news::{Hint, News};
use crate::pools::{DesiredPool, DesiredPools, Identity};
use crate::requests::{RequestError, Requests, sentence};
use crate::status::{Phase, PublishStatus};

/// So many times writes are followed by a list at once before the publisher
/// pauses: one pass suffices unless somebody else writes.
const PASSES: usize = 3;

/// The publisher's times. Tests shorten them.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// The limit of one request.
    pub request: Duration,
    /// How often to look without a reason, ±20 %.
    pub verify: Duration,
    /// The shortest time from one look to one that the watch asks for, so that
    /// somebody who edits for ever does not make us list for ever.
    pub spacing: Duration,
    /// The pause after a first failure; it doubles with each further one.
    pub first_retry: Duration,
    /// The longest pause after failures.
    pub last_retry: Duration,
}

impl Timing {
    /// The pause before another attempt, after so many failures before the last.
    pub(crate) fn retry_pause(&self, failures: u32) -> Duration {
        let pause = self.first_retry.saturating_mul(2_u32.saturating_pow(failures));
        jittered(pause.min(self.last_retry))
    }
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            request: Duration::from_secs(10),
            verify: Duration::from_mins(4),
            spacing: Duration::from_millis(500),
            first_retry: Duration::from_millis(250),
            last_retry: Duration::from_mins(1),
        }
    }
}

/// The controller. It writes only after [`Publisher::run`] is polled.
#[derive(Debug)]
pub struct Publisher {
    identity: Identity,
    requests: Requests,
    timing: Timing,
    desired: watch::Receiver<Option<Arc<DesiredPools>>>,
    may_publish: watch::Receiver<bool>,
    status: watch::Sender<PublishStatus>,
    /// The revision of the last list. Events up to it are no news.
    seen: u64,
    budget: RepairBudget,
    rivals: Rivals,
    order: Option<Order>,
}

/// A desired state and what was learned about it.
#[derive(Debug)]
struct Order {
    desired: Arc<DesiredPools>,
    /// The pools without the features that were dropped and guard nothing.
    pools: Vec<DesiredPool>,
    /// Whatever was dropped since the start, of this state or one before.
    dropped: BTreeSet<Feature>,
    /// The pools of which something that guards was dropped. They must not be
    /// there at all until another state is desired.
    withheld: BTreeSet<String>,
    /// Whether it was once seen stored; differences since then are others'.
    settled: bool,
}

impl Order {
    fn new(desired: Arc<DesiredPools>) -> Self {
        let pools = desired.pools().to_vec();
        let (dropped, withheld) = (BTreeSet::new(), BTreeSet::new());
        Self { desired, pools, dropped, withheld, settled: false }
    }

    fn learn(&mut self, pool: &str, features: BTreeSet<Feature>) -> Result<(), SyncError> {
        for feature in features {
            if feature.guards() {
                self.withheld.insert(pool.to_owned());
            }
            for pool in &mut self.pools {
                pool.change(|slice| feature.leave_out(slice))?;
            }
            self.dropped.insert(feature);
        }
        Ok(())
    }
}

/// When to look again.
enum Next {
    Verify,
    At(Instant),
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum SyncError {
    #[error(transparent)]
    Request(#[from] RequestError),
    #[error("ResourceSlices changed while they were being written, {PASSES} times in a row")]
    NeverSettles,
    #[error("a slice that was kept cannot be read, which is an internal error of kerf")]
    Unreadable(#[from] serde_json::Error),
}

impl Publisher {
    /// Makes a publisher of what `desired` holds: `None` while that is not
    /// known (what is stored stays), no pools to withdraw everything. It
    /// writes only while `may_publish` is true.
    pub fn new(
        client: kube::Client,
        identity: Identity,
        desired: watch::Receiver<Option<Arc<DesiredPools>>>,
        may_publish: watch::Receiver<bool>,
    ) -> (Self, watch::Receiver<PublishStatus>) {
        Self::with_timing(client, identity, desired, may_publish, Timing::default())
    }

    /// [`Publisher::new`] with other times.
    pub fn with_timing(
        client: kube::Client,
        identity: Identity,
        desired: watch::Receiver<Option<Arc<DesiredPools>>>,
        may_publish: watch::Receiver<bool>,
        timing: Timing,
    ) -> (Self, watch::Receiver<PublishStatus>) {
        let (status, receiver) = watch::channel(PublishStatus::default());
        let publisher = Self {
            requests: Requests::new(client, &identity, timing.request),
            identity,
            timing,
            desired,
            may_publish,
            status,
            seen: 0,
            budget: RepairBudget::new(Instant::now()),
            rivals: Rivals::default(),
            order: None,
        };
        (publisher, receiver)
    }

    /// Publishes until cancelled, or until nobody holds the sending half of
    /// its inputs. Slices are left: a quick restart must not withdraw them.
    pub async fn run(mut self, cancel: CancellationToken) {
        let mut news = News::new(self.requests.clone(), self.timing);
        let mut failures = 0;
        let mut wake = Instant::now();
        let mut not_before = wake;
        loop {
            tokio::select! {
                biased;
                () = cancel.cancelled() => return,
                changed = self.desired.changed() => {
                    let Ok(()) = changed else { return };
                    wake = Instant::now();
                }
                changed = self.may_publish.changed() => {
                    let Ok(()) = changed else { return };
                    wake = Instant::now();
                }
                () = sleep_until(wake) => {
                    let Some(outcome) = cancel.run_until_cancelled(self.sync()).await else { return };
                    let now = Instant::now();
                    (wake, not_before) = match outcome {
                        Ok(next) => {
                            failures = 0;
                            match next {
                                Next::Verify => (now + jittered(self.timing.verify), now + self.timing.spacing),
                                Next::At(instant) => (instant, instant),
                            }
                        }
                        Err(error) => {
                            self.note_failure(&error);
                            let retry = now + self.timing.retry_pause(failures);
                            failures += 1;
                            (retry, retry)
                        }
                    };
                }
                hint = news.next(self.seen) => {
                    if self.is_news(&hint) {
                        wake = wake.min(not_before.max(Instant::now()));
                    }
                }
            }
        }
    }

    /// Whether a hint tells something that the last list did not.
    fn is_news(&self, hint: &Hint) -> bool {
        match hint {
            Hint::Changed { revision } => revision.is_none_or(|new| new > self.seen),
            Hint::Missed => true,
        }
    }

    fn note_failure(&self, error: &SyncError) {
        let error = sentence(error);
        self.status.send_if_modified(|status| {
            let new = status.last_error.as_ref() != Some(&error);
            if new {
                tracing::warn!(error, "cannot publish ResourceSlices, trying again");
                status.last_error = Some(error.clone());
            }
            new
        });
    }

    /// Looks, and writes what differs, until a look finds no difference.
    async fn sync(&mut self) -> Result<Next, SyncError> {
        if !*self.may_publish.borrow_and_update() {
            self.report(|status| status.phase = Phase::Standby);
            return Ok(Next::Verify);
        }
        let desired = self.desired.borrow_and_update().clone();
        let Some(desired) = desired else {
            self.report(|status| status.phase = Phase::Undecided);
            return Ok(Next::Verify);
        };
        let mut order = match self.order.take() {
            // What was learned about an equal state still holds.
            Some(known) if known.desired == desired => Order { desired, ..known },
            known => {
                self.report(|status| status.phase = Phase::Writing);
                // What is desired now may need none of it: that is why it is so.
                let dropped = known.map(|known| known.dropped).unwrap_or_default();
                Order { dropped, ..Order::new(desired) }
            }
        };
        let outcome = self.carry_out(&mut order).await;
        self.order = Some(order);
        outcome
    }

    async fn carry_out(&mut self, order: &mut Order) -> Result<Next, SyncError> {
        let owner = diff::node_owner(&self.identity.node, &self.requests.node_uid().await?);
        for _ in 0..PASSES {
            let live = self.requests.list().await?;
            self.seen = live.revision;
            let (plan, rivals) = self.plan(order, &owner, &live.slices)?;
            let generation = live.slices.iter().map(|slice| slice.spec.pool.generation).max();
            self.report(|status| {
                status.slices = live.slices.len();
                status.generation = generation.unwrap_or(0);
                status.rivals = rivals;
                status.dropped.clone_from(&order.dropped);
            });
            if plan.is_empty() {
                order.settled = true;
                self.report(|status| {
                    let withheld = !order.withheld.is_empty();
                    status.phase = if withheld { Phase::Withheld } else { Phase::Stored };
                    status.stored = (!withheld).then(|| order.desired.clone());
                    status.last_error = None;
                });
                return Ok(Next::Verify);
            }
            if order.settled {
                if let Err(next) = self.budget.take(Instant::now()) {
                    self.report(|status| {
                        status.phase = Phase::Contended;
                        status.stored = None;
                    });
                    return Ok(Next::At(next));
                }
                self.report(|status| status.repairs += 1);
            }
            self.report(|status| {
                status.phase = Phase::Writing;
                status.stored = None;
            });
            self.write(order, plan).await?;
        }
        Err(SyncError::NeverSettles)
    }

    /// The plan for everything under our name, and the pools of rivals.
    fn plan(
        &mut self,
        order: &Order,
        owner: &OwnerReference,
        live: &[ResourceSlice],
    ) -> Result<(PoolPlan, Vec<String>), SyncError> {
        let mut plan = PoolPlan::default();
        let undesired = diff::undesired(live, &order.pools);
        let uids = |slices: &[&ResourceSlice]| -> BTreeSet<String> {
            slices.iter().filter_map(|slice| slice.metadata.uid.clone()).collect()
        };
        let present: BTreeMap<String, BTreeSet<String>> =
            undesired.iter().map(|(pool, slices)| (pool.clone(), uids(slices))).collect();
        let mut rivals = Vec::new();
        for (pool, verdict) in self.rivals.judge(&present, Instant::now()) {
            match verdict {
                Verdict::Alive => rivals.push(pool),
                Verdict::Leftover => {
                    plan.deletes.extend(undesired.get(&pool).into_iter().flatten().copied().cloned());
                }
            }
        }
        for pool in &order.pools {
            let existing: Vec<&ResourceSlice> =
                live.iter().filter(|slice| slice.spec.pool.name == pool.name()).collect();
            if order.withheld.contains(pool.name()) {
                plan.deletes.extend(existing.into_iter().cloned());
                continue;
            }
            let part = diff::plan_pool(&self.identity, owner, &pool.slices()?, &existing);
            plan.generation = plan.generation.max(part.generation);
            plan.deletes.extend(part.deletes);
            plan.updates.extend(part.updates);
            plan.creates.extend(part.creates);
        }
        Ok((plan, rivals))
    }

    async fn write(&mut self, order: &mut Order, plan: PoolPlan) -> Result<(), SyncError> {
        tracing::info!(
            generation = plan.generation,
            deletes = plan.deletes.len(),
            updates = plan.updates.len(),
            creates = plan.creates.len(),
            repair = order.settled,
            "writing ResourceSlices"
        );
        for slice in &plan.deletes {
            self.count_write();
            self.requests.delete(slice).await?;
        }
        let updates = plan.updates.iter().map(|slice| (slice, true));
        for (slice, exists) in updates.chain(plan.creates.iter().map(|slice| (slice, false))) {
            self.count_write();
            let stored =
                if exists { self.requests.update(slice).await? } else { self.requests.create(slice).await? };
            let features = dropped(&slice.spec, &stored.spec);
            if features.is_empty() {
                continue;
            }
            let gates: Vec<_> = features.iter().map(|feature| feature.gate()).collect();
            tracing::warn!(features = gates.join(", "), "the API server dropped fields of a ResourceSlice");
            let pool = &slice.spec.pool.name;
            order.learn(pool, features)?;
            if order.withheld.contains(pool) {
                // At once: each instant it is there it can be allocated. The
                // rest of the pool goes with the next look.
                self.count_write();
                self.requests.delete(&stored).await?;
                return Ok(());
            }
        }
        Ok(())
    }

    fn count_write(&self) {
        self.report(|status| status.writes += 1);
    }

    fn report(&self, change: impl FnOnce(&mut PublishStatus)) {
        self.status.send_if_modified(|status| {
            let before = status.clone();
            change(status);
            *status != before
        });
    }
}

/// A time ±20 %, so that a fleet that started together does not stay in step.
fn jittered(time: Duration) -> Duration {
    time.mul_f64(0.8 + 0.4 * fastrand::f64())
}
