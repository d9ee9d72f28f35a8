//! Every device of every known model of GPU: claimed, there on the hardware,
//! seen in the container and nothing else with it, given back without a trace.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::linux::fs::MetadataExt as _;
use std::path::Path;
use std::process::Command;

use k8s_openapi::api::resource::v1::ResourceSliceSpec;
use kerf_dra_driver::names::DeviceName;
use kerf_dra_driver::plan::find_placement;
use kerf_dra_driver::publication::Publication;
use kerf_dra_driver::taint::Conditions;
use kerf_emulator::layout::{compute_instance_capability, gpu_instance_capability};
use kerf_emulator::machine::Machine;
use kerf_emulator::model::Model;
use kerf_kubelet_plugin::Plugin;
use serde_json::Value;

use crate::emulated::{Emulated, machines_of_every_model, smi};

#[tokio::test]
async fn every_placement_on_one_gpu_is_prepared_seen_alone_and_released() {
    for (model, slot) in machines_of_every_model() {
        let machine = Emulated::new(&[&slot]);
        if machine.lacks_nodes() {
            return;
        }
        let plugin = machine.plugin().await;
        let slices = machine.publish(&plugin, &mut Publication::default(), &Conditions::default()).await;
        let devices = devices(&slices);
        assert_eq!(devices.len(), expected_devices(&model, &slot), "{slot}: {devices:?}");
        for device in devices {
            one_round(&machine, &plugin, &[("c".to_owned(), device)]).await;
        }
    }
}

/// A claim for a device of each kind, on as many GPUs at once as there are.
#[tokio::test]
async fn each_profile_on_eight_gpus_is_prepared_seen_alone_and_released() {
    for (_, slot) in machines_of_every_model() {
        let machine = Emulated::new(&[&slot; 8]);
        if machine.lacks_nodes() {
            return;
        }
        let plugin = machine.plugin().await;
        let slices = machine.publish(&plugin, &mut Publication::default(), &Conditions::default()).await;
        // By GPU, its kinds with their placements.
        let mut gpus: BTreeMap<_, BTreeMap<Option<String>, Vec<DeviceName>>> = BTreeMap::new();
        for device in devices(&slices) {
            let pci = device.gpu().unwrap();
            let profile = find_placement(machine.inventory().gpu(pci).unwrap(), &device)
                .map(|(_, profile, _)| profile.name.to_string());
            gpus.entry(pci).or_default().entry(profile).or_default().push(device);
        }
        assert_eq!(gpus.len(), 8, "{slot}");
        let kinds: BTreeSet<_> = gpus.values().flat_map(BTreeMap::keys).cloned().collect();
        for round in 0..kinds.len().div_ceil(gpus.len()) {
            let claims: Vec<(String, DeviceName)> = gpus
                .values()
                .enumerate()
                .map(|(at, kinds)| {
                    let placements = kinds.values().nth((round * 8 + at) % kinds.len()).unwrap();
                    (format!("c{at}"), placements[(round + at) % placements.len()].clone())
                })
                .collect();
            one_round(&machine, &plugin, &claims).await;
        }
    }
}

/// How many devices a GPU has, told from its model alone.
fn expected_devices(model: &Model, slot: &str) -> usize {
    let placements: usize =
        model.mig.iter().flat_map(|mig| &mig.profiles).map(|profile| profile.starts.len()).sum();
    match &model.mig {
        Some(mig) if mig.mode == kerf_emulator::model::ModeRule::NeedsReset => {
            if slot.ends_with("mig=on") {
                placements
            } else {
                1
            }
        }
        _ => placements + 1,
    }
}

fn devices(slices: &[ResourceSliceSpec]) -> Vec<DeviceName> {
    let all = slices.iter().flat_map(|slice| slice.devices.iter().flatten());
    all.map(|device| DeviceName::parse(&device.name).unwrap()).collect()
}

/// Prepares claims of one device each, looks at all there is, gives them back.
async fn one_round(machine: &Emulated, plugin: &Plugin, claims: &[(String, DeviceName)]) {
    let wanted = claims.iter().map(|(name, device)| (name.clone(), vec![device.clone()])).collect();
    machine.prepare(plugin, &wanted).await.unwrap();
    let inventory = machine.inventory();
    let partitions = claims.iter().filter_map(|(_, device)| {
        let gpu = inventory.gpu(device.gpu()?)?;
        let (_, profile, _) = find_placement(gpu, device)?;
        Some((gpu.pci.to_string(), profile.id.0, device.start()?))
    });
    assert_eq!(machine.instances(), partitions.collect(), "{claims:?}");
    for (name, device) in claims {
        let container = Container::of(machine, name);
        container.sees_only(machine, device);
    }
    for (name, device) in claims {
        machine.unprepare(plugin, name).await.unwrap();
        assert!(!machine.files_of_claims().iter().any(|file| file.contains(name)), "{device}");
    }
    assert_eq!(machine.instances(), BTreeSet::new(), "{claims:?}");
    assert_eq!(machine.files_of_claims(), [""; 0], "{claims:?}");
}

/// A container that has what a claim's CDI spec gives it.
struct Container {
    root: tempfile::TempDir,
    /// The device nodes, as the container names them.
    nodes: BTreeSet<String>,
}

impl Container {
    fn of(machine: &Emulated, claim: &str) -> Self {
        let file = machine.path(&format!("node/cdi/k8s.gpu.nvidia.com-claim_{claim}-uid.json"));
        let spec: Value = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
        let root = tempfile::tempdir_in(machine.path("node")).unwrap();
        let devices = spec["devices"].as_array().unwrap();
        assert_eq!(devices.len(), 1);
        let edits = [&spec["containerEdits"], &devices[0]["containerEdits"]];
        let all = edits.into_iter().filter_map(|edits| edits["deviceNodes"].as_array()).flatten();
        let mut nodes = BTreeSet::new();
        for node in all {
            let path = node["path"].as_str().unwrap();
            let host = fs::metadata(node["hostPath"].as_str().unwrap()).unwrap().st_rdev();
            let numbers = (rustix::fs::major(host).into(), rustix::fs::minor(host).into());
            assert_eq!((node["major"].clone(), node["minor"].clone()), numbers, "{path}");
            let inside = root.path().join(path.trim_start_matches('/'));
            fs::create_dir_all(inside.parent().unwrap()).unwrap();
            fs::write(inside, "").unwrap();
            nodes.insert(path.to_owned());
        }
        Self { root, nodes }
    }

    fn dev(&self) -> std::path::PathBuf {
        self.root.path().join("dev")
    }

    fn sees_only(&self, machine: &Emulated, device: &DeviceName) {
        let state = machine.state();
        let inventory = machine.inventory();
        let gpu = inventory.gpu(device.gpu().unwrap()).unwrap();
        let on = state.gpus.iter().find(|found| found.pci == gpu.pci.to_string()).unwrap();
        let partition = find_placement(gpu, device).map(|(_, profile, placement)| {
            let mut found = on.mig_devices().filter(|(instance, _)| {
                (instance.profile, instance.start) == (profile.id.0, placement.start)
            });
            (profile, found.next().unwrap())
        });

        let minor = on.minor;
        let mut nodes: BTreeSet<String> = ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset"]
            .map(|name| format!("/dev/{name}"))
            .into();
        nodes.insert(format!("/dev/nvidia{minor}"));
        nodes.extend(partition.iter().flat_map(|(_, (instance, compute))| {
            let capabilities = [
                gpu_instance_capability(minor, instance.id),
                compute_instance_capability(minor, instance.id, compute.id),
            ];
            capabilities.map(|number| format!("/dev/nvidia-caps/nvidia-cap{number}"))
        }));
        assert_eq!(self.nodes, nodes, "{device}");

        let inside = Machine::container(&machine.path("state"), &self.dev()).unwrap();
        let seen: Vec<&str> =
            state.gpus.iter().filter(|gpu| inside.sees(gpu)).map(|gpu| &*gpu.uuid).collect();
        assert_eq!(seen, [&on.uuid], "{device}");
        let all =
            state.gpus.iter().flat_map(|gpu| gpu.mig_devices().map(move |(of, found)| (gpu, of, found)));
        let seen = all.filter(|(gpu, of, found)| inside.sees_mig_device(gpu, of, found));
        let seen: Vec<&str> = seen.map(|(_, _, found)| &*found.uuid).collect();
        let expected: Vec<&str> = partition.iter().map(|(_, (_, compute))| &*compute.uuid).collect();
        assert_eq!(seen, expected, "{device}");

        let Some(smi) = smi() else {
            eprintln!("note: nvidia-smi is not built (cargo build -p kerf-emulator), so it was not run");
            return;
        };
        let partition = partition.map(|(profile, (_, compute))| {
            format!("  MIG {:<11} Device  0: (UUID: {})\n", profile.name.as_str(), compute.uuid)
        });
        let listed = format!("GPU 0: {} (UUID: {})\n{}", gpu.product, on.uuid, partition.unwrap_or_default());
        assert_eq!(self.run(machine, &smi), listed, "{device}");
    }

    /// What `nvidia-smi -L` prints in it.
    fn run(&self, machine: &Emulated, smi: &Path) -> String {
        let library = self.root.path().join("libnvidia-ml.so.1");
        let folder = machine.path(&format!("driver/usr/lib/{}-linux-gnu", std::env::consts::ARCH));
        fs::hard_link(folder.join("libnvidia-ml.so.1").canonicalize().unwrap(), library).unwrap();
        let mut command = Command::new(smi);
        command.env_clear().arg("-L").env("LD_LIBRARY_PATH", self.root.path());
        command.env("NVIDIA_EMULATOR_STATE", machine.path("state")).env("NVIDIA_EMULATOR_DEV", self.dev());
        String::from_utf8(command.output().unwrap().stdout).unwrap()
    }
}
