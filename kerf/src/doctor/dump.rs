//! `kerf doctor --dump-nvml`: what the GPUs answer, in the format of the
//! emulator's `models.json`, so that a board's answer can replace an entry.
//!
//! NVML tells compute instance profiles and instance ids of instances that
//! exist only. Nothing is made to be asked: what was not seen is named under
//! `derived`, and empty.

use std::collections::BTreeMap;

use kerf_gpu::{Answers, NvmlHardware, ProfileAnswers, Roots};
use serde_json::{Value, json};

/// The first architecture, `NVML_DEVICE_ARCH_HOPPER`, whose mode changes
/// without a reset.
const HOPPER: u32 = 9;

/// The models of a node's GPUs, as JSON.
pub(super) fn dump(roots: Roots) -> anyhow::Result<String> {
    let answers = NvmlHardware::new(roots).answers()?;
    // Two boards of a kind answer the same, but for what exists on them.
    let models: BTreeMap<String, Value> =
        answers.iter().rev().map(|answers| (key(&answers.name), model(answers))).collect();
    Ok(format!("{:#}\n", json!(models)))
}

fn key(name: &str) -> String {
    name.to_lowercase().split_whitespace().collect::<Vec<_>>().join("-")
}

fn model(answers: &Answers) -> Value {
    let Answers { name, compute_capability, memory, numbers, facts, profiles, .. } = answers;
    let unseen: Vec<u32> =
        profiles.iter().filter(|of| of.instances.is_empty()).map(|of| of.profile.id.0).collect();
    let mut derived = Vec::new();
    if !profiles.is_empty() {
        derived.push("mode, from the architecture".to_owned());
        derived.push("slice_multiprocessors, from the smallest profile of one slice".to_owned());
        derived.push("instance_ids are those that were seen, not the whole range".to_owned());
    }
    if !profiles.is_empty() && numbers.max_mig_devices == 0 {
        derived.push("max_devices, from the most instances of a profile: MIG is off".to_owned());
    }
    let nvlinks = facts.nvlinks.known();
    if nvlinks.is_some() {
        derived.push("nvlinks are those that are up".to_owned());
    }
    if !unseen.is_empty() {
        derived.push(format!(
            "not asked: compute and instance_ids of profiles {unseen:?}, of which no instance exists"
        ));
    }
    json!({
        "name": name,
        "pci_device_id": format!("0x{:04x}", numbers.device_id >> 16),
        "pci_subsystem_id": format!("0x{:08x}", numbers.subsystem_id),
        "architecture": numbers.architecture,
        "compute_capability": compute_capability,
        "brand": numbers.brand,
        "memory_mib": memory.0 >> 20,
        "power_limit_w": numbers.power_limit_w.unwrap_or(0),
        "ecc": facts.ecc.known(),
        "nvlinks": nvlinks.unwrap_or(&0),
        "sources": ["NVML on such a board: everything that is not derived"],
        "derived": derived,
        "mig": if profiles.is_empty() { Value::Null } else { mig(answers) },
    })
}

fn mig(answers: &Answers) -> Value {
    let Answers { numbers, profiles, .. } = answers;
    let one = profiles.iter().filter(|of| of.profile.compute_slices == 1);
    let compute: BTreeMap<u32, Value> = profiles
        .iter()
        .flat_map(|of| &of.compute)
        .map(|kind| (kind.id, json!({"id": kind.id, "profile": kind.probe, "slices": kind.compute_slices})))
        .collect();
    // NVML says 0 while MIG is off.
    let most = profiles.iter().map(|of| of.profile.max_instances).max().unwrap_or(0);
    let max_devices = if numbers.max_mig_devices == 0 { most } else { numbers.max_mig_devices };
    json!({
        "mode": if numbers.architecture >= HOPPER { "live" } else { "needs-reset" },
        "memory_slices": answers.memory_slices,
        "max_devices": max_devices,
        "slice_multiprocessors": one.map(|of| of.profile.multiprocessors).min().unwrap_or(0),
        "profiles": profiles.iter().map(profile).collect::<Vec<_>>(),
        "compute_profiles": compute.into_values().collect::<Vec<_>>(),
    })
}

fn profile(of: &ProfileAnswers) -> Value {
    let ProfileAnswers { profile, name, compute, instances } = of;
    let ids = instances.iter().map(|id| id.0);
    json!({
        "id": profile.id.0,
        "profile": profile.probe,
        "name": name.as_ref().map(ToString::to_string).unwrap_or_default(),
        "memory_mib": profile.memory.0 >> 20,
        "multiprocessors": profile.multiprocessors,
        "slices": profile.compute_slices,
        "copy_engines": profile.copy_engines,
        "decoders": profile.decoders,
        "encoders": profile.encoders,
        "jpeg_engines": profile.jpeg_engines,
        "ofa_engines": profile.ofa_engines,
        "max_instances": profile.max_instances,
        "starts": profile.placements.iter().map(|at| at.start).collect::<Vec<_>>(),
        "size": profile.placements.first().map_or(0, |at| at.size),
        "instance_ids": [ids.clone().min().unwrap_or(0), ids.max().unwrap_or(0)],
        "compute": compute.iter().map(|kind| kind.id).collect::<Vec<_>>(),
    })
}
