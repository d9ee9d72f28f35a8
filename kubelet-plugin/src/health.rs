//! The health stream, v1 and v1alpha1: what the kubelet shows in the status of
//! pods (KEP-4680).
//!
//! The inventory's owner says what is so; while this process has none, because a
//! younger instance describes the node, its streams stay open and silent. Each
//! message is complete, so a stream keeps nothing but the time of its next one,
//! and what nobody reads is not made.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures::stream::{self, BoxStream, Stream, StreamExt};
use kerf_dra_driver::health::Health;
use kerf_dra_driver::names::DeviceName;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use crate::proto::{health_v1, health_v1alpha1};

/// How long the kubelet believes a message.
const TIMEOUT_SECONDS: i64 = 180;
/// When the list is sent again for the first time; the pause doubles up to the
/// longest. When an elder instance ends, as it does soon after a younger one was
/// registered, the kubelet forgets what both said, until it is said again.
const FIRST_RESEND: Duration = Duration::from_secs(5);
const LAST_RESEND: Duration = Duration::from_mins(1);
/// How many streams there may be. A kubelet has one.
const MAX_STREAMS: usize = 16;

/// The health of all that is published.
#[derive(Debug, Clone, PartialEq)]
pub struct NodeHealth {
    /// When the hardware was last read; nothing where it never was.
    pub read_at: Option<Instant>,
    /// Each device.
    pub devices: Arc<[(DeviceName, Health)]>,
}

impl NodeHealth {
    /// Seconds since 1970. Counted back from now: when the clock is set back,
    /// what was read before does not lie in the future.
    fn updated(&self, now: SystemTime) -> i64 {
        let since = now.duration_since(UNIX_EPOCH).unwrap_or_default();
        let read = self.read_at.and_then(|read_at| since.checked_sub(read_at.elapsed()));
        read.map_or(0, |read| i64::try_from(read.as_secs()).unwrap_or(i64::MAX))
    }
}

/// The health service of one socket.
#[derive(Debug, Clone)]
pub(crate) struct Service {
    pool: Arc<str>,
    health: watch::Receiver<Option<NodeHealth>>,
    streams: Arc<Semaphore>,
    stop: CancellationToken,
}

impl Service {
    /// Its streams end with `stop`: open ones would hold up the end of the server.
    pub(crate) fn new(
        pool: &str,
        health: watch::Receiver<Option<NodeHealth>>,
        stop: CancellationToken,
    ) -> Self {
        Self { pool: pool.into(), health, streams: Arc::new(Semaphore::new(MAX_STREAMS)), stop }
    }

    /// What is said on one stream: all at once, at every change, and now and then.
    fn said(&self) -> Result<impl Stream<Item = NodeHealth> + Send + use<>, Status> {
        let permit = Arc::clone(&self.streams).try_acquire_owned().map_err(|_| {
            Status::resource_exhausted(format!(
                "there are {MAX_STREAMS} health streams already, which is all that kerf serves: end one of them first"
            ))
        })?;
        let mut health = self.health.clone();
        health.mark_changed();
        let watcher = Watcher { health, pause: FIRST_RESEND, stop: self.stop.clone(), _permit: permit };
        Ok(stream::unfold(watcher, |mut watcher| async move {
            let said = watcher.next().await?;
            Some((said, watcher))
        }))
    }
}

/// One open stream.
struct Watcher {
    health: watch::Receiver<Option<NodeHealth>>,
    pause: Duration,
    stop: CancellationToken,
    _permit: OwnedSemaphorePermit,
}

impl Watcher {
    async fn next(&mut self) -> Option<NodeHealth> {
        loop {
            tokio::select! {
                () = self.stop.cancelled() => return None,
                changed = self.health.changed() => changed.ok()?,
                () = sleep(self.pause) => self.pause = LAST_RESEND.min(self.pause * 2),
            }
            let said = self.health.borrow_and_update().clone();
            if said.is_some() {
                return said;
            }
        }
    }
}

macro_rules! serve {
    ($wire:ident) => {
        #[tonic::async_trait]
        impl $wire::dra_resource_health_server::DraResourceHealth for Service {
            type NodeWatchResourcesStream =
                BoxStream<'static, Result<$wire::NodeWatchResourcesResponse, Status>>;

            async fn node_watch_resources(
                &self,
                _: Request<$wire::NodeWatchResourcesRequest>,
            ) -> Result<Response<Self::NodeWatchResourcesStream>, Status> {
                let pool = Arc::clone(&self.pool);
                let messages = self.said()?.map(move |said| {
                    let last_updated_time = said.updated(SystemTime::now());
                    let devices = said.devices.iter().map(|(name, health)| {
                        let (health, message) = match health {
                            Health::Healthy => ($wire::HealthStatus::Healthy, ""),
                            Health::Unhealthy(message) => ($wire::HealthStatus::Unhealthy, &**message),
                            Health::Unknown(message) => ($wire::HealthStatus::Unknown, &**message),
                        };
                        $wire::DeviceHealth {
                            device: Some($wire::DeviceIdentifier {
                                pool_name: pool.to_string(),
                                device_name: name.to_string(),
                            }),
                            health: health.into(),
                            last_updated_time,
                            health_check_timeout_seconds: TIMEOUT_SECONDS,
                            message: message.to_owned(),
                        }
                    });
                    Ok($wire::NodeWatchResourcesResponse { devices: devices.collect() })
                });
                Ok(Response::new(messages.boxed()))
            }
        }
    };
}

serve!(health_v1);
serve!(health_v1alpha1);

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    fn health(word: Health) -> NodeHealth {
        let name = DeviceName::parse("gpu-0000-01-00-0").expect("a name");
        NodeHealth { read_at: Some(Instant::now()), devices: Arc::new([(name, word)]) }
    }

    fn lost(reason: &str) -> NodeHealth {
        health(Health::Unhealthy(reason.into()))
    }

    fn service(said: Option<NodeHealth>) -> (watch::Sender<Option<NodeHealth>>, Service) {
        let sender = watch::Sender::new(said);
        let service = Service::new("node/gpu", sender.subscribe(), CancellationToken::new());
        (sender, service)
    }

    #[tokio::test(start_paused = true)]
    async fn all_is_said_at_once_at_every_change_and_again_before_it_runs_out() {
        let (sender, service) = service(Some(health(Health::Healthy)));
        let mut stream = std::pin::pin!(service.said().expect("a stream"));
        let first = stream.next().now_or_never().expect("at once").expect("a message");
        assert_eq!(*first.devices, *health(Health::Healthy).devices);
        assert_eq!(stream.next().now_or_never(), None);
        sender.send_replace(Some(lost("gone")));
        let changed = stream.next().now_or_never().expect("at once").expect("a message");
        assert_eq!(*changed.devices, *lost("gone").devices);
        for pause in [5, 10, 20, 40, 60, 60] {
            let before = Instant::now();
            let again = stream.next().await.expect("a message");
            assert_eq!(*again.devices, *lost("gone").devices);
            assert_eq!(before.elapsed().as_secs(), pause);
            // A message that is lost on the way must not let it run out.
            assert!(
                before.elapsed().as_secs() * 2 <= TIMEOUT_SECONDS.unsigned_abs(),
                "{:?}",
                before.elapsed()
            );
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_nobody_reads_does_not_pile_up() {
        let (sender, service) = service(Some(health(Health::Healthy)));
        let mut stream = std::pin::pin!(service.said().expect("a stream"));
        for number in 0..100 {
            sender.send_replace(Some(lost(&number.to_string())));
            tokio::time::advance(LAST_RESEND).await;
        }
        let read = stream.next().now_or_never().expect("at once").expect("a message");
        assert_eq!(*read.devices, *lost("99").devices);
        assert_eq!(stream.next().now_or_never(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn who_does_not_describe_the_node_is_silent_and_keeps_the_stream_open() {
        let (sender, service) = service(None);
        let mut stream = std::pin::pin!(service.said().expect("a stream"));
        let silence = LAST_RESEND * 10;
        assert!(tokio::time::timeout(silence, stream.next()).await.is_err());
        sender.send_replace(Some(health(Health::Healthy)));
        assert!(stream.next().now_or_never().expect("at once").is_some());
        sender.send_replace(None);
        assert!(tokio::time::timeout(silence, stream.next()).await.is_err());
        service.stop.cancel();
        assert_eq!(stream.next().now_or_never(), Some(None), "it ends with the server");
    }

    #[tokio::test]
    async fn streams_are_bounded_and_one_that_ends_makes_room() {
        let (_sender, service) = service(None);
        let mut streams: Vec<_> =
            (0..MAX_STREAMS).map(|_| service.clone().said().expect("a stream")).collect();
        let refused = service.said().err().expect("no more");
        assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
        streams.pop();
        assert!(service.said().is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn the_time_of_a_reading_is_never_to_come_whatever_becomes_of_the_clock() {
        let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        let read = health(Health::Healthy);
        assert_eq!(read.updated(at(1_000)), 1_000);
        tokio::time::advance(Duration::from_mins(5)).await;
        assert_eq!(read.updated(at(1_300)), 1_000);
        // Set back by an hour, or before 1970.
        assert_eq!(read.updated(at(700)), 400);
        assert_eq!(read.updated(at(100)), 0);
        assert_eq!(NodeHealth { read_at: None, ..read }.updated(at(1_300)), 0);
    }
}
