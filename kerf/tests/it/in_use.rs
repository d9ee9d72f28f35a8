//! A partition that a process still computes on when its claim is given back.

use std::collections::BTreeMap;
use std::os::unix::fs::symlink;

use kerf_dra_driver::names::DeviceName;
use kerf_emulator::clients::Use;

use crate::emulated::Emulated;

#[tokio::test]
async fn a_partition_in_use_names_its_process_holds_up_nobody_and_goes_once_that_is_gone() {
    let machine = Emulated::new(&["h100-80:mig=on"]);
    if machine.lacks_nodes() {
        return;
    }
    let plugin = machine.plugin().await;
    let pci = machine.inventory().gpus[0].pci;
    let small = |start: u32| DeviceName::parse(&format!("gpu-{}-mig-1g-10gb-{start}", pci.dashed())).unwrap();
    let claims = |all: &[(&str, u32)]| -> BTreeMap<String, Vec<DeviceName>> {
        all.iter().map(|(name, start)| ((*name).to_owned(), vec![small(*start)])).collect()
    };
    machine.prepare(&plugin, &claims(&[("held", 4), ("other", 5)])).await.unwrap();
    let state = machine.state();
    let instance = state.gpus[0].instances.iter().find(|instance| instance.start == 4).unwrap();
    let uuid = &instance.compute[0].uuid;

    // This process is the one, and the node's /proc knows it.
    let pid = std::process::id();
    let name = std::fs::read_to_string("/proc/self/comm").unwrap();
    symlink(format!("/proc/{pid}"), machine.path(&format!("proc/{pid}"))).unwrap();
    let process = machine.control().clients().hold(uuid, Use::Compute).unwrap();
    let says_who = |error: &str| {
        let who = format!("used by {} (pid {pid})", name.trim());
        assert!(error.contains(&who) && error.contains("it can go on when these are gone"), "{error}");
    };
    says_who(&machine.unprepare(&plugin, "held").await.unwrap_err());
    // Claims of the same GPU come and go meanwhile, and the kubelet asks again.
    machine.unprepare(&plugin, "other").await.unwrap();
    machine.prepare(&plugin, &claims(&[("next", 5), ("more", 6)])).await.unwrap();
    says_who(&machine.unprepare(&plugin, "held").await.unwrap_err());
    plugin.reconcile_now().await;
    assert_eq!(machine.instances().len(), 3);

    drop(process);
    // Nobody has to ask.
    plugin.reconcile_now().await;
    assert_eq!(machine.instances().len(), 2);
    for claim in ["held", "next", "more"] {
        machine.unprepare(&plugin, claim).await.unwrap();
    }
    assert!(machine.instances().is_empty());
    assert!(machine.files_of_claims().is_empty(), "{:?}", machine.files_of_claims());
}
