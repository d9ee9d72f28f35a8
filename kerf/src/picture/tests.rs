//! Pictures as they are printed.

use kerf_dra_driver::claim::ClaimName;
use kerf_dra_driver::inventory::{Bytes, Placement};
use kerf_dra_driver::names::{DeviceName, ProfileName};
use kerf_dra_driver::status::Publication;

use super::*;

fn gpu(pci: &str, product: &str, memory_slices: u32) -> GpuStatus {
    let pci = pci.parse().expect("an address");
    GpuStatus {
        name: DeviceName::whole(pci),
        pci,
        lost: false,
        product: product.to_owned(),
        memory: Bytes::from_mib(81_559),
        mig: (memory_slices > 0).then_some(MigMode::Enabled),
        offered: Offered::Both,
        memory_slices,
        held_by: Vec::new(),
        partitions: Vec::new(),
        conditions: Vec::new(),
        health: Vec::new(),
    }
}

fn partition(profile: &str, start: u32, size: u32, held_by: Option<&str>) -> PartitionStatus {
    PartitionStatus {
        profile: profile.to_owned(),
        placement: Placement { start, size },
        held_by: held_by.map(str::to_owned),
    }
}

fn node(gpus: Vec<GpuStatus>) -> NodeStatus {
    NodeStatus {
        node: "node-1".to_owned(),
        driver: "gpu.nvidia.com".to_owned(),
        version: "0.1.0".to_owned(),
        nvidia_driver: Some("580.95.05".to_owned()),
        missing: Vec::new(),
        publication: Publication { pool: "node-1/gpu".to_owned(), generation: 3, slices: 4 },
        absent_profiles: Vec::new(),
        gpus,
        unprepared: Vec::new(),
    }
}

/// What is drawn below the header's first two lines.
fn drawn(status: &NodeStatus) -> String {
    draw(status).lines().skip(2).fold(String::new(), |text, line| text + line + "\n")
}

#[test]
fn a_node_is_drawn_with_its_partitions_where_they_are() {
    let mut partitioned = gpu("0000:17:00.0", "NVIDIA H100 80GB HBM3", 8);
    partitioned.partitions =
        vec![partition("3g.40gb", 0, 4, Some("team/train")), partition("1g.10gb", 6, 1, None)];
    partitioned.conditions =
        vec!["1 device is not given out: gpu.nvidia.com/foreign=gpu-instance".to_owned()];
    let mut whole = gpu("0000:65:00.0", "NVIDIA L4", 0);
    whole.held_by = vec!["default/job".to_owned()];
    assert_eq!(
        draw(&node(vec![partitioned, whole])),
        "\
node node-1   gpu.nvidia.com   kerf 0.1.0   NVIDIA driver 580.95.05
pool node-1/gpu   4 ResourceSlices   generation 3
ready

gpu-0000-17-00-0   NVIDIA H100 80GB HBM3   79.6 GiB   MIG on
  ┌───────────────────────────────────┬────────┬────────┬────────┬────────┐
  │3g.40gb                            │        │        │1g.10gb │        │
  │team/train                         │        │        │foreign │        │
  └───────────────────────────────────┴────────┴────────┴────────┴────────┘
  3g.40gb at 0: team/train
  ! 1 device is not given out: gpu.nvidia.com/foreign=gpu-instance

gpu-0000-65-00-0   NVIDIA L4   79.6 GiB
  ┌───────────────────────────────────────────────────────────────────────┐
  │whole GPU                                                              │
  │default/job                                                            │
  └───────────────────────────────────────────────────────────────────────┘

one column is one memory slice of the GPU, an empty one has no partition; foreign: a partition that kerf did not make
"
    );
}

#[test]
fn a_lost_gpu_is_drawn_as_lost_with_what_it_was_and_who_holds_it() {
    let mut known = gpu("0000:17:00.0", "NVIDIA H100 80GB HBM3", 0);
    known.lost = true;
    known.partitions = vec![partition("3g.40gb", 4, 4, Some("team/train"))];
    known.conditions = vec!["26 devices are not given out: gpu.nvidia.com/lost=gpu".to_owned()];
    let mut unknown = gpu("0000:65:00.0", "", 0);
    (unknown.lost, unknown.memory) = (true, Bytes(0));
    assert_eq!(
        drawn(&node(vec![known, unknown])),
        "\
ready

gpu-0000-17-00-0   NVIDIA H100 80GB HBM3   79.6 GiB   lost
  ┌───────────────────────────────────────────────────────────────────────┐
  │lost                                                                   │
  │team/train                                                             │
  └───────────────────────────────────────────────────────────────────────┘
  3g.40gb at 4: team/train
  ! 26 devices are not given out: gpu.nvidia.com/lost=gpu

gpu-0000-65-00-0   unknown model   lost
  ┌───────────────────────────────────────────────────────────────────────┐
  │lost                                                                   │
  │held by no claim                                                       │
  └───────────────────────────────────────────────────────────────────────┘
"
    );
}

#[test]
fn what_a_kept_mode_leaves_out_and_what_the_settings_name_in_vain_is_told() {
    let mut partitions = gpu("0000:17:00.0", "NVIDIA A100-SXM4-40GB", 4);
    partitions.offered = Offered::Partitions;
    let mut whole = gpu("0000:65:00.0", "NVIDIA A100-SXM4-40GB", 4);
    (whole.mig, whole.offered) = (Some(MigMode::Disabled), Offered::Whole);
    let mut guest = gpu("0000:81:00.0", "NVIDIA A100-SXM4-40GB", 4);
    guest.offered = Offered::Nothing;
    let mut status = node(vec![partitions, whole, guest]);
    status.publication.slices = 1;
    status.absent_profiles =
        ["1g.18gb", "3g.71gb"].map(|name| ProfileName::new(name).expect("a name")).into();
    let text = draw(&status);
    assert!(text.contains("   1 ResourceSlice   generation"), "{text}");
    assert!(text.contains("40GB   79.6 GiB   MIG on, partitions only\n"), "{text}");
    assert!(text.contains("40GB   79.6 GiB   MIG off, whole GPU only\n"), "{text}");
    assert!(text.contains("40GB   79.6 GiB   MIG on, nothing is offered\n"), "{text}");
    let vain = "! no GPU of this node has the profiles of --mig-profiles: 1g.18gb, 3g.71gb\n";
    assert!(text.contains(vain), "{text}");
    assert!(
        text.ends_with("one column is one memory slice of the GPU, an empty one has no partition\n"),
        "{text}"
    );
}

#[test]
fn claims_that_are_not_prepared_stand_under_a_heading() {
    let claim = |name: &str, phase, failed_at: Option<&str>, error: Option<&str>| UnpreparedClaim {
        claim: ClaimName { namespace: "team".to_owned(), name: name.to_owned() },
        uid: format!("{name}-uid"),
        phase,
        former_boot: false,
        failed_at: failed_at.map(str::to_owned),
        error: error.map(str::to_owned),
    };
    let mut status = node(Vec::new());
    let old = UnpreparedClaim { former_boot: true, ..claim("old", Some(Phase::Completed), None, None) };
    status.unprepared = vec![
        claim("eval", None, Some("2026-11-30T07:50:12Z"), Some("GPU 0000:17:00.0 is held by team/train")),
        old,
        claim("stop", Some(Phase::Undoing), None, Some("the partition is in use")),
        claim("train", Some(Phase::Started), None, None),
        claim("twice", Some(Phase::Completed), Some("2026-11-30T07:50:12Z"), Some("no answer")),
    ];
    assert_eq!(
        drawn(&status),
        "\
ready

no GPUs

claims that are not prepared, or not to the end
  team/eval   nothing of it is here
    ! 2026-11-30T07:50:12Z: GPU 0000:17:00.0 is held by team/train
  team/old   prepared before the node was rebooted
  team/stop   being unprepared, or left in the middle of it
    ! the partition is in use
  team/train   being prepared, or left in the middle of it
  team/twice   prepared before
    ! 2026-11-30T07:50:12Z: no answer
"
    );
}

#[test]
fn overlapping_partitions_do_not_break_the_picture() {
    let drawn = parts(8, &[partition("1g.10gb", 0, 1, None), partition("3g.40gb", 0, 4, None)]);
    assert_eq!(drawn.len(), 2 + 4);
}
