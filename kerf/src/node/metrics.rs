//! What `/metrics` says: numbers that others count, read when asked.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use k8s_openapi::api::resource::v1::Device;
use kerf_api::attributes::{attribute, device_type};
use kerf_dra_driver::names::DriverName;
use kerf_dra_driver::status::GpuStatus;
use kerf_dra_driver::taint::Condition;
use kerf_kubelet_plugin::{BUCKETS, Operation};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::{Registry, Unit};
use tracing::warn;

use super::report::Report;

/// A registry of everything that is counted.
pub(crate) fn registry(report: Arc<Report>) -> Registry {
    let mut registry = Registry::with_prefix("kerf");
    registry.register_collector(Box::new(Counted { report }));
    registry
}

#[derive(Debug)]
struct Counted {
    report: Arc<Report>,
}

impl Collector for Counted {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        self.operations(&mut encoder)?;
        self.devices(&mut encoder)?;
        let publisher = self.report.published.borrow().clone();
        let journal = self.report.plugin.journal().borrow().clone();
        gauge(
            &mut encoder,
            "ready",
            "1 while the node is registered and its slices are stored",
            i64::from(self.report.missing.borrow().is_empty()),
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
    /// GPUs and devices as the last inventory and layout have them: a scrape
    /// asks no hardware.
    fn devices(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let inventory = self.report.inventory.borrow().clone().unwrap_or_default();
        let devices = self.report.devices().map_err(|error| {
            // The page can only be given up, without a word.
            warn!(%error, "what is published cannot be counted");
            fmt::Error
        })?;
        let gpus = self.report.gpus(&inventory, &devices);
        family(encoder, "gpus", "GPUs of the node, each in one state", "state", &by_state(&gpus))?;
        family(encoder, "published_devices", "Devices published, by type", "type", &by_type(&devices))?;
        let taints = by_taint(&self.report.settings.driver, &devices);
        family(encoder, "tainted_devices", "Devices published with a taint, by its key", "taint", &taints)
    }

    fn operations(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let counted =
            Operation::ALL.map(|operation| (operation, self.report.plugin.metrics().counted(operation)));
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

/// The states of [`GpuStatus`] that are told apart, the worst that applies.
fn by_state(gpus: &[GpuStatus]) -> BTreeMap<String, usize> {
    let mut states = BTreeMap::from(["lost", "present", "tainted"].map(|state| (state.to_owned(), 0)));
    for gpu in gpus {
        let state = match gpu {
            GpuStatus { lost: true, .. } => "lost",
            GpuStatus { conditions, .. } if !conditions.is_empty() => "tainted",
            GpuStatus { .. } => "present",
        };
        *states.entry(state.to_owned()).or_default() += 1;
    }
    states
}

fn by_type(devices: &[Device]) -> BTreeMap<String, usize> {
    let mut types = BTreeMap::from([device_type::GPU, device_type::MIG].map(|kind| (kind.to_owned(), 0)));
    for device in devices {
        let kind = device.attributes.as_ref().and_then(|all| all.get(attribute::TYPE)?.string.clone());
        *types.entry(kind.unwrap_or_default()).or_default() += 1;
    }
    types
}

/// A device with two taints counts twice.
fn by_taint(driver: &DriverName, devices: &[Device]) -> BTreeMap<String, usize> {
    let known = Condition::ALL.map(|condition| (format!("{driver}/{}", condition.as_str()), 0));
    let mut taints = BTreeMap::from(known);
    for taint in devices.iter().flat_map(|device| device.taints.iter().flatten()) {
        *taints.entry(taint.key.clone()).or_default() += 1;
    }
    taints
}

/// A gauge with one label.
fn family(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    label: &'static str,
    values: &BTreeMap<String, usize>,
) -> Result<(), fmt::Error> {
    let mut gauges = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for (value, number) in values {
        let labels = [(label, value.as_str())];
        ConstGauge::new(count(*number)).encode(gauges.encode_family(&labels)?)?;
    }
    Ok(())
}

fn gauge(encoder: &mut DescriptorEncoder<'_>, name: &str, help: &str, value: i64) -> Result<(), fmt::Error> {
    ConstGauge::new(value).encode(encoder.encode_descriptor(name, help, None, MetricType::Gauge)?)
}

fn count(value: usize) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests;
