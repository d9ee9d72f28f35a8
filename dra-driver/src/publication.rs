//! What a node publishes next: everything that is known, put together.
//!
//! [`Publication`] holds the records of the node's GPUs and is asked again
//! whenever something is new. It decides which records have to be stored, what
//! is to be published after they are, and when a LIST of claims is due. It
//! stores and publishes nothing itself.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::resource::v1::ResourceSliceSpec;

use crate::health::{self, Health};
use crate::inventory::{GpuInstance, Inventory};
use crate::layout::{layout, layout_without_counters};
use crate::links::FewerLinks;
use crate::model::{GpuModel, Settings};
use crate::names::{DeviceName, PciAddress};
use crate::published::{GpuRecord, merge};
use crate::taint::Conditions;
use crate::withdraw::{self, ClaimList, Settling, Timestamp};

/// The records of a node's GPUs, as they are stored.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Publication {
    records: BTreeMap<PciAddress, GpuRecord>,
    settling: Settling,
    published: Vec<DeviceName>,
    fewer_links: FewerLinks,
}

/// What is known at an instant.
#[derive(Debug, Clone, Copy)]
pub struct Knowledge<'a> {
    /// The operator's choices.
    pub settings: &'a Settings,
    /// What is there. Nothing where the driver does not answer: then every GPU
    /// that was published counts as lost.
    pub inventory: &'a Inventory,
    /// The GPU instances that no journal entry made, decided under their GPU's
    /// lock.
    pub foreign: &'a BTreeMap<PciAddress, Vec<GpuInstance>>,
    /// The devices that claims hold, by the journal.
    pub held: &'a BTreeSet<DeviceName>,
    /// The last LIST of claims.
    pub list: Option<&'a ClaimList>,
    /// What else keeps devices from being given out.
    pub conditions: &'a Conditions,
    /// Whether the API server holds what was published last.
    pub is_stored: bool,
    /// Whether the API server keeps counters.
    pub counters: bool,
    /// The time.
    pub now: Timestamp,
}

/// What follows from it.
#[derive(Debug, Clone, PartialEq)]
pub struct Next {
    /// These records differ from what is stored. They are to be stored before
    /// anything is published.
    pub write: Vec<GpuRecord>,
    /// The records of these GPUs can go.
    pub remove: Vec<PciAddress>,
    /// The slices to publish once the records are stored.
    pub slices: Vec<ResourceSliceSpec>,
    /// When a LIST of claims is needed.
    pub list_at: Option<Timestamp>,
    all: BTreeMap<PciAddress, GpuRecord>,
    settling: Settling,
    fewer_links: FewerLinks,
}

impl Publication {
    /// Takes the records that were stored before.
    pub fn new(records: impl IntoIterator<Item = GpuRecord>) -> Self {
        let records = records.into_iter().map(|record| (record.pci, record)).collect();
        Self { records, ..Self::default() }
    }

    /// Whether nothing was ever published, as far as is stored.
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// The records.
    pub fn records(&self) -> impl Iterator<Item = &GpuRecord> {
        self.records.values()
    }

    /// The health of each device of the slices that were taken last.
    pub fn health(&self, reading: health::Reading<'_>) -> Vec<(DeviceName, Health)> {
        health::of(&self.published, |pci| self.records.get(&pci), reading)
    }

    /// Decides what comes next. Nothing changes until it is [`taken`].
    ///
    /// [`taken`]: Self::take
    pub fn next(&self, knowledge: Knowledge<'_>) -> Next {
        let Knowledge { settings, inventory, foreign, held, list, conditions, is_stored, counters, now } =
            knowledge;
        // What the last LIST showed counts as held: its claims may not have
        // been prepared yet.
        let mut holding = held.clone();
        holding.extend(list.into_iter().flat_map(|list| list.allocated.iter().cloned()));
        let mut models: BTreeMap<PciAddress, GpuModel> = inventory
            .gpus
            .iter()
            .map(|gpu| {
                let foreign = foreign.get(&gpu.pci).map_or(&[][..], Vec::as_slice);
                (gpu.pci, GpuModel::of(settings, inventory, gpu, foreign))
            })
            .collect();
        let fewer_links = self.fewer_links.next(&self.records, &mut models, now);
        let merged =
            |pci: PciAddress, previous: Option<&GpuRecord>| merge(pci, previous, models.get(&pci), &holding);

        let mut known: BTreeSet<PciAddress> = self.records.keys().chain(models.keys()).copied().collect();
        known.extend(holding.iter().filter_map(DeviceName::gpu));
        let mut all: BTreeMap<PciAddress, GpuRecord> =
            known.iter().filter_map(|pci| Some((*pci, merged(*pci, self.records.get(pci))?))).collect();

        let mut settling = self.settling.clone();
        if is_stored {
            settling.stored(self.records.values(), now);
        }
        let decision = withdraw::decide(all.values(), &settling, held, list, now);
        let leaving: BTreeSet<PciAddress> = decision.withdraw.iter().filter_map(DeviceName::gpu).collect();
        for pci in leaving {
            let Some(mut record) = all.remove(&pci) else { continue };
            record.withdraw(&decision.withdraw);
            if let Some(record) = merged(pci, Some(&record)) {
                all.insert(pci, record);
            }
        }

        settling.keep(all.values());

        let records: Vec<GpuRecord> = all.values().cloned().collect();
        let slices = if counters {
            layout(settings, &records, conditions)
        } else {
            layout_without_counters(settings, &records, conditions, &holding)
        };
        let write =
            records.into_iter().filter(|record| self.records.get(&record.pci) != Some(record)).collect();
        let remove = self.records.keys().filter(|pci| !all.contains_key(pci)).copied().collect();
        Next { write, remove, slices, list_at: decision.list_at, all, settling, fewer_links }
    }

    /// Takes over what was decided, once its records are stored. The answer is
    /// what to publish.
    pub fn take(&mut self, next: Next) -> Vec<ResourceSliceSpec> {
        self.records = next.all;
        self.settling = next.settling;
        self.fewer_links = next.fewer_links;
        let devices = next.slices.iter().flat_map(|slice| slice.devices.iter().flatten());
        self.published = devices.filter_map(|device| DeviceName::parse(&device.name).ok()).collect();
        next.slices
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::fixtures::{self, Model};
    use crate::inventory::Told;
    use crate::links;
    use crate::model::{AttributeValue, ProfileFilter};
    use crate::withdraw::SETTLE;

    const HELD: &str = "gpu-0000-65-00-0-mig-1g-10gb-6";

    /// A node with one H100 and whatever a test changes about it.
    struct Node {
        settings: Settings,
        inventory: Inventory,
        held: BTreeSet<DeviceName>,
        list: Option<ClaimList>,
        is_stored: bool,
        now: Timestamp,
        publication: Publication,
    }

    impl Node {
        fn new() -> Self {
            let mut node = Self {
                settings: fixtures::settings(),
                inventory: fixtures::inventory([fixtures::gpu(Model::H100, "0000:65:00.0")]),
                held: BTreeSet::new(),
                list: None,
                is_stored: false,
                now: Timestamp(1_000_000),
                publication: Publication::default(),
            };
            node.step();
            node.is_stored = true;
            node
        }

        fn next(&self) -> Next {
            self.publication.next(Knowledge {
                settings: &self.settings,
                inventory: &self.inventory,
                foreign: &BTreeMap::new(),
                held: &self.held,
                list: self.list.as_ref(),
                conditions: &Conditions::default(),
                is_stored: self.is_stored,
                counters: true,
                now: self.now,
            })
        }

        fn step(&mut self) -> Vec<ResourceSliceSpec> {
            let next = self.next();
            self.publication.take(next)
        }
    }

    fn device<'a>(
        slices: &'a [ResourceSliceSpec],
        name: &str,
    ) -> Option<&'a k8s_openapi::api::resource::v1::Device> {
        slices.iter().flat_map(|slice| slice.devices.iter().flatten()).find(|device| device.name == name)
    }

    fn is_tainted(slices: &[ResourceSliceSpec], name: &str) -> bool {
        device(slices, name).is_some_and(|device| device.taints.is_some())
    }

    #[test]
    fn where_nothing_is_new_nothing_is_stored_or_published_anew() {
        let mut node = Node::new();
        let first = node.step();
        let next = node.next();
        assert_eq!((next.write, next.remove, next.list_at), (Vec::new(), Vec::new(), None));
        assert_eq!(next.slices, first);
    }

    #[test]
    fn a_filtered_device_goes_only_after_taint_settling_and_a_list_and_never_while_it_is_held() {
        let mut node = Node::new();
        node.held = BTreeSet::from([DeviceName::parse(HELD).expect("a name")]);
        node.settings.mig_profiles = ProfileFilter::Only(BTreeSet::new());
        node.is_stored = false;
        assert!(is_tainted(&node.step(), HELD));
        node.is_stored = true;
        node.step();
        node.now = node.now.after(SETTLE);
        node.list = Some(ClaimList { began: node.now, allocated: BTreeSet::new() });
        let slices = node.step();
        assert!(is_tainted(&slices, HELD), "a claim holds it");
        assert!(device(&slices, "gpu-0000-65-00-0-mig-1g-10gb-5").is_none(), "nobody holds it");

        node.held.clear();
        node.list = None;
        let next = node.next();
        assert_eq!(next.list_at, Some(node.now), "nobody knows whether another claim got it");
        assert!(is_tainted(&next.slices, HELD));
        node.list = Some(ClaimList { began: node.now, allocated: BTreeSet::new() });
        assert!(device(&node.step(), HELD).is_none());
    }

    #[test]
    fn a_time_that_a_former_process_stored_is_not_believed() {
        for clock in [0, 999_999, 1_000_000, 40_000_000_000, u64::MAX] {
            let mut node = Node::new();
            node.settings.mig_profiles = ProfileFilter::Only(BTreeSet::new());
            node.step();
            node.step();
            let stored = node.publication.records().map(|record| {
                let mut json = serde_json::to_value(record).expect("a record");
                json["devices"][HELD]["leaving"]["taintedSince"] = clock.into();
                serde_json::from_value(json).expect("a record")
            });
            node.publication = Publication::new(stored.collect::<Vec<_>>());
            node.is_stored = false;
            node.list = Some(ClaimList { began: node.now, allocated: BTreeSet::new() });
            assert!(is_tainted(&node.step(), HELD), "withdrawn before its taint has settled: {clock}");
            node.is_stored = true;
            node.step();
            node.now = node.now.after(SETTLE);
            let next = node.next();
            assert_eq!(next.list_at, Some(node.now), "stored was {clock}");
            node.list = Some(ClaimList { began: node.now, allocated: BTreeSet::new() });
            assert!(device(&node.step(), HELD).is_none(), "it stays for ever: {clock}");
        }
    }

    #[test]
    fn links_that_go_down_and_up_change_nothing_and_those_that_stay_down_are_published() {
        let mut node = Node::new();
        let whole = DeviceName::whole(fixtures::pci("0000:65:00.0"));
        let mut look = |up: u32, after: Duration| {
            node.inventory.gpus[0].facts.nvlinks = Told::Known(up);
            node.now = node.now.after(after);
            let next = node.next();
            let writes = next.write.len();
            node.publication.take(next);
            let record = node.publication.records().next().expect("a record");
            (writes, record.devices[&whole].device.attributes["nvlinks"].clone())
        };
        let (second, published) = (Duration::from_secs(1), AttributeValue::Int);
        for up in [17, 18, 0, 18].into_iter().cycle().take(2000) {
            assert_eq!(look(up, second), (0, published(18)), "{up} links are up");
        }
        assert_eq!(look(17, second), (0, published(18)));
        assert_eq!(look(16, Duration::from_secs(599)), (0, published(18)));
        assert_eq!(look(17, second), (1, published(17)));
        assert_eq!(look(17, second), (0, published(17)));
        assert_eq!(look(18, second), (1, published(18)), "more are published at once");
        assert_eq!(look(17, links::SETTLE), (0, published(18)));
    }

    #[test]
    fn a_driver_that_is_gone_leaves_every_device_published_and_tainted() {
        let mut node = Node::new();
        let before = node.step();
        node.inventory = Inventory::default();
        let after = node.step();
        let names = |slices: &[ResourceSliceSpec]| -> Vec<String> {
            slices
                .iter()
                .flat_map(|slice| slice.devices.iter().flatten())
                .map(|device| device.name.clone())
                .collect()
        };
        assert_eq!(names(&after), names(&before));
        assert!(names(&after).iter().all(|name| is_tainted(&after, name)));
    }
}
