//! All checks, by area.

mod cdi;
mod hang;
mod health;
mod outage;
mod prepare;
mod registration;
mod restart;
mod slices;
mod state;
mod unprepare;
mod update;

use crate::check::Check;

/// All checks in the order in which they are run.
pub fn all() -> impl Iterator<Item = &'static Check> {
    [
        registration::CHECKS,
        prepare::CHECKS,
        unprepare::CHECKS,
        cdi::CHECKS,
        slices::CHECKS,
        health::CHECKS,
        restart::CHECKS,
        outage::CHECKS,
        state::CHECKS,
        hang::CHECKS,
        update::CHECKS,
    ]
    .into_iter()
    .flatten()
}
