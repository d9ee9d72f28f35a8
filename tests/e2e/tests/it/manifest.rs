//! Claims and pods as values, so that a case reads as its sentence.
//!
//! Every container lists the GPUs it sees and then waits to be ended.

use serde_json::{Value, json};

/// The class of whole GPUs.
pub(crate) const WHOLE: &str = "gpu.nvidia.com";
/// The class of all partitions.
pub(crate) const ANY_PARTITION: &str = "mig.nvidia.com";
/// The class of the smallest partition of an H100.
pub(crate) const SMALL: &str = "mig-1g.10gb.nvidia.com";

/// Ends at once whenever it is asked to, as process 1 does not by itself.
const COMMAND: &str = "trap 'exit 0' TERM; nvidia-smi -L; sleep infinity & wait";

/// A request of one device of a class.
pub(crate) fn request(name: &str, class: &str) -> Value {
    json!({ "name": name, "exactly": { "deviceClassName": class } })
}

/// A request of one device of a class for which an expression holds.
pub(crate) fn request_where(name: &str, class: &str, expression: &str) -> Value {
    let selectors = json!([{ "cel": { "expression": expression } }]);
    json!({ "name": name, "exactly": { "deviceClassName": class, "selectors": selectors } })
}

/// The expression that holds for the devices of one GPU.
pub(crate) fn on_gpu(pci: &str) -> String {
    format!("device.attributes[\"resource.kubernetes.io\"].pciBusID == \"{pci}\"")
}

/// The `devices` of a claim that has only requests.
pub(crate) fn requests(requests: &[Value]) -> Value {
    json!({ "requests": requests })
}

/// A claim for pods to name.
pub(crate) fn claim(name: &str, devices: &Value) -> Value {
    json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": { "name": name },
        "spec": { "devices": devices },
    })
}

/// A template from which each pod gets a claim of its own.
pub(crate) fn template(name: &str, devices: &Value) -> Value {
    json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": { "name": name },
        "spec": { "spec": { "devices": devices } },
    })
}

/// Several objects as one manifest.
pub(crate) fn list(items: &[Value]) -> String {
    json!({ "apiVersion": "v1", "kind": "List", "items": items }).to_string()
}

/// A pod with one container that uses all of one claim, made from a template
/// of the pod's name.
pub(crate) fn lone(name: &str, devices: &Value) -> String {
    list(&[
        template(name, devices),
        Pod::new(name).with_template("claim", name).container("main", &["claim"]).json(),
    ])
}

/// A pod in the making.
#[derive(Debug, Clone)]
pub(crate) struct Pod {
    metadata: Value,
    claims: Vec<Value>,
    init_containers: Vec<Value>,
    containers: Vec<Value>,
    scheduler: Option<String>,
    user_namespace: bool,
    once: bool,
}

impl Pod {
    pub(crate) fn new(name: &str) -> Self {
        Self {
            metadata: json!({ "name": name }),
            claims: Vec::new(),
            init_containers: Vec::new(),
            containers: Vec::new(),
            scheduler: None,
            user_namespace: false,
            once: false,
        }
    }

    /// It has a claim made from a template.
    pub(crate) fn with_template(mut self, claim: &str, template: &str) -> Self {
        self.claims.push(json!({ "name": claim, "resourceClaimTemplateName": template }));
        self
    }

    /// It uses a claim that is there on its own.
    pub(crate) fn with_claim(mut self, claim: &str, object: &str) -> Self {
        self.claims.push(json!({ "name": claim, "resourceClaimName": object }));
        self
    }

    /// A container that uses claims, `claim`, or single requests, `claim/request`.
    pub(crate) fn container(mut self, name: &str, uses: &[&str]) -> Self {
        self.containers.push(container(name, COMMAND, &json!({ "claims": uses_of(uses) })));
        self
    }

    /// A container that asks for extended resources.
    pub(crate) fn container_with_limits(mut self, name: &str, limits: &Value) -> Self {
        self.containers.push(container(name, COMMAND, &json!({ "limits": limits })));
        self
    }

    /// A container that runs, and ends, before the others.
    pub(crate) fn init_container(mut self, name: &str, uses: &[&str]) -> Self {
        self.init_containers.push(container(name, "nvidia-smi -L", &json!({ "claims": uses_of(uses) })));
        self
    }

    /// Whoever is to bind it.
    pub(crate) fn scheduler(mut self, name: &str) -> Self {
        self.scheduler = Some(name.to_owned());
        self
    }

    /// Its users are nobody on the host.
    pub(crate) fn in_user_namespace(mut self) -> Self {
        self.user_namespace = true;
        self
    }

    /// When its containers have ended, it has.
    pub(crate) fn once(mut self) -> Self {
        self.once = true;
        self
    }

    /// The manifest.
    pub(crate) fn json(&self) -> Value {
        json!({ "apiVersion": "v1", "kind": "Pod", "metadata": self.metadata, "spec": self.spec() })
    }

    /// What a template of pods holds.
    pub(crate) fn spec(&self) -> Value {
        let mut spec = json!({
            "terminationGracePeriodSeconds": 30,
            "resourceClaims": self.claims,
            "initContainers": self.init_containers,
            "containers": self.containers,
        });
        if let Some(scheduler) = &self.scheduler {
            spec["schedulerName"] = json!(scheduler);
        }
        if self.user_namespace {
            spec["hostUsers"] = json!(false);
        }
        if self.once {
            spec["restartPolicy"] = json!("Never");
        }
        spec
    }
}

fn container(name: &str, command: &str, resources: &Value) -> Value {
    json!({
        "name": name,
        "image": "localhost/cuda-stub:dev",
        "command": ["sh", "-c", command],
        "resources": resources,
    })
}

fn uses_of(uses: &[&str]) -> Vec<Value> {
    uses.iter()
        .map(|used| match used.split_once('/') {
            Some((claim, request)) => json!({ "name": claim, "request": request }),
            None => json!({ "name": used }),
        })
        .collect()
}
