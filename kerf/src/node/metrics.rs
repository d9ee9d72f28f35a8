//! What `/metrics` says: numbers that others count, read when asked.

use std::fmt;

use kerf_controller::PublishStatus;
use kerf_kubelet_plugin::{BUCKETS, Operation, Plugin};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::{Registry, Unit};
use tokio::sync::watch;

/// A registry of everything that is counted.
pub(crate) fn registry(
    plugin: Plugin,
    publisher: watch::Receiver<PublishStatus>,
    missing: watch::Receiver<Vec<String>>,
) -> Registry {
    let mut registry = Registry::with_prefix("kerf");
    registry.register_collector(Box::new(Counted { plugin, publisher, missing }));
    registry
}

#[derive(Debug)]
struct Counted {
    plugin: Plugin,
    publisher: watch::Receiver<PublishStatus>,
    missing: watch::Receiver<Vec<String>>,
}

impl Collector for Counted {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        self.operations(&mut encoder)?;
        let publisher = self.publisher.borrow().clone();
        let journal = self.plugin.journal().borrow().clone();
        gauge(
            &mut encoder,
            "ready",
            "1 while the node is registered and its slices are stored",
            i64::from(self.missing.borrow().is_empty()),
        )?;
        gauge(&mut encoder, "prepared_claims", "Claims with a journal entry", count(journal.entries.len()))?;
        gauge(
            &mut encoder,
            "quarantined_entries",
            "Journal entries that cannot be read",
            count(journal.quarantined.len()),
        )?;
        gauge(&mut encoder, "slices", "ResourceSlices stored for this node", count(publisher.slices))?;
        gauge(&mut encoder, "pool_generation", "Generation of the node's pool", publisher.generation)?;
        gauge(
            &mut encoder,
            "dropped_features",
            "Features whose fields the API server does not keep",
            count(publisher.dropped.len()),
        )?;
        let counters = [
            ("slice_writes", "ResourceSlices created, updated or deleted", publisher.writes),
            ("slice_repairs", "Changes of ResourceSlices by others that were undone", publisher.repairs),
        ];
        for (name, help, value) in counters {
            let encoder = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            ConstCounter::new(value).encode(encoder)?;
        }
        Ok(())
    }
}

impl Counted {
    fn operations(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let counted = Operation::ALL.map(|operation| (operation, self.plugin.metrics().counted(operation)));
        let mut durations = encoder.encode_descriptor(
            "operation_duration",
            "Duration of operations, from request to answer",
            Some(&Unit::Seconds),
            MetricType::Histogram,
        )?;
        for (operation, counted) in &counted {
            let bounds = BUCKETS.iter().copied().chain([f64::MAX]);
            let buckets: Vec<(f64, u64)> = bounds.zip(counted.buckets).collect();
            let labels = [("operation", operation.as_str())];
            durations.encode_family(&labels)?.encode_histogram::<NoLabelSet>(
                counted.seconds,
                counted.succeeded + counted.failed,
                &buckets,
                None,
            )?;
        }
        let mut failures = encoder.encode_descriptor(
            "operation_failures",
            "Operations that did not succeed",
            None,
            MetricType::Counter,
        )?;
        for (operation, counted) in &counted {
            let labels = [("operation", operation.as_str())];
            ConstCounter::new(counted.failed).encode(failures.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

fn gauge(encoder: &mut DescriptorEncoder<'_>, name: &str, help: &str, value: i64) -> Result<(), fmt::Error> {
    ConstGauge::new(value).encode(encoder.encode_descriptor(name, help, None, MetricType::Gauge)?)
}

fn count(value: usize) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}
