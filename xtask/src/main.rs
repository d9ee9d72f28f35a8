//! `cargo xtask`: everything repeatable of this repository.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use xtask::cluster::{self, Cluster, FeatureGates, Release};
use xtask::{bench, chaos, classes, codegen, conformance, demo, image, suite};

#[derive(Debug, Parser)]
#[command(name = "cargo xtask", about = "Everything repeatable of this repository")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Bring up a cluster with emulated GPUs and show what kerf does there.
    Demo {
        /// Leave the cluster up, to go on by hand.
        #[arg(long)]
        keep: bool,
    },
    /// Run every check and test, on clusters of its own.
    Test {
        /// Run all end-to-end tests on this release alone, not all on 1.37.2 and the stories on 1.36.3.
        #[arg(long, value_name = "VERSION")]
        kubernetes: Option<Release>,
    },
    /// Check kerf with dra-conformance, on an API server of its own.
    Conformance {
        /// On that of this cluster, which is up.
        #[arg(long)]
        name: Option<String>,
    },
    /// Print what kerf costs: memory, size, start and prepare times.
    Bench,
    /// Kill kerf, fail its calls and cut its power at every point, and print what was survived.
    Chaos {
        /// Only works with all of these in their names, e.g. "a partition: unprepare".
        words: Vec<String>,
        /// Print the names alone: scenario and work.
        #[arg(long)]
        list: bool,
    },
    /// A stock one-node Kubernetes cluster without Docker.
    #[command(subcommand)]
    Cluster(ClusterCommand),
    /// Make the container images as OCI archives under target/images.
    Image,
    /// Regenerate the chart's list of MIG profiles, or check that it is current.
    Classes {
        /// Change nothing; fail if anything would change.
        #[arg(long)]
        check: bool,
    },
    /// Regenerate committed code, or check that it is current.
    Codegen {
        /// Change nothing; fail if anything would change.
        #[arg(long)]
        check: bool,
    },
}

#[derive(Debug, Subcommand)]
enum ClusterCommand {
    /// Bring it up, from nothing or from whatever is left of it.
    Up {
        #[command(flatten)]
        name: Name,
        /// Emulate a GPU of this model, e.g. h100-80 or a30:mig=on; once per GPU.
        #[arg(long = "gpu", value_name = "MODEL")]
        gpus: Vec<String>,
        /// The release of Kubernetes, 1.37.2 or 1.36.3; once made a cluster keeps its own.
        #[arg(long, value_name = "VERSION")]
        kubernetes: Option<Release>,
        /// Feature gates to set in all components, or in one: kube-scheduler:NAME=false.
        #[arg(long, value_name = "[COMPONENT:]NAME=BOOL,…", default_value = "", hide_default_value = true)]
        feature_gates: FeatureGates,
    },
    /// Take it away with all it made; its logs are kept.
    Down {
        /// Which cluster; needed only where there are several.
        #[arg(long)]
        name: Option<String>,
    },
    /// Print what runs and how to reach it.
    Status {
        /// Which cluster; needed only where there are several.
        #[arg(long)]
        name: Option<String>,
    },
}

#[derive(Debug, Args)]
struct Name {
    /// Distinguishes clusters of one machine.
    #[arg(long, default_value = cluster::DEFAULT_NAME)]
    name: String,
}

fn main() -> ExitCode {
    match run(Arguments::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Demo { keep } => demo::run(keep),
        Command::Test { kubernetes } => suite::run(kubernetes),
        Command::Conformance { name } => conformance::of(name.as_deref()),
        Command::Bench => bench::run(),
        Command::Chaos { words, list } => chaos::run(&words, list),
        Command::Cluster(ClusterCommand::Up { name, gpus, kubernetes, feature_gates }) => {
            let name = name.name;
            Cluster::up(&cluster::Options { name: name.clone(), gpus, kubernetes, feature_gates })?;
            cluster::status(&name)
        }
        Command::Cluster(ClusterCommand::Down { name }) => cluster::down(&chosen(name)?),
        Command::Cluster(ClusterCommand::Status { name }) => cluster::status(&chosen(name)?),
        Command::Image => image::all(),
        Command::Classes { check } => classes::run(check),
        Command::Codegen { check } => codegen::run(check),
    }
}

fn chosen(name: Option<String>) -> anyhow::Result<String> {
    name.map_or_else(cluster::unnamed, Ok)
}
