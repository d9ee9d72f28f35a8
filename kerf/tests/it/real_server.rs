//! What nodes of every known model publish, on a real API server. It runs where
//! `KERF_TEST_KUBECONFIG` names a cluster, and only asks what would be stored.

use std::time::Instant;

use futures::future::join_all;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kerf_controller::Identity;
use kerf_controller::diff::{node_owner, plan_pool, same_spec};
use kerf_dra_driver::publication::Publication;
use kerf_dra_driver::taint::{Conditions, Rivalry};
use kube::api::{Api, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};

use crate::emulated::{Emulated, machines_of_every_model};

#[tokio::test]
async fn a_real_server_takes_what_1_and_8_gpus_of_every_model_publish_and_drops_nothing() {
    let Ok(path) = std::env::var("KERF_TEST_KUBECONFIG") else {
        eprintln!("skipped: KERF_TEST_KUBECONFIG names no cluster");
        return;
    };
    // Built beside others, rustls has two kinds of cryptography and takes none.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let kubeconfig = Kubeconfig::read_from(path).unwrap();
    let config =
        kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.unwrap();
    let slices: Api<ResourceSlice> = Api::all(kube::Client::try_from(config).unwrap());
    let dry_run = PostParams { dry_run: true, ..PostParams::default() };
    let begun = Instant::now();
    let mut sent = 0;
    for (_, slot) in machines_of_every_model() {
        for gpus in [1, 8] {
            let machine = Emulated::new(&vec![&slot; gpus]);
            let plugin = machine.plugin().await;
            let settings = machine.settings();
            let identity = Identity { driver: settings.driver, node: settings.node };
            let owner = node_owner(&identity.node, "5b4ba64e-3b1b-4a2c-9d3e-0123456789ab");
            // Of a slice with taints the server takes less.
            let tainted = Conditions { rival: Some(Rivalry::Driver), ..Conditions::default() };
            for conditions in [Conditions::default(), tainted] {
                let all = machine.publish(&plugin, &mut Publication::default(), &conditions).await;
                let creates: Vec<ResourceSlice> = plan_pool(&identity, &owner, &all, &[]).creates;
                let answers = join_all(creates.iter().map(|slice| slices.create(&dry_run, slice))).await;
                for (slice, stored) in creates.iter().zip(answers) {
                    let stored = stored.unwrap_or_else(|error| panic!("{gpus} × {slot}: {error}"));
                    assert!(
                        same_spec(&slice.spec, &stored.spec),
                        "{gpus} × {slot}: {:#?} became {:#?}",
                        slice.spec,
                        stored.spec
                    );
                    sent += 1;
                }
            }
        }
    }
    eprintln!("{sent} slices of every model taken in {:?}", begun.elapsed());
}
