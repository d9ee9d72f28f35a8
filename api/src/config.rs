//! Opaque device configs: what a claim or class says about a device, decoded
//! strictly and resolved for each allocation result.
//!
//! User input is hostile: anything that is not exactly a known config makes
//! its claim fail with a sentence. Configs of other drivers are never looked
//! into.

use k8s_openapi::api::resource::v1::DeviceAllocationConfiguration;
use serde::{Deserialize, Serialize};

use crate::quantity::Quantity;
use crate::text::printable;

/// The API version of NVIDIA's config kinds, which are accepted.
pub const NVIDIA_API_VERSION: &str = "resource.nvidia.com/v1beta1";

/// The API server's own limit for one opaque config.
const MAX_BYTES: usize = 10 * 1024;

/// What a device is, as far as configs must fit it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConfigTarget {
    /// A whole GPU.
    Gpu,
    /// A partition.
    Mig,
}

/// A decoded config.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeviceConfig {
    /// `GpuConfig`, for whole GPUs.
    Gpu,
    /// `MigDeviceConfig`, for partitions.
    Mig,
}

impl DeviceConfig {
    /// The kind as users write it.
    pub fn kind(self) -> &'static str {
        match self {
            Self::Gpu => "GpuConfig",
            Self::Mig => "MigDeviceConfig",
        }
    }

    fn fits(self, target: ConfigTarget) -> bool {
        matches!((self, target), (Self::Gpu, ConfigTarget::Gpu) | (Self::Mig, ConfigTarget::Mig))
    }
}

/// Where a config is put right.
const CORRECT_IT: &str = "correct the claim's manifest or its class, then delete claim and pod";

/// Why a claim's configs cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// Larger than the API allows.
    #[error("a device config is {bytes} bytes long; at most {MAX_BYTES} are allowed: {CORRECT_IT}")]
    TooLarge {
        /// How large.
        bytes: usize,
    },
    /// Not one of the kinds.
    #[error(
        "a device config has apiVersion `{api_version}` and kind `{kind}`; known are GpuConfig and \
         MigDeviceConfig of {NVIDIA_API_VERSION}: {CORRECT_IT}"
    )]
    UnknownKind {
        /// As written, shortened.
        api_version: String,
        /// As written, shortened.
        kind: String,
    },
    /// A known kind with something wrong in it.
    #[error("{kind}: {reason}; {CORRECT_IT}")]
    Invalid {
        /// The kind.
        kind: String,
        /// What is wrong.
        reason: String,
    },
    /// Sharing, in any form.
    #[error(
        "{kind}: `sharing` is not yet supported by this driver; remove `sharing` from the config and the \
         claim gets its device unshared"
    )]
    SharingNotYet {
        /// The kind.
        kind: &'static str,
    },
    /// The config names a request whose device is of another type.
    #[error(
        "{kind} is for {wants}, but request `{request}` got {device}; take the request out of the config's \
         `requests`, or the config out of the claim"
    )]
    WrongTarget {
        /// The kind.
        kind: &'static str,
        /// What it is for.
        wants: &'static str,
        /// The request.
        request: String,
        /// What was allocated.
        device: &'static str,
    },
}

/// The configs of one claim for one driver, in the order of their weight.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Configs {
    entries: Vec<Entry>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Entry {
    /// Empty: all.
    requests: Vec<String>,
    /// Whether it is for devices of its type alone, and no error beside others.
    /// A class names no request: those of its configs are the scheduler's.
    by_type: bool,
    config: DeviceConfig,
}

impl Configs {
    /// Decodes the configs of `driver` in an allocation; others are ignored.
    ///
    /// Class configs come before claim configs, whatever order they stand in.
    pub fn decode(driver: &str, configs: &[DeviceAllocationConfiguration]) -> Result<Self, ConfigError> {
        let mut ordered: Vec<_> = configs
            .iter()
            .filter_map(|config| {
                let opaque = config.opaque.as_ref().filter(|opaque| opaque.driver == driver)?;
                Some((config, opaque))
            })
            .collect();
        ordered.sort_by_key(|(config, _)| config.source == "FromClaim");
        let entries = ordered
            .into_iter()
            .map(|(config, opaque)| {
                let requests = config.requests.clone().unwrap_or_default();
                let by_type = requests.is_empty() || config.source == "FromClass";
                Ok(Entry { requests, by_type, config: decode(&opaque.parameters.0)? })
            })
            .collect::<Result<_, ConfigError>>()?;
        Ok(Self { entries })
    }

    /// The config for the result of a request: the last that matches.
    ///
    /// A config for `gpu` applies to the results of `gpu` and `gpu/sub`; one
    /// without requests, or of a class, to devices of its type only.
    pub fn for_result(
        &self,
        request: &str,
        target: ConfigTarget,
    ) -> Result<Option<DeviceConfig>, ConfigError> {
        let main = request.split_once('/').map_or(request, |(main, _)| main);
        let found = self.entries.iter().rev().find(|Entry { requests, by_type, config }| {
            (requests.is_empty() || requests.iter().any(|named| named == request || named == main))
                && (!by_type || config.fits(target))
        });
        match found {
            None => Ok(None),
            Some(Entry { config, .. }) if config.fits(target) => Ok(Some(*config)),
            Some(Entry { config, .. }) => Err(ConfigError::WrongTarget {
                kind: config.kind(),
                wants: match config {
                    DeviceConfig::Gpu => "whole GPUs",
                    DeviceConfig::Mig => "MIG partitions",
                },
                request: request.to_owned(),
                device: match target {
                    ConfigTarget::Gpu => "a whole GPU",
                    ConfigTarget::Mig => "a MIG partition",
                },
            }),
        }
    }
}

fn decode(parameters: &serde_json::Value) -> Result<DeviceConfig, ConfigError> {
    let bytes = parameters.to_string().len();
    if bytes > MAX_BYTES {
        return Err(ConfigError::TooLarge { bytes });
    }
    let field = |name: &str| parameters.get(name).and_then(serde_json::Value::as_str).unwrap_or_default();
    let (api_version, kind) = (field("apiVersion"), field("kind"));
    let config = match (api_version, kind) {
        (NVIDIA_API_VERSION, "GpuConfig") => {
            let wire: GpuConfig = strict("GpuConfig", parameters)?;
            refuse_sharing("GpuConfig", wire.sharing.is_some())?;
            DeviceConfig::Gpu
        }
        (NVIDIA_API_VERSION, "MigDeviceConfig") => {
            let wire: MigDeviceConfig = strict("MigDeviceConfig", parameters)?;
            refuse_sharing("MigDeviceConfig", wire.sharing.is_some())?;
            DeviceConfig::Mig
        }
        _ => {
            return Err(ConfigError::UnknownKind {
                api_version: shortened(api_version),
                kind: shortened(kind),
            });
        }
    };
    Ok(config)
}

fn strict<'de, T: Deserialize<'de>>(
    kind: &str,
    parameters: &'de serde_json::Value,
) -> Result<T, ConfigError> {
    T::deserialize(parameters).map_err(|error| ConfigError::Invalid {
        kind: kind.to_owned(),
        reason: shortened(&error.to_string()),
    })
}

fn refuse_sharing(kind: &'static str, present: bool) -> Result<(), ConfigError> {
    if present { Err(ConfigError::SharingNotYet { kind }) } else { Ok(()) }
}

/// A message is not the place to repeat ten kilobytes of somebody's input.
fn shortened(text: &str) -> String {
    // What a user wrote ends up in events and terminals.
    let mut short: String = text.chars().take(160).flat_map(printable).collect();
    if text.chars().nth(160).is_some() {
        short.push('…');
    }
    short
}

// The wire types carry every field NVIDIA's API has, so that a wrong one is
// told from one that is not supported.

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
#[expect(dead_code, reason = "read by serde, to refuse what is not known")]
struct GpuConfig {
    api_version: String,
    kind: String,
    sharing: Option<GpuSharing>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
#[expect(dead_code, reason = "read by serde, to refuse what is not known")]
struct MigDeviceConfig {
    api_version: String,
    kind: String,
    sharing: Option<MigSharing>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
#[expect(dead_code, reason = "read by serde, to refuse what is not known")]
struct GpuSharing {
    strategy: Option<String>,
    time_slicing_config: Option<TimeSlicing>,
    mps_config: Option<Mps>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
#[expect(dead_code, reason = "read by serde, to refuse what is not known")]
struct MigSharing {
    strategy: Option<String>,
    mps_config: Option<Mps>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
#[expect(dead_code, reason = "read by serde, to refuse what is not known")]
struct TimeSlicing {
    interval: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
#[expect(dead_code, reason = "read by serde, to refuse what is not known")]
struct Mps {
    default_active_thread_percentage: Option<u8>,
    default_pinned_device_memory_limit: Option<Memory>,
    default_per_device_pinned_memory_limit: Option<std::collections::BTreeMap<String, Memory>>,
    multi_user: Option<bool>,
}

/// A quantity, checked.
struct Memory(#[expect(dead_code, reason = "read by serde, to refuse what is not known")] Quantity);

impl<'de> Deserialize<'de> for Memory {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map(Self).map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::resource::v1::OpaqueDeviceConfiguration;
    use k8s_openapi::apimachinery::pkg::runtime::RawExtension;
    use serde_json::{Value, json};

    use super::*;

    const DRIVER: &str = "gpu.nvidia.com";

    fn config(
        source: &str,
        requests: &[&str],
        driver: &str,
        parameters: Value,
    ) -> DeviceAllocationConfiguration {
        DeviceAllocationConfiguration {
            source: source.to_owned(),
            requests: Some(requests.iter().map(ToString::to_string).collect()),
            opaque: Some(OpaqueDeviceConfiguration {
                driver: driver.to_owned(),
                parameters: RawExtension(parameters),
            }),
        }
    }

    fn gpu() -> Value {
        json!({"apiVersion": NVIDIA_API_VERSION, "kind": "GpuConfig"})
    }

    fn mig() -> Value {
        json!({"apiVersion": NVIDIA_API_VERSION, "kind": "MigDeviceConfig"})
    }

    fn error(parameters: Value) -> String {
        Configs::decode(DRIVER, &[config("FromClaim", &[], DRIVER, parameters)])
            .expect_err("a wrong config")
            .to_string()
    }

    #[test]
    fn the_page_of_claims_names_the_kinds_and_the_version_that_are_taken() {
        let page = include_str!("../../docs/claims.md");
        let (_, section) = page.split_once("\n## Configs\n").expect("the section");
        for config in [DeviceConfig::Gpu, DeviceConfig::Mig] {
            assert!(section.contains(&format!("`{}`", config.kind())), "{}", config.kind());
        }
        assert!(section.contains(&format!("`apiVersion: {NVIDIA_API_VERSION}`")), "{NVIDIA_API_VERSION}");
        let example = format!("{{apiVersion: {NVIDIA_API_VERSION}, kind: GpuConfig}}");
        assert!(section.contains(&example), "{example}");
        assert!(Configs::decode(DRIVER, &[config("FromClaim", &[], DRIVER, gpu())]).is_ok());
    }

    #[test]
    fn a_config_of_another_driver_is_not_even_looked_into() {
        let other = config("FromClaim", &[], "other.example.com", json!("garbage"));
        assert_eq!(Configs::decode(DRIVER, &[other]), Ok(Configs::default()));
    }

    #[test]
    fn a_config_for_a_request_covers_its_subrequests_but_not_the_other_way_round() {
        let configs =
            Configs::decode(DRIVER, &[config("FromClaim", &["gpu"], DRIVER, gpu())]).expect("decodes");
        let found = |request| configs.for_result(request, ConfigTarget::Gpu).expect("fits");
        assert_eq!(found("gpu"), Some(DeviceConfig::Gpu));
        assert_eq!(found("gpu/h100"), Some(DeviceConfig::Gpu));
        assert_eq!(found("gpu2"), None);
        let sub =
            Configs::decode(DRIVER, &[config("FromClaim", &["gpu/h100"], DRIVER, gpu())]).expect("decodes");
        assert_eq!(sub.for_result("gpu", ConfigTarget::Gpu), Ok(None));
        assert_eq!(sub.for_result("gpu/a100", ConfigTarget::Gpu), Ok(None));
    }

    #[test]
    fn a_claims_config_outweighs_its_classs_in_whatever_order_they_stand() {
        let configs =
            [config("FromClaim", &["r"], DRIVER, gpu()), config("FromClass", &["r"], DRIVER, mig())];
        let configs = Configs::decode(DRIVER, &configs).expect("decodes");
        assert_eq!(configs.for_result("r", ConfigTarget::Gpu), Ok(Some(DeviceConfig::Gpu)));
    }

    #[test]
    fn a_config_that_names_a_request_of_another_device_type_is_refused() {
        let configs =
            Configs::decode(DRIVER, &[config("FromClaim", &["r"], DRIVER, mig())]).expect("decodes");
        let error = configs.for_result("r", ConfigTarget::Gpu).expect_err("does not fit");
        assert_eq!(
            error.to_string(),
            "MigDeviceConfig is for MIG partitions, but request `r` got a whole GPU; take the request out of the \
             config's `requests`, or the config out of the claim"
        );
    }

    #[test]
    fn a_classs_config_applies_to_devices_of_its_type_only_whatever_requests_the_scheduler_names() {
        // Up to Kubernetes 1.36 always the request, from 1.37 on none if it is all.
        for requests in [&[] as &[&str], &["r"]] {
            let configs =
                Configs::decode(DRIVER, &[config("FromClass", requests, DRIVER, gpu())]).expect("decodes");
            assert_eq!(configs.for_result("r", ConfigTarget::Mig), Ok(None), "{requests:?}");
            assert_eq!(
                configs.for_result("r", ConfigTarget::Gpu),
                Ok(Some(DeviceConfig::Gpu)),
                "{requests:?}"
            );
        }
    }

    #[test]
    fn a_config_without_requests_applies_to_devices_of_its_type_only() {
        let both = [config("FromClaim", &[], DRIVER, gpu()), config("FromClaim", &[], DRIVER, mig())];
        let configs = Configs::decode(DRIVER, &both).expect("decodes");
        assert_eq!(configs.for_result("a", ConfigTarget::Gpu), Ok(Some(DeviceConfig::Gpu)));
        assert_eq!(configs.for_result("b", ConfigTarget::Mig), Ok(Some(DeviceConfig::Mig)));
    }

    #[test]
    fn what_is_not_exactly_a_known_config_fails_with_a_sentence() {
        let with = |key: &str, value: Value| {
            let mut config = gpu();
            config[key] = value;
            config
        };
        for (parameters, expected) in [
            (json!("text"), "apiVersion `` and kind ``"),
            (json!({"apiVersion": NVIDIA_API_VERSION, "kind": "GpuConfg"}), "kind `GpuConfg`"),
            (json!({"apiVersion": "resource.nvidia.com/v9", "kind": "GpuConfig"}), "resource.nvidia.com/v9"),
            (with("memory", json!("1Gi")), "unknown field `memory`"),
            (
                with("sharing", json!({"strategy": "TimeSlicing", "timeSlicingConfig": {}})),
                "not yet supported",
            ),
            (with("sharing", json!({"timeSlicingConfig": {}})), "remove `sharing`"),
            (with("sharing", json!({})), "not yet supported"),
            (with("sharing", json!({"mpsConfig": {"defaultPinnedDeviceMemoryLimit": "ten"}})), "GpuConfig: "),
            (with("sharing", json!({"mpsConfig": {"defaultActiveThreadPercentage": -1}})), "GpuConfig: "),
            (with("x", json!("y".repeat(10 * 1024))), "at most 10240"),
        ] {
            let error = error(parameters);
            assert!(error.contains(expected), "{error}");
            assert!(error.len() < 600, "{error}");
        }
    }

    #[test]
    fn an_absent_sharing_may_be_written_as_null() {
        let config = config(
            "FromClaim",
            &[],
            DRIVER,
            json!({"apiVersion": NVIDIA_API_VERSION, "kind": "GpuConfig", "sharing": null}),
        );
        assert!(Configs::decode(DRIVER, &[config]).is_ok());
    }
}
