//! `nvidia-emulator init`.

use std::path::{Path, PathBuf};

use clap::Args;
use kerf_emulator::install::{DriverSources, Plan, Slot, install, is_installed};
use kerf_emulator::model;

use crate::{Failure, say};

#[derive(Debug, Args)]
pub(crate) struct Init {
    /// A GPU: `<model>[:mig=on,pci=<address>,numa=<node>,minor=<number>,ecc=on|off,nvlinks=<up>,clique=<cluster UUID>.<clique>,vgpu=on]`;
    /// once for each.
    #[arg(long = "gpu", required = true)]
    gpus: Vec<Slot>,
    /// NUMA nodes over which the GPUs are spread.
    #[arg(long, default_value_t = 1)]
    numa: u32,
    /// Decides all UUIDs.
    #[arg(long, default_value = "0")]
    seed: String,
    /// The driver's version.
    #[arg(long, default_value = "580.95.05")]
    driver_version: String,
    /// The CUDA version, as 1000 × major + 10 × minor.
    #[arg(long, default_value_t = 13000)]
    cuda_version: i32,
    /// Models instead of the built-in ones (JSON).
    #[arg(long)]
    models: Option<PathBuf>,
    /// The emulated library, instead of the one beside this program.
    #[arg(long)]
    library: Option<PathBuf>,
    /// The stand-in nvidia-smi, instead of the one beside this program.
    #[arg(long)]
    smi: Option<PathBuf>,
    /// Replace a machine that is there.
    #[arg(long)]
    force: bool,
}

impl Init {
    pub(crate) fn run(self, root: &Path) -> Result<(), Failure> {
        if is_installed(root) && !self.force {
            return Err(format!("{} holds a machine; replace it with --force", root.display()));
        }
        let models = match &self.models {
            None => model::built_in(),
            Some(path) => {
                let text = std::fs::read(path)
                    .map_err(|error| format!("cannot read {}: {error}", path.display()))?;
                serde_json::from_slice(&text)
            }
        };
        let models = models.map_err(|error| format!("the models do not parse: {error}"))?;
        let sources = match (self.library, self.smi) {
            (Some(library), Some(smi)) => DriverSources { library, smi },
            (library, smi) => {
                let found = DriverSources::beside_program()?;
                DriverSources { library: library.unwrap_or(found.library), smi: smi.unwrap_or(found.smi) }
            }
        };
        let plan = Plan {
            gpus: self.gpus,
            numa_nodes: self.numa,
            seed: self.seed,
            driver_version: self.driver_version,
            cuda_version: self.cuda_version,
            models,
        };
        let state = install(root, &plan, &sources)?;
        for gpu in &state.gpus {
            say(&format!("{} {} {}", gpu.pci, gpu.model, gpu.uuid));
        }
        Ok(())
    }
}
