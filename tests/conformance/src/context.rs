//! What a check works with: the driver under test, as it runs now, and the
//! claims that were made of it.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, ensure};
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::Client;

use crate::api::{Claim, Cluster, Unusual};
use crate::check::{Check, Need, NotApplicable};
use crate::disk::Disk;
use crate::fault::{Fault, Requests};
use crate::kubelet::{Plugin, said};
use crate::launcher::{Launcher, Running};
use crate::profile::{ClaimProfile, Profile, seconds};
use crate::rules;

/// How long something is waited for that did not come before.
const SHORT: Duration = Duration::from_secs(3);
/// How often something that is waited for is looked at.
const LOOK: Duration = Duration::from_millis(50);

/// The instance that runs in all checks but those of rolling updates.
pub(crate) const FIRST: &str = "conformance-1";
pub(crate) const SECOND: &str = "conformance-2";

/// The driver under test and what was made of it.
#[derive(Debug)]
pub struct Context {
    pub(crate) profile: Profile,
    pub(crate) cluster: Cluster,
    launcher: Option<Box<dyn Launcher>>,
    running: BTreeMap<String, Box<dyn Running>>,
    /// To be taken away after the check.
    claims: Vec<Claim>,
    does_hang: bool,
    is_slow: bool,
    small_disk: Option<PathBuf>,
    sockets: Patience,
    published: Patience,
    silence: Patience,
}

/// Waits long, but not three times in vain: a driver that never starts would else
/// cost its whole time in every check.
#[derive(Debug, Default)]
struct Patience {
    in_vain: Cell<u32>,
}

impl Patience {
    async fn until<T>(&self, limit: f64, attempt: impl AsyncFnMut() -> Result<T>) -> Result<T> {
        let limit = if self.in_vain.get() < 2 { seconds(limit) } else { SHORT.min(seconds(limit)) };
        let came = until(limit, attempt).await;
        self.in_vain.set(if came.is_err() { self.in_vain.get() + 1 } else { 0 });
        came
    }
}

impl Context {
    /// Of a driver that `launcher` starts, or that runs already.
    pub fn new(profile: Profile, client: Client, launcher: Option<Box<dyn Launcher>>) -> Self {
        let cluster = Cluster::new(client, &profile);
        Self {
            profile,
            cluster,
            launcher,
            running: BTreeMap::new(),
            claims: Vec::new(),
            does_hang: false,
            is_slow: false,
            small_disk: None,
            sockets: Patience::default(),
            published: Patience::default(),
            silence: Patience::default(),
        }
    }

    /// Which instance has ended though nobody asked it to, and how.
    pub(crate) fn ended(&mut self) -> Option<anyhow::Error> {
        self.running.iter_mut().find_map(|(instance, running)| {
            Some(anyhow!("the driver's process ({instance}) ended: {}", running.ended()?))
        })
    }

    /// What keeps a check from applying.
    pub(crate) fn missing(&self, check: &Check) -> Option<&'static str> {
        let has = |need: &Need| match need {
            Need::Registry => self.profile.registry.is_some(),
            Need::Claims => !self.profile.claims.is_empty(),
            Need::Cdi => !self.profile.cdi.is_empty(),
            Need::Hang => self.launcher.as_ref().is_some_and(|launcher| launcher.has_hangs()),
            Need::Slow => self.launcher.as_ref().is_some_and(|launcher| launcher.has_slowness()),
            Need::Shares => self.profile.shares.is_some(),
            Need::Collect => self.profile.limits.collect.is_some(),
            Need::State => self.profile.state.is_some(),
            Need::Start => self.launcher.is_some(),
            Need::Instances => self.launcher.as_ref().is_some_and(|launcher| launcher.has_instances()),
            Need::Reboot => self.launcher.as_ref().is_some_and(|launcher| launcher.has_reboot()),
            Need::Outage => self.launcher.as_ref().is_some_and(|launcher| launcher.has_outages()),
            Need::Disturb => self.profile.registry.is_some() || self.profile.disturb,
        };
        check.needs.iter().find(|need| !has(need)).map(|need| need.missing())
    }

    /// Starts what must run for a check.
    pub(crate) async fn begin(&mut self) -> Result<()> {
        if self.profile.registry.is_some() {
            self.cluster.ensure_node().await?;
        }
        if self.launcher.is_some() && !self.running.contains_key(FIRST) {
            self.start(FIRST).await?;
        }
        Ok(())
    }

    /// Ends the driver after a check that failed, as far as it can be started again:
    /// the next check is not to fail for what this one has left.
    pub(crate) async fn renew(&mut self) {
        if let Some(running) = self.running.remove(FIRST) {
            running.kill().await.ok();
        }
    }

    /// Takes away what a check made. What does not work here is found by the
    /// checks that are about it.
    pub(crate) async fn tidy(&mut self) {
        self.trouble(Fault::None).ok();
        if self.does_hang {
            self.hang(false).await.ok();
        }
        if self.is_slow {
            self.slow(false).await.ok();
        }
        if let Some(second) = self.running.remove(SECOND) {
            second.kill().await.ok();
        }
        if self.small_disk.is_some() {
            self.unprepare_claims().await;
            self.normal_disk().await.ok();
        }
        if !self.claims.is_empty() && self.begin().await.is_ok() {
            self.unprepare_claims().await;
        }
        for claim in std::mem::take(&mut self.claims) {
            self.cluster.delete(&claim).await.ok();
        }
    }

    async fn unprepare_claims(&mut self) {
        if !self.claims.is_empty()
            && let Ok(plugin) = self.plugin().await
        {
            for claim in &self.claims {
                plugin.unprepare(claim).await.ok();
            }
        }
    }

    /// Ends everything in the midst of a check, after which nothing is run.
    pub async fn stop(&mut self) {
        self.tidy().await;
        self.end().await;
    }

    /// Ends everything.
    pub(crate) async fn end(&mut self) {
        for running in std::mem::take(&mut self.running).into_values() {
            running.terminate().await.ok();
        }
        self.cluster.leave().await;
    }

    pub(crate) async fn start(&mut self, instance: &str) -> Result<()> {
        self.until_silent().await?;
        let launcher = self.launcher.as_mut().context("the profile has no `start`")?;
        let running = launcher.start(instance).await?;
        self.running.insert(instance.to_owned(), running);
        Ok(())
    }

    pub(crate) async fn terminate(&mut self, instance: &str) -> Result<()> {
        let running = self.running.remove(instance).context("it does not run")?;
        running.terminate().await.context("the driver was asked to end (SIGTERM)")
    }

    pub(crate) async fn kill(&mut self, instance: &str) -> Result<()> {
        self.running.remove(instance).context("it does not run")?.kill().await?;
        self.until_silent().await
    }

    /// Waits until nobody answers for the driver, if no instance runs: what comes
    /// next is to be the answer of the next.
    async fn until_silent(&self) -> Result<()> {
        if !self.running.is_empty() {
            return Ok(());
        }
        self.silence.until(self.profile.limits.stop, async || self.silent().await).await
    }

    /// Whether the driver is started here.
    pub(crate) fn starts(&self) -> bool {
        self.launcher.is_some()
    }

    /// Kills the driver and starts it again.
    pub(crate) async fn crash(&mut self) -> Result<Plugin> {
        self.kill(FIRST).await?;
        self.start(FIRST).await?;
        self.plugin().await
    }

    /// Starts the driver again, if it can be: it may repair its slices only so
    /// often, and what other checks did to them is not to count.
    pub(crate) async fn rest(&mut self) -> Result<()> {
        if self.launcher.is_some() && self.profile.registry.is_some() {
            // Not in the middle of its start.
            self.plugin().await?;
            self.crash().await?;
        }
        Ok(())
    }

    pub(crate) async fn reboot(&mut self) -> Result<Plugin> {
        self.kill(FIRST).await?;
        self.launcher.as_mut().context("the profile has no `start`")?.reboot().await?;
        self.empty_cdi()?;
        self.start(FIRST).await?;
        self.plugin().await
    }

    /// Makes the devices hang, or answer again.
    pub(crate) async fn hang(&mut self, does_hang: bool) -> Result<()> {
        self.does_hang = does_hang;
        self.launcher.as_mut().context("the profile has no `start`")?.hang(does_hang).await
    }

    /// Makes prepares of the first kind of claims slow, or as they were.
    pub(crate) async fn slow(&mut self, is_slow: bool) -> Result<()> {
        self.is_slow = is_slow;
        self.launcher.as_mut().context("the profile has no `start`")?.slow(is_slow).await
    }

    /// Cuts the driver's way to the API server, or opens it again.
    pub(crate) fn cut(&mut self, is_cut: bool) -> Result<()> {
        self.trouble(if is_cut { Fault::Hold(Requests::All) } else { Fault::None })
    }

    /// Makes trouble on the driver's way to the API server, instead of what there was.
    pub(crate) fn trouble(&mut self, fault: Fault) -> Result<()> {
        self.launcher.as_mut().context("the profile has no `start`")?.trouble(fault);
        Ok(())
    }

    /// How many of the driver's requests have met that trouble.
    pub(crate) fn met(&self) -> u32 {
        self.launcher.as_ref().map_or(0, |launcher| launcher.met())
    }

    /// Starts the driver with a folder on a small disk.
    pub(crate) async fn shrink(&mut self, folder: &Path) -> Result<Plugin> {
        // Not in the middle of its start.
        self.plugin().await?;
        self.kill(FIRST).await?;
        self.small_disk = Some(folder.to_owned());
        let made = self.disk(Disk::Small);
        if made.is_err() {
            self.small_disk = None;
        }
        self.start(FIRST).await?;
        made.map_err(|error| NotApplicable(format!("there can be no full disk: {error:#}")))?;
        self.plugin().await
    }

    /// Makes the small disk full, or not full any more.
    pub(crate) fn fill(&mut self, is_full: bool) -> Result<()> {
        self.disk(if is_full { Disk::Full } else { Disk::Small })
    }

    fn disk(&mut self, disk: Disk) -> Result<()> {
        let folder = self.small_disk.as_ref().context("there is no small disk")?;
        self.launcher.as_mut().context("the profile has no `start`")?.disk(folder, disk)
    }

    /// Starts the driver without a small disk.
    async fn normal_disk(&mut self) -> Result<()> {
        self.renew().await;
        self.disk(Disk::Normal)?;
        self.small_disk = None;
        self.start(FIRST).await
    }

    pub(crate) fn registry(&self) -> Result<&Path> {
        self.profile.registry.as_deref().context("the profile has no `registry`")
    }

    /// The driver, found and registered.
    pub(crate) async fn plugin(&mut self) -> Result<Plugin> {
        self.plugin_except(&[]).await
    }

    pub(crate) async fn plugin_except(&mut self, except: &[PathBuf]) -> Result<Plugin> {
        let registry = self.registry()?.to_owned();
        let (driver, limit) = (self.profile.driver.clone(), self.profile.limits.start);
        // What it attempts needs the rest of `self`.
        let sockets = std::mem::take(&mut self.sockets);
        let plugin = sockets.until(limit, async || {
            // That is not going to change.
            if let Some(error) = self.ended() {
                return Ok(Err(error));
            }
            let plugin = Plugin::find(&registry, &driver, except).await?;
            // A socket of before a kill may be replaced just now.
            plugin
                .notify("")
                .await
                .map_err(|status| anyhow::anyhow!("NotifyRegistrationStatus: {}", said(&status)))?;
            Ok(Ok(plugin))
        });
        let plugin = plugin.await;
        self.sockets = sockets;
        plugin?
    }

    /// A claim of the profile's first or second kind.
    pub(crate) async fn claim(&mut self, kind: usize) -> Result<Claim> {
        self.unusual(kind, Unusual::default()).await
    }

    pub(crate) async fn unusual(&mut self, kind: usize, unusual: Unusual) -> Result<Claim> {
        let kinds = &self.profile.claims;
        let profile: ClaimProfile =
            kinds.get(kind).or(kinds.first()).context("the profile has no `claims`")?.clone();
        self.made(&profile, unusual).await
    }

    /// A claim of that profile.
    pub(crate) async fn made(&mut self, profile: &ClaimProfile, unusual: Unusual) -> Result<Claim> {
        self.settled().await?;
        let claim = self.cluster.create(profile, unusual).await.context("a claim cannot be made")?;
        self.claims.push(claim.clone());
        Ok(claim)
    }

    /// A call that a kubelet makes until it works: what went before may still be
    /// under way.
    pub(crate) async fn retried(&self, call: impl AsyncFnMut() -> Result<()>) -> Result<()> {
        until(seconds(self.profile.limits.start), call).await
    }

    /// A new claim can have the device of a former one.
    pub(crate) async fn require_free(&mut self, former: &Claim) -> Result<()> {
        let plugin = self.plugin().await?;
        let device = Some(former.device.clone());
        let claim = self.unusual(0, Unusual { device, ..Unusual::default() }).await?;
        plugin.prepare(&claim).await.context("the device is not free")?;
        plugin.unprepare(&claim).await?;
        self.cluster.delete(&claim).await
    }

    /// Slices once every pool is complete.
    pub(crate) async fn settled(&self) -> Result<Vec<ResourceSlice>> {
        self.settled_when(async |_| Ok(())).await
    }

    /// Slices once every pool is complete and `condition` holds.
    pub(crate) async fn settled_when(
        &self,
        condition: impl AsyncFn(&[ResourceSlice]) -> Result<()>,
    ) -> Result<Vec<ResourceSlice>> {
        let all = self.published.until(self.profile.limits.publish, async || {
            let slices = self.cluster.published().await?;
            ensure!(!slices.is_empty(), "there is no slice of `{}`", self.profile.driver);
            rules::complete(&slices)?;
            condition(&slices).await?;
            Ok(slices)
        });
        all.await
    }

    /// Slices that nobody has written for a while.
    pub(crate) async fn quiet(&self) -> Result<Vec<ResourceSlice>> {
        let quiet = seconds(self.profile.limits.quiet);
        let mut since = Instant::now();
        let mut last = self.settled().await?;
        until(seconds(self.profile.limits.publish) + quiet, async || {
            let now = self.cluster.published().await?;
            if written(&last, &now).is_some() {
                since = Instant::now();
                last = now;
            }
            ensure!(since.elapsed() >= quiet, "slices are written all the time");
            Ok(last.clone())
        })
        .await
    }

    /// Empties the folders of CDI specs, as a boot does.
    pub(crate) fn empty_cdi(&self) -> Result<()> {
        for folder in &self.profile.cdi {
            let Ok(entries) = std::fs::read_dir(folder) else { continue };
            for entry in entries {
                std::fs::remove_file(entry?.path())?;
            }
        }
        Ok(())
    }
}

/// Which slice differs between two looks, if one does.
pub(crate) fn written(before: &[ResourceSlice], after: &[ResourceSlice]) -> Option<String> {
    let versions = |slices: &[ResourceSlice]| -> BTreeMap<String, Option<String>> {
        let metadata = slices.iter().map(|slice| &slice.metadata);
        metadata.map(|meta| (meta.name.clone().unwrap_or_default(), meta.resource_version.clone())).collect()
    };
    let (before, after) = (versions(before), versions(after));
    let differs = |name: &&String| before.get(*name) != after.get(*name);
    before.keys().chain(after.keys()).find(differs).cloned()
}

/// Tries until it works, or says what was the matter when time was up.
pub(crate) async fn until<T>(limit: Duration, mut attempt: impl AsyncFnMut() -> Result<T>) -> Result<T> {
    let started = Instant::now();
    loop {
        match attempt().await {
            Ok(value) => return Ok(value),
            Err(error) if started.elapsed() >= limit => {
                return Err(error.context(format!("not within {} s", limit.as_secs_f32())));
            }
            Err(_) => tokio::time::sleep(LOOK).await,
        }
    }
}
