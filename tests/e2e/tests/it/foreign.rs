//! GPU instances that somebody else made: used where that is possible, never
//! touched.

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::resource::v1::Device;
use kerf_e2e::{Case, LIMIT, Needs, Scene, wait_until};

use crate::ground::{self, Machine};
use crate::workload::{self, Workload, on_gpu, with_uuid};

/// The cases of this file.
pub(crate) const CASES: &[Case] = &[
    Case {
        name: "foreign GPU instances are given to pods where they can be, and never touched",
        needs: Needs::Driver,
        seconds: 50,
        run: never_touched,
    },
    Case {
        name: "a whole GPU with a foreign instance waits until that is gone",
        needs: Needs::Driver,
        seconds: 10,
        run: taints_the_whole,
    },
];

/// The GPU of this case. It is in MIG mode from the beginning.
const GPU: usize = 2;

fn uuid(device: &Device) -> Option<String> {
    device.attributes.as_ref()?.get("uuid")?.string.clone()
}

fn never_touched(scene: &Scene<'_>) -> Result<()> {
    ground::clean(scene, || {
        let here = on_gpu(&Machine::of(scene)?.gpu(GPU)?.pci);
        let unchanged = |foreign: &[(usize, ground::Instance)], when: &str| {
            ground::agree(scene, foreign).with_context(|| when.to_owned())
        };

        // Before any pod: one that can be used, one that cannot.
        let usable = ground::make_foreign(scene, GPU, &["--profile", "2g.10gb", "--start", "0"])?;
        let bare = ground::make_foreign(scene, GPU, &["--profile", "1g.5gb", "--start", "2", "--no-ci"])?;
        let made = usable.compute.first().context("it has no compute instance")?.uuid.clone();
        let mut foreign = vec![(GPU, usable), (GPU, bare)];
        let fixed = wait_until("it is published with its UUID", LIMIT, || {
            let devices = ground::devices(scene)?.into_values();
            Ok(devices.into_iter().find(|device| uuid(device).as_deref() == Some(made.as_str())))
        })?;
        ensure!(ground::taints(&fixed).is_empty(), "its taints are {:?}", ground::taints(&fixed));
        wait_until("what has no compute instance is not offered", LIMIT, || {
            let gpu = Machine::of(scene)?.gpu(GPU)?.device();
            let device = ground::devices(scene)?.remove(&format!("{gpu}-mig-1g-5gb-2"));
            Ok(device.is_none_or(|device| ground::taints(&device) == ["foreign"]).then_some(()))
        })?;

        let selector = with_uuid(&made);
        let using = Workload::new("using", "mig.nvidia.com").choosing(&selector);
        ensure!(using.run(scene)? == [made.clone()], "the pod sees another device");
        Workload::new("ours", "mig-1g.5gb.nvidia.com").choosing(&here).run(scene)?;
        ground::agree(scene, &foreign)?;

        // While pods run.
        let during = ground::make_foreign(scene, GPU, &["--profile", "1g.5gb"])?;
        foreign.push((GPU, during));
        ground::renew_driver(scene)?;
        ground::agree(scene, &foreign)?;
        ensure!(workload::seen(scene, "using")? == [made.clone()], "the pod sees another device");

        workload::end(scene, "using")?;
        workload::end(scene, "ours")?;
        ground::await_nothing_left(scene, &foreign)?;

        // After pods, and at a place that one of ours has just left.
        foreign.push((GPU, ground::make_foreign(scene, GPU, &["--profile", "1g.5gb", "--start", "6"])?));
        ground::renew_driver(scene)?;
        unchanged(&foreign, "after a restart")?;
        ensure!(using.run(scene)? == [made], "the pod sees another device");
        workload::end(scene, "using")?;
        ground::await_nothing_left(scene, &foreign)
    })
}

fn taints_the_whole(scene: &Scene<'_>) -> Result<()> {
    ground::clean(scene, || {
        let machine = Machine::of(scene)?;
        let (gpu, here) = (machine.gpu(0)?.device(), on_gpu(&machine.gpu(0)?.pci));
        // Brings the GPU into MIG mode, in which it stays.
        Workload::new("before", "mig-1g.10gb.nvidia.com").choosing(&here).run(scene)?;
        workload::end(scene, "before")?;
        let instance = ground::make_foreign(scene, 0, &["--profile", "1g.10gb", "--start", "0"])?;
        ground::await_taints(scene, &gpu, &["foreign"])?;
        Workload::new("whole", "gpu.nvidia.com").choosing(&here).apply(scene)?;
        workload::await_refused(scene, "whole")?;
        ground::untouched(&Machine::of(scene)?, &[(0, instance.clone())])?;
        ground::destroy(scene, 0, &instance)?;
        scene.await_running("whole")?;
        workload::end(scene, "whole")?;
        ground::await_nothing_left(scene, &[])
    })
}
