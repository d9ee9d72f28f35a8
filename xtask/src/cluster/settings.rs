//! What a cluster keeps from its first `up` on: its addresses, its ports, its
//! Kubernetes release and the GPUs it emulates. Remembered, because
//! certificates, the node's object and running pods contain them.

use std::fs;
use std::net::{Ipv4Addr, TcpListener};
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use serde::{Deserialize, Serialize};

use super::Options;
use super::gates::FeatureGates;
use super::layout::Layout;
use super::release::Release;
use crate::{debian, exec, files};

/// First port of the first network's block. All blocks are below the kernel's
/// range for outgoing connections, so that none of those takes a port between a
/// stop and a start.
const FIRST_PORT: u16 = 20_000;

/// Ports in a network's block; more than are needed, as some may be taken.
const BLOCK: u16 = 32;

/// A cluster's lasting choices.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Settings {
    /// Pods are in `10.213.<network>.0/24`, services in `10.214.<network>.0/24`.
    network: u8,
    pub(crate) ports: Ports,
    /// Models to emulate, as given to `--gpu`; empty: no emulator.
    pub(crate) gpus: Vec<String>,
    #[serde(default)]
    pub(crate) kubernetes: Release,
    /// Those of the last `up`: unlike the rest, each sets them anew.
    #[serde(default)]
    pub(crate) feature_gates: FeatureGates,
}

/// Ports on the loopback address, the kubelet's on the node's.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Ports {
    pub(crate) etcd: u16,
    pub(crate) etcd_peer: u16,
    pub(crate) controller_manager: u16,
    pub(crate) scheduler: u16,
    pub(crate) kubelet: u16,
    pub(crate) kubelet_health: u16,
}

impl Settings {
    /// What was remembered, or new choices. The GPUs must agree with what the
    /// cluster was made with, unless there are none.
    ///
    /// Clusters that come up at the same time see neither each other's bridge
    /// nor ports, so networks are claimed one cluster at a time, and ports
    /// follow from the network.
    pub(crate) fn load_or_choose(layout: &Layout, options: &Options, kubernetes: Release) -> Result<Self> {
        let _lock = files::Lock::take(Path::new(Layout::RUN))?;
        let gpus = &options.gpus;
        let claimed = claimed_networks(layout)?;
        let mut settings = if let Some(settings) = Self::load(layout)? {
            settings
        } else {
            let network = free_network(&claimed)?;
            let (gpus, feature_gates) = (Vec::new(), FeatureGates::default());
            Self { network, ports: Ports::choose(network)?, gpus, kubernetes, feature_gates }
        };
        if claimed.contains(&settings.network) {
            bail!("another cluster took the addresses of {} meanwhile; take {0} down first", layout.name);
        }
        if settings.gpus.is_empty() {
            gpus.clone_into(&mut settings.gpus);
        } else if !gpus.is_empty() && settings.gpus != *gpus {
            bail!(
                "cluster {} has the GPUs {}; take it down before it gets others",
                layout.name,
                settings.gpus.join(" ")
            );
        }
        options.feature_gates.clone_into(&mut settings.feature_gates);
        settings.save(layout)?;
        files::replace(&layout.network_claim(), settings.network.to_string().as_bytes())?;
        Ok(settings)
    }

    /// The release that was remembered, or else the one that is asked for. They
    /// must agree.
    pub(crate) fn release(layout: &Layout, asked: Option<Release>) -> Result<Release> {
        let made = Self::load(layout)?.map(|settings| settings.kubernetes);
        if let (Some(made), Some(asked)) = (made, asked)
            && made != asked
        {
            bail!("cluster {} runs Kubernetes {made}; take it down before it gets {asked}", layout.name);
        }
        Ok(made.or(asked).unwrap_or_default())
    }

    /// What was remembered, if this cluster was ever brought up.
    pub(crate) fn load(layout: &Layout) -> Result<Option<Self>> {
        match fs::read(layout.settings()) {
            Ok(bytes) => {
                let settings = serde_json::from_slice(&bytes);
                Ok(Some(settings.with_context(|| format!("cannot read {}", layout.settings().display()))?))
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).with_context(|| format!("cannot read {}", layout.settings().display())),
        }
    }

    /// Chooses ports anew if another process took one while nothing ran here.
    pub(crate) fn renew_taken_ports(&mut self, layout: &Layout) -> Result<()> {
        if self.ports.all().into_iter().all(|port| bind(port).is_some()) {
            return Ok(());
        }
        self.ports = Ports::choose(self.network)?;
        self.save(layout)
    }

    fn save(&self, layout: &Layout) -> Result<()> {
        files::replace(&layout.settings(), &serde_json::to_vec_pretty(self)?)
    }

    /// The node's address, on the bridge: the kubelet takes no loopback address.
    pub(crate) fn node_address(&self) -> Ipv4Addr {
        Ipv4Addr::new(10, 213, self.network, 1)
    }

    /// The address of the service `kubernetes`, the first of its range.
    pub(crate) fn service_address(&self) -> Ipv4Addr {
        Ipv4Addr::new(10, 214, self.network, 1)
    }

    pub(crate) fn pod_range(&self) -> String {
        format!("10.213.{}.0/24", self.network)
    }

    pub(crate) fn service_range(&self) -> String {
        format!("10.214.{}.0/24", self.network)
    }

    /// A link-layer address of its own keeps the bridge from taking that of its
    /// lowest port, and so from changing it while pods come and go.
    pub(crate) fn bridge_hardware_address(&self) -> String {
        format!("02:6b:65:72:66:{:02x}", self.network)
    }
}

impl Ports {
    /// Ports that are free now, each bound while the next is looked for.
    fn choose(network: u8) -> Result<Self> {
        let first = FIRST_PORT + u16::from(network) * BLOCK;
        let mut free = (first..first + BLOCK).filter_map(bind);
        let mut held = Vec::new();
        let mut next = || -> Result<u16> {
            let listener = free.next().with_context(|| format!("no free TCP port from {first} on"))?;
            let port = listener.local_addr()?.port();
            held.push(listener);
            Ok(port)
        };
        Ok(Self {
            etcd: next()?,
            etcd_peer: next()?,
            controller_manager: next()?,
            scheduler: next()?,
            kubelet: next()?,
            kubelet_health: next()?,
        })
    }

    fn all(&self) -> [u16; 6] {
        let Self { etcd, etcd_peer, controller_manager, scheduler, kubelet, kubelet_health } = *self;
        [etcd, etcd_peer, controller_manager, scheduler, kubelet, kubelet_health]
    }
}

fn bind(port: u16) -> Option<TcpListener> {
    TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).ok()
}

/// Networks of the other clusters of this machine.
fn claimed_networks(layout: &Layout) -> Result<Vec<u8>> {
    let mut networks = Vec::new();
    for entry in fs::read_dir(Layout::RUN).context("cannot list clusters")? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(Layout::PREFIX) && entry.path() != layout.run {
            let claim = fs::read_to_string(entry.path().join(Layout::NETWORK_CLAIM));
            networks.extend(claim.ok().and_then(|text| text.parse::<u8>().ok()));
        }
    }
    Ok(networks)
}

/// A network that no other cluster claims and no route of this machine mentions.
fn free_network(claimed: &[u8]) -> Result<u8> {
    let ip = debian::program("ip").context("there is no program `ip`")?;
    let routes = exec::output(Command::new(ip).args(["-4", "route", "show", "table", "all"]))?;
    (0..=u8::MAX)
        .filter(|network| !claimed.contains(network))
        .find(|network| {
            !routes.contains(&format!("10.213.{network}.")) && !routes.contains(&format!("10.214.{network}."))
        })
        .context("all networks 10.213.0.0/24 to 10.213.255.0/24 are in use")
}
