//! Every check fails on some driver, and none on one that is right.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use dra_conformance::{Context, Finding, Launcher as _, Limits, Profile, Verdict};
use futures::StreamExt as _;

use crate::api::Api;
use crate::driver::{Defect, InProcess, NAME, NODE, folders};

/// What a driver is wrong in, the check that finds it, and what the check says
/// of it among other things.
const DEFECTS: &[(Defect, &str, &str)] = &[
    (Defect::SlowInfo, "REG-001", "no answer in 1 s"),
    (Defect::WrongType, "REG-002", "`CSIPlugin`"),
    (Defect::BadName, "REG-003", "`Driver_Example`"),
    (Defect::DeadEndpoint, "REG-004", "nobody listens"),
    (Defect::BetaFirst, "REG-005", "the older version"),
    (Defect::ListsMore, "REG-006", "`v2.DRAPlugin` is no version"),
    (Defect::PlainRegistrationSocket, "REG-007", "PROTOCOL_ERROR"),
    (Defect::LocalhostRefused, "REG-008", "`localhost`: an error and no answer"),
    (Defect::PlainDraSocket, "REG-009", "PROTOCOL_ERROR"),
    (Defect::InfoDiffers, "REG-010", "one client is told"),
    (Defect::RegistersOnce, "REG-011", "the first time within 5 s: AlreadyExists"),
    (Defect::GivesUp, "REG-012", "given up"),
    (Defect::UnknownMethodServed, "REG-013", "as if it were there"),
    (Defect::SocketsStay, "REG-014", "is still there"),
    (Defect::StaleSocketsInTheWay, "REG-015", "no registration socket"),
    (Defect::OtherDevice, "PREP-001", "device-9"),
    (Defect::BadIds, "PREP-002", "these are not: [\"device-0\"]"),
    (Defect::NewIdsEachTime, "PREP-003", "the first answer was"),
    (Defect::FirstClaimOnly, "PREP-004", "has no entry"),
    (Defect::BusyWithTheClaim, "PREP-005", "busy"),
    (Defect::BusyWithAnyClaim, "PREP-006", "busy"),
    (Defect::CancelledStaysBusy, "PREP-007", "busy"),
    (Defect::CancelledStaysBusy, "PREP-008", "busy"),
    (Defect::BetaDiffers, "PREP-009", "cdi_device_ids: []"),
    (Defect::MissingAccepted, "PREP-010", "it was prepared"),
    (Defect::UidIgnored, "PREP-011", "it was prepared"),
    (Defect::UnallocatedAccepted, "PREP-012", "it was prepared"),
    (Defect::OneFailsAll, "PREP-013", "the good claim failed with the other"),
    (Defect::ForeignTaken, "PREP-014", "foreign"),
    (Defect::AlternativeNamed, "PREP-015", "conformance/first"),
    (Defect::AnyParameters, "PREP-016", "it was prepared"),
    (Defect::AnyDevice, "PREP-017", "it was prepared"),
    (Defect::DoubleUse, "PREP-018", "it was prepared"),
    (Defect::RefusedForEver, "PREP-019", "refused before"),
    (Defect::UnprepareFails, "UNPREP-001", "it cannot be unprepared"),
    (Defect::UnknownFails, "UNPREP-002", "the second time"),
    (Defect::UnknownFails, "UNPREP-003", "the claim is not prepared"),
    (Defect::UnprepareReadsApi, "UNPREP-004", "the claim does not exist"),
    (Defect::KeyedByName, "UNPREP-005", "is in 0 specs"),
    (Defect::BusyUnprepare, "UNPREP-006", "busy"),
    (Defect::UnknownUnanswered, "UNPREP-007", "has no entry"),
    (Defect::NeverFreed, "UNPREP-008", "is in use"),
    (Defect::UnpreparedForEver, "UNPREP-009", "it was unprepared before"),
    (Defect::UnknownFails, "UNPREP-010", "the claim is not prepared"),
    (Defect::RemembersClaims, "UNPREP-011", "it was prepared"),
    (Defect::CrossedLost, "UNPREP-012", "after prepares and unprepares at once"),
    (Defect::FirstDeviceOnly, "PREP-020", "these are allocated"),
    (Defect::KeepsHalf, "PREP-021", "the device is not free"),
    (Defect::AdminEndsAll, "ADMIN-001", "after the end of administrative access"),
    (Defect::AdminHolds, "ADMIN-002", "is in use"),
    (Defect::ShareIdsMissing, "SHARE-001", "the share 33333333-3333-4333-8333-333333333301"),
    (Defect::SharesMerged, "SHARE-002", "the share 33333333-3333-4333-8333-333333333302"),
    (Defect::ShareEndsAll, "SHARE-003", "after the other was unprepared"),
    (Defect::MetadataOfOther, "META-001", "metadata.uid is \"other\""),
    (Defect::MetadataStays, "META-002", "these are left"),
    (Defect::NoSpec, "CDI-001", "is in 0 specs"),
    (Defect::InvalidSpec, "CDI-002", "cdiVersion is `new`"),
    (Defect::NamesWithoutUid, "CDI-003", "driver.example.com/claim=device-0"),
    (Defect::SpecStays, "CDI-004", "these are left"),
    (Defect::SpecBeforeRefusal, "CDI-005", "never-published"),
    (Defect::SpecOnlyOnce, "CDI-006", "is in 0 specs"),
    (Defect::DraftLeft, "CDI-007", ".draft"),
    (Defect::MissingDeviceNode, "CDI-008", "/dev/conformance-missing"),
    (Defect::SpecErrorsIgnored, "CDI-009", "it was prepared"),
    (Defect::SpecOnlyOnce, "CDI-010", "is in 0 specs"),
    (Defect::WrongCount, "SLICE-001", "has 3 slices of generation 1, which say resourceSliceCount {4}"),
    (Defect::OldGenerationLeft, "SLICE-002", "00003-left is of 0"),
    (Defect::NoOwner, "SLICE-003", "is not owned by the Node"),
    (Defect::NameTwice, "SLICE-004", "two devices `device-0`"),
    (Defect::MissingCounter, "SLICE-005", "consumes the counter `missing`"),
    (Defect::ManyAttributes, "SLICE-006", "34 attributes"),
    (Defect::Crowded, "SLICE-007", "65 devices"),
    (Defect::BadAttribute, "SLICE-008", "`not-an-identifier`"),
    (Defect::BadPciAddress, "SLICE-009", "0000:3B:00.0"),
    (Defect::WritesAlways, "SLICE-010", "all the time"),
    (Defect::OneNotRestored, "SLICE-011", "has 2 slices"),
    (Defect::NothingRestored, "SLICE-012", "there is no slice"),
    (Defect::ReversedWhenRestored, "SLICE-012", "in the pool `node-1/pool` was"),
    (Defect::EditsKept, "SLICE-013", "had 5 devices and has 3"),
    (Defect::GenerationFalls, "SLICE-014", "was at generation 6 and is at 1"),
    (Defect::DeletesOthers, "SLICE-015", "other-driver was deleted"),
    (Defect::HidesHeld, "SLICE-016", "is not published any more"),
    (Defect::OldOwner, "SLICE-017", "is not owned by the Node"),
    (Defect::LeftBehind, "SLICE-018", "the pools were"),
    (Defect::HealthOfSome, "HEALTH-001", "1 devices are told of"),
    (Defect::HealthOnce, "HEALTH-002", "after the first message"),
    (Defect::HealthOnFirstStream, "HEALTH-003", "0 devices are told of"),
    (Defect::HealthStatusUnknown, "HEALTH-004", "has the status 7"),
    (Defect::HealthUnlisted, "HEALTH-005", "v1.DRAResourceHealth is not listed, and not answered"),
    (Defect::IdsOfTheProcess, "RESTART-001", "it was"),
    (Defect::UnprepareReadsApi, "RESTART-002", "the claim does not exist"),
    (Defect::Forgets, "RESTART-003", "it was prepared"),
    (Defect::PrepareInterrupted, "RESTART-004", "it was interrupted"),
    (Defect::UnprepareInterrupted, "RESTART-005", "it was interrupted"),
    (Defect::DeletesAtItsEnd, "RESTART-006", "was deleted or written"),
    (Defect::WritesAtItsStart, "RESTART-007", "was written, with the same devices"),
    (Defect::SpecOnlyOnce, "RESTART-008", "is in 0 specs"),
    (Defect::OtherBootRefused, "RESTART-009", "it is of another boot"),
    (Defect::UnprepareReadsApi, "OUTAGE-001", "no answer of the API server"),
    (Defect::OutageRemembered, "OUTAGE-002", "after the API server was there again"),
    (Defect::EndsPublishing, "OUTAGE-003", "there is no slice"),
    (Defect::WaitsForApi, "OUTAGE-004", "no registration socket"),
    (Defect::OneLock, "OUTAGE-005", "before the other"),
    (Defect::EndsOnConflict, "API-001", "1 requests were answered with 409"),
    (Defect::EndsOnForbidden, "API-002", "there is no slice"),
    (Defect::EndsOnTooMany, "API-003", "1 requests were answered with 429"),
    (Defect::EndsWatching, "API-004", "there is no slice"),
    (Defect::UnprepareReadsApi, "API-005", "the claim was not unprepared"),
    (Defect::StatusNeeded, "API-006", "the claim was not prepared"),
    (Defect::WritesDropped, "API-007", "all the time"),
    (Defect::KeepsUncounted, "API-008", "more of `memory` of `set` than there is"),
    (Defect::DamageEndsIt, "STATE-001", "no registration socket"),
    (Defect::UnknownSpecRefused, "STATE-002", "there is a spec already"),
    (Defect::SpecOnlyOnce, "STATE-003", "is in 0 specs"),
    (Defect::TornEndsIt, "STATE-004", "no registration socket"),
    (Defect::NoRoomRemembered, "DISK-001", "once there was room"),
    (Defect::NoRoomRemembered, "DISK-002", "once there was room"),
    (Defect::SpecCutShort, "DISK-003", "answered as if all were well"),
    (Defect::AsksDevices, "HANG-001", "GetInfo: DeadlineExceeded"),
    (Defect::GivesUpOnDevices, "HANG-002", "no registration socket"),
    (Defect::PrepareHangsForEver, "HANG-003", "once they answered"),
    (Defect::UnprepareHangsForEver, "HANG-004", "once they answered"),
    (Defect::OneLock, "HANG-005", "before the other"),
    (Defect::SameSockets, "UPDATE-001", "the second instance"),
    (Defect::IdsOfTheProcess, "UPDATE-002", "the first answered"),
    (Defect::Fights, "UPDATE-003", "written"),
    (Defect::SweepsAtItsEnd, "UPDATE-004", "is gone"),
    (Defect::SweepsAtItsEnd, "UPDATE-005", "NodePrepareResources"),
    (Defect::NeverCollects, "COLLECT-001", "the device is not free"),
    (Defect::CollectsAll, "COLLECT-001", "of the claim that is still there"),
];

/// How many drivers are tried at once.
const AT_ONCE: usize = 4;

fn launcher(defect: Option<Defect>, root: &Path, api: &Api) -> InProcess {
    InProcess {
        defect,
        root: root.to_owned(),
        client: if defect == Some(Defect::WayAround) { api.client() } else { api.distant_client() },
        api: api.clone(),
        disk: Arc::default(),
        starts: 0,
    }
}

fn context(defect: Option<Defect>, root: &Path, patience: f64) -> Context {
    folders(root).unwrap();
    let api = Api::new();
    let mut profile = Profile::parse(&format!(
        "driver: {NAME}\nnode: {NODE}\nregistry: {root}/registry\ncdi: [{root}/cdi]\nstate: {root}/state\n\
         claims: [{{deviceClass: example.com, matching: {{type: plain}}}}]\n\
         shares: {{deviceClass: example.com, matching: {{type: shared}}, capacity: {{memory: 1Mi}}}}\n",
        root = root.display(),
    ))
    .unwrap();
    profile.limits =
        Limits { start: patience, publish: patience, quiet: 0.5, stop: patience, collect: Some(patience) };
    Context::new(profile, api.client(), Some(Box::new(launcher(defect, root, &api))))
}

async fn check(defect: Option<Defect>, only: Option<&str>, patience: f64) -> Vec<Finding> {
    let root = tempfile::tempdir().unwrap();
    let chosen = dra_conformance::all().filter(|check| only.is_none_or(|only| check.id.starts_with(only)));
    dra_conformance::run(&mut context(defect, root.path(), patience), chosen, |_| {}).await
}

#[tokio::test(flavor = "multi_thread")]
async fn every_check_fails_on_a_driver_that_is_wrong_in_it() {
    let tried = futures::stream::iter(DEFECTS).map(|(defect, id, says)| async move {
        let findings = check(Some(*defect), Some(id), 4.0).await;
        let verdict = &findings.first().unwrap_or_else(|| panic!("there is no check {id}")).verdict;
        let is_found = matches!(verdict, Verdict::Fail(reason) if reason.contains(says));
        (!is_found).then(|| format!("{defect:?} is not found by {id} (`{says}`): {verdict:?}"))
    });
    let wrong: Vec<String> = tried.buffer_unordered(AT_ONCE).filter_map(std::future::ready).collect().await;
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn every_check_has_a_driver_that_is_wrong_in_it() {
    let checks: Vec<&str> = dra_conformance::all().map(|check| check.id).collect();
    let known: BTreeSet<&str> = checks.iter().copied().collect();
    assert_eq!(known.len(), checks.len(), "an id is given twice");
    assert_eq!(DEFECTS.iter().map(|(_, id, _)| *id).collect::<BTreeSet<_>>(), known);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_driver_that_is_right_passes_every_check() {
    let health = ["HEALTH-001", "HEALTH-002", "HEALTH-003", "HEALTH-004"];
    for (flavour, area, not_applicable) in [
        (None, None, &["HEALTH-005"][..]),
        (Some(Defect::WithoutHealth), Some("HEALTH"), &health[..]),
        (Some(Defect::WayAround), Some("OUTAGE-005"), &["OUTAGE-005"]),
        (Some(Defect::WayAround), Some("API-005"), &["API-005"]),
        (Some(Defect::WayAround), Some("API-006"), &["API-006"]),
        (Some(Defect::AsksNoDevices), Some("HANG-003"), &["HANG-003"]),
        (Some(Defect::AsksNoDevices), Some("HANG-004"), &["HANG-004"]),
    ] {
        let findings = check(flavour, area, 60.0).await;
        let failed = findings.iter().filter(|finding| matches!(finding.verdict, Verdict::Fail(_)));
        let failed: Vec<&Finding> = failed.collect();
        assert!(failed.is_empty(), "{flavour:?}: {failed:#?}");
        let other = findings.iter().filter(|finding| matches!(finding.verdict, Verdict::NotApplicable(_)));
        assert_eq!(other.map(|finding| finding.id).collect::<Vec<_>>(), not_applicable);
    }
}

/// What one check has done to a driver does not fail the next.
#[tokio::test(flavor = "multi_thread")]
async fn a_driver_that_failed_is_started_anew() {
    let root = tempfile::tempdir().unwrap();
    let mut context = context(Some(Defect::GivesUp), root.path(), 2.0);
    let chosen =
        ["REG-012", "REG-013"].map(|id| dra_conformance::all().find(|check| check.id == id).unwrap());
    let findings = dra_conformance::run(&mut context, chosen, |_| {}).await;
    assert!(matches!(findings[0].verdict, Verdict::Fail(_)), "{findings:#?}");
    assert_eq!(findings[1].verdict, Verdict::Pass);
}

/// An observer changes nothing; the driver of which it is one has nothing to do.
#[tokio::test(flavor = "multi_thread")]
async fn an_observer_writes_nothing() {
    let root = tempfile::tempdir().unwrap();
    folders(root.path()).unwrap();
    let api = Api::new();
    let mut launcher = launcher(None, root.path(), &api);
    let nodes: kube::Api<k8s_openapi::api::core::v1::Node> = kube::Api::all(api.client());
    let node = serde_json::from_value(serde_json::json!({"metadata": {"name": NODE}})).unwrap();
    nodes.create(&kube::api::PostParams::default(), &node).await.unwrap();
    let running = launcher.start("observed").await.unwrap();
    let context = |api: &Api| {
        let mut profile = Profile::parse(&format!("driver: {NAME}\nnode: {NODE}\n")).unwrap();
        profile.limits = Limits { quiet: 0.3, ..Limits::default() };
        Context::new(profile, api.client(), None)
    };
    let passed = |findings: &[Finding]| -> Vec<&str> {
        let passed = findings.iter().filter(|finding| finding.verdict == Verdict::Pass);
        passed.map(|finding| finding.id).collect()
    };
    // Until it has published.
    let quiet = dra_conformance::all().filter(|check| check.id == "SLICE-010");
    assert_eq!(passed(&dra_conformance::run(&mut context(&api), quiet, |_| {}).await), ["SLICE-010"]);
    let before = *api.changes().borrow();
    let findings = dra_conformance::run(&mut context(&api), dra_conformance::all(), |_| {}).await;
    assert_eq!(*api.changes().borrow(), before);
    let expected: Vec<String> = (1..=10).map(|number| format!("SLICE-{number:03}")).collect();
    assert_eq!(passed(&findings), expected);
    assert!(findings.iter().all(|finding| !matches!(finding.verdict, Verdict::Fail(_))), "{findings:#?}");
    drop(running);
}
