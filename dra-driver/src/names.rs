//! Names that outlive a process: all are derived from one setting, the driver
//! name, and from facts of the hardware that do not change with a reboot.
//!
//! NVML minors and indices are renumbered by a reboot or a lost GPU, so no name
//! is made of them. A PCI address stays.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Why a text is not the name it was taken for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not {expected}")]
pub struct NameError {
    text: String,
    expected: &'static str,
}

impl NameError {
    fn new(text: &str, expected: &'static str) -> Self {
        // Hostile input may be long; a message is not the place to repeat it.
        Self { text: text.chars().take(80).collect(), expected }
    }
}

/// A PCI address, printed as the kernel prints it: `0000:65:00.0`.
///
/// NVML pads the domain to eight digits and writes letters in upper case;
/// both forms parse, one is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciAddress {
    /// PCI domain (segment); sixteen bits except behind VMD controllers.
    pub domain: u32,
    /// Bus number.
    pub bus: u8,
    /// Device number, 0 to 31.
    pub device: u8,
    /// Function number, 0 to 7.
    pub function: u8,
}

impl PciAddress {
    /// The address as it stands in device names: `0000-65-00-0`.
    pub fn dashed(self) -> String {
        format!("{:04x}-{:02x}-{:02x}-{:x}", self.domain, self.bus, self.device, self.function)
    }

    /// Reads [`PciAddress::dashed`] back.
    pub fn parse_dashed(text: &str) -> Result<Self, NameError> {
        Self::parse_with(text, '-', '-')
    }

    fn parse_with(text: &str, separator: char, last: char) -> Result<Self, NameError> {
        let error = || NameError::new(text, "a PCI address such as `0000:65:00.0`");
        let (head, function) = text.rsplit_once(last).ok_or_else(error)?;
        let mut parts = head.split(separator);
        let mut field = |max_length: usize| {
            let part = parts.next().filter(|part| !part.is_empty() && part.len() <= max_length);
            part.filter(|part| part.bytes().all(|byte| byte.is_ascii_hexdigit()))
                .and_then(|part| u32::from_str_radix(part, 16).ok())
                .ok_or_else(error)
        };
        let (domain, bus, device) = (field(8)?, field(2)?, field(2)?);
        if parts.next().is_some() || function.len() != 1 {
            return Err(error());
        }
        let function = u32::from_str_radix(function, 16).map_err(|_| error())?;
        if device > 31 || function > 7 {
            return Err(error());
        }
        let byte = |value: u32| u8::try_from(value).map_err(|_| error());
        Ok(Self { domain, bus: byte(bus)?, device: byte(device)?, function: byte(function)? })
    }
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{:x}", self.domain, self.bus, self.device, self.function)
    }
}

impl FromStr for PciAddress {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        Self::parse_with(text, ':', '.')
    }
}

/// Serialised as its printed form.
impl Serialize for PciAddress {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for PciAddress {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// The driver name: a lower-case DNS subdomain of at most 63 characters, from
/// which attribute domain, CDI kind, sockets and taint keys are derived.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct DriverName(String);

impl DriverName {
    /// The name that the ecosystem's classes and tools hard-code.
    pub const DEFAULT: &'static str = "gpu.nvidia.com";

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The CDI kind of the claim devices: `k8s.<driver>/claim`.
    pub fn cdi_kind(&self) -> String {
        format!("k8s.{}/claim", self.0)
    }

    /// The registration socket's file name, of one instance or of the only one.
    /// It contains `@`, without which h2 refuses the `:authority` that a kubelet
    /// sends (docs/decisions.md).
    pub fn registration_socket(&self, instance: Option<&str>) -> String {
        match instance {
            Some(instance) => format!("{}@{instance}-reg.sock", self.0),
            None => format!("{}@reg.sock", self.0),
        }
    }

    /// What the names of its classes end with: `nvidia.com` for `gpu.nvidia.com`.
    pub fn class_domain(&self) -> &str {
        self.0.strip_prefix("gpu.").unwrap_or(&self.0)
    }

    /// Whether a file has the name of a registration socket of this driver.
    pub fn is_registration_socket(&self, name: &str) -> bool {
        name.strip_prefix(&self.0).is_some_and(|rest| rest.starts_with('@') && rest.ends_with("reg.sock"))
    }
}

impl FromStr for DriverName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let label = |label: &str| {
            !label.is_empty()
                && !label.starts_with('-')
                && !label.ends_with('-')
                && label
                    .bytes()
                    .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
        };
        if text.len() <= 63 && text.split('.').all(label) {
            Ok(Self(text.to_owned()))
        } else {
            Err(NameError::new(text, "a driver name (a lower-case DNS subdomain of at most 63 characters)"))
        }
    }
}

impl fmt::Display for DriverName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The pool of a node's GPUs, `<node>/gpu`. It is not the bare node name:
/// schedulers up to 1.36 key a counter cache by pool name alone, and NVIDIA's
/// driver uses the node name.
pub fn gpu_pool(node: &str) -> String {
    format!("{node}/gpu")
}

/// Reads [`gpu_pool`] back.
pub fn node_of_pool(pool: &str) -> &str {
    pool.strip_suffix("/gpu").unwrap_or(pool)
}

/// A MIG profile's name as NVML and `nvidia-smi` print it: `1g.10gb`,
/// `1g.10gb+me`, `1g.24gb-me`, `2g.48gb+me.all`. It names, it does not
/// identify: profiles are known by their GPU instance profile id.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ProfileName(String);

impl ProfileName {
    /// Takes a name as NVML gives it, with or without its `MIG ` prefix.
    ///
    /// # Errors
    /// A text that cannot be part of a device name.
    pub fn new(text: &str) -> Result<Self, NameError> {
        let name = text.strip_prefix("MIG ").unwrap_or(text).trim();
        let valid = name.len() <= 24
            && name.starts_with(|first: char| first.is_ascii_digit())
            && name.ends_with(|last: char| last.is_ascii_alphanumeric())
            && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'+' | b'-'));
        if valid {
            Ok(Self(name.to_ascii_lowercase()))
        } else {
            Err(NameError::new(text, "a MIG profile name such as `1g.10gb+me`"))
        }
    }

    /// The name as NVML prints it.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The name as part of a DNS label. `+me` becomes `-me`, and `-me`, which
    /// means "without media engines", becomes `-nome`, so that both stay apart.
    pub fn dashed(&self) -> String {
        self.0.replace('-', "-no").replace(['.', '+'], "-")
    }
}

impl fmt::Display for ProfileName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The name of a published device: a DNS label of at most 63 characters.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct DeviceName(String);

impl DeviceName {
    /// The whole GPU at an address: `gpu-0000-65-00-0`.
    pub fn whole(gpu: PciAddress) -> Self {
        Self(format!("gpu-{}", gpu.dashed()))
    }

    /// A partition of a GPU: `gpu-0000-65-00-0-mig-1g-10gb-4`.
    pub fn partition(gpu: PciAddress, profile: &ProfileName, start: u32) -> Self {
        Self(format!("gpu-{}-mig-{}-{start}", gpu.dashed(), profile.dashed()))
    }

    /// A name that came from outside (an allocation, a file), unchecked
    /// against any inventory.
    ///
    /// # Errors
    /// A text that is not a DNS label.
    pub fn parse(text: &str) -> Result<Self, NameError> {
        let valid = !text.is_empty()
            && text.len() <= 63
            && !text.starts_with('-')
            && !text.ends_with('-')
            && text.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-');
        if valid {
            Ok(Self(text.to_owned()))
        } else {
            Err(NameError::new(text, "a device name (a DNS label)"))
        }
    }

    /// The GPU the device belongs to.
    pub fn gpu(&self) -> Option<PciAddress> {
        let mut fields = self.0.strip_prefix("gpu-")?.splitn(5, '-');
        let address: Vec<&str> = fields.by_ref().take(4).collect();
        PciAddress::parse_dashed(&address.join("-")).ok()
    }

    /// Where a partition begins, in memory slices.
    pub fn start(&self) -> Option<u32> {
        let (partition, start) = self.0.rsplit_once('-')?;
        start.parse().ok().filter(|_| partition.contains("-mig-"))
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A claim's UID, as the API server made it. It is used in file names and in
/// CDI device names, so only letters, digits and dashes are taken.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct ClaimUid(String);

impl ClaimUid {
    /// The UID as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for ClaimUid {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let valid = !text.is_empty()
            && text.len() <= 64
            && text.starts_with(|first: char| first.is_ascii_alphanumeric())
            && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
        if valid { Ok(Self(text.to_owned())) } else { Err(NameError::new(text, "a claim UID")) }
    }
}

impl<'de> Deserialize<'de> for ClaimUid {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

impl fmt::Display for ClaimUid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pci(text: &str) -> PciAddress {
        text.parse().expect("a test's own address")
    }

    #[test]
    fn a_pci_address_is_printed_as_the_kernel_does_however_nvml_wrote_it() {
        assert_eq!(pci("00000000:65:00.0").to_string(), "0000:65:00.0");
        assert_eq!(pci("00000000:AF:1F.7").to_string(), "0000:af:1f.7");
        assert_eq!(pci("10000:01:00.0").to_string(), "10000:01:00.0");
        for wrong in [
            "",
            "0000:65:00",
            "0000:65:20.0",
            "0000:65:00.8",
            "0000:6555:00.0",
            "+000:65:00.0",
            "0:65:00.0.0",
        ] {
            assert!(wrong.parse::<PciAddress>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_device_name_gives_its_gpu_back() {
        let gpu = pci("0000:65:00.0");
        let profile = ProfileName::new("MIG 1g.10gb+me").expect("a profile name");
        assert_eq!(DeviceName::whole(gpu).as_str(), "gpu-0000-65-00-0");
        assert_eq!(DeviceName::partition(gpu, &profile, 4).as_str(), "gpu-0000-65-00-0-mig-1g-10gb-me-4");
        assert_eq!(DeviceName::whole(gpu).gpu(), Some(gpu));
        assert_eq!(DeviceName::partition(gpu, &profile, 4).gpu(), Some(gpu));
        assert_eq!(DeviceName::parse("gpu-x").expect("a label").gpu(), None);
        assert_eq!(DeviceName::partition(gpu, &profile, 4).start(), Some(4));
        assert_eq!(DeviceName::whole(gpu).start(), None);
    }

    #[test]
    fn a_pool_gives_its_node_back_and_a_driver_name_the_domain_of_its_classes() {
        assert_eq!(node_of_pool(&gpu_pool("node-1.example.com")), "node-1.example.com");
        let domain =
            |name: &str| name.parse::<DriverName>().expect("a driver name").class_domain().to_owned();
        assert_eq!(domain("gpu.nvidia.com"), "nvidia.com");
        assert_eq!(domain("cards.example.com"), "cards.example.com");
    }

    #[test]
    fn with_and_without_media_engines_are_two_names() {
        let dashed = |text: &str| ProfileName::new(text).expect("a profile name").dashed();
        assert_eq!(dashed("1g.24gb+me"), "1g-24gb-me");
        assert_eq!(dashed("1g.24gb-me"), "1g-24gb-nome");
        assert_eq!(dashed("1g.24gb+me.all"), "1g-24gb-me-all");
        assert_eq!(dashed("1g.0gb+gfx"), "1g-0gb-gfx");
    }

    #[test]
    fn a_claim_uid_that_could_leave_its_folder_is_refused() {
        for wrong in ["", "../x", "a/b", ".hidden", "a b", "a_b"] {
            assert!(wrong.parse::<ClaimUid>().is_err(), "{wrong}");
        }
    }
}
