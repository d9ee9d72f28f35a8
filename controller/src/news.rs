//! When slices on the API server may have changed: a watch of their metadata,
//! which is a hint and no more. It begins where the last list ended, so there
//! is nothing to remember between two of them.
//!
//! Whatever stands between kerf and the API server may end each watch as soon
//! as it begins. Every node of a cluster would then open one after another
//! (kube's watcher does), so the pause grows as long as watches are short.

use std::error::Error;
use std::time::Duration;

use futures::StreamExt;
use futures::stream::BoxStream;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::WatchEvent;
use kube::core::PartialObjectMeta;
use tokio::time::{Instant, sleep_until, timeout_at};

use crate::publisher::Timing;
use crate::requests::{RequestError, Requests, WATCH_SECONDS, revision, sentence};

/// How long a watch is asked for, and a little more.
const LIFE: Duration = Duration::from_secs(WATCH_SECONDS as u64 + 10);
/// A watch that lived this long was not cut short.
const LONG: Duration = Duration::from_secs(30);

type Events = BoxStream<'static, kube::Result<WatchEvent<PartialObjectMeta<ResourceSlice>>>>;

/// What a watch told.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Hint {
    /// There is a slice of this revision, or one went with it.
    Changed {
        /// Unknown where it is not a number.
        revision: Option<u64>,
    },
    /// There may be changes that no watch will tell of.
    Missed,
}

/// The watch, as long as it lives, and the next one.
pub(crate) struct News {
    requests: Requests,
    timing: Timing,
    open: Option<(Events, Instant)>,
    not_before: Instant,
    /// How many watches in a row were short.
    short: u32,
}

impl News {
    pub(crate) fn new(requests: Requests, timing: Timing) -> Self {
        Self { requests, timing, open: None, not_before: Instant::now(), short: 0 }
    }

    /// The next hint, of what came after a revision. It may be given up at any time.
    pub(crate) async fn next(&mut self, after: u64) -> Hint {
        loop {
            let Some((events, since)) = &mut self.open else {
                sleep_until(self.not_before).await;
                let opened = self.requests.watch(after).await;
                let now = Instant::now();
                match opened {
                    Ok(events) => self.open = Some((events.boxed(), now)),
                    Err(error) => {
                        self.ended(now);
                        if matches!(&error, RequestError::Refused { source, .. } if is_expired(source)) {
                            return Hint::Missed;
                        }
                        failed(&error);
                    }
                }
                continue;
            };
            // The server has ended it by then, unless nobody is there any more.
            let event = timeout_at(*since + LIFE, events.next()).await;
            match event.unwrap_or(None) {
                Some(Ok(
                    WatchEvent::Added(slice) | WatchEvent::Modified(slice) | WatchEvent::Deleted(slice),
                )) => {
                    return Hint::Changed { revision: revision(slice.metadata.resource_version.as_deref()) };
                }
                Some(Ok(WatchEvent::Bookmark(_))) => {}
                Some(Ok(WatchEvent::Error(status))) => {
                    self.close();
                    let error = kube::Error::Api(status);
                    if is_expired(&error) {
                        return Hint::Missed;
                    }
                    failed(&error);
                }
                Some(Err(error)) => {
                    self.close();
                    failed(&error);
                }
                None => self.close(),
            }
        }
    }

    fn close(&mut self) {
        if let Some((_, since)) = self.open.take() {
            self.ended(since);
        }
    }

    /// A watch that was opened at an instant is no more.
    fn ended(&mut self, since: Instant) {
        let now = Instant::now();
        self.short = if now.duration_since(since) < LONG { self.short + 1 } else { 0 };
        self.not_before = match self.short.checked_sub(1) {
            None => now,
            Some(others) => now + self.timing.retry_pause(others),
        };
        if self.short == 4 {
            tracing::warn!("no watch of ResourceSlices lasts; changes by others are noticed later");
        }
    }
}

/// Whether the history that the watch wanted is gone.
fn is_expired(error: &kube::Error) -> bool {
    const EXPIRED: u16 = 410;
    matches!(error, kube::Error::Api(status) if status.code == EXPIRED)
}

fn failed(error: &(dyn Error + 'static)) {
    tracing::warn!(error = sentence(error), "cannot watch ResourceSlices");
}
