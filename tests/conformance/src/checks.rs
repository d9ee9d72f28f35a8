//! All checks, by area.

mod admin;
mod answers;
mod cdi;
mod collect;
mod full_disk;
mod hang;
mod health;
mod metadata;
mod outage;
mod prepare;
mod registration;
mod restart;
mod several;
mod shares;
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
        several::CHECKS,
        unprepare::CHECKS,
        admin::CHECKS,
        shares::CHECKS,
        cdi::CHECKS,
        metadata::CHECKS,
        slices::CHECKS,
        health::CHECKS,
        restart::CHECKS,
        outage::CHECKS,
        answers::CHECKS,
        state::CHECKS,
        full_disk::CHECKS,
        hang::CHECKS,
        update::CHECKS,
        collect::CHECKS,
    ]
    .into_iter()
    .flatten()
}
