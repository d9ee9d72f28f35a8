//! What a GPU's devices say about it, and what of that cannot be told now.

use std::collections::{BTreeMap, BTreeSet};

use kerf_api::attributes::attribute;

use super::AttributeValue;
use crate::inventory::{Gpu, Inventory, MigMode, Told};

/// Longest string the API takes as an attribute's value.
const MAX_STRING: usize = 64;

/// The attributes of which nothing is known now. In MIG mode NVLinks may be
/// down: that says nothing of what a whole GPU has.
pub(super) fn untold(gpu: &Gpu) -> BTreeSet<String> {
    let facts = &gpu.facts;
    let untold = [
        (attribute::BRAND, gpu.brand == Told::NotNow),
        (attribute::ADDRESSING_MODE, gpu.addressing_mode == Told::NotNow),
        (attribute::SERIAL, facts.serial == Told::NotNow),
        (attribute::ECC_ENABLED, facts.ecc == Told::NotNow),
        (
            attribute::NVLINKS,
            match facts.nvlinks {
                Told::NotNow => true,
                Told::HasNone | Told::Known(0) => in_mig_mode(gpu),
                Told::Known(_) => false,
            },
        ),
        (
            attribute::NVLINK_CLIQUE,
            match facts.nvlink_clique {
                Told::NotNow => true,
                Told::HasNone => in_mig_mode(gpu),
                Told::Known(_) => false,
            },
        ),
    ];
    untold.into_iter().filter(|(_, is_untold)| *is_untold).map(|(key, _)| key.to_owned()).collect()
}

fn in_mig_mode(gpu: &Gpu) -> bool {
    gpu.mig.as_ref().is_some_and(|mig| mig.current == MigMode::Enabled)
}

/// Attributes that the API accepts: what it would refuse is left out, since
/// one bad value costs the node all its slices.
#[derive(Default)]
pub(super) struct Attributes(BTreeMap<String, AttributeValue>);

impl Attributes {
    /// What every device of a GPU says about it.
    pub(super) fn of_gpu(inventory: &Inventory, gpu: &Gpu) -> Self {
        let mut attributes = Self::default();
        attributes.label(attribute::PRODUCT_NAME, &gpu.product);
        if let Some(brand) = gpu.brand.known() {
            attributes.label(attribute::BRAND, brand);
        }
        attributes.string(attribute::ARCHITECTURE, gpu.architecture.as_str());
        attributes.numbers(attribute::CUDA_COMPUTE_CAPABILITY, gpu.compute_capability);
        attributes.numbers(attribute::CUDA_DRIVER_VERSION, inventory.cuda_version);
        attributes.version(attribute::DRIVER_VERSION, &inventory.driver_version);
        if let Some(mode) = gpu.addressing_mode.known() {
            attributes.string(attribute::ADDRESSING_MODE, mode);
        }
        attributes.string(attribute::PCI_BUS_ID, &gpu.pci.to_string());
        if let Some(root) = &gpu.pcie_root {
            attributes.string(attribute::PCIE_ROOT, root);
        }
        if let Some(node) = gpu.numa_node {
            attributes.int(attribute::NUMA_NODE, node);
        }
        if let Some(serial) = gpu.facts.serial.known() {
            attributes.string(attribute::SERIAL, serial);
        }
        if let Some(on) = gpu.facts.ecc.known() {
            attributes.bool(attribute::ECC_ENABLED, *on);
        }
        attributes
    }

    /// What a whole GPU says of its NVLinks, as far as that can be told now.
    pub(super) fn nvlink(&mut self, gpu: &Gpu) {
        if let Some(up) = gpu.facts.nvlinks.known().filter(|up| **up > 0 || !in_mig_mode(gpu)) {
            self.int(attribute::NVLINKS, *up);
        }
        if let Some(clique) = gpu.facts.nvlink_clique.known() {
            self.string(attribute::NVLINK_CLIQUE, clique);
        }
    }

    pub(super) fn into_values(self) -> BTreeMap<String, AttributeValue> {
        self.0
    }

    /// A text that means nothing if it is cut.
    pub(super) fn string(&mut self, key: &str, value: &str) {
        if value.len() <= MAX_STRING {
            self.0.insert(key.to_owned(), AttributeValue::String(value.to_owned()));
        }
    }

    /// A text for readers, cut where it is too long.
    fn label(&mut self, key: &str, value: &str) {
        self.string(key, &value[..value.floor_char_boundary(MAX_STRING)]);
    }

    pub(super) fn int(&mut self, key: &str, value: u32) {
        self.0.insert(key.to_owned(), AttributeValue::Int(value.into()));
    }

    pub(super) fn bool(&mut self, key: &str, value: bool) {
        self.0.insert(key.to_owned(), AttributeValue::Bool(value));
    }

    fn numbers(&mut self, key: &str, (major, minor): (u32, u32)) {
        self.0.insert(key.to_owned(), AttributeValue::Version(format!("{major}.{minor}.0")));
    }

    fn version(&mut self, key: &str, text: &str) {
        if let Some(version) = semantic_version(text) {
            self.0.insert(key.to_owned(), AttributeValue::Version(version));
        }
    }
}

/// A driver version as a semantic version, which has three numbers without
/// leading zeros: `580.95.05` is `580.95.5`.
pub(super) fn semantic_version(text: &str) -> Option<String> {
    let mut numbers = text
        .split('.')
        .map(|part| part.bytes().all(|byte| byte.is_ascii_digit()).then(|| part.parse::<u32>().ok())?)
        .collect::<Option<Vec<u32>>>()?;
    numbers.resize(numbers.len().max(3), 0);
    match numbers.as_slice() {
        [major, minor, patch] => Some(format!("{major}.{minor}.{patch}")),
        _ => None,
    }
}
