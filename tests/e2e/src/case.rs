//! One case, run on one cluster in this process.

use std::time::Instant;

use anyhow::{Context as _, Result};
use xtask::cluster::{Cluster, Options};
use xtask::driver;

use crate::scene::Scene;

/// A test: the sentence that it proves, and how.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// The sentence.
    pub name: &'static str,
    /// What must be there before.
    pub needs: Needs,
    /// About how long it takes: the longest begin first. Nothing else hangs on it.
    pub seconds: u16,
    /// Proves the sentence or says why not.
    pub run: fn(&Scene<'_>) -> Result<()>,
}

/// What a case stands on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Needs {
    /// The stock cluster alone.
    Cluster,
    /// kerf, installed with the values that every case has, and nothing left of
    /// the case before.
    Driver,
}

/// All cases.
#[derive(Debug)]
pub struct Cases {
    /// What kerf promises on every release of Kubernetes.
    pub everywhere: Vec<Case>,
    /// What hangs on no release: faults and wrong input.
    pub once: Vec<Case>,
}

impl Cases {
    pub(crate) fn all(&self) -> impl Iterator<Item = &Case> {
        self.everywhere.iter().chain(&self.once)
    }
}

/// Returns when nothing is left of what cases before did to the machine and kerf.
pub type Ready = fn(&Scene<'_>) -> Result<()>;

impl Case {
    /// Mends what the case before broke, makes what this one needs, and runs it
    /// in its own namespace.
    pub(crate) fn play(
        &self,
        options: &Options,
        namespace: String,
        as_installed: bool,
        ready: Ready,
    ) -> Result<()> {
        let cluster = Cluster::up(options)?;
        let with_driver = self.needs == Needs::Driver;
        if with_driver && !as_installed {
            let started = Instant::now();
            let outcome = driver::install(&cluster, driver::Values::new());
            outcome.with_context(|| format!("logs of kerf:\n{}", driver::logs(&cluster)))?;
            eprintln!("  kerf is installed: {:.2} s", started.elapsed().as_secs_f64());
        }
        let scene = Scene::open(&cluster, namespace)?;
        let prepared = if with_driver { ready(&scene) } else { Ok(()) };
        let outcome = prepared.and_then(|()| (self.run)(&scene));
        if outcome.is_err() {
            eprintln!("{}", scene.describe());
        }
        let closed = scene.close();
        outcome.and(closed)
    }
}
