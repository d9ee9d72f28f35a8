//! Draws a node's GPUs and placements for a terminal. A function of the
//! status to text; it never prints.

mod cluster;

use kerf_api::text::printable;
use kerf_dra_driver::inventory::MigMode;
use kerf_dra_driver::journal::Phase;
use kerf_dra_driver::status::{GpuStatus, NodeStatus, Offered, PartitionStatus, UnpreparedClaim};

pub(crate) use cluster::draw_cluster;

/// Columns of one memory slice, its right border included.
const SLICE_WIDTH: usize = 9;

/// The picture, lines ended by newlines.
pub(crate) fn draw(status: &NodeStatus) -> String {
    let mut out = String::new();
    header(&mut out, status);
    for gpu in &status.gpus {
        out.push('\n');
        draw_gpu(&mut out, gpu);
    }
    if status.gpus.is_empty() {
        out.push_str("\nno GPUs\n");
    }
    legend(&mut out, &status.gpus);
    if !status.unprepared.is_empty() {
        out.push_str("\nclaims that are not prepared, or not to the end\n");
    }
    for claim in &status.unprepared {
        draw_unprepared(&mut out, claim);
    }
    out
}

fn header(out: &mut String, status: &NodeStatus) {
    let NodeStatus { node, driver, version, nvidia_driver, missing, publication, absent_profiles, .. } =
        status;
    let nvidia = nvidia_driver.as_deref().unwrap_or("not found");
    line(out, format_args!("node {node}   {driver}   kerf {version}   NVIDIA driver {nvidia}"));
    let slices = match publication.slices {
        1 => "1 ResourceSlice".to_owned(),
        number => format!("{number} ResourceSlices"),
    };
    line(out, format_args!("pool {}   {slices}   generation {}", publication.pool, publication.generation));
    if missing.is_empty() {
        line(out, format_args!("ready"));
    }
    for reason in missing {
        line(out, format_args!("not ready: {reason}"));
    }
    if !absent_profiles.is_empty() {
        let names = absent_profiles.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        line(out, format_args!("! no GPU of this node has the profiles of --mig-profiles: {names}"));
    }
}

fn draw_gpu(out: &mut String, gpu: &GpuStatus) {
    let mode = match (gpu.mig, gpu.offered) {
        _ if gpu.lost => "   lost",
        (_, Offered::Nothing) => "   MIG on, nothing is offered",
        (Some(MigMode::Enabled), Offered::Partitions) => "   MIG on, partitions only",
        (Some(MigMode::Disabled), Offered::Whole) => "   MIG off, whole GPU only",
        (Some(MigMode::Enabled), _) => "   MIG on",
        (Some(MigMode::Disabled), _) => "   MIG off",
        (None, _) => "",
    };
    let product = if gpu.product.is_empty() { "unknown model" } else { &gpu.product };
    let memory = if gpu.memory.0 == 0 { String::new() } else { format!("   {}", gibibytes(gpu.memory.0)) };
    line(out, format_args!("{}   {product}{memory}{mode}", gpu.name));
    let whole = if gpu.held_by.is_empty() { None } else { Some(gpu.held_by.join(", ")) };
    if gpu.lost {
        draw_boxes(out, &[Part::lost(gpu)]);
    } else if has_columns(gpu) {
        draw_boxes(out, &parts(gpu.memory_slices, &gpu.partitions));
    } else {
        draw_boxes(out, &[Part::whole(if gpu.memory_slices == 0 { 8 } else { gpu.memory_slices }, whole)]);
    }
    // A claim's name seldom fits into a slice's width.
    for partition in &gpu.partitions {
        let Some(claim) = &partition.held_by else { continue };
        let (profile, start) = (&partition.profile, partition.placement.start);
        line(out, format_args!("  {profile} at {start}: {claim}"));
    }
    for condition in gpu.conditions.iter().chain(&gpu.health) {
        line(out, format_args!("  ! {condition}"));
    }
}

/// Whether a GPU is drawn by its memory slices.
fn has_columns(gpu: &GpuStatus) -> bool {
    !gpu.lost && gpu.memory_slices > 0 && gpu.held_by.is_empty()
}

/// What the boxes mean, where they do not say it themselves.
fn legend(out: &mut String, gpus: &[GpuStatus]) {
    let drawn = || gpus.iter().filter(|gpu| has_columns(gpu));
    if drawn().next().is_none() {
        return;
    }
    let foreign = drawn().flat_map(|gpu| &gpu.partitions).any(|partition| partition.held_by.is_none());
    let foreign = if foreign { "; foreign: a partition that kerf did not make" } else { "" };
    out.push('\n');
    line(
        out,
        format_args!("one column is one memory slice of the GPU, an empty one has no partition{foreign}"),
    );
}

fn draw_unprepared(out: &mut String, claim: &UnpreparedClaim) {
    let state = match (claim.phase, claim.former_boot) {
        (None, _) => "nothing of it is here",
        (Some(Phase::Started), _) => "being prepared, or left in the middle of it",
        (Some(Phase::Undoing), _) => "being unprepared, or left in the middle of it",
        (Some(Phase::Completed), true) => "prepared before the node was rebooted",
        (Some(Phase::Completed), false) => "prepared before",
    };
    line(out, format_args!("  {}   {state}", claim.claim));
    match (&claim.error, &claim.failed_at) {
        (Some(error), Some(at)) => line(out, format_args!("    ! {at}: {error}")),
        (Some(error), None) => line(out, format_args!("    ! {error}")),
        (None, _) => {}
    }
}

/// A run of memory slices: a partition, a whole GPU, or one free slice.
struct Part {
    slices: u32,
    title: String,
    detail: String,
}

impl Part {
    fn free() -> Self {
        Self { slices: 1, title: String::new(), detail: String::new() }
    }

    fn whole(slices: u32, claims: Option<String>) -> Self {
        match claims {
            Some(claims) => Self { slices, title: "whole GPU".to_owned(), detail: claims },
            None => Self { slices, title: "free".to_owned(), detail: String::new() },
        }
    }

    /// All of a GPU that nobody can ask.
    fn lost(gpu: &GpuStatus) -> Self {
        let mut claims = gpu.held_by.clone();
        claims.extend(gpu.partitions.iter().filter_map(|partition| partition.held_by.clone()));
        claims.sort();
        claims.dedup();
        let detail = if claims.is_empty() { "held by no claim".to_owned() } else { claims.join(", ") };
        Self { slices: gpu.memory_slices.max(8), title: "lost".to_owned(), detail }
    }

    fn partition(partition: &PartitionStatus) -> Self {
        Self {
            slices: partition.placement.size.max(1),
            title: partition.profile.clone(),
            detail: partition.held_by.clone().unwrap_or_else(|| "foreign".to_owned()),
        }
    }
}

fn parts(slices: u32, partitions: &[PartitionStatus]) -> Vec<Part> {
    let mut parts = Vec::new();
    let mut at = 0;
    for partition in partitions {
        while at < partition.placement.start {
            parts.push(Part::free());
            at += 1;
        }
        at = at.max(partition.placement.start.saturating_add(partition.placement.size));
        parts.push(Part::partition(partition));
    }
    while at < slices {
        parts.push(Part::free());
        at += 1;
    }
    parts
}

fn draw_boxes(out: &mut String, parts: &[Part]) {
    let widths: Vec<usize> = parts.iter().map(|part| part.slices as usize * SLICE_WIDTH - 1).collect();
    let rule = |left, between, right| {
        let dashes: Vec<String> = widths.iter().map(|width| "─".repeat(*width)).collect();
        format!("  {left}{}{right}", dashes.join(between))
    };
    let row = |text: fn(&Part) -> &str| {
        let cells: Vec<String> =
            parts.iter().zip(&widths).map(|(part, width)| fitted(text(part), *width)).collect();
        format!("  │{}│", cells.join("│"))
    };
    line(out, format_args!("{}", rule("┌", "┬", "┐")));
    line(out, format_args!("{}", row(|part| &part.title)));
    line(out, format_args!("{}", row(|part| &part.detail)));
    line(out, format_args!("{}", rule("└", "┴", "┘")));
}

/// The text in exactly `width` columns, shortened with `…` where it is longer.
fn fitted(text: &str, width: usize) -> String {
    let length = text.chars().count();
    if length <= width {
        format!("{text:<width$}")
    } else {
        let mut short: String = text.chars().take(width.saturating_sub(1)).collect();
        short.push('…');
        short
    }
}

/// GiB with one decimal, rounded down.
fn gibibytes(bytes: u64) -> String {
    let tenths = u128::from(bytes) * 10 / (1 << 30);
    format!("{}.{} GiB", tenths / 10, tenths % 10)
}

/// A line. What others wrote, such as names, events and errors, neither ends it
/// nor moves the terminal's cursor.
fn line(out: &mut String, text: std::fmt::Arguments<'_>) {
    out.extend(text.to_string().chars().flat_map(printable));
    out.push('\n');
}

#[cfg(test)]
mod tests;
