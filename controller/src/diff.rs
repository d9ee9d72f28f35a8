//! Which slices to delete, update and create so that a pool becomes what is
//! desired: the algorithm of the Go helper's controller, so that readers and a
//! change from one driver to the other see what they are used to.
//!
//! Readers take a pool's slices of the highest generation, and only if there
//! are as many as each of them says. One changed slice can therefore keep the
//! generation (a single update is atomic), and so can any number of which only
//! taints changed; anything more bumps it, and the pool is incomplete, never
//! inconsistent, until the last write.
//!
//! This module is pure: it sees what was listed and returns what to write.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::resource::v1::{
    CapacityRequestPolicy, Counter, Device, DeviceCapacity, DeviceTaint, ResourcePool, ResourceSlice,
    ResourceSliceSpec,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};

use kerf_api::quantity::Quantity as Amount;

use crate::pools::{DesiredPool, Identity};

/// Letters of the hexadecimal index that a slice's name begins with.
const INDEX_WIDTH: usize = 5;
/// How much of a `generateName` is in the name (`maxGeneratedNameLength` of
/// k8s.io/apiserver's name generator).
const GENERATED_PREFIX: usize = 58;

/// What one pool needs. Deletes come first, then updates, then creates.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct PoolPlan {
    /// The pool's generation once the plan is carried out.
    pub generation: i64,
    /// Slices as they were listed; uid and resource version are preconditions.
    pub deletes: Vec<ResourceSlice>,
    /// Slices to put, with the resource version they had.
    pub updates: Vec<ResourceSlice>,
    /// Slices to create, with `generateName`.
    pub creates: Vec<ResourceSlice>,
}

impl PoolPlan {
    /// Whether the pool is already as desired.
    pub fn is_empty(&self) -> bool {
        self.deletes.is_empty() && self.updates.is_empty() && self.creates.is_empty()
    }
}

/// The Node as owner of slices, which are deleted with it.
pub fn node_owner(node: &str, uid: &str) -> OwnerReference {
    OwnerReference {
        api_version: "v1".to_owned(),
        kind: "Node".to_owned(),
        name: node.to_owned(),
        uid: uid.to_owned(),
        controller: Some(true),
        ..OwnerReference::default()
    }
}

/// Plans one pool. `wanted` are its slices as they should be, in index order,
/// `existing` those that were listed of it.
pub fn plan_pool(
    identity: &Identity,
    owner: &OwnerReference,
    wanted: &[ResourceSliceSpec],
    existing: &[&ResourceSlice],
) -> PoolPlan {
    let newest = existing.iter().map(|slice| slice.spec.pool.generation).max().unwrap_or(0);
    let mut matched: BTreeMap<usize, &ResourceSlice> = BTreeMap::new();
    let mut deletes = Vec::new();
    for &slice in existing {
        match index_of(slice) {
            Some(index)
                if slice.spec.pool.generation == newest
                    && index < wanted.len()
                    && !matched.contains_key(&index) =>
            {
                matched.insert(index, slice);
            }
            _ => deletes.push(slice.clone()),
        }
    }

    let spec = |slice: &ResourceSliceSpec, generation| complete(identity, wanted.len(), slice, generation);
    let missing = wanted.len() - matched.len();
    let indexed = || wanted.iter().enumerate();
    // A pool whose taints are of two times is as good as one of either.
    let changed = indexed()
        .filter_map(|(index, wanted)| Some((matched.get(&index)?, wanted)))
        .filter(|(stored, wanted)| {
            !same_spec(&untainted(spec(wanted, newest)), &untainted(stored.spec.clone()))
        })
        .count();
    let bump = missing > 0 || changed > 1;
    let generation = if bump { newest.saturating_add(1) } else { newest };

    let mut plan = PoolPlan { generation, deletes, ..PoolPlan::default() };
    for (index, wanted) in indexed() {
        let spec = spec(wanted, generation);
        match matched.get(&index) {
            Some(stored) if same_spec(&spec, &stored.spec) && is_owned_by(stored, owner) => {}
            Some(stored) => plan.updates.push(update(stored, spec, owner)),
            None => plan.creates.push(create(identity, index, spec, owner)),
        }
    }
    plan
}

/// The index that a slice's name begins with, `0000a-…`; none for names of
/// another scheme, such as that of helpers before Kubernetes 1.36.
fn index_of(slice: &ResourceSlice) -> Option<usize> {
    let (index, _) = slice.metadata.name.as_deref()?.split_once('-')?;
    let valid = index.len() == INDEX_WIDTH && index.bytes().all(|byte| byte.is_ascii_hexdigit());
    if valid { usize::from_str_radix(index, 16).ok() } else { None }
}

fn complete(
    identity: &Identity,
    count: usize,
    wanted: &ResourceSliceSpec,
    generation: i64,
) -> ResourceSliceSpec {
    ResourceSliceSpec {
        driver: identity.driver.to_string(),
        node_name: Some(identity.node.clone()),
        pool: ResourcePool {
            name: wanted.pool.name.clone(),
            generation,
            resource_slice_count: i64::try_from(count).unwrap_or(i64::MAX),
        },
        ..wanted.clone()
    }
}

fn update(stored: &ResourceSlice, spec: ResourceSliceSpec, owner: &OwnerReference) -> ResourceSlice {
    let mut slice = stored.clone();
    slice.metadata.managed_fields = None;
    slice.metadata.owner_references = Some(vec![owner.clone()]);
    slice.spec = with_times_of(spec, &stored.spec);
    slice
}

fn create(
    identity: &Identity,
    index: usize,
    spec: ResourceSliceSpec,
    owner: &OwnerReference,
) -> ResourceSlice {
    let mut name = format!("{index:0width$x}-{}-{}-", identity.driver, identity.node, width = INDEX_WIDTH);
    // The API server keeps as much of it itself, but refuses what is longer
    // than a name may be. A dot at the end it refuses too.
    name.truncate(name.floor_char_boundary(GENERATED_PREFIX));
    name.truncate(name.trim_end_matches('.').len());
    ResourceSlice {
        metadata: ObjectMeta {
            generate_name: Some(name),
            owner_references: Some(vec![owner.clone()]),
            ..ObjectMeta::default()
        },
        spec,
    }
}

fn is_owned_by(slice: &ResourceSlice, owner: &OwnerReference) -> bool {
    let owners = slice.metadata.owner_references.as_deref().unwrap_or_default();
    owners.iter().any(|found| {
        found.kind == owner.kind
            && found.name == owner.name
            && found.uid == owner.uid
            && found.controller == owner.controller
    })
}

/// Whether what is stored is what was or would be sent. Order matters, since
/// it is the packing policy; spellings of quantities do not, nor the times
/// that the API server gives to taints.
pub fn same_spec(sent: &ResourceSliceSpec, stored: &ResourceSliceSpec) -> bool {
    let sent = with_times_of(sent.clone(), stored);
    normal(with_amounts_of(sent, stored)) == normal(stored.clone())
}

fn untainted(mut spec: ResourceSliceSpec) -> ResourceSliceSpec {
    for device in spec.devices.iter_mut().flatten() {
        device.taints = None;
    }
    spec
}

/// Copies the times of taints that are stored and meant to stay.
fn with_times_of(mut wanted: ResourceSliceSpec, stored: &ResourceSliceSpec) -> ResourceSliceSpec {
    let stored = by_name(stored);
    for device in wanted.devices.iter_mut().flatten() {
        let Some(stored) = stored.get(device.name.as_str()) else { continue };
        for taint in device.taints.iter_mut().flatten() {
            let same = |other: &&DeviceTaint| same_taint(taint, other);
            if let Some(found) = stored.taints.iter().flatten().find(same) {
                taint.time_added.clone_from(&found.time_added);
            }
        }
    }
    wanted
}

/// The same key, value and effect, and no different time was asked for. The
/// API stores seconds, so one more or less is the same time.
fn same_taint(wanted: &DeviceTaint, stored: &DeviceTaint) -> bool {
    let same_time = match (&wanted.time_added, &stored.time_added) {
        (Some(wanted), Some(stored)) => wanted.0.duration_since(stored.0).abs().as_secs() <= 1,
        _ => true,
    };
    wanted.key == stored.key
        && wanted.value.as_deref().unwrap_or_default() == stored.value.as_deref().unwrap_or_default()
        && wanted.effect == stored.effect
        && same_time
}

fn by_name(spec: &ResourceSliceSpec) -> BTreeMap<&str, &Device> {
    spec.devices.iter().flatten().map(|device| (device.name.as_str(), device)).collect()
}

/// Takes over the stored spelling of quantities that are the same amount.
fn with_amounts_of(mut wanted: ResourceSliceSpec, stored: &ResourceSliceSpec) -> ResourceSliceSpec {
    let devices = by_name(stored);
    for device in wanted.devices.iter_mut().flatten() {
        let Some(stored) = devices.get(device.name.as_str()) else { continue };
        for (key, capacity) in device.capacity.iter_mut().flatten() {
            if let Some(stored) = stored.capacity.as_ref().and_then(|found| found.get(key)) {
                adopt_capacity(capacity, stored);
            }
        }
        let consumed = stored.consumes_counters.iter().flatten();
        for (mine, theirs) in device.consumes_counters.iter_mut().flatten().zip(consumed) {
            adopt_counters(&mut mine.counters, &theirs.counters);
        }
    }
    let sets = stored.shared_counters.iter().flatten();
    for (mine, theirs) in wanted.shared_counters.iter_mut().flatten().zip(sets) {
        adopt_counters(&mut mine.counters, &theirs.counters);
    }
    wanted
}

/// The API server stores the canonical spelling: `1024Mi` comes back as `1Gi`.
fn adopt(mine: &mut Quantity, theirs: &Quantity) {
    if let (Ok(left), Ok(right)) = (Amount::try_from(&*mine), Amount::try_from(theirs))
        && left == right
    {
        mine.clone_from(theirs);
    }
}

fn adopt_counters(mine: &mut BTreeMap<String, Counter>, theirs: &BTreeMap<String, Counter>) {
    for (name, counter) in mine {
        if let Some(stored) = theirs.get(name) {
            adopt(&mut counter.value, &stored.value);
        }
    }
}

fn adopt_capacity(mine: &mut DeviceCapacity, theirs: &DeviceCapacity) {
    fn adopt_option(mine: Option<&mut Quantity>, theirs: Option<&Quantity>) {
        if let (Some(mine), Some(theirs)) = (mine, theirs) {
            adopt(mine, theirs);
        }
    }
    fn adopt_policy(mine: &mut CapacityRequestPolicy, theirs: &CapacityRequestPolicy) {
        adopt_option(mine.default.as_mut(), theirs.default.as_ref());
        let values = theirs.valid_values.iter().flatten();
        for (mine, theirs) in mine.valid_values.iter_mut().flatten().zip(values) {
            adopt(mine, theirs);
        }
        if let (Some(mine), Some(theirs)) = (&mut mine.valid_range, &theirs.valid_range) {
            adopt(&mut mine.min, &theirs.min);
            adopt_option(mine.max.as_mut(), theirs.max.as_ref());
            adopt_option(mine.step.as_mut(), theirs.step.as_ref());
        }
    }
    adopt(&mut mine.value, &theirs.value);
    if let (Some(mine), Some(theirs)) = (&mut mine.request_policy, &theirs.request_policy) {
        adopt_policy(mine, theirs);
    }
}

/// Leaves out what the API server's JSON leaves out: empty lists and maps.
fn normal(mut spec: ResourceSliceSpec) -> ResourceSliceSpec {
    fn drop_empty<T>(list: &mut Option<Vec<T>>) {
        list.take_if(|list| list.is_empty());
    }
    drop_empty(&mut spec.devices);
    drop_empty(&mut spec.shared_counters);
    drop_empty(&mut spec.skip_node_operations);
    for device in spec.devices.iter_mut().flatten() {
        drop_empty(&mut device.taints);
        drop_empty(&mut device.consumes_counters);
        drop_empty(&mut device.binding_conditions);
        drop_empty(&mut device.binding_failure_conditions);
        device.attributes.take_if(|attributes| attributes.is_empty());
        device.capacity.take_if(|capacity| capacity.is_empty());
        device.node_allocatable_resources.take_if(|resources| resources.is_empty());
        for taint in device.taints.iter_mut().flatten() {
            taint.value.take_if(|value| value.is_empty());
        }
        for consumption in device.consumes_counters.iter_mut().flatten() {
            drop_empty(&mut consumption.compatibility_groups);
        }
    }
    spec
}

/// The pools that are there but not desired, with their slices.
pub fn undesired<'a>(
    live: &'a [ResourceSlice],
    desired: &[DesiredPool],
) -> BTreeMap<String, Vec<&'a ResourceSlice>> {
    let wanted: BTreeSet<&str> = desired.iter().map(DesiredPool::name).collect();
    let mut pools: BTreeMap<String, Vec<&ResourceSlice>> = BTreeMap::new();
    for slice in live.iter().filter(|slice| !wanted.contains(slice.spec.pool.name.as_str())) {
        pools.entry(slice.spec.pool.name.clone()).or_default().push(slice);
    }
    pools
}

#[cfg(test)]
#[path = "diff_tests.rs"]
mod tests;
