//! What GPUs report by themselves.

use kerf_dra_driver::hardware::{HardwareEvent, HardwareEventKind};
use kerf_kubelet_plugin::testing::Fuse;
use tokio_util::sync::CancellationToken;

use super::{node, pci};

#[tokio::test]
async fn what_a_gpu_reports_has_the_hardware_read_again() {
    let root = tempfile::tempdir().unwrap();
    let node = node(&root);
    let plugin = node.plugin(&Fuse::none()).unwrap();
    let mut changed = plugin.hardware_changed();
    let cancel = CancellationToken::new();
    plugin.listen(cancel.clone()).unwrap();
    let kind = HardwareEventKind::MigConfigurationChanged;
    node.machine.lock().unwrap().events.push_back(HardwareEvent { gpu: Some(pci(2)), kind });
    changed.changed().await.unwrap();
    cancel.cancel();
}
