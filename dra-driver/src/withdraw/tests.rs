//! A node's life, drawn at random: GPUs lost, settings changed, foreign
//! instances, claims, restarts; a scheduler that may be half a minute behind.

use std::collections::{BTreeMap, VecDeque};

use k8s_openapi::api::resource::v1::{Device, ResourceSliceSpec};
use proptest::prelude::*;

use super::*;
use crate::fixtures::allocator::{devices, offers};
use crate::fixtures::{Model, gpu, instance, inventory, mig_on, names, settings};
use crate::inventory::{Gpu, GpuInstance, Placement};
use crate::layout::layout;
use crate::model::{GpuModel, Settings};
use crate::names::PciAddress;
use crate::published::merge;
use crate::taint::Conditions;

const SECOND: Duration = Duration::from_secs(1);

#[derive(Debug, Clone)]
enum Event {
    Allocate { pick: usize, behind: usize },
    Prepare(usize),
    Release(usize),
    Lose(usize),
    Return(usize),
    Filter(usize),
    Foreign { gpu: usize, pick: usize },
    ForeignGone(usize),
    Upgrade(bool),
    Wait(u64),
    List,
    Restart { clock: u64 },
    RecordsLost,
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let event = prop_oneof![
        6 => (any::<usize>(), 0..4_usize).prop_map(|(pick, behind)| Event::Allocate { pick, behind }),
        4 => any::<usize>().prop_map(Event::Prepare),
        3 => any::<usize>().prop_map(Event::Release),
        1 => (0..3_usize).prop_map(Event::Lose),
        2 => (0..3_usize).prop_map(Event::Return),
        2 => (0..3_usize).prop_map(Event::Filter),
        2 => (0..3_usize, any::<usize>()).prop_map(|(gpu, pick)| Event::Foreign { gpu, pick }),
        1 => (0..3_usize).prop_map(Event::ForeignGone),
        1 => any::<bool>().prop_map(Event::Upgrade),
        6 => prop_oneof![Just(1), Just(29), Just(31), Just(61)].prop_map(Event::Wait),
        6 => Just(Event::List),
        1 => any::<u64>().prop_map(|clock| Event::Restart { clock }),
        1 => Just(Event::RecordsLost),
    ];
    prop::collection::vec(event, 20..80)
}

/// What a claim was given.
#[derive(Debug, Clone)]
struct Claim {
    device: Device,
    /// Whether it is an instance that somebody else made.
    fixed: bool,
    /// Whether the journal has it.
    prepared: bool,
    /// Whether the records were never lost since it was given.
    cost_known: bool,
}

#[derive(Debug)]
struct World {
    now: Timestamp,
    settings: Settings,
    gpus: Vec<Gpu>,
    absent: BTreeSet<PciAddress>,
    foreign: BTreeMap<PciAddress, Vec<GpuInstance>>,
    records: BTreeMap<PciAddress, GpuRecord>,
    settling: Settling,
    list: Option<ClaimList>,
    claims: Vec<Claim>,
    /// What the API server stored, with the time; the newest last.
    stored: VecDeque<(Timestamp, Vec<ResourceSliceSpec>)>,
}

/// The GPU and the memory slices of a device; none of them for a whole GPU.
fn place(world: &World, name: &str) -> (PciAddress, Option<Placement>) {
    let name = DeviceName::parse(name).expect("a name");
    let pci = name.gpu().expect("a GPU");
    let gpu = world.gpus.iter().find(|gpu| gpu.pci == pci).expect("a GPU of this world");
    let placements = gpu.mig.iter().flat_map(|mig| &mig.profiles).flat_map(|profile| {
        profile.placements.iter().map(|at| (DeviceName::partition(pci, &profile.name, at.start), *at))
    });
    (pci, placements.into_iter().find(|(known, _)| *known == name).map(|(_, placement)| placement))
}

fn overlap(one: (PciAddress, Option<Placement>), other: (PciAddress, Option<Placement>)) -> bool {
    one.0 == other.0
        && match (one.1, other.1) {
            (Some(one), Some(other)) => one.overlaps(other),
            _ => true,
        }
}

impl World {
    fn new() -> Self {
        let gpus = vec![
            mig_on(gpu(Model::A100, "0000:01:00.0")),
            gpu(Model::H100, "0000:02:00.0"),
            gpu(Model::L4, "0000:03:00.0"),
        ];
        let mut world = Self {
            now: Timestamp(1_000_000),
            settings: settings(),
            gpus,
            absent: BTreeSet::new(),
            foreign: BTreeMap::new(),
            records: BTreeMap::new(),
            settling: Settling::default(),
            list: None,
            claims: Vec::new(),
            stored: VecDeque::new(),
        };
        world.publish();
        world
    }

    fn held(&self, everything: bool) -> BTreeSet<DeviceName> {
        let held = self.claims.iter().filter(|claim| everything || claim.prepared);
        names(held.map(|claim| claim.device.name.as_str()))
    }

    /// What the owner task does after each event.
    fn publish(&mut self) {
        let held = self.held(false);
        self.merge(&held);
        let decision = decide(self.records.values(), &self.settling, &held, self.list.as_ref(), self.now);
        if !decision.withdraw.is_empty() {
            self.records.values_mut().for_each(|record| record.withdraw(&decision.withdraw));
            self.merge(&held);
        }
        let records: Vec<_> = self.records.values().cloned().collect();
        let slices = layout(&self.settings, &records, &Conditions::default());
        self.settling.keep(self.records.values());
        self.settling.stored(self.records.values(), self.now);
        self.check(&slices);
        self.stored.push_back((self.now, slices));
        // A scheduler that is further behind has been told otherwise.
        let settled = |since: Timestamp, now: Timestamp| since.after(SETTLE) <= now;
        while self.stored.len() > 1 && settled(self.stored[1].0, self.now) {
            self.stored.pop_front();
        }
    }

    fn merge(&mut self, held: &BTreeSet<DeviceName>) {
        let inventory = inventory(self.gpus.clone());
        for gpu in &self.gpus {
            let foreign = self.foreign.get(&gpu.pci).map(Vec::as_slice).unwrap_or_default();
            let model = GpuModel::of(&self.settings, &inventory, gpu, foreign);
            let current = (!self.absent.contains(&gpu.pci)).then_some(&model);
            let previous = self.records.get(&gpu.pci);
            let Some(record) = merge(gpu.pci, previous, current, held) else {
                self.records.remove(&gpu.pci);
                continue;
            };
            assert_eq!(merge(gpu.pci, Some(&record), current, held).as_ref(), Some(&record), "merging twice");
            let json = serde_json::to_vec(&record).expect("a record");
            self.records.insert(gpu.pci, serde_json::from_slice(&json).expect("a record"));
        }
    }

    /// Nothing that a claim holds is missing or costs something else, unless
    /// it could not be published and its GPU is closed.
    fn check(&self, slices: &[ResourceSliceSpec]) {
        for claim in &self.claims {
            let (pci, _) = place(self, &claim.device.name);
            match devices(slices).find(|device| device.name == claim.device.name) {
                Some(device) => assert!(
                    !claim.cost_known || device.consumes_counters == claim.device.consumes_counters,
                    "{} was re-costed",
                    claim.device.name
                ),
                None => assert!(
                    devices(slices)
                        .filter(|device| place(self, &device.name).0 == pci)
                        .all(|d| d.taints.is_some()),
                    "{} was withdrawn",
                    claim.device.name
                ),
            }
        }
    }

    fn allocate(&mut self, pick: usize, behind: usize) {
        let view = &self.stored[self.stored.len().saturating_sub(1 + behind)].1;
        let allocated = self.claims.iter().map(|claim| claim.device.name.as_str()).collect();
        let free = offers(view, &allocated);
        let Some(device) = (!free.is_empty()).then(|| free[pick % free.len()].clone()) else { return };
        let claim =
            Claim { fixed: device.consumes_counters.is_none(), device, prepared: false, cost_known: true };
        for other in &self.claims {
            // A static partition exists: whoever waits for the same place is
            // refused by the node. Nothing that is prepared is met by it.
            let refused = claim.fixed && !other.prepared || other.fixed && !claim.fixed;
            assert!(
                refused || !overlap(place(self, &claim.device.name), place(self, &other.device.name)),
                "{} was given out beside {}",
                claim.device.name,
                other.device.name
            );
        }
        self.claims.push(claim);
    }

    /// The node refuses what is occupied.
    fn prepare(&mut self, pick: usize) {
        let waiting: Vec<usize> =
            (0..self.claims.len()).filter(|index| !self.claims[*index].prepared).collect();
        let Some(index) = (!waiting.is_empty()).then(|| waiting[pick % waiting.len()]) else { return };
        let claim = &self.claims[index];
        let at = place(self, &claim.device.name);
        let met =
            self.claims.iter().any(|other| other.prepared && overlap(at, place(self, &other.device.name)));
        let foreign =
            self.foreign.get(&at.0).into_iter().flatten().any(|one| overlap(at, (at.0, Some(one.placement))));
        if !met && (claim.fixed || !foreign) && !self.absent.contains(&at.0) {
            self.claims[index].prepared = true;
        }
    }

    /// Another process, maybe in another boot: it has the records as a former
    /// version wrote them, with the time of a clock that was set since.
    fn restart(&mut self, clock: u64) {
        (self.list, self.settling, self.now) = (None, Settling::default(), Timestamp(clock % 1_000_000));
        for record in self.records.values_mut() {
            let mut json = serde_json::to_value(&*record).expect("a record");
            for device in json["devices"].as_object_mut().expect("devices").values_mut() {
                if let Some(leaving) = device.get_mut("leaving") {
                    leaving["taintedSince"] = clock.into();
                }
            }
            *record = serde_json::from_value(json).expect("a record");
        }
        // Schedulers know what was published before.
        self.stored.iter_mut().for_each(|(since, _)| *since = self.now);
    }

    fn step(&mut self, event: &Event) {
        match *event {
            Event::Allocate { pick, behind } => self.allocate(pick, behind),
            Event::Prepare(pick) => self.prepare(pick),
            Event::Release(pick) => {
                if !self.claims.is_empty() {
                    self.claims.remove(pick % self.claims.len());
                }
            }
            Event::Lose(gpu) => {
                self.absent.insert(self.gpus[gpu].pci);
            }
            Event::Return(gpu) => {
                self.absent.remove(&self.gpus[gpu].pci);
            }
            Event::Filter(which) => {
                let filter = ["all", "1g.5gb,3g.40gb", "none"][which];
                self.settings.mig_profiles = filter.parse().expect("a filter");
            }
            Event::Foreign { gpu, pick } => {
                let gpu = &self.gpus[gpu];
                let profiles = gpu.mig.iter().flat_map(|mig| &mig.profiles);
                let all: Vec<_> = profiles
                    .flat_map(|profile| {
                        profile.placements.iter().map(|at| instance(gpu, profile.name.as_str(), at.start))
                    })
                    .collect();
                if !all.is_empty() {
                    let next = all[pick % all.len()].clone();
                    let instances = self.foreign.entry(gpu.pci).or_default();
                    if instances.iter().all(|other| !other.placement.overlaps(next.placement)) {
                        instances.push(next);
                    }
                }
            }
            Event::ForeignGone(gpu) => {
                self.foreign.remove(&self.gpus[gpu].pci);
            }
            Event::Upgrade(more) => {
                for profile in
                    self.gpus.iter_mut().flat_map(|gpu| &mut gpu.mig).flat_map(|mig| &mut mig.profiles)
                {
                    profile.multiprocessors = profile.compute_slices * if more { 14 } else { 13 };
                }
            }
            Event::Wait(seconds) => {
                self.now = self.now.after(SECOND * u32::try_from(seconds).expect("seconds"));
            }
            Event::List => {
                self.list = Some(ClaimList { began: self.now, allocated: self.held(true) });
            }
            Event::Restart { clock } => self.restart(clock),
            Event::RecordsLost => {
                // The claims are listed before anything is published again.
                self.records.clear();
                let held = self.held(true);
                self.merge(&held);
                // What a device cost before nobody knows any more.
                self.claims.iter_mut().for_each(|claim| claim.cost_known = false);
            }
        }
        self.publish();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, max_shrink_iters: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn nothing_is_handed_out_twice_whatever_happens_to_a_node(events in events()) {
        let mut world = World::new();
        for event in &events {
            world.step(event);
        }
    }
}

#[test]
fn what_nobody_holds_goes_in_the_end() {
    let mut world = World::new();
    world.step(&Event::Filter(2));
    let tainted = |world: &World| world.records.values().flat_map(GpuRecord::leaving).count();
    assert_eq!(tainted(&world), 50);
    for event in [Event::List, Event::Wait(29), Event::List, Event::Wait(1)] {
        world.step(&event);
        assert_eq!(tainted(&world), 50, "no LIST yet that began after the taints had settled");
    }
    world.step(&Event::List);
    assert_eq!(tainted(&world), 0);
}

fn leaving(tainted_since: Option<u64>) -> (GpuRecord, Settling) {
    let gpu = mig_on(gpu(Model::A30, "0000:65:00.0"));
    let model = GpuModel::of(&settings(), &inventory([gpu.clone()]), &gpu, &[]);
    let record = merge(gpu.pci, None, Some(&model), &BTreeSet::new()).expect("there");
    let filter = Settings {
        mig_profiles: "1g.6gb,2g.12gb,2g.12gb+me,1g.6gb+me".parse().expect("names"),
        ..settings()
    };
    let model = GpuModel::of(&filter, &inventory([gpu.clone()]), &gpu, &[]);
    let record = merge(gpu.pci, Some(&record), Some(&model), &BTreeSet::new()).expect("there");
    let mut settling = Settling::default();
    if let Some(since) = tainted_since {
        settling.stored([&record], Timestamp(since));
    }
    (record, settling)
}

#[test]
fn a_list_is_asked_for_when_the_taint_has_settled_and_not_before() {
    let all = || names(["gpu-0000-65-00-0-mig-4g-24gb-0"]);
    let none = BTreeSet::new;
    let list = |began: u64, allocated: BTreeSet<DeviceName>| ClaimList { began: Timestamp(began), allocated };
    let list_at = |(record, settling): &(GpuRecord, Settling),
                   held: &BTreeSet<DeviceName>,
                   list: Option<ClaimList>,
                   now: u64| {
        let decision = decide([record], settling, held, list.as_ref(), Timestamp(now));
        assert_eq!(decision.keep.len() + decision.withdraw.len(), 1);
        (decision.withdraw.len(), decision.list_at.map(|at| at.0))
    };
    assert_eq!(list_at(&leaving(None), &none(), None, 99_000), (0, None), "the taint is not stored yet");
    let record = leaving(Some(10_000));
    assert_eq!(list_at(&record, &none(), None, 11_000), (0, Some(40_000)));
    assert_eq!(list_at(&record, &none(), None, 50_000), (0, Some(50_000)));
    assert_eq!(
        list_at(&record, &none(), Some(list(39_999, none())), 50_000),
        (0, Some(50_000)),
        "began too early"
    );
    assert_eq!(list_at(&record, &none(), Some(list(40_000, none())), 50_000), (1, None));
    assert_eq!(
        list_at(&record, &all(), Some(list(40_000, none())), 50_000),
        (0, None),
        "the journal holds it"
    );
    assert_eq!(
        list_at(&record, &none(), Some(list(40_000, all())), 50_000),
        (0, Some(100_000)),
        "a claim has it"
    );
    assert_eq!(list_at(&record, &none(), Some(list(40_000, none())), 100_000), (0, Some(100_000)), "too old");
    assert_eq!(
        list_at(&record, &none(), Some(list(60_000, none())), 50_000),
        (0, Some(50_000)),
        "of the future"
    );
}
