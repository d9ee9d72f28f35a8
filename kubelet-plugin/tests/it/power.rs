//! The power is cut after every call that reaches disk or hardware, and the
//! disk keeps any part of what it may lose. On the node that boots again
//! nothing is given to two claims, nothing is left over and nothing is lost
//! for good.

pub(crate) mod disk;

use std::collections::BTreeSet;
use std::sync::Arc;

use kerf_dra_driver::inventory::{Gpu, GpuInstance, MigMode};
use kerf_dra_driver::names::DeviceName;
use kerf_kubelet_plugin::testing::{Fuse, ModelHardware, Node, claim};
use kerf_kubelet_plugin::{ClaimSource, Files, Plugin};
use tokio::sync::watch;

use super::crash::{instances, scenarios};
use super::reconcile::{kubelet, minutes};
use super::{node, pci, prepare, unprepare};
use disk::{Left, PowerDisk};

pub(crate) type Devices = Vec<(&'static str, DeviceName)>;

/// What the power is cut in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Work {
    Prepare,
    Unprepare,
    /// A prepare of a claim that gets what another one has just given back.
    Next,
    /// A prepare of a claim that was allocated anew meanwhile.
    Moved,
}

/// What remembers the MIG mode over a reboot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// Nothing, as from Hopper on.
    Reset,
    /// The GPU, as Ampere's do.
    Kept,
}

/// What somebody else has made after the reboot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Foreign {
    Nothing,
    /// Instances with the ids that ours had.
    Beside,
    /// An instance in the place of the claim's.
    InTheWay,
}

/// What a power cut left of a node.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Wreck {
    left: Left,
    modes: Vec<bool>,
}

/// A process on a node with this disk.
pub(crate) fn plugin(node: &Node, files: impl Files + 'static, fuse: &Arc<Fuse>) -> Option<Plugin> {
    let inventory = node.machine.lock().unwrap().inventory.clone();
    Plugin::with_files(
        node.config(),
        Arc::new(ModelHardware::new(Arc::clone(&node.machine), Arc::clone(fuse))),
        Arc::clone(&node.claims) as Arc<dyn ClaimSource>,
        watch::Sender::new(Some(Arc::new(inventory))).subscribe(),
        Arc::new(files),
    )
    .ok()
}

/// Other devices of the same shape.
pub(crate) fn elsewhere(devices: &Devices) -> Devices {
    let moved = |device: &DeviceName| {
        let text = device.as_str();
        let text = [("-01-", "-x-"), ("-02-", "-01-"), ("-x-", "-02-"), ("-03-", "-y-"), ("-04-", "-03-")]
            .iter()
            .chain(&[("-y-", "-04-")])
            .fold(text.to_owned(), |text, (from, to)| text.replacen(from, to, 1));
        DeviceName::parse(&text).unwrap()
    };
    devices.iter().map(|(request, device)| (*request, moved(device))).collect()
}

/// All wrecks of some work, each once.
async fn wrecks(devices: &Devices, work: Work) -> BTreeSet<Wreck> {
    let mut wrecks = BTreeSet::new();
    for call in 0.. {
        let root = super::in_memory();
        let node = node(&root);
        let disk = PowerDisk::new(&node.root, &Left::new());
        let before = plugin(&node, disk.until(&Fuse::none()), &Fuse::none()).unwrap();
        match work {
            Work::Prepare => {}
            Work::Unprepare => {
                node.claims.put(claim("c", devices));
                prepare(&before, "c").await.unwrap();
            }
            Work::Moved => {
                node.claims.put(claim("c", &elsewhere(devices)));
                prepare(&before, "c").await.unwrap();
            }
            Work::Next => {
                node.claims.put(claim("former", devices));
                prepare(&before, "former").await.unwrap();
                unprepare(&before, "former").await.unwrap();
            }
        }
        drop(before);
        node.claims.put(claim("c", devices));
        let fuse = Fuse::at(call, true);
        let mut answered = false;
        if let Some(plugin) = plugin(&node, disk.until(&fuse), &fuse) {
            answered = match work {
                Work::Unprepare => unprepare(&plugin, "c").await.is_ok(),
                Work::Prepare | Work::Next | Work::Moved => prepare(&plugin, "c").await.is_ok(),
            };
        }
        let machine = node.machine.lock().unwrap();
        let is_enabled = |gpu: &Gpu| gpu.mig.as_ref().is_some_and(|mig| mig.current == MigMode::Enabled);
        let modes: Vec<bool> = machine.inventory.gpus.iter().map(is_enabled).collect();
        for left in disk.cuts() {
            if answered && work == Work::Unprepare {
                let entry =
                    left.keys().find(|path| path.starts_with("plugin/state") && !disk::is_half_written(path));
                assert_eq!(entry, None, "an unprepare that was answered is not forgotten");
            }
            wrecks.insert(Wreck { left, modes: modes.clone() });
        }
        if !fuse.is_dead() {
            assert!(call > 3 && answered, "the power was not cut where it matters");
            return wrecks;
        }
    }
    unreachable!()
}

/// A node that has booted after a power cut.
struct Rebooted {
    node: Node,
    disk: PowerDisk,
    foreign: Vec<GpuInstance>,
    root: tempfile::TempDir,
}

impl Rebooted {
    fn new(wreck: &Wreck, mode: Mode, foreign: Foreign) -> Self {
        let root = super::in_memory();
        let node = node(&root);
        node.boot("boot-2").unwrap();
        let mut machine = node.machine.lock().unwrap();
        for (gpu, enabled) in machine.inventory.gpus.iter_mut().zip(&wreck.modes) {
            let mig = gpu.mig.as_mut().unwrap();
            let is_enabled = *enabled && mode == Mode::Kept;
            mig.current = if is_enabled { MigMode::Enabled } else { MigMode::Disabled };
            mig.pending = mig.current;
        }
        match foreign {
            Foreign::Nothing => {}
            Foreign::Beside => (0..4).for_each(|start| machine.make_foreign(pci(1), 19, start, start == 1)),
            Foreign::InTheWay => (1..=4).for_each(|gpu| machine.make_foreign(pci(gpu), 0, 0, false)),
        }
        drop(machine);
        let foreign = instances(&node);
        Self { disk: PowerDisk::new(&node.root, &wreck.left), node, foreign, root }
    }

    async fn start(&self, claims: &[(&str, &Devices)]) -> Plugin {
        for (name, devices) in claims {
            self.node.claims.put(claim(name, devices));
        }
        let plugin = plugin(&self.node, self.disk.until(&Fuse::none()), &Fuse::none()).unwrap();
        plugin.start().await.unwrap();
        plugin
    }

    fn assert_clean(&self, what: &str) {
        assert_eq!(instances(&self.node), self.foreign, "{what}: only foreign instances are left");
        for folder in ["plugin/state/claims", "plugin/state/quarantine", "cdi"] {
            assert_eq!(self.node.files(folder), Vec::<String>::new(), "{what}: {folder}");
        }
    }
}

/// Shows every wreck of every work to a check, on one kind of machine after the
/// other: all of them for each would take minutes.
async fn cut_everywhere(foreign: &[Foreign], check: impl AsyncFn(Rebooted, &Devices, &str)) {
    // Without MIG mode nobody makes instances.
    let kept = foreign.iter().map(|foreign| (Mode::Kept, *foreign));
    let mut machines = kept.chain([(Mode::Reset, Foreign::Nothing)]).cycle();
    for (scenario, devices) in scenarios() {
        for work in [Work::Prepare, Work::Unprepare, Work::Next, Work::Moved] {
            for wreck in wrecks(&devices, work).await {
                let Some((mode, foreign)) = machines.next() else { return };
                let names: Vec<_> = wreck.left.keys().collect();
                let what = format!("{scenario}, {work:?}, {mode:?}, foreign {foreign:?}, left {names:?}");
                check(Rebooted::new(&wreck, mode, foreign), &devices, &what).await;
            }
        }
    }
}

#[tokio::test]
async fn a_claim_that_still_exists_is_prepared_after_the_reboot_and_leaves_nothing() {
    let all = [Foreign::Nothing, Foreign::Beside, Foreign::InTheWay];
    cut_everywhere(&all, async |rebooted, devices, what| {
        let plugin = rebooted.start(&[("c", devices), ("d", devices)]).await;
        plugin.reconcile_now().await;
        let observed = plugin.observe().await.unwrap();
        let foreign: usize = observed.foreign.values().map(Vec::len).sum();
        assert_eq!(foreign, rebooted.foreign.len(), "{what}: nobody owns what is foreign");
        let first = match prepare(&plugin, "c").await {
            Ok(first) => first,
            Err(error) => {
                assert!(error.contains("GPU instance"), "{what}: {error}");
                assert!(!rebooted.foreign.is_empty(), "{what}: {error}");
                unprepare(&plugin, "c").await.unwrap();
                return rebooted.assert_clean(what);
            }
        };
        assert_eq!(first.len(), devices.len(), "{what}");
        let partitions = devices.iter().filter(|(_, device)| device.as_str().contains("-mig-")).count();
        assert_eq!(instances(&rebooted.node).len(), rebooted.foreign.len() + partitions, "{what}");
        assert_eq!(rebooted.node.files("cdi"), ["k8s.gpu.nvidia.com-claim_c-uid.json"], "{what}");
        assert_eq!(prepare(&plugin, "c").await.as_ref(), Ok(&first), "{what}");
        let error = prepare(&plugin, "d").await.unwrap_err();
        assert!(error.contains("held by claim ns/c"), "{what}: {error}");
        unprepare(&plugin, "c").await.unwrap_or_else(|error| panic!("{what}: {error}"));
        prepare(&plugin, "d").await.unwrap_or_else(|error| panic!("{what}: {error}"));
        unprepare(&plugin, "d").await.unwrap_or_else(|error| panic!("{what}: {error}"));
        rebooted.assert_clean(what);
    })
    .await;
}

#[tokio::test]
async fn a_claim_that_is_gone_leaves_nothing_when_the_kubelet_asks() {
    cut_everywhere(&[Foreign::Nothing, Foreign::Beside], async |rebooted, _, what| {
        let plugin = rebooted.start(&[]).await;
        unprepare(&plugin, "c").await.unwrap_or_else(|error| panic!("{what}: {error}"));
        rebooted.assert_clean(what);
    })
    .await;
}

#[tokio::test]
async fn a_claim_that_is_gone_leaves_nothing_when_the_kubelet_has_forgotten_it() {
    cut_everywhere(&[Foreign::Nothing, Foreign::Beside], async |rebooted, devices, what| {
        let plugin = rebooted.start(&[("d", devices)]).await;
        plugin.reconcile_now().await;
        // It is in nobody's way meanwhile.
        prepare(&plugin, "d").await.unwrap_or_else(|error| panic!("{what}: {error}"));
        unprepare(&plugin, "d").await.unwrap_or_else(|error| panic!("{what}: {error}"));
        let kubelet = kubelet(&rebooted.root, vec![], || ());
        minutes(11).await;
        plugin.reconcile_now().await;
        kubelet.abort();
        rebooted.assert_clean(what);
    })
    .await;
}
