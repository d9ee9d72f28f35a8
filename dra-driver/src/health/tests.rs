//! Tests of what is told of each device.

use std::collections::BTreeSet;

use super::*;
use crate::claim::Allocated;
use crate::fixtures::{self, Model};
use crate::inventory::{Placement, ProfileId, UnreadableGpu};
use crate::journal;
use crate::names::ProfileName;
use crate::publication::{Knowledge, Publication};
use crate::step::{PartitionProgress, PartitionStep, Step};
use crate::taint::Conditions;
use crate::withdraw::Timestamp;

const ONE: &str = "0000:17:00.0";
const TWO: &str = "0000:65:00.0";
const HELD: &str = "gpu-0000-17-00-0-mig-1g-10gb-4";

fn taken(
    publication: &mut Publication,
    inventory: &Inventory,
    foreign: &BTreeMap<PciAddress, Vec<GpuInstance>>,
) {
    let next = publication.next(Knowledge {
        settings: &fixtures::settings(),
        inventory,
        foreign,
        held: &fixtures::names([HELD]),
        list: None,
        conditions: &Conditions::default(),
        is_stored: true,
        counters: true,
        now: Timestamp(1_000_000),
    });
    publication.take(next);
}

fn two_gpus() -> Inventory {
    fixtures::inventory([ONE, TWO].map(|address| fixtures::mig_on(fixtures::gpu(Model::H100, address))))
}

/// The publication of a node with two GPUs.
fn published() -> Publication {
    let mut publication = Publication::default();
    taken(&mut publication, &two_gpus(), &BTreeMap::new());
    publication
}

/// What is said, with the devices of each GPU that it is said of.
fn told(publication: &Publication, inventory: &Inventory) -> BTreeSet<(String, String)> {
    words(&publication.health(Reading::Read { inventory, vanished: &BTreeMap::new() }))
}

fn words(health: &[(DeviceName, Health)]) -> BTreeSet<(String, String)> {
    let gpu = |name: &DeviceName| name.gpu().expect("a GPU").to_string();
    health.iter().map(|(name, health)| (gpu(name), word(health))).collect()
}

fn word(health: &Health) -> String {
    match health {
        Health::Healthy => "healthy".to_owned(),
        Health::Unhealthy(message) => format!("unhealthy: {message}"),
        Health::Unknown(message) => format!("unknown: {message}"),
    }
}

fn said<const N: usize>(expected: [(&str, &str); N]) -> BTreeSet<(String, String)> {
    expected.map(|(gpu, words)| (gpu.to_owned(), words.to_owned())).into()
}

#[test]
fn every_published_device_is_told_of_once() {
    let publication = published();
    let health = publication.health(Reading::Read { inventory: &two_gpus(), vanished: &BTreeMap::new() });
    let names: BTreeSet<&DeviceName> = health.iter().map(|(name, _)| name).collect();
    let published: BTreeSet<&DeviceName> =
        publication.records().flat_map(|record| record.devices.keys()).collect();
    assert_eq!((names.len(), &names), (health.len(), &published));
    assert_eq!(words(&health), said([(ONE, "healthy"), (TWO, "healthy")]));
}

#[test]
fn a_gpu_is_unhealthy_where_it_is_lost_and_unknown_where_nobody_can_tell() {
    const LOST: &str = "unhealthy: GPU 0000:65:00.0 is lost, and containers cannot use it any more: ";
    const DO: &str = "; delete the pods that use it, then reset it or reboot the node";
    let publication = published();
    let mut inventory = two_gpus();
    inventory.gpus.pop();
    let gone = format!("{LOST}the driver does not list it any more{DO}");
    assert_eq!(told(&publication, &inventory), said([(ONE, "healthy"), (TWO, &gone)]));

    let hangs = "GPU 1 has not answered for 10 s";
    let unknown = format!(
        "unknown: GPU 0000:65:00.0 cannot be read, so it is not known whether it works: {hangs}; kerf asks again, \
         and the node's kernel log may say more (`dmesg`, lines with NVRM)"
    );
    let answers = "GPU 1 could not be read: nvmlDeviceGetHandleByIndex_v2 answered GPU_IS_LOST";
    let lost = format!("{LOST}{answers}{DO}");
    let unreadable = |pci: Option<&str>, error: &str, lost| UnreadableGpu {
        index: 1,
        pci: pci.map(fixtures::pci),
        error: error.to_owned(),
        lost,
    };
    for (unreadable, expected) in [
        (vec![unreadable(Some(TWO), hangs, false)], &unknown),
        (vec![unreadable(Some(TWO), answers, true)], &lost),
        (vec![unreadable(None, hangs, false)], &unknown),
        (vec![unreadable(None, answers, true)], &lost),
        // It may be either.
        (vec![unreadable(None, "another", true), unreadable(None, hangs, false)], &unknown),
        (vec![unreadable(None, hangs, false), unreadable(Some(TWO), answers, true)], &lost),
    ] {
        inventory.unreadable = unreadable;
        assert_eq!(
            told(&publication, &inventory),
            said([(ONE, "healthy"), (TWO, expected)]),
            "{inventory:?}"
        );
    }
}

#[test]
fn nothing_is_known_of_any_device_while_the_driver_does_not_answer() {
    let health = published().health(Reading::Unanswered("the driver has not answered for 30 s"));
    let expected = "unknown: the node's GPUs cannot be read, so it is not known whether they work: the driver has not \
                    answered for 30 s; kerf asks again, and `kerf doctor` in the node's kerf pod looks for the cause";
    assert_eq!(words(&health), said([(ONE, expected), (TWO, expected)]));
}

#[test]
fn a_static_partition_that_is_gone_is_unhealthy_as_long_as_it_is_published() {
    let mut inventory = two_gpus();
    let instance = fixtures::instance(&inventory.gpus[0], "3g.40gb", 0);
    let foreign = BTreeMap::from([(fixtures::pci(ONE), vec![instance.clone()])]);
    if let Some(mig) = &mut inventory.gpus[0].mig {
        mig.instances.push(instance);
    }
    let mut publication = Publication::default();
    taken(&mut publication, &inventory, &foreign);
    let unhealthy = |publication: &Publication, inventory| {
        let health = publication.health(Reading::Read { inventory, vanished: &BTreeMap::new() });
        let unhealthy = health.into_iter().filter(|(_, health)| *health != Health::Healthy);
        unhealthy.map(|(name, health)| (name.to_string(), word(&health))).collect::<Vec<_>>()
    };
    assert_eq!(unhealthy(&publication, &inventory), []);
    let without = two_gpus();
    taken(&mut publication, &without, &BTreeMap::new());
    let expected = "unhealthy: the partition is not there any more, and containers cannot use it: whoever made it has \
                    destroyed it; delete the pods that use it";
    let name = "gpu-0000-17-00-0-mig-3g-40gb-0".to_owned();
    assert_eq!(unhealthy(&publication, &without), [(name, expected.to_owned())]);
}

/// A prepared claim with a partition on the first GPU.
fn entry(instance: &GpuInstance) -> Entry {
    let (gpu, placement) = (fixtures::pci(ONE), Placement { start: 4, size: 1 });
    let compute = &instance.compute_instances[0];
    Entry {
        version: journal::VERSION,
        uid: "uid".parse().expect("a UID"),
        claim: ClaimName { namespace: "team".to_owned(), name: "train".to_owned() },
        boot_id: BootId("boot".to_owned()),
        allocation: vec![Allocated {
            request: "r".to_owned(),
            pool: "node-1/gpu".to_owned(),
            device: DeviceName::parse(HELD).expect("a name"),
            admin_access: false,
            share_id: None,
            config: None,
        }],
        devices: vec![Device::Partition { gpu, profile: ProfileId(19), placement }],
        steps: vec![Step::Partition(PartitionStep {
            gpu,
            profile: ProfileId(19),
            profile_name: ProfileName::new("1g.10gb").expect("a profile"),
            placement,
            progress: PartitionProgress::Ready {
                instance: instance.id,
                compute_instance: compute.id,
                uuid: compute.uuid.clone(),
            },
        })],
        phase: Phase::Completed,
        error: None,
        unknown: BTreeMap::new(),
    }
}

#[test]
fn a_partition_has_vanished_when_a_prepared_claim_of_this_boot_has_it_and_the_gpu_has_not() {
    let gpu = fixtures::mig_on(fixtures::gpu(Model::H100, ONE));
    let (boot, made) = (BootId("boot".to_owned()), fixtures::instance(&gpu, "1g.10gb", 4));
    let gone = |entry: &Entry, gpu: &str, instances: &[GpuInstance]| {
        vanished(entry, &boot, fixtures::pci(gpu), instances).map(ToString::to_string).collect::<Vec<_>>()
    };
    let prepared = entry(&made);
    assert_eq!(gone(&prepared, ONE, std::slice::from_ref(&made)), Vec::<String>::new());
    assert_eq!(gone(&prepared, ONE, &[]), [HELD]);
    assert_eq!(gone(&prepared, TWO, &[]), Vec::<String>::new());
    let mut hollow = made.clone();
    hollow.compute_instances.clear();
    let mut anew = made.clone();
    anew.compute_instances[0].uuid = "MIG-another".to_owned();
    assert_eq!(gone(&prepared, ONE, &[hollow, anew.clone()]), [HELD]);
    for phase in [Phase::Started, Phase::Undoing] {
        assert_eq!(gone(&Entry { phase, ..prepared.clone() }, ONE, &[]), Vec::<String>::new());
    }
    let rebooted = Entry { boot_id: BootId("former".to_owned()), ..prepared.clone() };
    assert_eq!(gone(&rebooted, ONE, &[]), Vec::<String>::new());

    let compute = &made.compute_instances[0];
    let fixed = Device::Fixed {
        gpu: gpu.pci,
        profile: made.profile,
        placement: made.placement,
        instance: made.id,
        compute_instance: compute.id,
        uuid: compute.uuid.clone(),
    };
    let of_others = Entry { devices: vec![fixed], steps: Vec::new(), ..prepared };
    assert_eq!(gone(&of_others, ONE, std::slice::from_ref(&made)), Vec::<String>::new());
    assert_eq!(gone(&of_others, ONE, &[anew]), [HELD]);
}

#[test]
fn a_vanished_partition_alone_is_unhealthy_and_its_claim_is_named() {
    let vanished = fixtures::names([HELD])
        .into_iter()
        .map(|name| (name, ClaimName { namespace: "team".to_owned(), name: "train".to_owned() }))
        .collect();
    let health = published().health(Reading::Read { inventory: &two_gpus(), vanished: &vanished });
    let unhealthy: Vec<_> = health.iter().filter(|(_, health)| *health != Health::Healthy).collect();
    let [(name, health)] = unhealthy[..] else { panic!("{unhealthy:?}") };
    assert_eq!(name.as_str(), HELD);
    let expected = "unhealthy: somebody destroyed the partition that claim team/train holds, and containers cannot use it \
                    any more: delete the claim's pods; kerf makes it again for the next pod";
    assert_eq!(word(health), expected);
}

#[test]
fn what_is_not_healthy_of_a_gpu_is_a_sentence_for_each_kind() {
    let device = |name: &str, health| (DeviceName::parse(name).expect("a name"), health);
    let devices = [
        device("gpu-0000-17-00-0", Health::Unknown("it hangs".into())),
        device("gpu-0000-17-00-0-mig-1g-10gb-0", Health::Unhealthy("gone".into())),
        device("gpu-0000-17-00-0-mig-1g-10gb-1", Health::Unhealthy("gone".into())),
        device("gpu-0000-17-00-0-mig-1g-10gb-2", Health::Healthy),
        device("gpu-0000-65-00-0", Health::Healthy),
    ];
    let expected = ["1 device is of unknown health: it hangs", "2 devices are unhealthy: gone"];
    assert_eq!(sentences(&devices, fixtures::pci(ONE)), expected);
    assert_eq!(sentences(&devices, fixtures::pci(TWO)), Vec::<String>::new());
}

#[test]
fn a_long_message_is_cut_between_two_characters() {
    let cut = Fault::Unanswered { reason: "é".repeat(1000) }.message();
    assert!((MAX_MESSAGE - 1..=MAX_MESSAGE).contains(&cut.len()) && cut.ends_with('é'), "{}", cut.len());
}
