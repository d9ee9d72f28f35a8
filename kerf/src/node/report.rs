//! What this node looks like now, from everything that runs in it: for the
//! status socket, the metrics, and a word of warning in the log.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::resource::v1::Device;
use kerf_controller::PublishStatus;
use kerf_dra_driver::health;
use kerf_dra_driver::inventory::Inventory;
use kerf_dra_driver::model::Settings;
use kerf_dra_driver::names::gpu_pool;
use kerf_dra_driver::status::{self, GpuStatus, NodeStatus, Publication};
use kerf_kubelet_plugin::{NodeLayout, Plugin};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::warn;

/// How long a status waits for the hardware before it tells the last inventory.
const FRESH: Duration = Duration::from_secs(3);

/// Where the node's status comes from.
#[derive(Debug)]
pub(crate) struct Report {
    pub(crate) settings: Settings,
    pub(crate) plugin: Plugin,
    pub(crate) inventory: watch::Receiver<Option<Arc<Inventory>>>,
    pub(crate) layout: watch::Receiver<Option<Arc<NodeLayout>>>,
    pub(crate) published: watch::Receiver<PublishStatus>,
    pub(crate) missing: watch::Receiver<Vec<String>>,
}

impl Report {
    /// The status now: the owner's inventory is as old as the last event.
    ///
    /// # Errors
    /// As [`Self::devices`].
    pub(crate) async fn json(&self) -> Result<Vec<u8>, serde_json::Error> {
        let inventory = match tokio::time::timeout(FRESH, self.plugin.observe()).await {
            Ok(Ok(observed)) => Some(observed.inventory),
            _ => self.inventory.borrow().clone(),
        };
        let (generation, slices) = {
            let published = self.published.borrow();
            (published.generation, published.slices)
        };
        let nvidia_driver = inventory.as_ref().map(|inventory| inventory.driver_version.clone());
        let inventory = inventory.unwrap_or_default();
        let journal = self.plugin.journal().borrow().clone();
        let entries: Vec<_> = journal.entries.values().map(AsRef::as_ref).collect();
        let failed = self.plugin.failed_prepares();
        let status = NodeStatus {
            node: self.settings.node.clone(),
            driver: self.settings.driver.to_string(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            nvidia_driver,
            missing: self.missing.borrow().clone(),
            publication: Publication { pool: gpu_pool(&self.settings.node), generation, slices },
            absent_profiles: self.settings.mig_profiles.absent(&inventory),
            gpus: self.gpus(&inventory, &self.devices()?),
            unprepared: status::unprepared(&entries, self.plugin.boot_id(), &failed),
        };
        serde_json::to_vec(&status)
    }

    /// The GPUs of an inventory, and those that are published and not in it.
    pub(crate) fn gpus(&self, inventory: &Inventory, published: &[Device]) -> Vec<GpuStatus> {
        let journal = self.plugin.journal().borrow().clone();
        let entries: Vec<_> = journal.entries.values().map(AsRef::as_ref).collect();
        let mut gpus = status::gpus(&self.settings, inventory, &entries, self.plugin.boot_id(), published);
        if let Some(told) = &*self.plugin.health().borrow() {
            for gpu in &mut gpus {
                gpu.health = health::sentences(&told.devices, gpu.pci);
            }
        }
        gpus
    }

    /// The devices that are to be published.
    ///
    /// # Errors
    /// None that is known; see `PackedSlice::unpack`.
    pub(crate) fn devices(&self) -> Result<Vec<Device>, serde_json::Error> {
        let layout = self.layout.borrow().clone();
        let mut devices = Vec::new();
        for slice in layout.iter().flat_map(|layout| &layout.slices) {
            devices.extend(slice.unpack()?.devices.into_iter().flatten());
        }
        Ok(devices)
    }
}

/// Says once in the log which profiles of `--mig-profiles` no GPU has. One
/// value serves a fleet of many models, so that is no error.
pub(crate) async fn tell_absent_profiles(
    settings: Settings,
    mut inventory: watch::Receiver<Option<Arc<Inventory>>>,
    cancel: CancellationToken,
) -> anyhow::Result<()> {
    let mut told = Vec::new();
    loop {
        let known = inventory.borrow_and_update().clone();
        let absent = known.map(|known| settings.mig_profiles.absent(&known)).unwrap_or_default();
        if absent != told {
            told = absent;
            if !told.is_empty() {
                let profiles = told.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
                warn!(profiles, "--mig-profiles has profiles that no GPU of this node has");
            }
        }
        tokio::select! {
            () = cancel.cancelled() => return Ok(()),
            changed = inventory.changed() => changed?,
        }
    }
}
