//! The ways to ask that Kubernetes has beside one request of one class: lists of
//! alternatives, all devices, constraints, extended resources by the names of
//! classes, controllers of every kind, several claims.

use std::collections::BTreeSet;

use anyhow::{Result, ensure};
use k8s_openapi::api::core::v1::Pod as PodObject;
use kerf_e2e::{Case, LIMIT, Needs, Scene, wait_until};
use serde_json::{Value, json};

use crate::machine::{self, Held};
use crate::manifest::{self, ANY_PARTITION, Pod, SMALL, WHOLE, request, request_where, requests};

/// The cases of this file.
pub(crate) const CASES: &[Case] = &[
    Case {
        name: "of a list of alternatives a pod gets the first that is there",
        needs: Needs::Driver,
        seconds: 15,
        run: first_available,
    },
    Case {
        name: "a pod gets all GPUs of a kind, or waits while one of them is held",
        needs: Needs::Driver,
        seconds: 20,
        run: all_of_a_kind,
    },
    Case {
        name: "slices that must not share a GPU are of different ones",
        needs: Needs::Driver,
        seconds: 10,
        run: distinct_parents,
    },
    Case {
        name: "a class is asked for as an extended resource by its own name, and +me by .me",
        needs: Needs::Driver,
        seconds: 15,
        run: by_names_of_classes,
    },
    Case {
        name: "a Job and a StatefulSet get partitions by plain limits and give them back",
        needs: Needs::Driver,
        seconds: 30,
        run: controllers,
    },
    Case {
        name: "a pod with many claims gets a device of each, and all are given back",
        needs: Needs::Driver,
        seconds: 15,
        run: many_claims,
    },
];

fn first_available(scene: &Scene<'_>) -> Result<()> {
    let memory = |least: &str| {
        format!("device.capacity[\"gpu.nvidia.com\"].memory.compareTo(quantity(\"{least}\")) >= 0")
    };
    // A subrequest is written like what `exactly` holds.
    let alternative = |name: &str, request: Value| {
        let mut alternative = request["exactly"].clone();
        alternative["name"] = json!(name);
        alternative
    };
    let devices = requests(&[json!({
        "name": "gpu",
        "firstAvailable": [
            alternative("huge", request_where("huge", WHOLE, &memory("200Gi"))),
            alternative("half", request_where("half", ANY_PARTITION, &memory("38Gi"))),
            alternative("whole", request("whole", WHOLE)),
        ],
    })]);
    let held = machine::run_lone(scene, "pod", &devices)?;
    ensure!(held.len() == 1 && held.iter().all(|held| held.request == "gpu/half"), "the pod holds {held:?}");

    // A container that names the request gets what the alternative gave.
    let template = manifest::template("named", &devices);
    let pod = Pod::new("named").with_template("claim", "named").container("main", &["claim/gpu"]);
    scene.apply(&manifest::list(&[template, pod.json()]))?;
    scene.await_running("named")?;
    machine::sees_what_it_holds(scene, "named").map(drop)
}

fn all_of_a_kind(scene: &Scene<'_>) -> Result<()> {
    let kind = "device.attributes[\"gpu.nvidia.com\"].productName.startsWith(\"NVIDIA H100\")";
    let mut all = request_where("all", WHOLE, kind);
    all["exactly"]["allocationMode"] = json!("All");
    let first = machine::gpus_of(scene, "h100-80")?.remove(0);
    let small = request_where("slice", SMALL, &manifest::on_gpu(&first.pci));
    machine::run_lone(scene, "holder", &requests(&[small]))?;
    scene.apply(&manifest::lone("all", &requests(&[all])))?;
    crate::workload::await_refused(scene, "all")?;
    scene.delete("pod/holder")?;
    scene.await_running("all")?;
    let held = machine::sees_what_it_holds(scene, "all")?;
    let gpus = machine::gpus_of(scene, "h100-80")?.len();
    ensure!(held.len() == gpus, "of {gpus} GPUs the pod holds {held:?}");
    Ok(())
}

fn distinct_parents(scene: &Scene<'_>) -> Result<()> {
    let mut devices = requests(&[request("one", SMALL), request("other", SMALL)]);
    devices["constraints"] =
        json!([{ "requests": ["one", "other"], "distinctAttribute": "gpu.nvidia.com/parentUUID" }]);
    let held = machine::run_lone(scene, "apart", &devices)?;
    let parents = held.iter().map(Held::pci).collect::<Result<BTreeSet<_>>>()?;
    ensure!(held.len() == 2 && parents.len() == 2, "the pod holds {held:?}");
    Ok(())
}

fn by_names_of_classes(scene: &Scene<'_>) -> Result<()> {
    for (pod, resource, profile) in [
        ("implicit", "deviceclass.resource.kubernetes.io/mig-2g.20gb.nvidia.com", "2g-20gb"),
        ("engines", "nvidia.com/mig-1g.10gb.me", "1g-10gb-me"),
    ] {
        let limits = json!({ resource: 1 });
        scene.apply(&Pod::new(pod).container_with_limits("main", &limits).json().to_string())?;
        scene.await_running(pod)?;
        let held = machine::sees_what_it_holds(scene, pod)?;
        let found: Vec<_> = held.iter().filter_map(Held::partition).map(|(profile, _)| profile).collect();
        ensure!(found == [profile], "for {resource} the pod holds {held:?}");
    }
    Ok(())
}

fn controllers(scene: &Scene<'_>) -> Result<()> {
    let limits = json!({ "nvidia.com/mig-1g.10gb": 1 });
    let labels = json!({ "app": "set" });
    let set = json!({
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": { "name": "set" },
        "spec": {
            "serviceName": "set",
            "replicas": 2,
            "selector": { "matchLabels": labels },
            "template": {
                "metadata": { "labels": labels },
                "spec": Pod::new("unused").container_with_limits("main", &limits).spec(),
            },
        },
    });
    let mut once = Pod::new("unused").container_with_limits("main", &limits).once().spec();
    once["containers"][0]["command"] = json!(["nvidia-smi", "-L"]);
    let job = json!({
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": { "name": "job" },
        "spec": { "completions": 3, "parallelism": 2, "template": { "spec": once } },
    });
    scene.apply(&manifest::list(&[set, job]))?;
    let mut held = BTreeSet::new();
    for pod in ["set-0", "set-1"] {
        scene.await_running(pod)?;
        held.extend(machine::sees_what_it_holds(scene, pod)?);
    }
    ensure!(held.len() == 2, "the set's pods hold {held:?}");
    let limit = format!("--timeout={}s", LIMIT.as_secs());
    scene.kubectl(&["wait", "--for=condition=Complete", "job/job", &limit])?;
    for pod in scene.list::<PodObject>()? {
        let name = pod.metadata.name.unwrap_or_default();
        if name.starts_with("job-") {
            let seen = machine::listed(&scene.logs(&name, None)?)?;
            ensure!(seen.len() == 1, "{name} saw {seen:?}");
        }
    }
    // The same name again, as after a node's drain.
    scene.delete("pod/set-0")?;
    wait_until("set-0 is another pod that runs", LIMIT, || {
        Ok((machine::sees_what_it_holds(scene, "set-0").is_ok_and(|now| now.len() == 1)).then_some(()))
    })?;
    scene.kubectl(&["scale", "statefulset/set", "--replicas=0"])?;
    machine::await_no_instance(scene)
}

fn many_claims(scene: &Scene<'_>) -> Result<()> {
    let classes = [WHOLE, SMALL, "mig-2g.20gb.nvidia.com", "mig-1g.5gb.nvidia.com", "mig-1g.6gb.nvidia.com"];
    let mut objects = Vec::new();
    let mut pod = Pod::new("many");
    let names: Vec<String> = (0..classes.len()).map(|number| format!("claim-{number}")).collect();
    for (name, class) in names.iter().zip(classes) {
        objects.push(manifest::template(name, &requests(&[request("device", class)])));
        pod = pod.with_template(name, name);
    }
    let uses: Vec<&str> = names.iter().map(String::as_str).collect();
    objects.push(pod.container("main", &uses).json());
    scene.apply(&manifest::list(&objects))?;
    scene.await_running("many")?;
    let held = machine::sees_what_it_holds(scene, "many")?;
    ensure!(held.len() == classes.len(), "the pod holds {held:?}");
    scene.delete("pod/many")?;
    machine::await_no_instance(scene)
}
