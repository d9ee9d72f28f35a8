//! `dra-conformance`: checks a DRA driver, or lists what is checked.

#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, reason = "the report goes there")]

mod signals;

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, Result, anyhow, ensure};
use clap::{Args, Parser, Subcommand};
use dra_conformance::{Check, Commands, Context, Finding, Launcher, Profile, Verdict};
use kube::config::{KubeConfigOptions, Kubeconfig, KubeconfigError};

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
    /// Check a driver. Exit code 1 where something fails, 2 where nothing could be checked,
    /// 130 and 143 where SIGINT and SIGTERM have ended it.
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
            Ok(0)
        }
        Command::Run(arguments) => run(arguments).await,
    };
    match done {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(2)
        }
    }
}

/// The exit code.
async fn run(arguments: RunArguments) -> Result<u8> {
    // Built beside others, several may be there. Refused only if one is installed already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let profile = Profile::read(&arguments.profile)?;
    let (client, server) = client(&arguments.kubeconfig).await?;
    let launcher = Commands::of(&profile, &client).await?;

    let begins = |check: &Check, ids: &[String]| ids.iter().any(|id| check.id.starts_with(id.as_str()));
    let chosen: Vec<&Check> = dra_conformance::all()
        .filter(|check| arguments.only.is_empty() || begins(check, &arguments.only))
        .filter(|check| !begins(check, &arguments.skip))
        .collect();
    ensure!(!chosen.is_empty(), "no check is left of --only and --skip");

    // Before anything is made that would be left.
    let asked = signals::listen()?;

    // Not after minutes of checks whose results would be lost.
    let json = arguments.json.map(create).transpose()?;
    let junit = arguments.junit.map(create).transpose()?;

    let driver = profile.driver.clone();
    let launcher = launcher.map(|commands| Box::new(commands) as Box<dyn Launcher>);
    let mut context = Context::new(profile, client, launcher);
    let place = || {
        format!(
            "ResourceSlices cannot be listed on the API server {server} of {}; see that it runs, is Kubernetes \
             1.34 or later, and lets the user of that file list them",
            arguments.kubeconfig.display()
        )
    };
    let work = async {
        context.reach().await.with_context(place)?;
        context.alone().await?;
        context.look().await?;
        let tell = |finding: &Finding| print!("{}", dra_conformance::text(finding));
        Ok::<_, anyhow::Error>(dra_conformance::run(&mut context, chosen, tell).await)
    };
    let findings = tokio::select! {
        findings = work => findings?,
        Ok(signal) = asked => {
            context.stop().await;
            eprintln!("error: ended by {}: the check that ran was given up, and what was made is taken away", signal.name);
            return Ok(signal.code);
        }
    };
    println!("{}", dra_conformance::summary(&findings));
    for (file, text) in [
        (json, dra_conformance::json(&driver, &findings)),
        (junit, dra_conformance::junit(&driver, &findings)),
    ] {
        if let Some((path, mut file)) = file {
            let written = file.write_all(text.as_bytes());
            written.with_context(|| format!("{} cannot be written", path.display()))?;
        }
    }
    Ok(findings.iter().any(|finding| matches!(finding.verdict, Verdict::Fail(_))).into())
}

fn create(path: PathBuf) -> Result<(PathBuf, File)> {
    let file = File::create(&path).with_context(|| format!("{} cannot be written", path.display()))?;
    Ok((path, file))
}

/// A client of the API server of a kubeconfig, and where that server is.
async fn client(path: &Path) -> Result<(kube::Client, String)> {
    let kubeconfig = Kubeconfig::read_from(path).map_err(|error| match error {
        // Its own words have the path too.
        KubeconfigError::ReadConfig(error, _) => {
            anyhow!("the kubeconfig {} cannot be read: {error}", path.display())
        }
        error => anyhow!("{} is no kubeconfig: {error}", path.display()),
    })?;
    let options = KubeConfigOptions::default();
    // Its causes are in its own words.
    let config = kube::Config::from_custom_kubeconfig(kubeconfig, &options)
        .await
        .map_err(|error| anyhow!("{} is no kubeconfig that can be used: {error}", path.display()))?;
    let server = config.cluster_url.to_string();
    Ok((kube::Client::try_from(config)?, server))
}
