//! What a container gets, as a runtime's own CDI code sees it.

use container_device_interface::cache::{CdiOption, new_cache, with_auto_refresh};
use container_device_interface::spec::read_spec;
use container_device_interface::spec_dirs::with_spec_dirs;
use kerf_kubelet_plugin::testing::{Fuse, claim, partition};
use oci_spec::runtime::Spec;

use super::{node, pci, prepare, whole};

#[tokio::test]
async fn a_runtime_injects_exactly_what_was_allocated() {
    let root = tempfile::tempdir().unwrap();
    let node = node(&root);
    let plugin = node.plugin(&Fuse::none()).unwrap();
    node.claims.put(claim("c", &[("mig", partition(pci(2), "1g.10gb", 4)), ("gpu", whole(3))]));
    let devices = prepare(&plugin, "c").await.unwrap();

    let file = root.path().join("cdi/k8s.gpu.nvidia.com-claim_c-uid.json");
    read_spec(&file, 0).expect("a valid spec");

    let folder = root.path().join("cdi").display().to_string();
    let options: Vec<CdiOption> = vec![with_auto_refresh(false), with_spec_dirs(&[folder.as_str()])];
    let cache = new_cache(options);
    let mut cache = cache.lock().unwrap();
    cache.refresh().unwrap();
    let mut container = Spec::default();
    cache.inject_devices(Some(&mut container), vec![devices[0].cdi_device.clone()]).unwrap();
    let linux = container.linux().clone().unwrap();
    let nodes: Vec<String> =
        linux.devices().clone().unwrap().iter().map(|device| device.path().display().to_string()).collect();
    assert_eq!(nodes, ["/dev/nvidia1", "/dev/nvidiactl", "/dev/nvidia-caps/nvidia-cap101"]);
    let env = container.process().clone().unwrap().env().clone().unwrap();
    assert!(env.contains(&"NVIDIA_VISIBLE_DEVICES=void".to_owned()));
    let mounts = container.mounts().clone().unwrap();
    assert!(mounts.iter().any(|mount| mount.destination().ends_with("libcuda.so.580.95.05")));
}
