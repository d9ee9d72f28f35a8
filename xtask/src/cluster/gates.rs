//! Feature gates that are not as the release has them. A cluster's components
//! can disagree about one, as in a cluster that is being upgraded or is
//! configured by halves.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use anyhow::{Context as _, Result, bail};
use serde::{Deserialize, Serialize};

use super::components::Component;

/// The components that have feature gates.
const GATED: [Component; 4] =
    [Component::ApiServer, Component::ControllerManager, Component::Scheduler, Component::Kubelet];

/// Gates to set, as `NAME=BOOL` for all components or `COMPONENT:NAME=BOOL`
/// for one, separated by commas. A later one wins over an earlier one.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct FeatureGates(Vec<Gate>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct Gate {
    /// None: all that have gates.
    component: Option<Component>,
    name: String,
    on: bool,
}

impl FeatureGates {
    /// Whether every gate is as the release has it.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The component's argument for its gates, if any is set.
    pub(super) fn argument(&self, component: Component) -> Option<String> {
        let mine = |gate: &&Gate| gate.component.is_none_or(|named| named == component);
        let set: BTreeMap<&str, bool> =
            self.0.iter().filter(mine).map(|gate| (gate.name.as_str(), gate.on)).collect();
        if set.is_empty() || !GATED.contains(&component) {
            return None;
        }
        let set: Vec<String> = set.into_iter().map(|(name, on)| format!("{name}={on}")).collect();
        Some(format!("--feature-gates={}", set.join(",")))
    }
}

impl fmt::Display for FeatureGates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gates: Vec<String> = self.0.iter().map(Gate::to_string).collect();
        f.write_str(&gates.join(","))
    }
}

impl fmt::Display for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(component) = self.component {
            write!(f, "{}:", component.name())?;
        }
        write!(f, "{}={}", self.name, self.on)
    }
}

impl FromStr for FeatureGates {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let gates = text.split(',').filter(|gate| !gate.is_empty()).map(str::parse);
        Ok(Self(gates.collect::<Result<_>>()?))
    }
}

impl FromStr for Gate {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let (name, on) = text
            .split_once('=')
            .with_context(|| format!("{text:?} sets no feature gate; write NAME=true or NAME=false"))?;
        let on =
            on.parse().with_context(|| format!("{text:?} sets a feature gate to neither true nor false"))?;
        let (component, name) = match name.split_once(':') {
            None => (None, name),
            Some((component, name)) => {
                let known = GATED.into_iter().find(|gated| gated.name() == component);
                if known.is_none() {
                    let names = GATED.map(Component::name).join(", ");
                    bail!("{component:?} in {text:?} has no feature gates; those that have are {names}");
                }
                (known, name)
            }
        };
        Ok(Self { component, name: name.to_owned(), on })
    }
}

impl TryFrom<String> for FeatureGates {
    type Error = anyhow::Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl From<FeatureGates> for String {
    fn from(gates: FeatureGates) -> Self {
        gates.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gate_without_a_component_is_set_in_all_that_have_gates_and_one_with_in_that_alone() {
        let gates: FeatureGates =
            "DRADeviceTaints=true,kube-scheduler:DRAPartitionableDevices=false".parse().expect("two gates");
        for component in Component::ALL {
            let expected = match component {
                Component::Etcd | Component::Containerd => None,
                Component::Scheduler => {
                    Some("--feature-gates=DRADeviceTaints=true,DRAPartitionableDevices=false")
                }
                _ => Some("--feature-gates=DRADeviceTaints=true"),
            };
            assert_eq!(gates.argument(component).as_deref(), expected);
        }
    }

    #[test]
    fn the_later_of_two_settings_of_a_gate_wins() {
        let gates: FeatureGates = "A=true,kubelet:A=false".parse().expect("two gates");
        assert_eq!(gates.argument(Component::Kubelet).as_deref(), Some("--feature-gates=A=false"));
        assert_eq!(gates.argument(Component::ApiServer).as_deref(), Some("--feature-gates=A=true"));
    }

    #[test]
    fn no_gate_adds_no_argument() {
        for component in Component::ALL {
            assert_eq!("".parse::<FeatureGates>().expect("no gate").argument(component), None);
        }
    }

    #[test]
    fn what_sets_no_gate_is_refused_with_what_would() {
        for (text, hint) in [
            ("DRAPartitionableDevices", "NAME=true"),
            ("DRAPartitionableDevices=off", "neither true nor false"),
            ("apiserver:DRAPartitionableDevices=false", "kube-apiserver"),
            ("etcd:A=true", "kubelet"),
        ] {
            let refusal = text.parse::<FeatureGates>().expect_err("it sets nothing").to_string();
            assert!(refusal.contains(hint) && refusal.contains(text), "{refusal}");
        }
    }

    #[test]
    fn settings_remember_gates_as_they_were_given() {
        let text = "A=true,kube-apiserver:B=false";
        let gates: FeatureGates = text.parse().expect("two gates");
        let stored = serde_json::to_string(&gates).expect("JSON");
        assert_eq!(stored, format!("{text:?}"));
        assert_eq!(serde_json::from_str::<FeatureGates>(&stored).expect("its own"), gates);
    }
}
