//! `dra-conformance`: checks a DRA driver, or lists what is checked.

#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, reason = "the report goes there")]

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result, ensure};
use clap::{Args, Parser, Subcommand};
use dra_conformance::{Check, Commands, Context, Finding, Launcher, Profile, Verdict};
use kube::config::{KubeConfigOptions, Kubeconfig};

/// Checks any Kubernetes DRA driver through its sockets and the API server.
#[derive(Debug, Parser)]
#[command(name = "dra-conformance", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Print all checks as a table.
    List,
    /// Check a driver. Exit code 1 where something fails.
    Run(RunArguments),
}

#[derive(Debug, Args)]
struct RunArguments {
    /// What is to be known of the driver.
    #[arg(long, value_name = "FILE")]
    profile: PathBuf,
    /// How to reach the API server.
    #[arg(long, value_name = "FILE", env = "KUBECONFIG")]
    kubeconfig: PathBuf,
    /// Run only the checks whose ids begin with this. May be repeated.
    #[arg(long, value_name = "ID")]
    only: Vec<String>,
    /// Do not run the checks whose ids begin with this. May be repeated.
    #[arg(long, value_name = "ID")]
    skip: Vec<String>,
    /// Write the results as JSON too.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write the results in the form of `JUnit` too.
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,
}

// One thread: checks wait for others nearly always.
#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let done = match Arguments::parse().command {
        Command::List => {
            print!("{}", dra_conformance::table(dra_conformance::all()));
            Ok(true)
        }
        Command::Run(arguments) => run(arguments).await,
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(2)
        }
    }
}

async fn run(arguments: RunArguments) -> Result<bool> {
    // Built beside others, several may be there. Refused only if one is installed already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let profile = Profile::read(&arguments.profile)?;
    let kubeconfig = Kubeconfig::read_from(&arguments.kubeconfig)
        .with_context(|| format!("{} cannot be read", arguments.kubeconfig.display()))?;
    let config = kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    let client = kube::Client::try_from(config)?;
    let launcher = Commands::of(&profile, &client).await?;

    let begins = |check: &Check, ids: &[String]| ids.iter().any(|id| check.id.starts_with(id.as_str()));
    let chosen: Vec<&Check> = dra_conformance::all()
        .filter(|check| arguments.only.is_empty() || begins(check, &arguments.only))
        .filter(|check| !begins(check, &arguments.skip))
        .collect();
    ensure!(!chosen.is_empty(), "no check is left of --only and --skip");

    let driver = profile.driver.clone();
    let launcher = launcher.map(|commands| Box::new(commands) as Box<dyn Launcher>);
    let mut context = Context::new(profile, client, launcher);
    let tell = |finding: &Finding| print!("{}", dra_conformance::text(finding));
    let findings = dra_conformance::run(&mut context, chosen, tell).await;
    println!("{}", dra_conformance::summary(&findings));
    for (path, text) in [
        (arguments.json, dra_conformance::json(&driver, &findings)),
        (arguments.junit, dra_conformance::junit(&driver, &findings)),
    ] {
        if let Some(path) = path {
            std::fs::write(&path, text).with_context(|| format!("{} cannot be written", path.display()))?;
        }
    }
    Ok(!findings.iter().any(|finding| matches!(finding.verdict, Verdict::Fail(_))))
}
