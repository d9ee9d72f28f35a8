//! The end-to-end tests.

mod aftermath;
mod allocation;
mod api_away;
mod asking;
mod away;
mod compatibility;
mod crash;
mod exclusion;
mod foreign;
mod gates;
mod ground;
mod holding;
mod input;
mod machine;
mod manifest;
mod mixed;
mod plain;
mod publishing;
mod restart;
mod rival;
mod rollout;
mod slices;
mod uninstall;
mod visibility;
mod watch;
mod workload;

use std::process::ExitCode;

use kerf_e2e::{Case, Cases, Needs};

/// What pods ask for and get.
const STORIES: &[Case] = &[
    Case {
        name: "a pod without a device runs, prints, and can be entered",
        needs: Needs::Cluster,
        seconds: 5,
        run: plain::a_pod_runs,
    },
    Case {
        name: "every GPU of the node is published with its counters",
        needs: Needs::Driver,
        seconds: 5,
        run: publishing::every_gpu_is_published,
    },
    Case {
        name: "kerf status and kerf doctor in kerf's pod need no flag, and find only what the emulated driver lacks",
        needs: Needs::Driver,
        seconds: 5,
        run: publishing::the_node_tells_of_itself,
    },
    Case {
        name: "kerf status --cluster tells who holds what, and why a claim waits",
        needs: Needs::Driver,
        seconds: 10,
        run: publishing::the_cluster_is_told,
    },
    Case {
        name: "a pod from a template gets a whole GPU, and another pod another",
        needs: Needs::Driver,
        seconds: 5,
        run: allocation::a_whole_gpu,
    },
    Case {
        name: "a pod gets a partition of the profile that it names",
        needs: Needs::Driver,
        seconds: 5,
        run: allocation::a_partition_by_profile,
    },
    Case {
        name: "at least 15Gi of memory gets the smallest partition that serves",
        needs: Needs::Driver,
        seconds: 5,
        run: allocation::the_smallest_partition_that_serves,
    },
    Case {
        name: "two slices that must share a GPU share one",
        needs: Needs::Driver,
        seconds: 5,
        run: allocation::slices_of_one_parent,
    },
    Case {
        name: "two pods use one claim at once, and its partition goes with the last",
        needs: Needs::Driver,
        seconds: 5,
        run: allocation::one_claim_for_two_pods,
    },
    Case {
        name: "a claim used by pod after pod gets another device when its first is taken",
        needs: Needs::Driver,
        seconds: 15,
        run: allocation::another_device_for_the_next_pod,
    },
    Case {
        name: "a pod gets a GPU and a partition by plain limits",
        needs: Needs::Driver,
        seconds: 5,
        run: allocation::plain_limits,
    },
    Case {
        name: "a Deployment's pods get partitions by plain limits",
        needs: Needs::Driver,
        seconds: 10,
        run: allocation::a_deployment_by_limits,
    },
    Case {
        name: "of a pod that is gone neither instance, CDI file nor journal entry is left",
        needs: Needs::Driver,
        seconds: 5,
        run: allocation::nothing_is_left_of_a_pod,
    },
    Case {
        name: "each container sees exactly the devices of its requests",
        needs: Needs::Driver,
        seconds: 15,
        run: visibility::only_its_requests,
    },
    Case {
        name: "a pod whose users are nobody on the host gets its devices and the driver's files",
        needs: Needs::Driver,
        seconds: 10,
        run: visibility::in_a_user_namespace,
    },
    Case {
        name: "a whole GPU waits for the partitions of its GPU and runs when they leave",
        needs: Needs::Driver,
        seconds: 10,
        run: exclusion::a_whole_gpu_waits_for_partitions,
    },
    Case {
        name: "a partition waits for the whole GPU and runs when it leaves",
        needs: Needs::Driver,
        seconds: 15,
        run: exclusion::partitions_wait_for_whole_gpus,
    },
    Case {
        name: "a whole GPU and a partition that wait for one GPU get it one after the other",
        needs: Needs::Driver,
        seconds: 10,
        run: exclusion::whole_and_partition_wait_for_one_gpu,
    },
    Case {
        name: "small pods fill GPU after GPU from the end that larger ones need least",
        needs: Needs::Driver,
        seconds: 20,
        run: exclusion::small_pods_fill_gpu_after_gpu,
    },
];

/// Where what is asked for is wrong.
const REFUSED: &[Case] = &[
    Case {
        name: "prepare refuses what was allocated by hand and is held, and names the holder",
        needs: Needs::Driver,
        seconds: 20,
        run: exclusion::prepare_refuses_what_is_held,
    },
    Case {
        name: "a wrong config in a claim fails that claim with a sentence",
        needs: Needs::Driver,
        seconds: 15,
        run: input::in_claims,
    },
    Case {
        name: "a wrong config in a class fails its claims with a sentence",
        needs: Needs::Driver,
        seconds: 10,
        run: input::in_classes,
    },
    Case {
        name: "an allocation of what is not there fails that claim with a sentence",
        needs: Needs::Driver,
        seconds: 15,
        run: input::in_allocations,
    },
];

fn main() -> ExitCode {
    let cases = Cases {
        everywhere: [STORIES, asking::CASES, mixed::CASES, slices::CASES, restart::CASES, rollout::CASES]
            .concat(),
        once: [
            REFUSED,
            holding::CASES,
            foreign::CASES,
            crash::CASES,
            away::CASES,
            api_away::CASES,
            uninstall::CASES,
            gates::CASES,
            rival::CASES,
            compatibility::CASES,
        ]
        .concat(),
    };
    kerf_e2e::main(&cases, ground::ready)
}
