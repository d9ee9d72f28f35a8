//! What kerf is doing when it is struck.

use std::path::Path;

use kerf_dra_driver::journal::Entry;
use kerf_kubelet_plugin::Files as _;
use kerf_kubelet_plugin::testing::{Fuse, Strike};

use crate::scenario::{BYSTANDER, Scenario, pci};
use crate::world::{Process, World};

/// The claim that all is about.
pub(crate) const CLAIM: &str = "c";

/// A piece of work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// A prepare of a new claim.
    Prepare,
    /// A prepare of a claim that gets what another one has just given back.
    Next,
    /// A prepare of a claim that was allocated anew meanwhile.
    Moved,
    /// A prepare whose last call to hardware fails: it undoes what it made.
    Refused,
    /// A prepare of a claim whose partitions somebody destroyed by hand.
    Mend,
    /// A prepare of a claim whose entry cannot be read, without a spec.
    PrepareUnreadable,
    /// An unprepare.
    Unprepare,
    /// An unprepare of a claim whose entry cannot be read, without a spec.
    UnprepareUnreadable,
    /// A start after a prepare that was killed.
    AfterPrepare,
    /// A start after an unprepare that was killed.
    AfterUnprepare,
    /// A start and reconcile with the whole journal lost under running pods.
    JournalLost,
    /// A start and reconcile with an entry that is half, empty, or of a version
    /// that is not known.
    EntryUnreadable,
    /// A start and reconcile with the CDI folder empty.
    SpecsLost,
    /// Reconcile, where the kubelet has forgotten the claim.
    Forgotten,
    /// A start and reconcile in another boot.
    Rebooted,
    /// What is published changes, and is stored before.
    Publish,
}

/// An earlier strike that a piece of work is about.
pub(crate) type Prelude = Option<(usize, Strike)>;

impl Work {
    /// All of them.
    pub const ALL: [Self; 16] = [
        Self::Prepare,
        Self::Next,
        Self::Moved,
        Self::Refused,
        Self::Mend,
        Self::PrepareUnreadable,
        Self::Unprepare,
        Self::UnprepareUnreadable,
        Self::AfterPrepare,
        Self::AfterUnprepare,
        Self::JournalLost,
        Self::EntryUnreadable,
        Self::SpecsLost,
        Self::Forgotten,
        Self::Rebooted,
        Self::Publish,
    ];

    /// What it is called.
    pub fn name(self) -> &'static str {
        match self {
            Self::Prepare => "prepare",
            Self::Next => "prepare, right after another claim's unprepare",
            Self::Moved => "prepare, allocated anew meanwhile",
            Self::Refused => "prepare that the hardware refuses in the end",
            Self::Mend => "prepare, the partition destroyed by hand",
            Self::PrepareUnreadable => "prepare, the entry unreadable and the spec gone",
            Self::Unprepare => "unprepare",
            Self::UnprepareUnreadable => "unprepare, the entry unreadable and the spec gone",
            Self::AfterPrepare => "start after a killed prepare",
            Self::AfterUnprepare => "start after a killed unprepare",
            Self::JournalLost => "start, the journal lost",
            Self::EntryUnreadable => "start, the entry unreadable",
            Self::SpecsLost => "start, the CDI specs lost",
            Self::Forgotten => "reconcile, the claim gone for long",
            Self::Rebooted => "start in another boot",
            Self::Publish => "publish",
        }
    }

    /// The work, and the kind of call in it, that comes before this work: there
    /// is none of this work where there is no such call.
    pub(crate) fn prelude(self) -> Option<(Self, &'static [&'static str], Strike)> {
        const MADE: &[&str] = &["create compute instance", "set MIG mode"];
        match self {
            Self::Refused => Some((Self::Prepare, MADE, Strike::Fails)),
            Self::AfterPrepare => Some((Self::Prepare, MADE, Strike::KilledAfter)),
            Self::AfterUnprepare => {
                Some((Self::Unprepare, &["destroy compute instance"], Strike::KilledAfter))
            }
            _ => None,
        }
    }

    /// Whether there is such work in a scenario.
    pub(crate) fn applies(self, scenario: &Scenario) -> bool {
        self != Self::Mend || scenario.makes_partitions()
    }

    /// Whether a pod wants the claim.
    pub(crate) fn has_pod(self) -> bool {
        !matches!(self, Self::Unprepare | Self::UnprepareUnreadable | Self::AfterUnprepare | Self::Forgotten)
    }

    /// Whether the kubelet asks for it.
    pub(crate) fn is_asked_for(self) -> bool {
        matches!(self, Self::Unprepare | Self::UnprepareUnreadable)
    }

    /// Whether nothing but its entry, which cannot be read, tells of the claim.
    pub(crate) fn is_unreadable(self) -> bool {
        matches!(self, Self::PrepareUnreadable | Self::UnprepareUnreadable | Self::EntryUnreadable)
    }

    /// What was before.
    pub(crate) async fn set_up(self, world: &mut World, scenario: &Scenario, prelude: Prelude) {
        let killed = prelude.map(|strike| Fuse::with(vec![strike])).unwrap_or_default();
        let process = world.process(&Fuse::none()).unwrap();
        let claim = scenario.claim(CLAIM, &scenario.devices);
        match self {
            Self::Prepare | Self::Refused => {}
            Self::Next => {
                world.put("former", scenario.claim("former", &scenario.devices));
                world.prepare(&process, "former").await.unwrap();
                world.unprepare(&process, "former").await.unwrap();
                world.delete("former");
            }
            Self::Moved => {
                world.put(CLAIM, scenario.claim(CLAIM, &scenario.former));
                world.prepare(&process, CLAIM).await.unwrap();
            }
            Self::AfterPrepare => {
                drop(process);
                let process = world.process(&killed).unwrap();
                world.put(CLAIM, claim.clone());
                world.prepare(&process, CLAIM).await.unwrap_err();
            }
            _ => {
                world.put(CLAIM, claim.clone());
                world.prepare(&process, CLAIM).await.unwrap();
            }
        }
        world.put(CLAIM, claim);
        match self {
            Self::AfterUnprepare => {
                let process = world.process(&killed).unwrap();
                world.unprepare(&process, CLAIM).await.unwrap_err();
            }
            Self::Mend => {
                let entry = entry(world);
                let mut machine = world.node.machine.lock().unwrap();
                for gpu in &mut machine.inventory.gpus {
                    let pci = gpu.pci;
                    let instances = gpu.mig.as_mut().map(|mig| &mut mig.instances);
                    instances.unwrap().retain(|one| !entry.owns(&entry.boot_id, pci, one));
                }
            }
            Self::JournalLost => {
                remove_all(world, "plugin/state/claims");
            }
            Self::EntryUnreadable => {
                let mut later = entry(world);
                later.version += 9;
                let broken = [b"{".to_vec(), Vec::new(), later.encode()];
                damage(world, &broken[scenario.name.len() % broken.len()]);
            }
            Self::SpecsLost => {
                remove_all(world, "cdi");
            }
            Self::Publish => {
                // Of one GPU more is taken, and of another the record is lost.
                world.make_foreign(&[(pci(2), 19, 6, true)]);
                remove(world, &format!("plugin/state/gpus/{}.json", pci(3).dashed()));
            }
            Self::Forgotten => world.delete(CLAIM),
            Self::Rebooted => world.boot("boot-2", &world.modes()),
            _ => {}
        }
    }

    /// Does it.
    pub(crate) async fn run(self, world: &mut World, process: &Process) -> Result<(), String> {
        if matches!(self, Self::PrepareUnreadable | Self::UnprepareUnreadable) {
            // While it runs: at a start this would be seen without any work.
            damage(world, b"{");
            remove(world, &format!("cdi/k8s.gpu.nvidia.com-claim_{CLAIM}-uid.json"));
            // Nobody can tell any more that these were made for the claim.
            let bystander = world.process(&Fuse::none()).unwrap().plugin.journal().borrow().clone();
            world.foreign = world
                .instances()
                .into_iter()
                .filter(|(gpu, instance)| {
                    let owner = bystander.owner(process.plugin.boot_id(), *gpu, instance);
                    owner.is_none_or(|entry| entry.claim.name != BYSTANDER)
                })
                .collect();
        }
        match self {
            Self::Unprepare | Self::UnprepareUnreadable => world.unprepare(process, CLAIM).await,
            Self::Publish => crate::scheduler::published(world, process).await.map(drop),
            Self::Forgotten => {
                world.reconcile_for_long(process, &[BYSTANDER]).await;
                Ok(())
            }
            Self::AfterPrepare
            | Self::AfterUnprepare
            | Self::JournalLost
            | Self::EntryUnreadable
            | Self::SpecsLost
            | Self::Rebooted => {
                process.plugin.start().await.map_err(|error| kerf_kubelet_plugin::chain(&error))?;
                process.plugin.reconcile_now().await;
                Ok(())
            }
            _ => world.prepare(process, CLAIM).await,
        }
    }
}

/// The claim's entry.
fn entry(world: &World) -> Entry {
    let view = world.process(&Fuse::none()).unwrap().plugin.journal().borrow().clone();
    let entry = view.entries.values().find(|entry| entry.claim.name == CLAIM);
    Entry::clone(entry.unwrap())
}

fn remove(world: &World, path: &str) {
    let path = world.node.root.join(Path::new(path));
    world.disk.remove(&path).unwrap();
    world.disk.sync_folder(path.parent().unwrap()).unwrap();
}

/// Somebody removes a folder with all that is in it.
fn remove_all(world: &World, folder: &str) {
    for name in world.node.files(folder) {
        remove(world, &format!("{folder}/{name}"));
    }
    std::fs::remove_dir(world.node.root.join(folder)).unwrap();
}

fn damage(world: &World, content: &[u8]) {
    let files = world.node.files("plugin/state/claims");
    let name = files.into_iter().find(|name| name.starts_with(&format!("{CLAIM}-uid"))).unwrap();
    world.disk.damage(&format!("plugin/state/claims/{name}"), content);
}
