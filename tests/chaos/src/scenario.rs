//! What is claimed: whole GPUs, partitions, several of both, in either mode.

use k8s_openapi::api::resource::v1::{DeviceRequestAllocationResult, ResourceClaim};
use kerf_dra_driver::inventory::MigMode;
use kerf_dra_driver::names::{DeviceName, PciAddress};
use kerf_kubelet_plugin::testing::{Node, h100, partition};

/// Requests, and what each of them got.
pub(crate) type Devices = Vec<(&'static str, DeviceName)>;

/// A shape of claim.
#[derive(Debug, Clone)]
pub struct Scenario {
    /// What it is called.
    pub name: &'static str,
    pub(crate) devices: Devices,
    /// What the claim had before, where it was allocated anew meanwhile.
    pub(crate) former: Devices,
    /// Whether another driver has a device in the claim too.
    mixed: bool,
}

/// The address of a GPU of the node.
pub(crate) fn pci(bus: u8) -> PciAddress {
    PciAddress { domain: 0, bus, device: 0, function: 0 }
}

fn whole(bus: u8) -> DeviceName {
    DeviceName::whole(pci(bus))
}

fn small(bus: u8, start: u32) -> DeviceName {
    partition(pci(bus), "1g.10gb", start)
}

fn large(bus: u8, start: u32) -> DeviceName {
    partition(pci(bus), "3g.40gb", start)
}

/// The claim that is there throughout, and its device.
pub(crate) const BYSTANDER: &str = "bystander";

pub(crate) fn bystanders() -> Devices {
    vec![("gpu", small(1, 2))]
}

/// Two GPUs that partitions are made on, and two that are used whole.
pub(crate) fn node(root: &std::path::Path) -> Node {
    let gpu = |bus: u8, mode| h100(pci(bus), u32::from(bus) - 1, mode);
    let (on, off) = (MigMode::Enabled, MigMode::Disabled);
    Node::new(root, vec![gpu(1, on), gpu(2, on), gpu(3, off), gpu(4, off)]).unwrap()
}

/// All of them.
pub fn scenarios() -> Vec<Scenario> {
    let scenario = |name, devices, former| Scenario { name, devices, former, mixed: false };
    let one = |device| vec![("gpu", device)];
    vec![
        scenario("a whole GPU", one(whole(3)), one(whole(4))),
        scenario("a partition", one(small(1, 4)), one(small(2, 4))),
        scenario(
            "two partitions of one GPU",
            vec![("a", small(1, 4)), ("b", small(1, 5))],
            vec![("a", small(1, 5)), ("b", small(1, 3))],
        ),
        scenario(
            "several GPUs",
            vec![("a", small(1, 4)), ("b", large(2, 0)), ("c", whole(4))],
            vec![("a", small(1, 5)), ("b", large(2, 4)), ("c", whole(3))],
        ),
        scenario("a partition of a GPU in the other mode", one(large(3, 4)), one(large(4, 4))),
        scenario("a whole GPU in the other mode", one(whole(2)), one(whole(3))),
        Scenario { mixed: true, ..scenario("a claim of two drivers", one(small(1, 4)), one(small(1, 5))) },
    ]
}

impl Scenario {
    /// A claim of this shape, as the API has it.
    pub(crate) fn claim(&self, name: &str, devices: &Devices) -> ResourceClaim {
        let mut claim = kerf_kubelet_plugin::testing::claim(name, devices);
        let allocation = claim.status.as_mut().and_then(|status| status.allocation.as_mut());
        let results = allocation.and_then(|allocation| allocation.devices.as_mut()?.results.as_mut());
        if let Some(results) = results.filter(|_| self.mixed) {
            let other = DeviceRequestAllocationResult {
                request: "network".to_owned(),
                driver: "net.example.com".to_owned(),
                pool: "node".to_owned(),
                device: "gpu-0000-01-00-0-mig-1g-10gb-4".to_owned(),
                ..DeviceRequestAllocationResult::default()
            };
            results.insert(0, other);
        }
        claim
    }

    /// Whether preparing it makes partitions.
    pub(crate) fn makes_partitions(&self) -> bool {
        self.devices.iter().any(|(_, device)| device.as_str().contains("-mig-"))
    }
}
