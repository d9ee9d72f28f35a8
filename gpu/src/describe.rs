//! Puts NVML's and sysfs' answers about a GPU together into the plain data
//! that the rest of the driver works with.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use kerf_dra_driver::hardware::HardwareErrorKind;
use kerf_dra_driver::inventory::{Bytes, Gpu, Inventory, Mig, MigMode, Profile, UnreadableGpu};
use kerf_dra_driver::names::PciAddress;

use crate::nvml;
use crate::nvml::{Failure, GpuProfile, GpuProfiles, Session};
use crate::roots::Roots;
use crate::sysfs;

/// How long one GPU may take to be read. NVML answers within milliseconds, or
/// hangs with the GPU.
const BUDGET: Duration = Duration::from_secs(10);

type Read = Result<Gpu, Unread>;

/// Why a GPU could not be read.
enum Unread {
    /// NVML says so; of which GPU, where that is known.
    Failure(Option<PciAddress>, Failure),
    /// A defect of this program.
    Panicked,
}

/// Reads GPUs, each on a thread of its own: one that hangs hides no other.
#[derive(Debug, Default)]
pub(crate) struct Reader {
    /// Held by the one reading that goes on. Without turns, GPUs that another
    /// reading is just at would look as if they hung.
    turn: Mutex<()>,
    /// GPUs, by NVML's index, whose last reading has not come back. They are
    /// not read again until it has: each attempt would cost a thread.
    hanging: Mutex<BTreeSet<u32>>,
}

impl Reader {
    /// Everything that NVML counts. A GPU that cannot be read is listed with
    /// the reason.
    pub(crate) fn inventory(
        self: &Arc<Self>,
        session: &Arc<Session>,
        roots: &Roots,
    ) -> Result<Inventory, Failure> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let mut inventory = Inventory {
            driver_version: session.driver_version()?,
            cuda_version: session.cuda_version().unwrap_or_default(),
            ..Inventory::default()
        };
        let count = session.gpu_count()?;
        let (session, roots) = (Arc::clone(session), roots.clone());
        self.read_all(&mut inventory, count, move |index| describe(&session, &roots, index))?;
        Ok(inventory)
    }

    fn read_all(
        self: &Arc<Self>,
        inventory: &mut Inventory,
        count: u32,
        describe: impl Fn(u32) -> Read + Clone + Send + 'static,
    ) -> Result<(), Failure> {
        let (sender, receiver) = mpsc::channel();
        let mut awaited: BTreeSet<u32> = (0..count).collect();
        for index in awaited.clone() {
            if !self.hanging().insert(index) {
                awaited.remove(&index);
                inventory.unreadable.push(unanswered(index));
                continue;
            }
            let read = {
                let (reader, sender, describe) = (Arc::clone(self), sender.clone(), describe.clone());
                move || {
                    let read = caught(|| describe(index));
                    reader.hanging().remove(&index);
                    // Nobody listens any more to one that comes too late.
                    let _ = sender.send((index, read));
                }
            };
            if thread::Builder::new().name(format!("gpu-read-{index}")).spawn(read).is_err() {
                // No more threads: without one of its own there is no budget.
                self.hanging().remove(&index);
                awaited.remove(&index);
                add(inventory, index, caught(|| describe(index)))?;
            }
        }
        let deadline = Instant::now() + BUDGET;
        while !awaited.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            let Ok((index, read)) = receiver.recv_timeout(left) else { break };
            awaited.remove(&index);
            add(inventory, index, read)?;
        }
        inventory.unreadable.extend(awaited.into_iter().map(unanswered));
        inventory.unreadable.sort_by_key(|unreadable| unreadable.index);
        inventory.gpus.sort_by_key(|gpu| gpu.pci);
        Ok(())
    }

    fn hanging(&self) -> MutexGuard<'_, BTreeSet<u32>> {
        self.hanging.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A panic is an error of that one reading: the next one tries again. What a
/// reading shares with others is caches whose locks forgive it.
fn caught(read: impl FnOnce() -> Read) -> Read {
    catch_unwind(AssertUnwindSafe(read)).unwrap_or(Err(Unread::Panicked))
}

fn unanswered(index: u32) -> UnreadableGpu {
    let error = format!("GPU {index} has not answered for {} s", BUDGET.as_secs());
    UnreadableGpu { index, pci: None, error, lost: false }
}

fn add(inventory: &mut Inventory, index: u32, read: Read) -> Result<(), Failure> {
    match read {
        Ok(gpu) if inventory.gpu(gpu.pci).is_some() => inventory.unreadable.push(UnreadableGpu {
            index,
            pci: Some(gpu.pci),
            error: format!("NVML lists the GPU at {} twice", gpu.pci),
            lost: false,
        }),
        Ok(gpu) => inventory.gpus.push(gpu),
        // The driver went away under the listing: what is left would look as
        // if every GPU were lost.
        Err(Unread::Failure(_, failure)) if failure.driver_is_gone() => return Err(failure),
        Err(unread) => {
            let lost =
                matches!(&unread, Unread::Failure(_, failure) if failure.kind() == HardwareErrorKind::Lost);
            let (pci, error) = match unread {
                Unread::Failure(Some(pci), failure) => {
                    (Some(pci), format!("the GPU at {pci} could not be read: {failure}"))
                }
                Unread::Failure(None, failure) => (None, format!("GPU {index} could not be read: {failure}")),
                Unread::Panicked => (
                    None,
                    format!(
                        "GPU {index} could not be read: an internal error of this program, to be reported with \
                         its log; the GPU is read again soon"
                    ),
                ),
            };
            inventory.unreadable.push(UnreadableGpu { index, pci, error, lost });
        }
    }
    Ok(())
}

fn describe(session: &Session, roots: &Roots, index: u32) -> Read {
    let handle = session.gpu_by_index(index).map_err(|failure| Unread::Failure(None, failure))?;
    let pci = handle.pci().map_err(|failure| Unread::Failure(None, failure))?;
    read(session, roots, pci, &handle).map_err(|failure| Unread::Failure(Some(pci), failure))
}

fn read(session: &Session, roots: &Roots, pci: PciAddress, gpu: &nvml::Gpu<'_>) -> Result<Gpu, Failure> {
    let memory = gpu.memory()?;
    Ok(Gpu {
        pci,
        minor: gpu.minor()?,
        uuid: gpu.uuid()?,
        product: gpu.name()?,
        brand: gpu.brand(),
        architecture: gpu.architecture()?,
        compute_capability: gpu.compute_capability()?,
        memory,
        addressing_mode: gpu.addressing_mode(),
        numa_node: sysfs::numa_node(&roots.sys, pci),
        pcie_root: sysfs::pcie_root(&roots.sys, pci),
        vgpu_guest: gpu.is_vgpu_guest()?,
        facts: gpu.board_facts(),
        mig: mig(session, pci, gpu, memory)?,
    })
}

fn mig(
    session: &Session,
    pci: PciAddress,
    gpu: &nvml::Gpu<'_>,
    board: Bytes,
) -> Result<Option<Mig>, Failure> {
    let (current, pending) = match gpu.mig_mode() {
        Ok(modes) => modes,
        Err(failure) if failure.is_not_supported() => return Ok(None),
        Err(failure) => return Err(failure),
    };
    let profiles = session.read_profiles(pci, gpu)?;
    if profiles.profiles.is_empty() {
        return Ok(None);
    }
    let instances = instances(current, pci, gpu, &profiles)?;
    Ok(Some(Mig { current, pending, profiles: published(pci, &profiles, board), instances }))
}

/// The GPU instances that exist. Without MIG mode there are none, and NVML
/// refuses to be asked.
pub(crate) fn instances(
    current: MigMode,
    pci: PciAddress,
    gpu: &nvml::Gpu<'_>,
    profiles: &Arc<GpuProfiles>,
) -> Result<Vec<kerf_dra_driver::inventory::GpuInstance>, Failure> {
    match current {
        MigMode::Enabled => gpu.gpu_instances(pci, profiles),
        MigMode::Disabled => Ok(Vec::new()),
    }
}

/// The profiles under their names. Devices are named after profiles, so of two
/// with one name the first is kept.
fn published(pci: PciAddress, profiles: &GpuProfiles, board: Bytes) -> Vec<Profile> {
    let memory_slices = profiles.memory_slices();
    let mut named: Vec<Profile> = Vec::with_capacity(profiles.profiles.len());
    for profile in &profiles.profiles {
        let name = profile.name_on(board, memory_slices);
        let Some(name) = name.filter(|name| named.iter().all(|known| known.name != *name)) else {
            tracing::warn!(gpu = %pci, profile = profile.id.0, "a MIG profile has no name of its own and is left out");
            continue;
        };
        let GpuProfile {
            id,
            memory,
            compute_slices,
            multiprocessors,
            copy_engines,
            decoders,
            encoders,
            jpeg_engines,
            ofa_engines,
            max_instances,
            ref placements,
            ..
        } = *profile;
        named.push(Profile {
            id,
            name,
            memory,
            compute_slices,
            multiprocessors,
            copy_engines,
            decoders,
            encoders,
            jpeg_engines,
            ofa_engines,
            max_instances,
            placements: placements.clone(),
        });
    }
    named
}

#[cfg(test)]
mod tests {
    use kerf_dra_driver::inventory::{Architecture, BoardFacts, Told};

    use super::*;

    fn gpu(index: u32) -> Gpu {
        Gpu {
            pci: PciAddress { domain: 0, bus: u8::try_from(index).unwrap(), device: 0, function: 0 },
            minor: index,
            uuid: format!("GPU-{index}"),
            product: "a GPU".to_owned(),
            brand: Told::Known("a brand".to_owned()),
            architecture: Architecture::Hopper,
            compute_capability: (9, 0),
            memory: Bytes::from_mib(81559),
            addressing_mode: Told::HasNone,
            numa_node: None,
            pcie_root: None,
            vgpu_guest: false,
            facts: BoardFacts::default(),
            mig: None,
        }
    }

    #[test]
    fn a_panic_is_an_error_of_that_reading_and_of_that_gpu_only() {
        let reader = Arc::new(Reader::default());
        let began = Instant::now();
        let mut broken = Inventory::default();
        let panics = |index| if index == 1 { panic!("a defect, staged") } else { Ok(gpu(index)) };
        reader.read_all(&mut broken, 3, panics).unwrap();
        assert_eq!(broken.gpus.iter().map(|gpu| gpu.minor).collect::<Vec<_>>(), [0, 2]);
        assert_eq!(broken.unreadable.len(), 1);
        assert!(broken.unreadable[0].error.contains("GPU 1 could not be read: an internal error"));
        assert!(began.elapsed() < BUDGET, "a panic is not waited for");

        let mut next = Inventory::default();
        reader.read_all(&mut next, 3, |index| Ok(gpu(index))).unwrap();
        assert_eq!(next.gpus.len(), 3);
        assert_eq!(next.unreadable, []);
    }
}
