//! How the driver under test is started, ended, killed and started again.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use futures::FutureExt as _;
use futures::future::LocalBoxFuture;
use kube::Client;

use crate::disk::{self, Disk};
use crate::fault::Fault;
use crate::process::Process;
use crate::profile::{Pair, Profile, seconds};
use crate::tunnel::Tunnel;

/// Starts the driver.
pub trait Launcher: std::fmt::Debug {
    /// Starts an instance, which need not serve yet.
    fn start(&mut self, instance: &str) -> LocalBoxFuture<'_, Result<Box<dyn Running>>>;
    /// Makes the next start look like the first one after a boot.
    fn reboot(&mut self) -> LocalBoxFuture<'_, Result<()>>;
    /// Makes its devices hang, or answer again.
    fn hang(&mut self, does_hang: bool) -> LocalBoxFuture<'_, Result<()>>;
    /// Makes prepares of the first kind of claims slow, or as they were.
    fn slow(&mut self, is_slow: bool) -> LocalBoxFuture<'_, Result<()>>;
    /// Makes trouble on its way to the API server, instead of what there was.
    fn trouble(&mut self, fault: Fault);
    /// How many of its requests have met that trouble.
    fn met(&self) -> u32;
    /// Makes the disk small or full on which a folder is; an error where that
    /// cannot be done here. Small or normal again only while it does not run.
    fn disk(&mut self, folder: &Path, disk: Disk) -> Result<()>;
    /// Whether two instances can run at once.
    fn has_instances(&self) -> bool;
    /// Whether a reboot can be made up.
    fn has_reboot(&self) -> bool;
    /// Whether its way to the API server can be cut.
    fn has_outages(&self) -> bool;
    /// Whether its devices can be made to hang.
    fn has_hangs(&self) -> bool;
    /// Whether prepares of one kind of claims can be made slow.
    fn has_slowness(&self) -> bool;
}

/// A running instance. Dropped, it is killed.
pub trait Running: std::fmt::Debug {
    /// Asks it to end, and waits for that.
    fn terminate(self: Box<Self>) -> LocalBoxFuture<'static, Result<()>>;
    /// Ends it without a word.
    fn kill(self: Box<Self>) -> LocalBoxFuture<'static, Result<()>>;
    /// How it ended, if nobody asked it to.
    fn ended(&mut self) -> Option<String>;
}

/// The commands of a profile.
#[derive(Debug)]
pub struct Commands {
    start: Vec<String>,
    environment: Vec<(String, String)>,
    reboot: Vec<String>,
    hang: Option<Pair>,
    slow: Option<Pair>,
    stop: Duration,
    tunnel: Option<Tunnel>,
}

const INSTANCE: &str = "{instance}";
const KUBECONFIG: &str = "{kubeconfig}";

impl Commands {
    /// None if the profile does not say how the driver is started.
    pub async fn of(profile: &Profile, client: &Client) -> Result<Option<Self>> {
        if profile.start.is_empty() {
            return Ok(None);
        }
        let mut commands = Self {
            start: profile.start.clone(),
            environment: profile.environment.clone().into_iter().collect(),
            reboot: profile.reboot.clone(),
            hang: profile.hang.clone(),
            slow: profile.slow.clone(),
            stop: seconds(profile.limits.stop),
            tunnel: None,
        };
        if commands.has_placeholder(KUBECONFIG) {
            commands.tunnel = Some(Tunnel::open(client.clone()).await?);
        }
        Ok(Some(commands))
    }

    fn has_placeholder(&self, placeholder: &str) -> bool {
        let values = self.environment.iter().map(|(_, value)| value);
        self.start.iter().chain(values).any(|word| word.contains(placeholder))
    }

    fn filled(&self, word: &str, instance: &str) -> String {
        let word = word.replace(INSTANCE, instance);
        let path = self.tunnel.as_ref().map(|tunnel| tunnel.kubeconfig.display().to_string());
        word.replace(KUBECONFIG, &path.unwrap_or_default())
    }
}

fn command(words: &[String]) -> Result<Command> {
    let (program, arguments) = words.split_first().context("the command is empty")?;
    let mut command = Command::new(PathBuf::from(program));
    // Standard output is the report's.
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null());
    Ok(command)
}

/// Runs a command to its end.
fn complete(words: &[String]) -> Result<()> {
    let status = command(words)?.status().with_context(|| format!("cannot run {}", words.join(" ")))?;
    ensure!(status.success(), "{} failed ({status})", words.join(" "));
    Ok(())
}

/// Runs one of two commands, if there are such.
fn one_of(pair: Option<&Pair>, begins: bool) -> Result<()> {
    pair.map_or(Ok(()), |pair| complete(if begins { &pair.begin } else { &pair.end }))
}

impl Launcher for Commands {
    fn start(&mut self, instance: &str) -> LocalBoxFuture<'_, Result<Box<dyn Running>>> {
        let words: Vec<String> = self.start.iter().map(|word| self.filled(word, instance)).collect();
        let environment: Vec<(String, String)> =
            self.environment.iter().map(|(key, value)| (key.clone(), self.filled(value, instance))).collect();
        async move {
            let process = Process::start(command(&words)?.envs(environment), self.stop);
            let process =
                process.with_context(|| format!("the driver cannot be started: {}", words.join(" ")))?;
            Ok(Box::new(process) as Box<dyn Running>)
        }
        .boxed_local()
    }

    fn reboot(&mut self) -> LocalBoxFuture<'_, Result<()>> {
        std::future::ready(complete(&self.reboot)).boxed_local()
    }

    fn hang(&mut self, does_hang: bool) -> LocalBoxFuture<'_, Result<()>> {
        std::future::ready(one_of(self.hang.as_ref(), does_hang)).boxed_local()
    }

    fn slow(&mut self, is_slow: bool) -> LocalBoxFuture<'_, Result<()>> {
        std::future::ready(one_of(self.slow.as_ref(), is_slow)).boxed_local()
    }

    fn trouble(&mut self, fault: Fault) {
        if let Some(tunnel) = &self.tunnel {
            tunnel.way.set(fault);
        }
    }

    fn met(&self) -> u32 {
        self.tunnel.as_ref().map_or(0, |tunnel| tunnel.way.met())
    }

    fn disk(&mut self, folder: &Path, disk: Disk) -> Result<()> {
        disk::make(folder, disk)
    }

    fn has_instances(&self) -> bool {
        self.has_placeholder(INSTANCE)
    }

    fn has_hangs(&self) -> bool {
        self.hang.is_some()
    }

    fn has_slowness(&self) -> bool {
        self.slow.is_some()
    }

    fn has_outages(&self) -> bool {
        self.tunnel.is_some()
    }

    fn has_reboot(&self) -> bool {
        !self.reboot.is_empty()
    }
}
