//! The kubelet side of kerf: registration, prepare and unprepare, CDI specs,
//! reconcile.
//!
//! ```text
//! Plugin::new(config, hardware, claims, inventory)   reads the journal
//!   .start().await                                   settles what a crash left
//!   .serve(cancel).await                             sockets, until cancelled
//!   .listen(cancel)                                  what GPUs report by themselves
//!   .observe().await                                 hardware + journal + foreign instances
//!   .follow(others, cancel).await                    what other instances write
//!   .journal() / .registration() / .hardware_changed() / .health() / .metrics()
//! Instances::join(folder)                            this process among those of its node
//!   .lead().await                                    when it is its turn to publish:
//! Owner::new(plugin, channels, lead).run(cancel)     reads the GPUs, says what is published
//! plugin.keep_reconciled(cancel).await               now and then, and on events
//! ```
//!
//! The [`Owner`] reads the inventory with [`Plugin::observe`] and sends it into
//! the watch that [`Plugin::new`] was given, again whenever
//! [`Plugin::hardware_changed`] says so; it also keeps what is known of
//! [`Rival`]s.

#![forbid(unsafe_code)]

mod cdi;
mod claims;
mod disk;
mod effects;
mod errors;
mod events;
mod failures;
mod health;
mod hook_program;
mod instances;
mod lock;
mod metrics;
mod owner;
mod plugin;
mod pods;
pub mod proto;
mod reconcile;
mod records;
mod registration;
mod rivals;
mod server;
mod service;
mod socket;
mod store;
#[cfg(feature = "testing")]
pub mod testing;
mod turns;
mod view;
mod work;

pub use cdi::{CdiError, ExtraMount};
pub use claims::{ClaimSource, ClaimSourceError};
pub use disk::{Files, HostFiles};
pub use effects::StepError;
pub use errors::{PrepareError, UndoError, WorkError};
pub use health::NodeHealth;
pub use hook_program::{HookProgram, HookProgramError};
pub use instances::{Instances, Lead, Others};
pub use metrics::{BUCKETS, Counted, Metrics, Operation};
pub use owner::{Channels, NodeLayout, Owner, OwnerError, Stored};
pub use plugin::{ClaimRequest, ObserveError, Observed, Plugin, PluginConfig, PluginError};
pub use records::RecordError;
pub use registration::Registration;
pub use rivals::{Rival, RivalFolders, RivalKind};
pub use server::ServeError;
pub use socket::{SocketFile, SocketFolders, knock};
pub use store::StoreError;
pub use view::{JournalView, StuckMode};
pub use work::PreparedDevice;

use kerf_dra_driver::error::in_one_sentence;

/// An error and its causes in one sentence.
pub fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    in_one_sentence(error, ToString::to_string)
}
