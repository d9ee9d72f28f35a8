//! What must hold of slices, as functions of slices. The API server validates
//! each slice by itself; a pool is right or wrong as a whole.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, Result, bail, ensure};
use k8s_openapi::api::resource::v1::{Device, DeviceAttribute, ResourceSlice};

/// As of Kubernetes 1.35: with taints or counters a slice holds half as many.
const DEVICES: usize = 128;
const DEVICES_WITH_TAINTS: usize = 64;
const ATTRIBUTES: usize = 32;
const COUNTER_SETS: usize = 8;
const COUNTERS: usize = 32;
const CONSUMED_SETS: usize = 2;
const TAINTS: usize = 16;
const VALUE: usize = 64;

/// The slices of each pool.
pub(crate) fn pools(slices: &[ResourceSlice]) -> BTreeMap<&str, Vec<&ResourceSlice>> {
    let mut pools: BTreeMap<&str, Vec<&ResourceSlice>> = BTreeMap::new();
    for slice in slices {
        pools.entry(&slice.spec.pool.name).or_default().push(slice);
    }
    pools
}

pub(crate) fn devices(slice: &ResourceSlice) -> impl Iterator<Item = &Device> {
    slice.spec.devices.iter().flatten()
}

fn name(slice: &ResourceSlice) -> &str {
    slice.metadata.name.as_deref().unwrap_or_default()
}

fn newest(slices: &[&ResourceSlice]) -> i64 {
    slices.iter().map(|slice| slice.spec.pool.generation).max().unwrap_or_default()
}

/// Every pool has as many slices of its newest generation as these say.
pub(crate) fn complete(slices: &[ResourceSlice]) -> Result<()> {
    for (pool, slices) in pools(slices) {
        let generation = newest(&slices);
        let current = slices.iter().filter(|slice| slice.spec.pool.generation == generation);
        let counts: BTreeSet<i64> =
            current.clone().map(|slice| slice.spec.pool.resource_slice_count).collect();
        let has = i64::try_from(current.count())?;
        ensure!(
            counts == BTreeSet::from([has]),
            "the pool `{pool}` has {has} slices of generation {generation}, which say resourceSliceCount {counts:?}"
        );
    }
    Ok(())
}

/// No slice of an older generation is left.
pub(crate) fn one_generation(slices: &[ResourceSlice]) -> Result<()> {
    for (pool, slices) in pools(slices) {
        let generation = newest(&slices);
        if let Some(old) = slices.iter().find(|slice| slice.spec.pool.generation != generation) {
            let was = old.spec.pool.generation;
            bail!("the pool `{pool}` is at generation {generation}, but {} is of {was}", name(old));
        }
    }
    Ok(())
}

/// Devices have names of their own in the whole pool, and they are DNS labels.
pub(crate) fn device_names(slices: &[ResourceSlice]) -> Result<()> {
    for (pool, slices) in pools(slices) {
        let mut seen = BTreeSet::new();
        for device in slices.iter().flat_map(|slice| devices(slice)) {
            ensure!(is_label(&device.name), "the pool `{pool}` has a device `{}`: no DNS label", device.name);
            ensure!(seen.insert(&device.name), "the pool `{pool}` has two devices `{}`", device.name);
        }
    }
    Ok(())
}

/// Counter sets are of their own in the whole pool, and what is consumed is there.
pub(crate) fn counters(slices: &[ResourceSlice]) -> Result<()> {
    for (pool, slices) in pools(slices) {
        let mut sets = BTreeMap::new();
        for set in slices.iter().flat_map(|slice| slice.spec.shared_counters.iter().flatten()) {
            let had = sets.insert(set.name.as_str(), &set.counters);
            ensure!(had.is_none(), "the pool `{pool}` has two counter sets `{}`", set.name);
        }
        for device in slices.iter().flat_map(|slice| devices(slice)) {
            for consumed in device.consumes_counters.iter().flatten() {
                let set = sets.get(consumed.counter_set.as_str());
                let lacks =
                    consumed.counters.keys().find(|name| !set.is_some_and(|set| set.contains_key(*name)));
                if let Some(lacks) = lacks {
                    let set = &consumed.counter_set;
                    bail!(
                        "`{}` consumes the counter `{lacks}` of `{set}`, which the pool `{pool}` has not",
                        device.name
                    );
                }
            }
        }
    }
    Ok(())
}

/// Devices that consumed counters `before` and do not now fit beside each other:
/// nobody counts any more what they have in common.
pub(crate) fn fit_without_counters(before: &[ResourceSlice], after: &[ResourceSlice]) -> Result<()> {
    for (pool, slices) in pools(before) {
        let is_uncounted = |name: &str| {
            let now = after.iter().filter(|slice| slice.spec.pool.name == pool).flat_map(devices);
            now.into_iter().any(|now| {
                now.name == name && now.consumes_counters.as_deref().unwrap_or_default().is_empty()
            })
        };
        let mut taken: BTreeMap<(&str, &str), (f64, Vec<&str>)> = BTreeMap::new();
        for device in
            slices.iter().flat_map(|slice| devices(slice)).filter(|device| is_uncounted(&device.name))
        {
            for consumed in device.consumes_counters.iter().flatten() {
                for (counter, amount) in &consumed.counters {
                    let (sum, names) = taken.entry((&consumed.counter_set, counter)).or_default();
                    *sum += quantity(&amount.value.0)?;
                    names.push(&device.name);
                }
            }
        }
        for set in slices.iter().flat_map(|slice| slice.spec.shared_counters.iter().flatten()) {
            for (counter, has) in &set.counters {
                let Some((sum, names)) = taken.get(&(set.name.as_str(), counter.as_str())) else { continue };
                ensure!(
                    *sum <= quantity(&has.value.0)?,
                    "in the pool `{pool}` {} devices are published without counters, {} among them, which together \
                     need more of `{counter}` of `{}` than there is",
                    names.len(),
                    names.join(", "),
                    set.name
                );
            }
        }
    }
    Ok(())
}

/// A quantity of Kubernetes; what is lost of one that no `f64` holds is no matter here.
fn quantity(text: &str) -> Result<f64> {
    const SUFFIXES: [(&str, f64); 16] = [
        ("Ki", 1024.0),
        ("Mi", 1_048_576.0),
        ("Gi", 1_073_741_824.0),
        ("Ti", 1_099_511_627_776.0),
        ("Pi", 1_125_899_906_842_624.0),
        ("Ei", 1_152_921_504_606_846_976.0),
        ("n", 1e-9),
        ("u", 1e-6),
        ("m", 1e-3),
        ("k", 1e3),
        ("M", 1e6),
        ("G", 1e9),
        ("T", 1e12),
        ("P", 1e15),
        ("E", 1e18),
        ("", 1.0),
    ];
    let parsed = SUFFIXES.iter().find_map(|(suffix, factor)| {
        let number: f64 = text.strip_suffix(suffix)?.parse().ok()?;
        Some(number * factor)
    });
    parsed.with_context(|| format!("`{text}` is no quantity"))
}

/// The API's limits, which an older server does not know.
pub(crate) fn limits(slices: &[ResourceSlice]) -> Result<()> {
    for slice in slices {
        let (slice_name, spec) = (name(slice), &slice.spec);
        let at_most = |what: &str, number: usize, limit: usize| {
            ensure!(number <= limit, "{slice_name} has {number} {what}, {limit} are possible");
            Ok(())
        };
        let sets: Vec<_> = spec.shared_counters.iter().flatten().collect();
        at_most("devices", devices(slice).count(), DEVICES)?;
        at_most("counter sets", sets.len(), COUNTER_SETS)?;
        ensure!(sets.is_empty() || devices(slice).count() == 0, "{slice_name} has devices and counter sets");
        for set in sets {
            at_most(&format!("counters in `{}`", set.name), set.counters.len(), COUNTERS)?;
        }
        for device in devices(slice) {
            let of = |what: &str| format!("{what} at `{}`", device.name);
            let attributes = device.attributes.as_ref().map_or(0, BTreeMap::len);
            let capacities = device.capacity.as_ref().map_or(0, BTreeMap::len);
            at_most(&of("attributes and capacities"), attributes + capacities, ATTRIBUTES)?;
            at_most(&of("taints"), device.taints.as_ref().map_or(0, Vec::len), TAINTS)?;
            at_most(
                &of("consumed counter sets"),
                device.consumes_counters.as_ref().map_or(0, Vec::len),
                CONSUMED_SETS,
            )?;
        }
    }
    Ok(())
}

/// Every slice has room for a taint, which may come at any time.
pub(crate) fn room_for_taints(slices: &[ResourceSlice]) -> Result<()> {
    for slice in slices {
        let number = devices(slice).count();
        ensure!(
            number <= DEVICES_WITH_TAINTS,
            "{} has {number} devices: with the first taint it would be refused, for {DEVICES_WITH_TAINTS} are possible then",
            name(slice)
        );
    }
    Ok(())
}

/// Names and values of attributes and capacities are what selectors can ask for.
pub(crate) fn attributes(slices: &[ResourceSlice]) -> Result<()> {
    for device in slices.iter().flat_map(devices) {
        let names = device.attributes.iter().flatten().map(|(name, _)| name);
        for attribute in names.chain(device.capacity.iter().flatten().map(|(name, _)| name)) {
            ensure!(is_qualified(attribute), "`{}` has an attribute or capacity `{attribute}`", device.name);
        }
        for (attribute, value) in device.attributes.iter().flatten() {
            let kinds =
                [value.bool.is_some(), value.int.is_some(), value.string.is_some(), value.version.is_some()];
            let lists = [
                value.bools.is_some(),
                value.ints.is_some(),
                value.strings.is_some(),
                value.versions.is_some(),
            ];
            let number = kinds.into_iter().chain(lists).filter(|is| *is).count();
            ensure!(number == 1, "`{attribute}` of `{}` has {number} values", device.name);
            let text = value.string.as_ref().or(value.version.as_ref()).map_or(0, String::len);
            ensure!(
                text <= VALUE,
                "`{attribute}` of `{}` is {text} characters long, not at most {VALUE}",
                device.name
            );
        }
    }
    Ok(())
}

/// Attributes that Kubernetes has defined are in its form.
pub(crate) fn standard_attributes(slices: &[ResourceSlice]) -> Result<()> {
    for device in slices.iter().flat_map(devices) {
        for (attribute, value) in device.attributes.iter().flatten() {
            let Some(standard) = attribute.strip_prefix("resource.kubernetes.io/") else { continue };
            let is_right = match standard {
                "pciBusID" => value.string.as_deref().is_some_and(is_pci_address),
                "pcieRoot" => value.string.as_deref().is_some_and(is_pcie_root),
                "numaNode" => is_numa(value),
                _ => true,
            };
            ensure!(is_right, "`{attribute}` of `{}` is {}", device.name, serde_json::to_string(value)?);
        }
    }
    Ok(())
}

fn is_numa(value: &DeviceAttribute) -> bool {
    let all = value.int.iter().chain(value.ints.iter().flatten());
    let numbers: Vec<&i64> = all.collect();
    !numbers.is_empty() && numbers.into_iter().all(|node| *node >= 0)
}

fn is_hex(text: &str, length: usize) -> bool {
    text.len() == length && text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

/// `dddd:bb:dd.f`, lower case.
fn is_pci_address(text: &str) -> bool {
    let parts: Vec<&str> = text.split([':', '.']).collect();
    let [domain, bus, device, function] = parts[..] else { return false };
    is_hex(domain, 4)
        && is_hex(bus, 2)
        && is_hex(device, 2)
        && is_hex(function, 1)
        && text.as_bytes().get(7) == Some(&b':')
}

/// `pcidddd:bb`.
fn is_pcie_root(text: &str) -> bool {
    let root = text.strip_prefix("pci").and_then(|rest| rest.split_once(':'));
    root.is_some_and(|(domain, bus)| is_hex(domain, 4) && is_hex(bus, 2))
}

fn is_label(text: &str) -> bool {
    let good = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    (1..=63).contains(&text.len()) && text.bytes().all(good) && !text.starts_with('-') && !text.ends_with('-')
}

/// Whether it is a DNS subdomain of at most 63 characters, as a driver's name is.
pub(crate) fn is_domain(text: &str) -> bool {
    text.len() <= 63 && text.split('.').all(is_label)
}

/// A C identifier of at most 32 characters, with or without a domain.
fn is_qualified(text: &str) -> bool {
    let (domain, id) = text.split_once('/').map_or((None, text), |(domain, id)| (Some(domain), id));
    let good = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    domain.is_none_or(is_domain)
        && (1..=32).contains(&id.len())
        && id.bytes().all(good)
        && !id.starts_with(|first: char| first.is_ascii_digit())
}

#[cfg(test)]
mod tests;
