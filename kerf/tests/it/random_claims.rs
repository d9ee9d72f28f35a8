//! Random lives of random nodes: whatever the published counters allow, the
//! hardware takes and kerf does not refuse, and nothing of it is left behind.
//!
//! A taint is the one thing beside the counters that the allocator of this test
//! obeys. No refusal is excepted: what an operator or a scheduler cannot know
//! from what is published (an administrator who changes a mode or makes an
//! instance while claims run) does not happen here.
//!
//! `PROPTEST_CASES` asks for more cases, `PROPTEST_RNG_SEED` for those of a
//! seed; a failure prints its seed and the shortest life that fails.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher as _, RandomState};

use k8s_openapi::api::resource::v1::ResourceSliceSpec;
use kerf_dra_driver::fixtures::allocator::{left, offers};
use kerf_dra_driver::inventory::Inventory;
use kerf_dra_driver::names::{DeviceName, ProfileName};
use kerf_dra_driver::plan::find_placement;
use kerf_dra_driver::publication::Publication;
use kerf_dra_driver::taint::Conditions;
use kerf_emulator::model::built_in;
use kerf_kubelet_plugin::Plugin;
use kerf_kubelet_plugin::testing::Fuse;
use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::RngSeed;

use crate::emulated::Emulated;

/// A GPU: which model, and whether it starts with MIG on where it has MIG.
type Slot = (Index, bool);

/// A GPU instance that somebody else made before kerf came.
#[derive(Debug, Clone)]
struct Foreign {
    gpu: Index,
    profile: Index,
    start: Index,
    compute: Compute,
}

/// Which compute instance it has.
#[derive(Debug, Clone, Copy)]
enum Compute {
    None,
    Full,
    Part,
}

/// A kind of device among those that are free, and which of them: the first, as
/// the scheduler takes them, or any.
type Choice = (Index, Option<Index>);

#[derive(Debug, Clone)]
enum Event {
    /// Claims come at once, each for as many devices as it has choices.
    Claims(Vec<Vec<Choice>>),
    /// A claim is given back.
    Release(Index),
    /// The kubelet asks again.
    Again(Index),
    /// kerf is restarted.
    Restart,
    /// It is killed at a write, while claims come and one is given back. The
    /// kubelet asks the next one for all of that again.
    Kill { write: usize, after: bool, claims: Vec<Vec<Choice>>, release: Option<Index> },
    /// The machine is, and the kubelet asks again for all claims at once.
    Reboot,
}

fn slots() -> impl Strategy<Value = Vec<Slot>> {
    proptest::collection::vec((any::<Index>(), proptest::bool::weighted(0.7)), 1..4)
}

fn foreign() -> impl Strategy<Value = Vec<Foreign>> {
    let compute = prop_oneof![Just(Compute::None), Just(Compute::Full), Just(Compute::Part)];
    let one = (any::<Index>(), any::<Index>(), any::<Index>(), compute)
        .prop_map(|(gpu, profile, start, compute)| Foreign { gpu, profile, start, compute });
    prop_oneof![Just(Vec::new()), proptest::collection::vec(one, 1..4)]
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let choice = (any::<Index>(), proptest::option::of(any::<Index>()));
    let claim = proptest::collection::vec(choice, 1..4);
    let claims = proptest::collection::vec(claim, 1..4).boxed();
    let kill = (0..30_usize, any::<bool>(), claims.clone(), proptest::option::of(any::<Index>()));
    let event = prop_oneof![
        8 => claims.prop_map(Event::Claims),
        6 => any::<Index>().prop_map(Event::Release),
        1 => any::<Index>().prop_map(Event::Again),
        1 => Just(Event::Restart),
        2 => kill.prop_map(|(write, after, claims, release)| Event::Kill { write, after, claims, release }),
        1 => Just(Event::Reboot),
    ];
    proptest::collection::vec(event, 1..24)
}

fn config() -> ProptestConfig {
    let default = ProptestConfig::default();
    let seed = match default.rng_seed {
        RngSeed::Fixed(seed) => seed,
        RngSeed::Random => RandomState::new().hash_one(()),
    };
    eprintln!("PROPTEST_RNG_SEED={seed} makes these lives again");
    ProptestConfig {
        cases: if std::env::var_os("PROPTEST_CASES").is_some() { default.cases } else { 48 },
        max_shrink_iters: 400,
        max_shrink_time: 60_000,
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(seed),
        ..default
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn what_the_counters_allow_is_prepared_and_leaves_nothing(
        slots in slots(), foreign in foreign(), events in events(),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(live(&slots, &foreign, &events)).map_err(TestCaseError::fail)?;
    }
}

/// One life of a node.
struct Life {
    machine: Emulated,
    /// The GPUs as they were found; their profiles never change.
    inventory: Inventory,
    /// The GPU instances of somebody else.
    foreign: BTreeSet<(String, u32, u32)>,
    /// Only while one follows another there is none.
    plugin: Option<Plugin>,
    publication: Publication,
    slices: Vec<ResourceSliceSpec>,
    claims: BTreeMap<String, Vec<DeviceName>>,
    made: usize,
}

async fn live(slots: &[Slot], foreign: &[Foreign], events: &[Event]) -> Result<(), String> {
    let machine = Emulated::new(&slots.iter().map(text).collect::<Vec<_>>());
    if machine.lacks_nodes() {
        return Ok(());
    }
    for foreign in foreign {
        make(&machine, foreign);
    }
    let plugin = machine.plugin().await;
    let mut publication = Publication::default();
    let slices = machine.publish(&plugin, &mut publication, &Conditions::default()).await;
    let foreign = machine.instances();
    let claims = BTreeMap::new();
    let inventory = machine.inventory();
    let mut life =
        Life { machine, inventory, foreign, plugin: Some(plugin), publication, slices, claims, made: 0 };
    for event in events {
        life.meet(event).await.map_err(|error| format!("{event:?}: {error}"))?;
        life.check().await;
    }
    while let Some((name, _)) = life.claims.pop_first() {
        life.machine.unprepare(life.plugin(), &name).await?;
    }
    life.check().await;
    Ok(())
}

impl Life {
    fn plugin(&self) -> &Plugin {
        self.plugin.as_ref().unwrap()
    }

    async fn restart(&mut self) {
        self.plugin = None;
        self.plugin = Some(self.machine.plugin().await);
    }

    async fn meet(&mut self, event: &Event) -> Result<(), String> {
        match event {
            Event::Claims(claims) => {
                let new = self.allocate(claims);
                self.machine.prepare(self.plugin(), &new).await?;
                self.claims.extend(new);
            }
            Event::Release(which) => {
                if let Some(name) = self.one_of(*which) {
                    self.machine.unprepare(self.plugin(), &name).await?;
                    self.claims.remove(&name);
                }
            }
            Event::Again(which) => {
                if let Some(name) = self.one_of(*which) {
                    let again = BTreeMap::from([(name.clone(), self.claims[&name].clone())]);
                    self.machine.prepare(self.plugin(), &again).await?;
                }
            }
            Event::Restart => self.restart().await,
            Event::Kill { write, after, claims, release } => {
                let new = self.allocate(claims);
                let released = release.and_then(|which| self.one_of(which));
                self.plugin = None;
                let fuse = Fuse::at(*write, *after);
                // It may die while it starts, and whatever it answers.
                if let Ok(plugin) = self.machine.node.plugin_with(self.machine.hardware(), &fuse) {
                    let _ = self.machine.prepare(&plugin, &new).await;
                    if let Some(name) = &released {
                        let _ = self.machine.unprepare(&plugin, name).await;
                    }
                }
                self.restart().await;
                self.machine.prepare(self.plugin(), &new).await?;
                self.claims.extend(new);
                if let Some(name) = released {
                    self.machine.unprepare(self.plugin(), &name).await?;
                    self.claims.remove(&name);
                }
            }
            // What somebody else made would be gone, and with it what is published.
            Event::Reboot if !self.foreign.is_empty() => {}
            Event::Reboot => {
                self.machine.control().reboot().unwrap();
                self.made += 1;
                self.machine.node.boot(&format!("boot-of-{}", self.made)).unwrap();
                self.restart().await;
                self.machine.prepare(self.plugin(), &self.claims).await?;
            }
        }
        Ok(())
    }

    fn one_of(&self, which: Index) -> Option<String> {
        (!self.claims.is_empty())
            .then(|| self.claims.keys().nth(which.index(self.claims.len())).unwrap().clone())
    }

    /// Gives out devices for claims, as far as there are any.
    fn allocate(&mut self, claims: &[Vec<Choice>]) -> BTreeMap<String, Vec<DeviceName>> {
        let mut given: BTreeSet<DeviceName> = self.claims.values().flatten().cloned().collect();
        let mut new = BTreeMap::new();
        for choices in claims {
            let mut devices = Vec::new();
            for (kind, which) in choices {
                let mut kinds: BTreeMap<_, Vec<DeviceName>> = BTreeMap::new();
                let allocated = given.iter().map(DeviceName::as_str).collect();
                assert!(left(&self.slices, &allocated).values().all(|left| *left >= 0), "{given:?}");
                for device in offers(&self.slices, &allocated) {
                    let device = DeviceName::parse(&device.name).unwrap();
                    kinds.entry(self.kind(&device)).or_default().push(device);
                }
                if let Some(free) = kinds.values().nth(kind.index(kinds.len().max(1))) {
                    let device = &free[which.map_or(0, |which| which.index(free.len()))];
                    devices.push(device.clone());
                    given.insert(device.clone());
                }
            }
            if !devices.is_empty() {
                self.made += 1;
                new.insert(format!("c{}", self.made), devices);
            }
        }
        new
    }

    /// What a class selects by: the profile, or that it is a whole GPU.
    fn kind(&self, device: &DeviceName) -> Option<ProfileName> {
        let (_, profile, _) = find_placement(self.inventory.gpu(device.gpu()?)?, device)?;
        Some(profile.name.clone())
    }

    /// The hardware has what the claims have, and what somebody else made;
    /// neither changes what is published.
    async fn check(&mut self) {
        let partitions = self.claims.values().flatten().filter_map(|device| {
            let gpu = self.inventory.gpu(device.gpu()?)?;
            let (_, profile, placement) = find_placement(gpu, device)?;
            Some((gpu.pci.to_string(), profile.id.0, placement.start))
        });
        let expected = self.foreign.iter().cloned().chain(partitions).collect();
        assert_eq!(self.machine.instances(), expected, "{:?}", self.claims);
        let plugin = self.plugin.as_ref().unwrap();
        let slices = self.machine.publish(plugin, &mut self.publication, &Conditions::default()).await;
        assert_eq!(slices, self.slices, "{:?}", self.claims);
        let files: usize = self.machine.files_of_claims().len();
        assert_eq!(files, 2 * self.claims.len(), "{:?}", self.machine.files_of_claims());
    }
}

/// The GPU as the emulator names it.
fn text((model, on): &Slot) -> String {
    let models = built_in().unwrap();
    let (key, model) = models.iter().nth(model.index(models.len())).unwrap();
    if *on && model.mig.is_some() { format!("{key}:mig=on") } else { key.clone() }
}

/// Makes an instance as an administrator would, where the GPU has room.
fn make(machine: &Emulated, foreign: &Foreign) {
    let control = machine.control();
    let state = machine.state();
    let at = foreign.gpu.index(state.gpus.len());
    let Some(mig) = &control.model(&state.gpus[at]).unwrap().mig else { return };
    let profile = &mig.profiles[foreign.profile.index(mig.profiles.len())];
    let start = profile.starts[foreign.start.index(profile.starts.len())];
    let Ok((id, _)) = control.create_gpu_instance(at, profile.id, Some((start, profile.size))) else {
        return;
    };
    let compute = match foreign.compute {
        Compute::None => return,
        Compute::Full => mig.full_compute(profile),
        Compute::Part => mig.compute_profiles.iter().find(|part| profile.compute.contains(&part.id)),
    };
    control.create_compute_instance(at, id, compute.unwrap().id, None).unwrap();
}
