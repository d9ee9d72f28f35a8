//! What a check is.

use std::fmt;

use anyhow::Result;
use futures::future::LocalBoxFuture;

use crate::context::Context;

/// One thing that must hold of a driver.
pub struct Check {
    /// Never changes its meaning; a number is not used again.
    pub id: &'static str,
    /// What must hold, as a sentence.
    pub says: &'static str,
    /// Whose word that is.
    pub reference: &'static str,
    /// Without these it does not apply.
    pub(crate) needs: &'static [Need],
    pub(crate) run: for<'a> fn(&'a mut Context) -> LocalBoxFuture<'a, Result<()>>,
}

impl fmt::Debug for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.id)
    }
}

/// What a profile must give for a check to apply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Need {
    /// The sockets' folder.
    Registry,
    /// How claims are made.
    Claims,
    /// Folders of CDI specs.
    Cdi,
    /// How the driver is started.
    Start,
    /// How two instances are started beside each other.
    Instances,
    /// How a reboot is made up.
    Reboot,
    /// That the driver reaches the API server through the tool, which can make trouble.
    Outage,
    /// How devices are made to hang.
    Hang,
    /// How prepares of one kind of claims are made slow.
    Slow,
    /// A kind of claims that get shares.
    Shares,
    /// How soon claims are collected of which it is told nothing.
    Collect,
    /// The folder of the driver's state.
    State,
    /// That slices and the Node may be changed.
    Disturb,
}

impl Need {
    /// Why a check without it does not apply.
    pub(crate) fn missing(self) -> &'static str {
        match self {
            Self::Registry => "the profile has no `registry`",
            Self::Claims => "the profile has no `claims`",
            Self::Cdi => "the profile has no `cdi`",
            Self::Start => "the profile has no `start`",
            Self::Instances => "`start` of the profile has no `{instance}` in it",
            Self::Hang => "the profile has no `hang`",
            Self::Slow => "the profile has no `slow`",
            Self::Shares => "the profile has no `shares`",
            Self::Collect => "`limits` of the profile have no `collect`",
            Self::State => "the profile has no `state`",
            Self::Reboot => "the profile has no `reboot`",
            Self::Outage => "`start` and `environment` of the profile have no `{kubeconfig}` in them",
            Self::Disturb => "the profile has no `registry` and does not say `disturb: true`",
        }
    }
}

/// The error of a check that finds that it does not apply after all.
#[derive(Debug)]
pub(crate) struct NotApplicable(pub(crate) String);

impl fmt::Display for NotApplicable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for NotApplicable {}

/// A table of checks: id, needs, sentence, reference, function.
macro_rules! checks {
    ($($id:literal [$($need:ident)*] $says:literal, $reference:literal => $run:ident;)*) => {
        pub(crate) const CHECKS: &[$crate::check::Check] = &[$(
            $crate::check::Check {
                id: $id,
                says: $says,
                reference: $reference,
                needs: &[$($crate::check::Need::$need),*],
                run: |context| Box::pin($run(context)),
            }
        ),*];
    };
}
pub(crate) use checks;
