//! What the owner says from what it knows: what is to be published, of which
//! records are stored before, and how that is. It reads no hardware.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use kerf_dra_driver::health::Reading;
use kerf_dra_driver::layout::PackedSlice;
use kerf_dra_driver::names::DeviceName;
use kerf_dra_driver::publication::Knowledge;
use kerf_dra_driver::withdraw::LIST_FRESH;
use tokio::time::Instant;
use tracing::{info, warn};

use super::bearing::conditions;
use super::{NodeLayout, Owner, OwnerError, now};
use crate::health::NodeHealth;

impl Owner {
    /// Decides what is to be published, stores what must be stored before, and
    /// says it. The answer is when claims have to be listed.
    pub(super) async fn decide(&mut self) -> Result<Option<Instant>, OwnerError> {
        let stored = self.channels.stored.borrow_and_update().clone();
        if self.counters && !stored.counters {
            // What is published without counters leaves out all that is not
            // held: who holds what has to be known first.
            self.counters = false;
            self.must_list = true;
        }
        let Some(rivals) = self.rivals.borrow_and_update().clone() else { return Ok(None) };
        if self.must_list {
            return Ok(Some(Instant::now()));
        }
        let is_unused = self.list.as_ref().is_none_or(|list| list.allocated.is_empty());
        if self.publication.is_empty() && is_unused && !rivals.is_empty() {
            // Slices of which no record is left are withdrawn.
            let view = Arc::clone(&self.journal.borrow_and_update());
            self.decided_on = self.bearing(&view);
            self.channels.layout.send_if_modified(|last| {
                let changed = last.as_ref().is_none_or(|last| !last.slices.is_empty());
                *last = last.take().filter(|_| !changed).or_else(|| Some(Arc::default()));
                changed
            });
            return Ok(None);
        }
        let inventory = match self.channels.inventory.borrow().clone() {
            // Whatever was published stays, and says that it is lost.
            _ if self.unanswered.is_some() && !self.publication.is_empty() => Arc::default(),
            Some(inventory) => inventory,
            None => return Ok(None),
        };
        let now = now();
        if self.counters {
            self.list.take_if(|list| now >= list.began.after(LIST_FRESH));
        }
        let view = Arc::clone(&self.journal.borrow_and_update());
        let layout = self.channels.layout.borrow().clone();
        let is_stored = match (&stored.layout, &layout) {
            (Some(stored), Some(layout)) => Arc::ptr_eq(stored, layout),
            _ => false,
        };
        let held: BTreeSet<DeviceName> = view.held().map(|(device, _)| device.clone()).collect();
        let mut next = self.publication.next(Knowledge {
            settings: self.settings(),
            inventory: &inventory,
            foreign: &self.foreign,
            held: &held,
            list: self.list.as_ref(),
            conditions: &conditions(&view, &inventory, self.publication.records(), Some(&rivals)),
            is_stored,
            counters: self.counters,
            now,
        });
        self.records.write_all(std::mem::take(&mut next.write)).await?;
        let list_at =
            next.list_at.map(|at| Instant::now() + Duration::from_millis(at.0.saturating_sub(now.0)));
        let removed = next.remove.clone();
        let slices = self.publication.take(next);
        let slices = slices.iter().map(PackedSlice::pack).collect::<Result<Vec<_>, _>>()?;
        self.decided_on = self.bearing(&view);
        self.channels.layout.send_if_modified(|last| {
            if last.as_ref().is_some_and(|last| last.slices == slices) {
                return false;
            }
            info!(slices = slices.len(), "the node's layout changed");
            *last = Some(Arc::new(NodeLayout { slices }));
            true
        });
        for pci in removed {
            // Only tidiness: a record of nothing changes nothing.
            if let Err(error) = self.records.remove(pci).await {
                warn!(error = crate::chain(&error), "a record stays");
            }
        }
        Ok(list_at)
    }

    /// Says how what is published is, once that is known; also where what is to be
    /// published could not be stored.
    pub(super) fn tell_health(&self) {
        let inventory = self.channels.inventory.borrow().clone();
        let vanished = self.vanished(&self.journal.borrow());
        let reading = match (&self.unanswered, &inventory) {
            (Some(reason), _) => Reading::Unanswered(reason),
            (None, Some(inventory)) => Reading::Read { inventory, vanished: &vanished },
            (None, None) => return,
        };
        if self.channels.layout.borrow().is_none() {
            return;
        }
        let devices = self.publication.health(reading);
        self.plugin.inner.health.send_if_modified(|last| {
            let known = last.take().map(|last| last.devices).filter(|known| **known == *devices);
            let changed = known.is_none();
            let devices = known.unwrap_or_else(|| devices.into());
            *last = Some(NodeHealth { read_at: self.read_at, devices });
            changed
        });
    }
}
