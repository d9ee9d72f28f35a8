//! A device that a claim holds stays published whatever happens to it, and
//! nobody else gets its hardware.

use std::cell::RefCell;
use std::time::UNIX_EPOCH;

use anyhow::{Context as _, Result, bail, ensure};
use k8s_openapi::api::resource::v1::Device;
use kerf_e2e::{Case, LIMIT, Needs, Scene, Values, wait_until, watch_until};
use serde_json::json;

use crate::aftermath;
use crate::ground::{self, Machine};
use crate::workload::{self, Workload, on_gpu};

/// The cases of this file.
pub(crate) const CASES: &[Case] = &[
    Case {
        name: "a held partition whose profile is filtered out stays, tainted, and its GPU goes to nobody else",
        needs: Needs::Driver,
        seconds: 105,
        run: filtered_out,
    },
    Case {
        name: "a held partition stays when others fill its GPU",
        needs: Needs::Driver,
        seconds: 10,
        run: occupied_by_others,
    },
    Case {
        name: "a held partition is published all the time while kerf is killed or replaced",
        needs: Needs::Driver,
        seconds: 15,
        run: restarted,
    },
    Case {
        name: "a held partition stays, tainted, while its GPU is lost, and its pod's status tells it",
        needs: Needs::Driver,
        seconds: 50,
        run: lost,
    },
];

/// A running pod with a partition of the first GPU, and a pod that wants all of
/// that GPU and has to wait.
struct Held<'a> {
    scene: &'a Scene<'a>,
    /// The whole GPU's device.
    gpu: String,
    /// The held device.
    device: String,
    /// As it was published when it was claimed.
    published: Device,
    /// What its pod sees.
    uuids: Vec<String>,
    lapses: RefCell<Vec<String>>,
}

impl<'a> Held<'a> {
    fn new(scene: &'a Scene<'a>) -> Result<Self> {
        let machine = Machine::of(scene)?;
        let gpu = machine.gpu(0)?;
        let here = on_gpu(&gpu.pci);
        let uuids = Workload::new("holder", "mig-1g.10gb.nvidia.com").choosing(&here).run(scene)?;
        let device = workload::device_of(scene, "holder")?;
        let published = ground::devices(scene)?.remove(&device).context("it is not published")?;
        Workload::new("waiter", "gpu.nvidia.com").choosing(&here).apply(scene)?;
        workload::await_refused(scene, "waiter")?;
        Ok(Self { scene, gpu: gpu.device(), device, published, uuids, lapses: RefCell::default() })
    }

    /// Notes it if the device is not there with its cost, or its GPU was given
    /// to the waiter.
    fn look(&self) -> Result<Option<Device>> {
        let now = ground::devices(self.scene)?.remove(&self.device);
        match &now {
            Some(now) if now.consumes_counters == self.published.consumes_counters => {}
            other => self.lapses.borrow_mut().push(format!("{other:?}")),
        }
        if !workload::is_refused(self.scene, "waiter")? {
            self.lapses.borrow_mut().push("the waiting pod got a device".to_owned());
        }
        Ok(now)
    }

    fn await_taints(&self, expected: &[&str]) -> Result<()> {
        watch_until(&format!("the held device has the taints {expected:?}"), LIMIT, || {
            let found = self.look()?.map(|device| ground::taints(&device));
            ensure!(found.as_deref().is_some_and(|found| found == expected), "its taints are {found:?}");
            Ok(Some(()))
        })?;
        self.never_lapsed()
    }

    fn never_lapsed(&self) -> Result<()> {
        let lapses = self.lapses.borrow();
        if lapses.is_empty() { Ok(()) } else { bail!("the held device lapsed: {lapses:?}") }
    }

    /// Its pod is as it was; once it leaves, the waiter gets the GPU.
    fn release(self) -> Result<()> {
        self.look()?;
        self.never_lapsed()?;
        ensure!(workload::seen(self.scene, "holder")? == self.uuids, "the holder sees another device");
        workload::end(self.scene, "holder")?;
        self.scene.await_running("waiter")?;
        ensure!(workload::device_of(self.scene, "waiter")? == self.gpu, "the waiter has another GPU");
        workload::end(self.scene, "waiter")?;
        ground::await_nothing_left(self.scene, &[])
    }
}

fn values(key: &str, value: &str) -> Values {
    Values::from_iter([(key.to_owned(), json!(value))])
}

fn filtered_out(scene: &Scene<'_>) -> Result<()> {
    ground::clean_values(scene, || {
        let held = Held::new(scene)?;
        let small = |device: &str| device.contains("-mig-1g-10gb-");
        scene.configure_driver(values("migProfiles", "3g.40gb"))?;
        held.await_taints(&["withheld"])?;
        let tainted = tainted_at(ground::devices(scene)?.get(&held.device).context("it is gone")?)?;
        watch_until("all others of the profile are withdrawn", LIMIT, || {
            held.look()?;
            let left = ground::devices(scene)?.into_keys().filter(|name| small(name)).collect::<Vec<_>>();
            ensure!(left == [held.device.clone()], "published are {left:?}");
            Ok(Some(()))
        })?;
        let settled = UNIX_EPOCH.elapsed()?.as_secs().saturating_sub(tainted);
        // The API server's clock has seconds, so one may be lost.
        ensure!(settled >= 29, "they were withdrawn {settled} s after their taint");
        // The scheduler is made to look again at what there is now.
        Workload::new("late", "mig-1g.10gb.nvidia.com").apply(scene)?;
        workload::await_refused(scene, "late")?;
        workload::end(scene, "late")?;
        let device = held.device.clone();
        held.release()?;
        wait_until("the device is withdrawn when nothing holds it", LIMIT, || {
            Ok((!ground::devices(scene)?.contains_key(&device)).then_some(()))
        })?;
        scene.configure_driver(Values::new())?;
        wait_until("it is published again", LIMIT, || {
            Ok(ground::devices(scene)?.contains_key(&device).then_some(()))
        })
    })
}

/// When a device's oldest taint was stored, in seconds since 1970.
fn tainted_at(device: &Device) -> Result<u64> {
    let times = device.taints.iter().flatten().filter_map(|taint| taint.time_added.as_ref());
    let oldest = times.map(|time| time.0.as_second()).min().context("it has no taint with a time")?;
    Ok(u64::try_from(oldest)?)
}

fn occupied_by_others(scene: &Scene<'_>) -> Result<()> {
    ground::clean(scene, || {
        let held = Held::new(scene)?;
        let start = held.published.name.rsplit('-').next().context("it has no start")?.to_owned();
        let foreign = [
            // Beside it, used and unused, wherever there is room.
            (0, ground::make_foreign(scene, 0, &["--profile", "3g.40gb"])?),
            (0, ground::make_foreign(scene, 0, &["--profile", "1g.10gb", "--no-ci"])?),
        ];
        ground::await_taints(scene, &held.gpu, &["foreign"])?;
        held.await_taints(&[])?;
        // While the GPU is full of others, the scheduler is asked once more.
        Workload::new("late", "mig-3g.40gb.nvidia.com")
            .choosing(&on_gpu(&Machine::of(scene)?.gpu(0)?.pci))
            .apply(scene)?;
        workload::await_refused(scene, "late")?;
        workload::end(scene, "late")?;
        ground::agree(scene, &foreign)?;
        ensure!(workload::seen(scene, "holder")? == held.uuids, "the holder at {start} sees another device");
        for (gpu, instance) in &foreign {
            ground::destroy(scene, *gpu, instance)?;
        }
        ground::await_taints(scene, &held.gpu, &[])?;
        held.release()
    })
}

fn restarted(scene: &Scene<'_>) -> Result<()> {
    aftermath::clean(scene, || {
        let held = Held::new(scene)?;
        for how in [ground::kill_driver, ground::renew_driver] {
            how(scene)?;
            watch_until("kerf serves again", LIMIT, || {
                held.look()?;
                Ok((ground::metric(scene, "kerf_ready")? > 0.5).then_some(()))
            })?;
            held.await_taints(&[])?;
            ground::agree(scene, &[])?;
        }
        held.release()
    })
}

fn lost(scene: &Scene<'_>) -> Result<()> {
    ground::clean(scene, || {
        let held = Held::new(scene)?;
        workload::await_health(scene, "holder", "Healthy", "")?;
        scene.emulator(&["lose", "--gpu", "0"])?;
        held.await_taints(&["lost"])?;
        workload::await_health(scene, "holder", "Unhealthy", "is lost")?;
        ground::await_taints(scene, &held.gpu, &["lost"])?;
        // Nothing of it is given out, and the others go on.
        let pci = Machine::of(scene)?.gpu(0)?.pci.clone();
        Workload::new("late", "mig-1g.10gb.nvidia.com").choosing(&on_gpu(&pci)).apply(scene)?;
        workload::await_refused(scene, "late")?;
        workload::end(scene, "late")?;
        Workload::new("other", "mig-1g.10gb.nvidia.com").run(scene)?;
        workload::end(scene, "other")?;
        Workload::new("whole", "gpu.nvidia.com").run(scene)?;
        workload::await_health(scene, "whole", "Healthy", "")?;
        // A process that starts while it is lost knows of it from its records.
        ground::renew_driver(scene)?;
        held.await_taints(&["lost"])?;
        workload::await_health(scene, "holder", "Unhealthy", "is lost")?;
        workload::await_health(scene, "whole", "Healthy", "")?;
        workload::end(scene, "whole")?;
        scene.emulator(&["return", "--gpu", "0"])?;
        held.await_taints(&[])?;
        workload::await_health(scene, "holder", "Healthy", "")?;
        held.release()
    })
}
