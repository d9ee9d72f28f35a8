//! What a container gets, as a runtime's own CDI code sees it.

use std::time::Duration;

use container_device_interface::cache::{CdiOption, new_cache, with_auto_refresh};
use container_device_interface::spec::read_spec;
use container_device_interface::spec_dirs::with_spec_dirs;
use kerf_kubelet_plugin::testing::{Fuse, claim, partition};
use oci_spec::runtime::{Mount, Spec};

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
    let mounts: Vec<(String, String)> = container
        .mounts()
        .clone()
        .unwrap()
        .iter()
        .map(|mount| (mount.destination().display().to_string(), source(mount)))
        .filter(|(_, source)| source.starts_with("/host"))
        .collect();
    let host = |path: &str| (path.to_owned(), format!("/host{path}"));
    assert_eq!(mounts, [host("/usr/lib/libcuda.so.580.95.05"), host("/run/nvidia-persistenced/socket")]);
    let hooks = container.hooks().clone().unwrap();
    let hook = &hooks.create_container().clone().unwrap()[0];
    assert_eq!(*hook.path(), root.path().join("hook").join(only(&root.path().join("hook"))).join("kerf"));
    let expected = [
        "kerf",
        "cdi-hook",
        "--link=libcuda.so.580.95.05::/usr/lib/libcuda.so.1",
        "--link=libcuda.so.1::/usr/lib/libcuda.so",
        "--library=/usr/lib/libcuda.so.1",
    ];
    assert_eq!(hook.args().clone().unwrap(), expected);
}

fn source(mount: &Mount) -> String {
    mount.source().as_ref().map(|source| source.display().to_string()).unwrap_or_default()
}

/// The name of the only thing in a folder.
fn only(folder: &std::path::Path) -> String {
    let mut entries = std::fs::read_dir(folder).unwrap();
    let name = entries.next().unwrap().unwrap().file_name().into_string().unwrap();
    assert!(entries.next().is_none());
    name
}

#[tokio::test]
async fn a_former_hook_program_stays_as_long_as_a_spec_names_it() {
    let root = tempfile::tempdir().unwrap();
    let node = node(&root);
    let plugin = node.plugin(&Fuse::none()).unwrap();
    node.claims.put(claim("c", &[("gpu", whole(3))]));
    prepare(&plugin, "c").await.unwrap();
    let copies = root.path().join("hook");
    let now = only(&copies);
    let spec = root.path().join("cdi/k8s.gpu.nvidia.com-claim_c-uid.json");
    let text = std::fs::read_to_string(&spec).unwrap();
    std::fs::write(&spec, text.replace(&format!("/hook/{now}/"), "/hook/kerf-named/")).unwrap();
    let ago = std::time::SystemTime::now() - Duration::from_secs(3_700);
    for name in ["kerf-named", "kerf-old"] {
        std::fs::create_dir_all(copies.join(name)).unwrap();
        let mark = std::fs::File::create(copies.join(name).join(".former")).unwrap();
        mark.set_modified(ago).unwrap();
    }
    let left = || {
        let mut names: Vec<_> = std::fs::read_dir(&copies)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort_unstable();
        names
    };
    drop(plugin);
    // The specs are made anew after the copies are looked through.
    node.plugin(&Fuse::none()).unwrap().start().await.unwrap();
    assert_eq!(left(), [now.as_str(), "kerf-named"]);
    assert_eq!(std::fs::read_to_string(&spec).unwrap(), text);
    // Nothing names it any more, from now on.
    node.plugin(&Fuse::none()).unwrap().start().await.unwrap();
    assert_eq!(left(), [now.as_str(), "kerf-named"]);
    std::fs::File::open(copies.join("kerf-named/.former")).unwrap().set_modified(ago).unwrap();
    node.plugin(&Fuse::none()).unwrap().start().await.unwrap();
    assert_eq!(left(), [now]);
}
