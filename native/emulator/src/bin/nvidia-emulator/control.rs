//! What an administrator, a program or bad luck does to the machine.

use clap::{Args, Subcommand, ValueEnum};
use kerf_emulator::clients::Use;
use kerf_emulator::code::Code;
use kerf_emulator::machine::Machine;
use kerf_emulator::mig::ModeChange;
use kerf_emulator::model;
use kerf_emulator::state::{EventKind, Gpu};

use crate::{Failure, refused, say};

/// The XID of a GPU that has fallen off the bus.
const XID_FALLEN_OFF: u64 = 79;

#[derive(Debug, Args)]
pub(crate) struct Which {
    /// PCI address, UUID or index.
    #[arg(long)]
    gpu: String,
}

impl Which {
    fn find(&self, machine: &Machine) -> Result<(usize, Gpu), Failure> {
        let state = machine.state().map_err(refused("show"))?;
        let found = state.find_gpu(&self.gpu).and_then(|index| Some((index, state.gpus.get(index)?.clone())));
        found.ok_or_else(|| format!("no GPU `{}`", self.gpu))
    }

    pub(crate) fn set_lost(&self, machine: &Machine, lost: bool) -> Result<(), Failure> {
        let (index, gpu) = self.find(machine)?;
        let set = |state: &mut kerf_emulator::state::State| {
            if lost {
                state.note(&gpu.uuid, EventKind::Xid, XID_FALLEN_OFF, None);
            }
            state.gpus.get_mut(index).ok_or(Code::NOT_FOUND)?.lost = lost;
            Ok(())
        };
        machine.change(set).map_err(refused("change"))
    }
}

#[derive(Debug, Args)]
pub(crate) struct Xid {
    #[command(flatten)]
    which: Which,
    /// The XID's number.
    number: u64,
    /// The GPU instance it is about.
    #[arg(long, requires = "compute")]
    instance: Option<u32>,
    /// The compute instance it is about.
    #[arg(long, requires = "instance")]
    compute: Option<u32>,
}

impl Xid {
    pub(crate) fn run(&self, machine: &Machine) -> Result<(), Failure> {
        let (_, gpu) = self.which.find(machine)?;
        let note = |state: &mut kerf_emulator::state::State| {
            state.note(&gpu.uuid, EventKind::Xid, self.number, self.instance.zip(self.compute));
            Ok(())
        };
        machine.change(note).map_err(refused("xid"))
    }
}

#[derive(Debug, Args)]
pub(crate) struct Hold {
    /// UUID of a GPU or MIG device.
    #[arg(long)]
    uuid: String,
}

impl Hold {
    /// Holds until the process is killed.
    pub(crate) fn run(&self, machine: &Machine) -> Result<(), Failure> {
        let state = machine.state().map_err(refused("hold"))?;
        if state.gpus.iter().any(|gpu| gpu.uuid == self.uuid && gpu.mig_current) {
            return Err("a GPU in MIG mode is used through its MIG devices".to_owned());
        }
        let _holding = machine.clients().hold(&self.uuid, Use::Compute).map_err(refused("hold"))?;
        say("holding");
        loop {
            std::thread::park();
        }
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum Mig {
    /// Create a GPU instance and its compute instance; print the MIG UUID.
    Create(Create),
    /// Destroy a GPU instance with its compute instances.
    Destroy {
        #[command(flatten)]
        which: Which,
        /// Id of the GPU instance.
        #[arg(long)]
        instance: u32,
    },
    /// Ask for a MIG mode.
    Mode {
        #[command(flatten)]
        which: Which,
        /// The mode.
        #[arg(value_enum)]
        mode: Switch,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Switch {
    On,
    Off,
}

#[derive(Debug, Args)]
pub(crate) struct Create {
    #[command(flatten)]
    which: Which,
    /// Profile name, such as `1g.10gb`.
    #[arg(long)]
    profile: String,
    /// First memory slice; the first free one where absent.
    #[arg(long)]
    start: Option<u32>,
    /// Make no compute instance.
    #[arg(long)]
    no_ci: bool,
}

impl Create {
    fn run(&self, machine: &Machine) -> Result<(), Failure> {
        let (index, gpu) = self.which.find(machine)?;
        let model = machine.model(&gpu).map_err(refused("create"))?;
        let mig: &model::Mig = model.mig.as_ref().ok_or_else(|| format!("{} has no MIG", gpu.model))?;
        let profile = mig.profiles.iter().find(|profile| profile.name == self.profile);
        let profile = profile.ok_or_else(|| format!("{} has no profile `{}`", gpu.model, self.profile))?;
        let placement = self.start.map(|start| (start, profile.size));
        let created = machine.create_gpu_instance(index, profile.id, placement);
        let (instance, _) = created.map_err(refused("create"))?;
        if self.no_ci {
            say(&instance.to_string());
            return Ok(());
        }
        let whole = mig.full_compute(profile).ok_or("the profile has no full compute instance")?;
        machine.create_compute_instance(index, instance, whole.id, None).map_err(refused("create"))?;
        let (_, gpu) = self.which.find(machine)?;
        let uuid =
            gpu.mig_devices().find(|(of, _)| of.id == instance).map(|(_, compute)| compute.uuid.clone());
        say(&format!("{instance} {}", uuid.unwrap_or_default()));
        Ok(())
    }
}

impl Mig {
    pub(crate) fn run(&self, machine: &Machine) -> Result<(), Failure> {
        match self {
            Self::Create(create) => create.run(machine),
            Self::Destroy { which, instance } => {
                let (index, gpu) = which.find(machine)?;
                let found = gpu.instances.iter().find(|found| found.id == *instance);
                let found = found.ok_or_else(|| format!("no GPU instance {instance}"))?;
                for compute in &found.compute {
                    let destroyed =
                        machine.destroy_compute_instance(index, *instance, compute.id, compute.serial);
                    destroyed.map_err(refused("destroy"))?;
                }
                machine.destroy_gpu_instance(index, *instance, found.serial).map_err(refused("destroy"))
            }
            Self::Mode { which, mode } => {
                let (index, _) = which.find(machine)?;
                match machine.set_mig_mode(index, *mode == Switch::On).map_err(refused("mode"))? {
                    ModeChange::Active => say("active"),
                    ModeChange::Pending(why) => say(&format!("pending: {why}")),
                }
                Ok(())
            }
        }
    }
}

/// Reboots the machine.
pub(crate) fn reboot(machine: &Machine) -> Result<(), Failure> {
    machine.reboot().map_err(refused("reboot"))
}

/// Prints the state.
pub(crate) fn show(machine: &Machine) -> Result<(), Failure> {
    let state = machine.state().map_err(refused("show"))?;
    say(&serde_json::to_string_pretty(&*state).map_err(|error| error.to_string())?);
    Ok(())
}
