//! NVLinks that are down, before that is published.
//!
//! A link with a bad connection goes down and up with every look, and each
//! error of it makes kerf look. So that this does not have slices rewritten
//! without end, fewer links than are published are published once each look of
//! ten minutes saw fewer. More are published at once: links come up one after
//! another while a node starts.

use std::collections::BTreeMap;
use std::time::Duration;

use kerf_api::attributes::attribute;

use crate::model::{AttributeValue, GpuModel, ModelDevice};
use crate::names::{DeviceName, PciAddress};
use crate::published::GpuRecord;
use crate::withdraw::Timestamp;

/// How long links must be down before that is published.
pub(crate) const SETTLE: Duration = Duration::from_mins(10);

/// The GPUs of which fewer links are up than are published, and since when.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct FewerLinks(BTreeMap<PciAddress, Timestamp>);

impl FewerLinks {
    /// What is so after this was looked at: what has not settled counts as
    /// untold.
    pub(crate) fn next(
        &self,
        records: &BTreeMap<PciAddress, GpuRecord>,
        models: &mut BTreeMap<PciAddress, GpuModel>,
        now: Timestamp,
    ) -> Self {
        let mut next = Self::default();
        for (pci, model) in models {
            let whole = DeviceName::whole(*pci);
            let published = records.get(pci).and_then(|record| Some(&record.devices.get(&whole)?.device));
            let (Some(published), Some(device)) = (published, model.devices.get(&whole)) else { continue };
            let known = self.0.get(pci).copied();
            let since = if model.untold.contains(attribute::NVLINKS) {
                known
            } else {
                (up(device) < up(published)).then(|| known.unwrap_or(now))
            };
            let Some(since) = since else { continue };
            next.0.insert(*pci, since);
            if now < since.after(SETTLE) {
                model.untold.insert(attribute::NVLINKS.to_owned());
            }
        }
        next
    }
}

/// How many links of a whole GPU are up; nothing where it has none.
fn up(device: &ModelDevice) -> Option<i64> {
    match device.attributes.get(attribute::NVLINKS) {
        Some(AttributeValue::Int(up)) => Some(*up),
        _ => None,
    }
}
