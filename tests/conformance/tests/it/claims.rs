//! What the driver does with claims.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use dra_conformance::proto::dra_v1::{Claim, Device};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{Api, Patch, PatchParams};
use serde_json::{Value, json};

use crate::driver::{Defect, Disk, Entry, Instance, NAME, devices, is_full, pool};

/// A call is under way for so long that others can come in between.
pub(crate) const WORK: Duration = Duration::from_millis(20);
/// How long the API server may take.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long a slow device takes.
const SLOW: Duration = Duration::from_secs(5);
/// How often it is looked for claims that are gone, and how often in a row they must be.
const ROUND: Duration = Duration::from_millis(100);
const ROUNDS: u32 = 10;

/// Marks something as under way until it is dropped.
struct Busy<'a>(&'a Instance, String);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        if !self.0.has(Defect::CancelledStaysBusy) {
            self.0.memory.lock().unwrap().busy.remove(&self.1);
        }
    }
}

/// One result of ours.
struct Allocated {
    device: String,
    request: String,
    share: Option<String>,
    is_admin: bool,
}

impl Allocated {
    /// What nobody else can have at the same time.
    fn part(&self) -> String {
        self.share.iter().fold(self.device.clone(), |part, share| format!("{part}-{share}"))
    }
}

impl Instance {
    /// Waits until nobody works on a claim. A wrong driver does not wait.
    async fn busy(&self, key: &str, does_wait: bool) -> Result<Busy<'_>> {
        let key = if self.has(Defect::OneLock) { "all" } else { key };
        loop {
            {
                let mut memory = self.memory.lock().unwrap();
                let is_any = self.has(Defect::BusyWithAnyClaim) && !memory.busy.is_empty();
                if !is_any && memory.busy.insert(key.to_owned()) {
                    return Ok(Busy(self, key.to_owned()));
                }
                ensure!(does_wait && !is_any, "busy");
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    pub(crate) fn does_hang(&self) -> bool {
        // Where it is a process, a file says so.
        self.disk.lock().unwrap().does_hang || self.root.join("hang").exists()
    }

    /// What the devices do. What has hung once hangs for ever in a wrong driver.
    async fn work(&self, for_ever: Defect) -> Result<()> {
        tokio::time::sleep(WORK).await;
        while self.does_hang() && !self.has(Defect::AsksNoDevices) {
            if self.has(for_ever) {
                self.memory.lock().unwrap().has_hung = true;
            }
            tokio::time::sleep(WORK).await;
        }
        ensure!(!self.memory.lock().unwrap().has_hung, "the devices hang");
        Ok(())
    }

    pub(crate) fn key(&self, claim: &Claim) -> String {
        if self.has(Defect::KeyedByName) { claim.name.clone() } else { claim.uid.clone() }
    }

    async fn claim(&self, claim: &Claim) -> Result<Option<ResourceClaim>> {
        let remembered = self.memory.lock().unwrap().remembered.get(&claim.uid).cloned();
        if remembered.is_some() && self.has(Defect::RemembersClaims) {
            return Ok(remembered);
        }
        let claims: Api<ResourceClaim> = Api::namespaced(self.client.clone(), &claim.namespace);
        let got = tokio::time::timeout(PATIENCE, claims.get_opt(&claim.name)).await;
        if got.is_err() && self.has(Defect::OutageRemembered) {
            self.memory.lock().unwrap().lost.insert(claim.uid.clone());
        }
        ensure!(!self.memory.lock().unwrap().lost.contains(&claim.uid), "it failed before");
        let found = got.context("no answer of the API server")??;
        if let Some(found) = &found {
            self.memory.lock().unwrap().remembered.insert(claim.uid.clone(), found.clone());
        }
        Ok(found)
    }

    /// What is allocated of ours.
    async fn allocated(&self, claim: &Claim) -> Result<Vec<Allocated>> {
        let Some(object) = self.claim(claim).await? else {
            ensure!(self.has(Defect::MissingAccepted), "the claim does not exist");
            return Ok(Vec::new());
        };
        let uid = object.metadata.uid.unwrap_or_default();
        ensure!(uid == claim.uid || self.has(Defect::UidIgnored), "the claim was replaced");
        let Some(allocation) = object.status.and_then(|status| status.allocation) else {
            ensure!(self.has(Defect::UnallocatedAccepted), "nothing is allocated");
            return Ok(Vec::new());
        };
        let allocated = allocation.devices.unwrap_or_default();
        for config in allocated.config.into_iter().flatten() {
            let opaque = config.opaque.context("a config is opaque")?;
            let is_known = opaque.driver != NAME || opaque.parameters.0["kind"] == "Known";
            ensure!(is_known || self.has(Defect::AnyParameters), "unknown parameters");
        }
        let mut ours = Vec::new();
        for result in allocated.results.into_iter().flatten() {
            if result.driver != NAME && !self.has(Defect::ForeignTaken) {
                continue;
            }
            let base = result.request.split('/').next().unwrap_or_default().to_owned();
            let request = if self.has(Defect::AlternativeNamed) { result.request } else { base };
            ours.push(Allocated {
                device: result.device,
                request,
                share: result.share_id,
                is_admin: result.admin_access == Some(true),
            });
        }
        ensure!(!ours.is_empty(), "nothing of ours is allocated");
        if self.has(Defect::FirstDeviceOnly) || self.has(Defect::SharesMerged) {
            ours.truncate(1);
        }
        if self.has(Defect::SpecBeforeRefusal) {
            self.write_spec(claim, &ours)?;
        }
        for one in &ours {
            let is_ours = devices(self.defect).contains(&one.device);
            if self.has(Defect::KeepsHalf) {
                self.memory.lock().unwrap().held.insert(one.part());
            }
            ensure!(
                is_ours || self.has(Defect::AnyDevice) || self.has(Defect::ForeignTaken),
                "there is no such device"
            );
        }
        Ok(ours)
    }

    fn spec_path(&self, key: &str) -> PathBuf {
        self.root.join("cdi").join(format!("driver.example.com-claim_{key}.json"))
    }

    fn metadata_path(&self, key: &str) -> PathBuf {
        self.root.join("metadata").join(format!("{key}.json"))
    }

    fn id(&self, claim: &Claim, part: &str) -> String {
        match self.defect {
            Some(Defect::BadIds) => part.to_owned(),
            Some(Defect::NamesWithoutUid) => format!("driver.example.com/claim={part}"),
            Some(Defect::IdsOfTheProcess) => {
                format!("driver.example.com/claim={}-{part}-{}", claim.uid, self.process)
            }
            Some(Defect::NewIdsEachTime) => {
                let number = self.memory.lock().unwrap().prepares;
                format!("driver.example.com/claim={}-{part}-{number}", claim.uid)
            }
            _ => format!("driver.example.com/claim={}-{part}", claim.uid),
        }
    }

    /// What containers are told of their devices.
    fn write_metadata(&self, claim: &Claim, allocated: &[Allocated]) -> Result<Vec<Value>> {
        let uid = if self.has(Defect::MetadataOfOther) { "other" } else { &claim.uid };
        let mut mounts = Vec::new();
        let requests = allocated.iter().map(|one| {
            let device = json!({"driver": NAME, "pool": pool(), "name": one.device});
            json!({"name": one.request, "devices": [device]})
        });
        let document = json!({
            "apiVersion": "metadata.resource.k8s.io/v1beta1",
            "kind": "DeviceMetadata",
            "metadata": {"name": claim.name, "namespace": claim.namespace, "uid": uid, "generation": 1},
            "requests": requests.collect::<Vec<_>>(),
        });
        let path = self.metadata_path(&self.key(claim));
        std::fs::write(&path, format!("{document}\n{document}\n"))?;
        for one in allocated {
            let container = format!(
                "/var/run/kubernetes.io/dra-device-attributes/resourceclaims/{}/{}/{NAME}-metadata.json",
                claim.name, one.request
            );
            mounts.push(json!({"hostPath": path, "containerPath": container, "options": ["ro", "bind"]}));
        }
        Ok(mounts)
    }

    fn write_spec(&self, claim: &Claim, allocated: &[Allocated]) -> Result<()> {
        let mounts = self.write_metadata(claim, allocated)?;
        let node = if self.has(Defect::MissingDeviceNode) { "/dev/conformance-missing" } else { "/dev/null" };
        let edits = json!({"env": ["A=b"], "deviceNodes": [{"path": "/dev/device", "hostPath": node}]});
        let named = allocated.iter().map(|one| {
            let id = self.id(claim, &one.part());
            json!({"name": id.split_once('=').map_or("none", |(_, name)| name), "containerEdits": edits})
        });
        let version = if self.has(Defect::InvalidSpec) { "new" } else { "0.6.0" };
        let spec = json!({
            "cdiVersion": version,
            "kind": "driver.example.com/claim",
            "devices": named.collect::<Vec<_>>(),
            "containerEdits": {"mounts": mounts},
        });
        let path = self.spec_path(&self.key(claim));
        let draft = path.with_extension("draft");
        let folder = self.root.join("cdi");
        if self.has(Defect::SpecCutShort) && is_full(&self.disk.lock().unwrap(), &folder).is_err() {
            std::fs::write(path, "{")?;
            return Ok(());
        }
        is_full(&self.disk.lock().unwrap(), &folder)?;
        std::fs::write(&draft, spec.to_string())?;
        std::fs::rename(&draft, path)?;
        if self.has(Defect::DraftLeft) {
            std::fs::write(&draft, "")?;
        }
        Ok(())
    }

    /// Changes what is on disk, or nothing if that is full.
    fn save(&self, key: &str, change: impl FnOnce(&mut Disk) -> Result<()>) -> Result<()> {
        let mut disk = self.disk.lock().unwrap();
        let mut memory = self.memory.lock().unwrap();
        let had_no_room = self.has(Defect::NoRoomRemembered) && memory.lost.contains(key);
        ensure!(!had_no_room, "there was no room before");
        if let Err(error) = is_full(&disk, &self.root.join("state")) {
            memory.lost.extend(self.has(Defect::NoRoomRemembered).then(|| key.to_owned()));
            return Err(error);
        }
        drop(memory);
        change(&mut disk)?;
        disk.save(&self.root);
        Ok(())
    }

    pub(crate) async fn prepare(&self, claim: &Claim, is_beta: bool) -> Result<Vec<Device>> {
        let key = self.key(claim);
        let _busy = self
            .busy(&key, !self.has(Defect::BusyWithTheClaim) && !self.has(Defect::CancelledStaysBusy))
            .await?;
        self.memory.lock().unwrap().prepares += 1;
        let allocated = self.allocated(claim).await?;
        if allocated.is_empty() {
            return Ok(Vec::new());
        }
        if self.has(Defect::RefusedForEver) {
            ensure!(!self.memory.lock().unwrap().refused.contains(&key), "refused before");
        }
        let is_prepared = self.begin(&key, claim, &allocated)?;
        self.work(Defect::PrepareHangsForEver).await?;
        let is_slow = self.disk.lock().unwrap().is_slow;
        if is_slow && allocated.iter().any(|one| one.device == "device-0") {
            tokio::time::sleep(SLOW).await;
        }
        let claims: Api<ResourceClaim> = Api::namespaced(self.client.clone(), &claim.namespace);
        let nothing = json!({"status": {"devices": []}});
        let told = claims.patch_status(&claim.name, &PatchParams::default(), &Patch::Merge(&nothing)).await;
        if self.has(Defect::StatusNeeded) {
            told?;
        }
        let has_spec = self.has(Defect::SpecOnlyOnce) && is_prepared;
        if !self.has(Defect::NoSpec) && !has_spec {
            let written = self.write_spec(claim, &allocated);
            if !self.has(Defect::SpecErrorsIgnored)
                && let Err(error) = written
            {
                self.save(&key, |disk| {
                    disk.claims.remove(&key);
                    Ok(())
                })?;
                return Err(error);
            }
        }
        self.save(&key, |disk| {
            if let Some(entry) = disk.claims.get_mut(&key) {
                entry.is_complete = true;
            }
            Ok(())
        })?;
        if self.has(Defect::CancelledStaysBusy) {
            self.memory.lock().unwrap().busy.remove(&key);
        }
        let told = allocated.into_iter().map(|one| {
            let mut ids = vec![self.id(claim, &one.part())];
            if self.has(Defect::BetaDiffers) && is_beta {
                ids.clear();
            }
            let wrong = self.has(Defect::OtherDevice);
            Device {
                request_names: vec![one.request],
                pool_name: pool(),
                device_name: if wrong { "device-9".to_owned() } else { one.device },
                cdi_device_ids: ids,
                share_id: one.share.filter(|_| !is_beta && !self.has(Defect::ShareIdsMissing)),
            }
        });
        Ok(told.collect())
    }

    /// Notes what the claim is going to have. Whether it had it already.
    fn begin(&self, key: &str, claim: &Claim, allocated: &[Allocated]) -> Result<bool> {
        let is_counted = |one: &&Allocated| !one.is_admin || self.has(Defect::AdminHolds);
        let parts: Vec<String> = allocated.iter().filter(is_counted).map(Allocated::part).collect();
        let mut is_prepared = false;
        self.save(key, |disk| {
            let mut memory = self.memory.lock().unwrap();
            let others = disk.claims.iter().filter(|(holder, _)| *holder != key);
            let mut held: Vec<&String> = others.flat_map(|(_, entry)| &entry.parts).collect();
            if !disk.claims.contains_key(key) {
                held.extend(&memory.held);
            }
            let is_admin = allocated.iter().any(|one| one.is_admin);
            let is_held = parts.iter().any(|part| held.contains(&part)) && !is_admin;
            if is_held && !self.has(Defect::DoubleUse) {
                memory.refused.insert(key.to_owned());
                bail!("{parts:?} is in use");
            }
            ensure!(
                !self.has(Defect::UnpreparedForEver) || !disk.unprepared.contains(key),
                "it was unprepared before"
            );
            if self.has(Defect::NeverFreed) {
                memory.held.extend(parts.clone());
            }
            let known = disk.claims.get(key);
            let is_interrupted = known.is_some_and(|entry| !entry.is_complete);
            ensure!(!self.has(Defect::PrepareInterrupted) || !is_interrupted, "it was interrupted");
            is_prepared = known.is_some_and(|entry| entry.is_complete);
            // As one that never starts over from what it finds.
            let is_unknown = known.is_none() && self.spec_path(key).exists();
            ensure!(!self.has(Defect::UnknownSpecRefused) || !is_unknown, "there is a spec already");
            let entry = Entry {
                namespace: claim.namespace.clone(),
                name: claim.name.clone(),
                uid: claim.uid.clone(),
                parts,
                device: allocated[0].device.clone(),
                is_admin,
                is_complete: is_prepared,
                boot: disk.boot,
            };
            disk.claims.insert(key.to_owned(), entry);
            Ok(())
        })?;
        Ok(is_prepared)
    }

    pub(crate) async fn unprepare(&self, claim: &Claim) -> Result<()> {
        let key = self.key(claim);
        if self.has(Defect::CrossedLost) {
            let mut memory = self.memory.lock().unwrap();
            let is_crossed = memory.busy.contains(&key);
            memory.lost.extend(is_crossed.then(|| key.clone()));
        }
        let _busy = self
            .busy(&key, !self.has(Defect::BusyUnprepare) && !self.has(Defect::CancelledStaysBusy))
            .await?;
        ensure!(!self.has(Defect::UnprepareFails), "it cannot be unprepared");
        if self.has(Defect::UnprepareReadsApi) {
            self.claim(claim).await?.context("the claim does not exist")?;
        }
        let Some(entry) = self.disk.lock().unwrap().claims.get(&key).cloned() else {
            ensure!(!self.has(Defect::UnknownFails), "the claim is not prepared");
            return Ok(());
        };
        self.save(&key, |disk| {
            ensure!(entry.boot == disk.boot || !self.has(Defect::OtherBootRefused), "it is of another boot");
            ensure!(entry.is_complete || !self.has(Defect::UnprepareInterrupted), "it was interrupted");
            if let Some(entry) = disk.claims.get_mut(&key) {
                entry.is_complete = false;
            }
            Ok(())
        })?;
        self.work(Defect::UnprepareHangsForEver).await?;
        if !self.has(Defect::SpecStays) {
            std::fs::remove_file(self.spec_path(&key)).ok();
        }
        if !self.has(Defect::MetadataStays) {
            std::fs::remove_file(self.metadata_path(&key)).ok();
        }
        let ends_others = self.has(Defect::ShareEndsAll) || self.has(Defect::AdminEndsAll) && entry.is_admin;
        self.save(&key, |disk| {
            for (other, _) in
                disk.claims.iter().filter(|(_, other)| ends_others && other.device == entry.device)
            {
                std::fs::remove_file(self.spec_path(other)).ok();
            }
            disk.claims.remove(&key);
            disk.unprepared.insert(key.clone());
            Ok(())
        })
    }

    /// Unprepares claims that are gone for long.
    pub(crate) async fn collect(self) {
        let mut missing = BTreeMap::<String, u32>::new();
        loop {
            tokio::time::sleep(ROUND).await;
            let entries: Vec<Entry> = self.disk.lock().unwrap().claims.values().cloned().collect();
            for Entry { namespace, name, uid, .. } in entries {
                let claims: Api<ResourceClaim> = Api::namespaced(self.client.clone(), &namespace);
                let Ok(Ok(found)) = tokio::time::timeout(PATIENCE, claims.get_opt(&name)).await else {
                    continue;
                };
                let is_there = found.is_some_and(|found| found.metadata.uid.as_ref() == Some(&uid));
                let rounds = missing.entry(uid.clone()).or_default();
                *rounds = if is_there && !self.has(Defect::CollectsAll) { 0 } else { *rounds + 1 };
                if *rounds >= ROUNDS && !self.has(Defect::NeverCollects) {
                    self.unprepare(&Claim { namespace, name, uid }).await.ok();
                }
            }
        }
    }
}
