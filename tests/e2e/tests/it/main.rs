//! The end-to-end tests, in the order in which they run.

mod crash;
mod foreign;
mod ground;
mod holding;
mod plain;
mod restart;
mod slices;
mod workload;

use std::process::ExitCode;

use kerf_e2e::{Case, Needs};

const CASES: &[Case] = &[
    Case {
    name: "a pod without a device runs, prints, and can be entered",
    needs: Needs::Cluster,
    run: plain::a_pod_runs,
},
    Case {
        name: "slices that somebody deletes or edits become right again",
        needs: Needs::Driver,
        run: slices::become_right_again,
    },
    Case {
        name: "an idle node writes no slice, and neither does a claim",
        needs: Needs::Driver,
        run: slices::idle_is_silent,
    },
    Case {
        name: "a held partition whose profile is filtered out stays, tainted, and its GPU goes to nobody else",
        needs: Needs::Driver,
        run: holding::filtered_out,
    },
    Case {
        name: "a device that nobody wants any more is withdrawn only after its taint has settled",
        needs: Needs::Driver,
        run: holding::settles_before_it_goes,
    },
    Case {
        name: "a held partition stays when others fill its GPU",
        needs: Needs::Driver,
        run: holding::occupied_by_others,
    },
    Case {
        name: "a held partition is published all the time while kerf is killed or replaced",
        needs: Needs::Driver,
        run: holding::restarted,
    },
    Case {
        name: "a held partition stays, tainted, while its GPU is lost",
        needs: Needs::Driver,
        run: holding::lost,
    },
    Case {
        name: "foreign GPU instances are given to pods where they can be, and never touched",
        needs: Needs::Driver,
        run: foreign::never_touched,
    },
    Case {
        name: "a whole GPU with a foreign instance waits until that is gone",
        needs: Needs::Driver,
        run: foreign::taints_the_whole,
    },
    Case {
        name: "kerf dies before or after each call of prepare, and the pod runs",
        needs: Needs::Driver,
        run: crash::died_in_prepare,
    },
    Case {
        name: "kerf dies before or after each call of unprepare, and nothing is left",
        needs: Needs::Driver,
        run: crash::died_in_unprepare,
    },
    Case {
        name: "kerf is killed at each journal state of prepare, and the pod runs or is cleaned up",
        needs: Needs::Driver,
        run: crash::killed_in_prepare,
    },
    Case {
        name: "kerf is killed at each journal state of unprepare, and nothing is left",
        needs: Needs::Driver,
        run: crash::killed_in_unprepare,
    },
    Case {
        name: "kerf dies before or after a GPU changes its mode, and the pod runs",
        needs: Needs::Driver,
        run: crash::died_changing_mode,
    },
    Case {
        name: "pods deleted by force and claims deleted under pods leave nothing",
        needs: Needs::Driver,
        run: crash::withdrawn_pods,
    },
    Case {
        name: "a deleted namespace leaves nothing",
        needs: Needs::Driver,
        run: crash::namespace_deleted,
    },
    Case {
        name: "running pods notice nothing of a restart of the kubelet",
        needs: Needs::Driver,
        run: restart::kubelet,
    },
    Case {
        name: "running pods notice nothing of a crash of the kubelet",
        needs: Needs::Driver,
        run: restart::killed_kubelet,
    },
    Case {
        name: "running pods notice nothing of a restart of containerd",
        needs: Needs::Driver,
        run: restart::containerd,
    },
    Case {
        name: "running pods notice nothing of another pod of kerf",
        needs: Needs::Driver,
        run: restart::driver,
    },
    Case {
        name: "pods have their devices again after a reboot",
        needs: Needs::Driver,
        run: restart::machine,
    },
];

fn main() -> ExitCode {
    kerf_e2e::main(CASES)
}
