//! Draws a cluster's GPUs for a terminal: a line for each GPU, holding and
//! claim that waits.

use std::fmt::Write;

use kerf_dra_driver::cluster::{
    ClusterStatus, GpuDevices, Holding, NodeDevices, UNUSED, WaitingClaim, WaitingRequest,
};

use super::{gibibytes, line};

/// The picture, lines ended by newlines.
pub(crate) fn draw_cluster(status: &ClusterStatus) -> String {
    let ClusterStatus { driver, version, nodes, waiting, notes } = status;
    let mut out = String::new();
    let gpus = || nodes.iter().flat_map(|node| &node.gpus);
    let free = gpus().filter(|gpu| gpu.free.iter().any(|free| free.profile.is_none())).count();
    let (nodes_said, gpus_said) = (counted(nodes.len(), "node"), counted(gpus().count(), "GPU"));
    line(
        &mut out,
        format_args!("{driver}   kerf {version}   {nodes_said} with {gpus_said}, {free} free as a whole"),
    );
    for node in nodes {
        out.push('\n');
        draw_node(&mut out, node);
    }
    if !waiting.is_empty() {
        out.push_str("\nclaims that wait\n");
    }
    for claim in waiting {
        draw_waiting(&mut out, claim);
    }
    if !notes.is_empty() {
        out.push('\n');
    }
    for note in notes {
        line(&mut out, format_args!("! {note}"));
    }
    out
}

fn draw_node(out: &mut String, node: &NodeDevices) {
    line(out, format_args!("node {}   pool {}", node.node, node.pool));
    if !node.complete {
        line(out, format_args!("  ! slices of the pool are missing: nothing of it is given out"));
    }
    for gpu in &node.gpus {
        draw_gpu(out, gpu);
    }
    if node.gpus.is_empty() {
        line(out, format_args!("  no GPUs"));
    }
}

fn draw_gpu(out: &mut String, gpu: &GpuDevices) {
    let product = if gpu.product.is_empty() { "not published" } else { &gpu.product };
    // Of what is only cut up, the largest part is known.
    let least = if gpu.whole_published { "" } else { "≥ " };
    let memory =
        if gpu.memory.0 == 0 { String::new() } else { format!("   {least}{}", gibibytes(gpu.memory.0)) };
    line(out, format_args!("  {}   {product}{memory}   {}", gpu.name, free(gpu)));
    for Holding { device, profile, claim, pods, admin_access } in &gpu.held {
        let what = match (profile, device.start()) {
            (Some(profile), Some(start)) => format!("{profile} at {start}"),
            _ if *device == gpu.name => "whole GPU".to_owned(),
            _ => device.to_string(),
        };
        let admin = if *admin_access { " (administrative access)" } else { "" };
        let pods = if pods.is_empty() { "reserved for no pod".to_owned() } else { named("pod", pods) };
        line(out, format_args!("    {what}{admin}   {claim}   {pods}"));
    }
    for condition in &gpu.conditions {
        line(out, format_args!("    ! {condition}"));
    }
}

/// What of a GPU a claim could get.
fn free(gpu: &GpuDevices) -> String {
    let profiles = gpu.free.iter().filter_map(|free| Some((free.profile.as_deref()?, free.count)));
    let profiles: Vec<String> = profiles.map(|(profile, count)| format!("{count} × {profile}")).collect();
    if gpu.free.iter().any(|free| free.profile.is_none()) {
        "free".to_owned()
    } else if profiles.is_empty() {
        "nothing free".to_owned()
    } else {
        format!("free: {}", profiles.join(" or "))
    }
}

fn draw_waiting(out: &mut String, waiting: &WaitingClaim) {
    let pods = match waiting.pods.as_deref() {
        None => "which pods wait for it is not known".to_owned(),
        Some([]) => UNUSED.to_owned(),
        Some(pods) => named("pod", pods),
    };
    line(out, format_args!("  {}   for {}   {pods}", waiting.claim, duration(waiting.waited_seconds)));
    if pods == UNUSED {
        return;
    }
    for WaitingRequest { request, class, count, why, .. } in &waiting.requests {
        let count = match count {
            Some(1) => String::new(),
            Some(count) => format!("{count} × "),
            None => "all ".to_owned(),
        };
        line(out, format_args!("    {request} ({count}{class}): {why}"));
    }
    if let Some(event) = &waiting.scheduler {
        let at = event.at.as_deref().map(|at| format!(" at {at}")).unwrap_or_default();
        line(out, format_args!("    the scheduler said of {}{at}: {}", event.pod, event.message));
    }
}

fn counted(count: usize, what: &str) -> String {
    if count == 1 { format!("1 {what}") } else { format!("{count} {what}s") }
}

fn named(what: &str, names: &[String]) -> String {
    let mut text = what.to_owned();
    if names.len() > 1 {
        text.push('s');
    }
    let _ = write!(text, " {}", names.join(", "));
    text
}

/// One unit says enough.
fn duration(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7_200 => format!("{} min", seconds / 60),
        7_200..172_800 => format!("{} h", seconds / 3_600),
        _ => format!("{} days", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use kerf_dra_driver::claim::ClaimName;
    use kerf_dra_driver::cluster::{FreeDevices, SchedulerEvent};
    use kerf_dra_driver::inventory::Bytes;
    use kerf_dra_driver::names::DeviceName;

    use super::*;

    fn name(name: &str) -> ClaimName {
        ClaimName { namespace: "team".to_owned(), name: name.to_owned() }
    }

    fn gpu(device: &str, free: Vec<FreeDevices>, held: Vec<Holding>) -> GpuDevices {
        GpuDevices {
            name: DeviceName::parse(device).expect("a name"),
            product: "NVIDIA H100 80GB HBM3".to_owned(),
            memory: Bytes::from_mib(81_559),
            whole_published: true,
            free,
            held,
            conditions: Vec::new(),
        }
    }

    fn holding(device: &str, profile: Option<&str>, claim: &str, pods: &[&str]) -> Holding {
        Holding {
            device: DeviceName::parse(device).expect("a name"),
            profile: profile.map(str::to_owned),
            claim: name(claim),
            pods: pods.iter().map(ToString::to_string).collect(),
            admin_access: false,
        }
    }

    fn small(count: usize) -> FreeDevices {
        FreeDevices { profile: Some("1g.10gb".to_owned()), count }
    }

    #[test]
    fn a_cluster_is_drawn_node_by_node_with_the_claims_that_wait_below() {
        let part = holding("gpu-0000-17-00-0-mig-3g-40gb-0", Some("3g.40gb"), "train", &["a", "b"]);
        let whole = holding("gpu-0000-65-00-0", None, "job", &[]);
        let mut tainted = gpu("gpu-0000-65-00-0", Vec::new(), vec![whole]);
        tainted.conditions = vec!["1 device is not given out: gpu.nvidia.com/lost=gpu".to_owned()];
        let entire = FreeDevices { profile: None, count: 1 };
        let status = ClusterStatus {
            driver: "gpu.nvidia.com".to_owned(),
            version: "0.1.0".to_owned(),
            nodes: vec![
                NodeDevices {
                    node: "node-1".to_owned(),
                    pool: "node-1/gpu".to_owned(),
                    complete: true,
                    gpus: vec![
                        gpu("gpu-0000-17-00-0", vec![small(3)], vec![part]),
                        gpu("gpu-0000-31-00-0", vec![entire, small(7)], Vec::new()),
                    ],
                },
                NodeDevices {
                    node: "node-2".to_owned(),
                    pool: "node-2/gpu".to_owned(),
                    complete: false,
                    gpus: vec![tainted],
                },
            ],
            waiting: vec![WaitingClaim {
                claim: name("big"),
                uid: "u".to_owned(),
                since: "2026-11-30T10:00:00Z".to_owned(),
                waited_seconds: 150,
                owned_by_pod: true,
                pods: Some(vec!["big-0".to_owned()]),
                requests: vec![WaitingRequest {
                    request: "gpu".to_owned(),
                    class: "gpu.nvidia.com".to_owned(),
                    count: Some(2),
                    published: Some(3),
                    tainted: Some(1),
                    free_on_one_node: Some(1),
                    enough_free: false,
                    why: "2 are needed on one node, and node-1 has most that are free: 1".to_owned(),
                }],
                scheduler: Some(SchedulerEvent {
                    pod: "big-0".to_owned(),
                    at: Some("2026-11-30T10:01:00Z".to_owned()),
                    message: "0/2 nodes are available: 2 cannot allocate all claims.".to_owned(),
                }),
            }],
            notes: vec!["something".to_owned()],
        };
        assert_eq!(
            draw_cluster(&status),
            "\
gpu.nvidia.com   kerf 0.1.0   2 nodes with 3 GPUs, 1 free as a whole

node node-1   pool node-1/gpu
  gpu-0000-17-00-0   NVIDIA H100 80GB HBM3   79.6 GiB   free: 3 × 1g.10gb
    3g.40gb at 0   team/train   pods a, b
  gpu-0000-31-00-0   NVIDIA H100 80GB HBM3   79.6 GiB   free

node node-2   pool node-2/gpu
  ! slices of the pool are missing: nothing of it is given out
  gpu-0000-65-00-0   NVIDIA H100 80GB HBM3   79.6 GiB   nothing free
    whole GPU   team/job   reserved for no pod
    ! 1 device is not given out: gpu.nvidia.com/lost=gpu

claims that wait
  team/big   for 2 min   pod big-0
    gpu (2 × gpu.nvidia.com): 2 are needed on one node, and node-1 has most that are free: 1
    the scheduler said of big-0 at 2026-11-30T10:01:00Z: 0/2 nodes are available: 2 cannot allocate all claims.

! something
"
        );
    }

    #[test]
    fn of_a_gpu_that_is_only_cut_up_the_memory_is_a_lower_bound() {
        let mut out = String::new();
        let part = gpu("gpu-0000-17-00-0", vec![small(1)], Vec::new());
        draw_gpu(&mut out, &GpuDevices { whole_published: false, memory: Bytes::from_mib(40_192), ..part });
        assert_eq!(out, "  gpu-0000-17-00-0   NVIDIA H100 80GB HBM3   ≥ 39.2 GiB   free: 1 × 1g.10gb\n");
    }

    #[test]
    fn of_a_claim_that_no_pod_names_only_that_is_told() {
        let waiting = |pods| WaitingClaim {
            claim: name("idle"),
            uid: "u".to_owned(),
            since: String::new(),
            waited_seconds: 90_000,
            owned_by_pod: false,
            pods,
            requests: vec![WaitingRequest {
                request: "gpu".to_owned(),
                class: "gpu.nvidia.com".to_owned(),
                count: Some(1),
                published: Some(1),
                tainted: Some(0),
                free_on_one_node: Some(0),
                enough_free: false,
                why: "none of 1 is free".to_owned(),
            }],
            scheduler: None,
        };
        let draw = |pods| {
            let mut out = String::new();
            draw_waiting(&mut out, &waiting(pods));
            out
        };
        assert_eq!(
            draw(Some(Vec::new())),
            "  team/idle   for 25 h   no pod that waits names it: it is allocated when a pod needs it\n"
        );
        assert_eq!(
            draw(None),
            "  team/idle   for 25 h   which pods wait for it is not known\n    gpu (gpu.nvidia.com): none of 1 is \
             free\n"
        );
    }
}
