//! What is counted, and that the page says so.

use std::collections::BTreeSet;

use kerf_controller::{DesiredPools, PublishStatus};
use kerf_dra_driver::fixtures::{Model, gpu, inventory, pci, settings};
use kerf_dra_driver::layout::{PackedSlice, layout};
use kerf_dra_driver::model::GpuModel;
use kerf_dra_driver::published::merge;
use kerf_dra_driver::status;
use kerf_dra_driver::taint::Conditions;
use kerf_kubelet_plugin::NodeLayout;
use kerf_kubelet_plugin::testing::{Fuse, Node};
use tokio::sync::watch;

use super::*;

#[test]
fn gpus_devices_and_taints_are_counted_and_what_there_is_none_of_is_zero() {
    let node = inventory([gpu(Model::H100, "0000:17:00.0"), gpu(Model::L4, "0000:65:00.0")]);
    let lost = gpu(Model::A30, "0000:b3:00.0");
    let mut records = Vec::new();
    for gpu in node.gpus.iter().chain([&lost]) {
        let model = GpuModel::of(&settings(), &node, gpu, &[]);
        records.extend(merge(gpu.pci, None, Some(&model), &[].into()));
    }
    records[2] = merge(lost.pci, Some(&records[2]), None, &[].into()).expect("it is published");
    let stuck = Conditions { quarantined: [pci("0000:65:00.0")].into(), ..Conditions::default() };
    let slices = layout(&settings(), &records, &stuck);
    let devices: Vec<Device> = slices.into_iter().filter_map(|slice| slice.devices).flatten().collect();
    let boot = kerf_dra_driver::journal::BootId("boot".to_owned());
    let gpus = status::gpus(&settings(), &node, &[], &boot, &devices);
    let text = |counts: BTreeMap<String, usize>| {
        counts.iter().map(|(name, count)| format!("{name}={count}")).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(text(by_state(&gpus)), "lost=1 present=1 tainted=1");
    assert_eq!(text(by_state(&[])), "lost=0 present=0 tainted=0");
    // An A30 that is whole is published as such only.
    assert_eq!(text(by_type(&devices)), "gpu=3 mig=25");
    assert_eq!(
        text(by_taint(&settings().driver, &devices)),
        "gpu.nvidia.com/foreign=0 gpu.nvidia.com/lost=1 gpu.nvidia.com/mode-stuck=0 \
         gpu.nvidia.com/quarantined=1 gpu.nvidia.com/rival=0 gpu.nvidia.com/withheld=0"
    );
}

/// A node with one GPU and these slices.
fn report(slices: Vec<PackedSlice>) -> Arc<Report> {
    let root = tempfile::tempdir().expect("a folder");
    let node = Node::new(root.path(), Vec::new()).expect("a node");
    let known = inventory([gpu(Model::H100, "0000:17:00.0")]);
    Arc::new(Report {
        settings: settings(),
        plugin: node.plugin(&Fuse::none()).expect("a plugin"),
        inventory: watch::Sender::new(Some(Arc::new(known))).subscribe(),
        layout: watch::Sender::new(Some(Arc::new(NodeLayout { slices }))).subscribe(),
        published: watch::Sender::new(PublishStatus::default()).subscribe(),
        missing: watch::Sender::new(Vec::new()).subscribe(),
    })
}

/// What a scrape answers.
fn scrape(report: Arc<Report>) -> Result<String, fmt::Error> {
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry(report))?;
    Ok(text)
}

#[tokio::test]
async fn a_slice_that_cannot_be_read_again_is_passed_over_by_nobody() {
    let slices = vec![PackedSlice::torn("node/gpu")];
    let pools: DesiredPools = slices.iter().cloned().collect();
    pools.pools().first().expect("a pool").slices().expect_err("nothing is published");
    let report = report(slices);
    scrape(Arc::clone(&report)).expect_err("nothing is counted");
    report.json().await.expect_err("nothing is told");
}

#[test]
fn the_page_names_every_metric_and_no_other() {
    let text = scrape(report(Vec::new())).expect("a page");
    assert!(text.contains("kerf_gpus{state=\"present\"} 1\n"), "{text}");
    assert!(text.contains("kerf_tainted_devices{taint=\"gpu.nvidia.com/lost\"} 0\n"), "{text}");
    // A counter's samples have a suffix that its type line has not.
    let served: BTreeSet<String> = text
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '))
        .map(|(name, kind)| name.to_owned() + if kind == "counter" { "_total" } else { "" })
        .collect();
    let page = include_str!("../../../../docs/operating.md");
    let (_, section) = page.split_once("\n## Metrics\n").expect("the section");
    let section = section.split_once("\n## ").map_or(section, |(section, _)| section);
    let named = section.lines().filter_map(|line| line.strip_prefix("| `")?.split(['`', '{']).next());
    assert_eq!(named.map(str::to_owned).collect::<BTreeSet<_>>(), served);
}
