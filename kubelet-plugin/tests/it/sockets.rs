//! What a kubelet sees on the sockets.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use http::uri::Authority;
use hyper_util::rt::TokioIo;
use kerf_dra_driver::names::DriverName;
use kerf_kubelet_plugin::proto::dra_v1::dra_plugin_client::DraPluginClient as V1;
use kerf_kubelet_plugin::proto::dra_v1beta1::dra_plugin_client::DraPluginClient as V1Beta1;
use kerf_kubelet_plugin::proto::registration::registration_client::RegistrationClient;
use kerf_kubelet_plugin::proto::registration::{InfoRequest, RegistrationStatus};
use kerf_kubelet_plugin::proto::{dra_v1, dra_v1beta1};
use kerf_kubelet_plugin::testing::{Fuse, claim, partition};
use kerf_kubelet_plugin::{Plugin, PluginConfig, Registration};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use tokio::net::UnixStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint};

use super::{node, pci, whole};

/// Generous: it is reached only by a failure.
const LIMIT: Duration = Duration::from_mins(1);

pub(super) async fn connect(path: &Path) -> Option<Channel> {
    let path = path.to_owned();
    Endpoint::from_static("http://localhost")
        .connect_with_connector(tower::service_fn(move |_| {
            let path = path.clone();
            async move { UnixStream::connect(path).await.map(TokioIo::new) }
        }))
        .await
        .ok()
}

pub(super) async fn until<T>(what: &str, attempt: impl AsyncFn() -> Option<T>) -> T {
    let found = tokio::time::timeout(LIMIT, async {
        loop {
            if let Some(found) = attempt().await {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    found.await.unwrap_or_else(|_| panic!("not in time: {what}"))
}

pub(super) struct Served {
    plugin: Plugin,
    pub(super) cancel: CancellationToken,
    pub(super) task: tokio::task::JoinHandle<()>,
    registration: PathBuf,
    pub(super) dra: PathBuf,
}

pub(super) fn serve(root: &tempfile::TempDir, plugin: Plugin) -> Served {
    let cancel = CancellationToken::new();
    let task = tokio::spawn({
        let (plugin, cancel) = (plugin.clone(), cancel.clone());
        async move { plugin.serve(cancel).await }
    });
    Served {
        plugin,
        cancel,
        task,
        registration: root.path().join("registry/gpu.nvidia.com@reg.sock"),
        dra: root.path().join("plugin/dra@plugin.sock"),
    }
}

async fn register(served: &Served) {
    let channel = until("registration socket", async || connect(&served.registration).await).await;
    let mut client = RegistrationClient::new(channel);
    let status = RegistrationStatus { plugin_registered: true, error: String::new() };
    client.notify_registration_status(status).await.unwrap();
}

#[tokio::test]
async fn a_kubelet_registers_prepares_and_unprepares_in_either_version() {
    let root = tempfile::tempdir().unwrap();
    let node = node(&root);
    node.claims.put(claim("good", &[("r/sub", partition(pci(1), "1g.10gb", 4))]));
    node.claims.put(claim("bad", &[("r", partition(pci(1), "3g.40gb", 0))]));
    node.machine.lock().unwrap().make_foreign(pci(1), 19, 0, false);
    let served = serve(&root, node.plugin(&Fuse::none()).unwrap());

    let channel = until("registration socket", async || connect(&served.registration).await).await;
    let info = RegistrationClient::new(channel).get_info(InfoRequest {}).await.unwrap().into_inner();
    assert_eq!((info.r#type.as_str(), info.name.as_str()), ("DRAPlugin", "gpu.nvidia.com"));
    assert_eq!(info.endpoint, served.dra.display().to_string());
    let health = ["v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth"];
    assert_eq!(info.supported_versions, [["v1.DRAPlugin", "v1beta1.DRAPlugin"], health].concat());
    assert_eq!(*served.plugin.registration().borrow(), Registration::Waiting);
    register(&served).await;
    assert_eq!(*served.plugin.registration().borrow(), Registration::Registered);

    let channel = connect(&served.dra).await.unwrap();
    let claims = ["good", "bad", "gone"].map(|name| dra_v1::Claim {
        namespace: "ns".to_owned(),
        name: name.to_owned(),
        uid: format!("{name}-uid"),
    });
    let mut v1 = V1::new(channel.clone());
    let request = dra_v1::NodePrepareResourcesRequest { claims: claims.to_vec() };
    let answer = v1.node_prepare_resources(request.clone()).await.unwrap().into_inner();
    let good = &answer.claims["good-uid"];
    assert_eq!(good.error, "");
    assert_eq!(good.devices[0].request_names, ["r"]);
    assert_eq!(good.devices[0].pool_name, "node/gpu");
    assert!(answer.claims["bad-uid"].error.contains("did not make"));
    assert!(answer.claims["gone-uid"].error.contains("does not exist"));
    assert_eq!(v1.node_prepare_resources(request).await.unwrap().into_inner(), answer);

    let mut beta = V1Beta1::new(channel);
    let claims = vec![dra_v1beta1::Claim {
        namespace: "ns".to_owned(),
        name: "good".to_owned(),
        uid: "good-uid".to_owned(),
    }];
    let request = dra_v1beta1::NodePrepareResourcesRequest { claims: claims.clone() };
    let older = beta.node_prepare_resources(request).await.unwrap().into_inner();
    assert_eq!(older.claims["good-uid"].devices[0].cdi_device_ids, good.devices[0].cdi_device_ids);
    let request = dra_v1beta1::NodeUnprepareResourcesRequest { claims };
    let answer = beta.node_unprepare_resources(request).await.unwrap().into_inner();
    let expected = dra_v1beta1::NodeUnprepareResourceResponse { error: String::new() };
    assert_eq!(answer.claims, BTreeMap::from([("good-uid".to_owned(), expected)]));
    assert!(node.files("plugin/state/claims").is_empty());

    served.cancel.cancel();
    served.task.await.unwrap();
    assert!(!served.registration.exists() && !served.dra.exists(), "sockets are removed");
}

#[tokio::test]
async fn a_stale_socket_and_one_that_is_removed_are_made_anew() {
    let root = tempfile::tempdir().unwrap();
    let node = node(&root);
    node.claims.put(claim("c", &[("r", whole(3))]));
    let stale = root.path().join("registry/gpu.nvidia.com@reg.sock");
    std::fs::create_dir_all(stale.parent().unwrap()).unwrap();
    drop(std::os::unix::net::UnixListener::bind(&stale).unwrap());
    let served = serve(&root, node.plugin(&Fuse::none()).unwrap());
    register(&served).await;
    for removed in [&served.registration, &served.dra] {
        let mut known = served.plugin.registration();
        known.mark_unchanged();
        std::fs::remove_file(removed).unwrap();
        tokio::time::timeout(LIMIT, known.wait_for(|state| *state == Registration::Waiting))
            .await
            .unwrap()
            .unwrap();
        register(&served).await;
        until("DRA socket", async || connect(&served.dra).await).await;
    }
    served.cancel.cancel();
    served.task.await.unwrap();
}

#[tokio::test]
async fn a_folder_of_sockets_that_is_moved_away_or_removed_is_made_anew_with_them() {
    let root = tempfile::tempdir().unwrap();
    let served = serve(&root, node(&root).plugin(&Fuse::none()).unwrap());
    register(&served).await;
    let unregistered = async || {
        let mut known = served.plugin.registration();
        tokio::time::timeout(LIMIT, known.wait_for(|state| *state == Registration::Waiting))
            .await
            .unwrap()
            .unwrap();
    };
    for (round, socket) in [&served.registration, &served.dra, &served.registration].iter().enumerate() {
        std::fs::rename(socket.parent().unwrap(), root.path().join(format!("moved-{round}"))).unwrap();
        unregistered().await;
        register(&served).await;
        until("DRA socket", async || connect(&served.dra).await).await;
    }
    // The socket may be back before its folder is removed.
    let registry = served.registration.parent().unwrap();
    until("removal", async || std::fs::remove_dir_all(registry).ok()).await;
    unregistered().await;
    register(&served).await;
    std::fs::remove_file(&served.registration).unwrap();
    unregistered().await;
    register(&served).await;
    served.cancel.cancel();
    served.task.await.unwrap();
}

/// What grpc-go makes of a socket's path as `:authority` (`encodeAuthority`):
/// bytes that no authority may hold are escaped, `@` among those that stay.
fn encoded(path: &str) -> String {
    path.bytes()
        .map(|byte| match byte {
            byte if byte.is_ascii_alphanumeric() => char::from(byte).to_string(),
            b'-' | b'.' | b'_' | b'~' | b'!' | b'$' | b'&' | b'\'' | b'(' | b')' | b'*' | b'+' | b','
            | b';' | b'=' | b':' | b'[' | b']' | b'@' => char::from(byte).to_string(),
            byte => format!("%{byte:02X}"),
        })
        .collect()
}

#[test]
fn every_socket_name_is_an_authority_that_h2_accepts() {
    let long = format!("{}.example.com", "a".repeat(51));
    for driver in [DriverName::DEFAULT, "gpu.example.com", long.as_str()] {
        let driver: DriverName = driver.parse().unwrap();
        for name in [
            driver.registration_socket(None),
            driver.registration_socket(Some("5b4ba64e-3b1b")),
            "dra@5b4ba64e-3b1b.sock".to_owned(),
        ] {
            for folder in ["/var/lib/kubelet/plugins_registry", "/var/lib/kubelet/plugins/gpu.nvidia.com"] {
                let authority = encoded(&format!("{folder}/{name}"));
                assert!(Authority::try_from(authority.as_str()).is_ok(), "{authority}");
            }
        }
    }
    let without = encoded("/var/lib/kubelet/plugins_registry/gpu.nvidia.com-reg.sock");
    assert!(Authority::try_from(without.as_str()).is_err(), "or this guard guards nothing");
}

#[tokio::test]
async fn what_stands_in_a_sockets_place_is_named_and_waited_for() {
    let root = tempfile::tempdir().unwrap();
    let (registry, folder) = (root.path().join("registry"), root.path().join("plugin"));
    let paths = [registry.join("gpu.nvidia.com@reg.sock"), folder.join("dra@plugin.sock")];
    // Empty ones are replaced like a file.
    for path in &paths {
        std::fs::create_dir_all(path).unwrap();
    }
    let served = serve(&root, node(&root).plugin(&Fuse::none()).unwrap());
    register(&served).await;
    let unserved = async |path: &Path| {
        let mut known = served.plugin.registration();
        let says = |state: &Registration| matches!(state, Registration::Unserved(why) if why.contains(&path.display().to_string()));
        tokio::time::timeout(LIMIT, known.wait_for(says)).await.unwrap().unwrap();
    };
    let away = |number: usize| root.path().join(format!("full-{number}"));
    for (number, path) in paths.iter().enumerate() {
        std::fs::create_dir_all(away(number).join("something")).unwrap();
        renameat_with(CWD, away(number), CWD, path, RenameFlags::EXCHANGE).unwrap();
        unserved(path).await;
        assert!(!served.task.is_finished());
        std::fs::remove_dir_all(path).unwrap();
        // The socket of before is made anew too.
        let mut known = served.plugin.registration();
        let made = known.wait_for(|state| *state == Registration::Waiting);
        tokio::time::timeout(LIMIT, made).await.unwrap().unwrap();
        register(&served).await;
        until("DRA socket", async || connect(&served.dra).await).await;
    }
    served.cancel.cancel();
    served.task.await.unwrap();
}

#[tokio::test]
async fn instances_serve_beside_each_other_and_remove_what_killed_ones_left() {
    let root = tempfile::tempdir().unwrap();
    let node = node(&root);
    node.claims.put(claim("c", &[("r", whole(3))]));
    let start = |instance: &str| {
        let config = PluginConfig { instance: Some(instance.to_owned()), ..node.config() };
        let plugin = node.plugin_of(config, &Fuse::none()).unwrap();
        let mut served = serve(&root, plugin);
        served.dra = root.path().join(format!("plugin/dra@{instance}.sock"));
        served.registration = root.path().join(format!("registry/gpu.nvidia.com@{instance}-reg.sock"));
        served
    };
    let [dead, stranger] = ["gpu.nvidia.com@dead-reg.sock", "gpu.nvidia.com-dead-reg.sock"]
        .map(|name| root.path().join("registry").join(name));
    std::fs::create_dir_all(root.path().join("registry")).unwrap();
    for path in [&dead, &stranger] {
        drop(std::os::unix::net::UnixListener::bind(path).unwrap());
    }
    let elder = start("elder");
    register(&elder).await;
    assert!(!dead.exists() && stranger.exists());
    let younger = start("younger");
    register(&younger).await;
    assert_eq!(*elder.plugin.registration().borrow(), Registration::Registered);
    for served in [&elder, &younger] {
        let request = dra_v1::NodePrepareResourcesRequest {
            claims: vec![dra_v1::Claim {
                namespace: "ns".to_owned(),
                name: "c".to_owned(),
                uid: "c-uid".to_owned(),
            }],
        };
        let mut v1 = V1::new(connect(&served.dra).await.unwrap());
        let answer = v1.node_prepare_resources(request).await.unwrap().into_inner();
        assert_eq!(answer.claims["c-uid"].error, "");
    }
    elder.cancel.cancel();
    elder.task.await.unwrap();
    assert!(!elder.dra.exists() && !elder.registration.exists());
    assert!(younger.dra.exists() && younger.registration.exists());
    younger.cancel.cancel();
    younger.task.await.unwrap();
}

#[tokio::test]
async fn a_socket_on_which_another_process_answers_is_not_taken_from_it() {
    let root = tempfile::tempdir().unwrap();
    let node = node(&root);
    let elder = serve(&root, node.plugin(&Fuse::none()).unwrap());
    register(&elder).await;
    // Without a pod's UID it has the same sockets.
    let younger = serve(&root, node.plugin(&Fuse::none()).unwrap());
    let mut state = younger.plugin.registration();
    let says = |state: &Registration| matches!(state, Registration::Unserved(why) if why.contains("another process serves it"));
    tokio::time::timeout(LIMIT, state.wait_for(says)).await.unwrap().unwrap();
    assert_eq!(*elder.plugin.registration().borrow(), Registration::Registered);
    elder.cancel.cancel();
    elder.task.await.unwrap();
    register(&younger).await;
    younger.cancel.cancel();
    younger.task.await.unwrap();
}
