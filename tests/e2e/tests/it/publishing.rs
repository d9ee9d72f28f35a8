//! What kerf tells the API server of the node.

use std::collections::BTreeSet;

use anyhow::Result;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kerf_e2e::{GPUS, LIMIT, Scene, wait_until};

pub(crate) fn every_gpu_is_published(scene: &Scene<'_>) -> Result<()> {
    wait_until("each GPU has devices in a slice", LIMIT, || {
        let slices: Vec<ResourceSlice> = scene.list_of_cluster()?;
        let gpus: BTreeSet<String> = slices
            .iter()
            .filter(|slice| slice.spec.node_name == Some(scene.cluster.node_name()))
            .flat_map(|slice| slice.spec.devices.iter().flatten())
            .flat_map(|device| device.consumes_counters.iter().flatten())
            .map(|counters| counters.counter_set.clone())
            .collect();
        Ok((gpus.len() == GPUS.len()).then_some(()))
    })
}
