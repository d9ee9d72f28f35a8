//! A process of the driver under test, with all that it starts: `start` may be a
//! shell. They are one process group, apart from the tool's, so that a Ctrl-C is
//! the tool's alone to answer.

use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use futures::FutureExt as _;
use futures::future::LocalBoxFuture;
use rustix::process::{Pid, Signal, kill_process_group};

use crate::launcher::Running;

/// How often it is looked whether a process has ended.
const LOOK: Duration = Duration::from_millis(20);

#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    stop: Duration,
}

impl Process {
    pub(crate) fn start(command: &mut Command, stop: Duration) -> std::io::Result<Self> {
        Ok(Self { child: command.process_group(0).spawn()?, stop })
    }

    /// Whether any of the group runs. One that has ended and is not waited for
    /// does not.
    fn runs(&self) -> bool {
        let group = self.child.id().to_string();
        let of_group = |stat: &str| {
            // The program's name, in parentheses, may have anything in it.
            let mut fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
            let state = fields.next().unwrap_or_default();
            !["Z", "X"].contains(&state) && fields.nth(1) == Some(&group)
        };
        let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        processes
            .filter_map(|process| std::fs::read_to_string(process.path().join("stat")).ok())
            .any(|stat| of_group(&stat))
    }

    /// To the group, if there is one: its number may be another's otherwise.
    fn signal(&self, signal: Signal) {
        if self.runs() {
            // It may have ended just now.
            let _ = kill_process_group(Pid::from_child(&self.child), signal);
        }
    }

    async fn ends_after(&mut self, what: &str) -> Result<()> {
        let asked = Instant::now();
        while self.child.try_wait()?.is_none() || self.runs() {
            let limit = self.stop.as_secs_f32();
            ensure!(asked.elapsed() < self.stop, "it has not ended {limit} s after {what}");
            tokio::time::sleep(LOOK).await;
        }
        Ok(())
    }
}

impl Running for Process {
    fn terminate(mut self: Box<Self>) -> LocalBoxFuture<'static, Result<()>> {
        async move {
            if let Some(status) = self.child.try_wait()? {
                bail!("it had ended by itself ({status})");
            }
            self.signal(Signal::TERM);
            self.ends_after("SIGTERM").await
        }
        .boxed_local()
    }

    fn kill(mut self: Box<Self>) -> LocalBoxFuture<'static, Result<()>> {
        async move {
            self.signal(Signal::KILL);
            self.ends_after("SIGKILL").await
        }
        .boxed_local()
    }

    fn ended(&mut self) -> Option<String> {
        self.child.try_wait().ok().flatten().map(|status| status.to_string())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
        let _ = self.child.wait();
    }
}
