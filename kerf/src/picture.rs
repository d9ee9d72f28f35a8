//! Draws a node's GPUs and placements for a terminal. A function of the
//! status to text; it never prints.

use std::fmt::Write;

use kerf_dra_driver::inventory::MigMode;
use kerf_dra_driver::status::{GpuStatus, NodeStatus, PartitionStatus};

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
    out
}

fn header(out: &mut String, status: &NodeStatus) {
    let NodeStatus { node, driver, version, nvidia_driver, missing, publication, .. } = status;
    let nvidia = nvidia_driver.as_deref().unwrap_or("not found");
    line(out, format_args!("node {node}   {driver}   kerf {version}   NVIDIA driver {nvidia}"));
    line(
        out,
        format_args!(
            "pool {}   {} slices   generation {}",
            publication.pool, publication.slices, publication.generation
        ),
    );
    if missing.is_empty() {
        line(out, format_args!("ready"));
    }
    for reason in missing {
        line(out, format_args!("not ready: {reason}"));
    }
}

fn draw_gpu(out: &mut String, gpu: &GpuStatus) {
    let mode = match gpu.mig {
        Some(MigMode::Enabled) => "   MIG on",
        Some(MigMode::Disabled) => "   MIG off",
        None => "",
    };
    let product = if gpu.product.is_empty() { "lost" } else { &gpu.product };
    line(out, format_args!("{}   {product}   {}{mode}", gpu.name, gibibytes(gpu.memory.0)));
    let whole = if gpu.held_by.is_empty() { None } else { Some(gpu.held_by.join(", ")) };
    match (gpu.memory_slices, whole) {
        (0, whole) => draw_boxes(out, &[Part::whole(8, whole)]),
        (slices, Some(claims)) => draw_boxes(out, &[Part::whole(slices, Some(claims))]),
        (slices, None) => draw_boxes(out, &parts(slices, &gpu.partitions)),
    }
    // A claim's name seldom fits into a slice's width.
    for partition in &gpu.partitions {
        let Some(claim) = &partition.held_by else { continue };
        let (profile, start) = (&partition.profile, partition.placement.start);
        line(out, format_args!("  {profile} at {start}: {claim}"));
    }
    for condition in &gpu.conditions {
        line(out, format_args!("  ! {condition}"));
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

fn line(out: &mut String, text: std::fmt::Arguments<'_>) {
    // Writing to a String cannot fail.
    let _ = writeln!(out, "{text}");
}

#[cfg(test)]
mod tests {
    use kerf_dra_driver::inventory::{Bytes, Placement};
    use kerf_dra_driver::names::DeviceName;
    use kerf_dra_driver::status::Publication;

    use super::*;

    fn gpu(pci: &str, product: &str, memory_slices: u32) -> GpuStatus {
        let pci = pci.parse().expect("an address");
        GpuStatus {
            name: DeviceName::whole(pci),
            pci,
            product: product.to_owned(),
            memory: Bytes::from_mib(81_559),
            mig: (memory_slices > 0).then_some(MigMode::Enabled),
            memory_slices,
            held_by: Vec::new(),
            partitions: Vec::new(),
            conditions: Vec::new(),
        }
    }

    fn partition(profile: &str, start: u32, size: u32, held_by: Option<&str>) -> PartitionStatus {
        PartitionStatus {
            profile: profile.to_owned(),
            placement: Placement { start, size },
            held_by: held_by.map(str::to_owned),
        }
    }

    #[test]
    fn a_node_is_drawn_with_its_partitions_where_they_are() {
        let mut partitioned = gpu("0000:17:00.0", "NVIDIA H100 80GB HBM3", 8);
        partitioned.partitions =
            vec![partition("3g.40gb", 0, 4, Some("team/train")), partition("1g.10gb", 6, 1, None)];
        partitioned.conditions = vec!["whole GPU not allocatable: a partition kerf did not make".to_owned()];
        let mut whole = gpu("0000:65:00.0", "NVIDIA L4", 0);
        whole.held_by = vec!["default/job".to_owned()];
        let status = NodeStatus {
            node: "node-1".to_owned(),
            driver: "gpu.nvidia.com".to_owned(),
            version: "0.1.0".to_owned(),
            nvidia_driver: Some("580.95.05".to_owned()),
            missing: Vec::new(),
            publication: Publication { pool: "node-1/gpu".to_owned(), generation: 3, slices: 4 },
            gpus: vec![partitioned, whole],
        };
        assert_eq!(
            draw(&status),
            "\
node node-1   gpu.nvidia.com   kerf 0.1.0   NVIDIA driver 580.95.05
pool node-1/gpu   4 slices   generation 3
ready

gpu-0000-17-00-0   NVIDIA H100 80GB HBM3   79.6 GiB   MIG on
  ┌───────────────────────────────────┬────────┬────────┬────────┬────────┐
  │3g.40gb                            │        │        │1g.10gb │        │
  │team/train                         │        │        │foreign │        │
  └───────────────────────────────────┴────────┴────────┴────────┴────────┘
  3g.40gb at 0: team/train
  ! whole GPU not allocatable: a partition kerf did not make

gpu-0000-65-00-0   NVIDIA L4   79.6 GiB
  ┌───────────────────────────────────────────────────────────────────────┐
  │whole GPU                                                              │
  │default/job                                                            │
  └───────────────────────────────────────────────────────────────────────┘
"
        );
    }

    #[test]
    fn overlapping_partitions_do_not_break_the_picture() {
        let drawn = parts(8, &[partition("1g.10gb", 0, 1, None), partition("3g.40gb", 0, 4, None)]);
        assert_eq!(drawn.len(), 2 + 4);
    }
}
