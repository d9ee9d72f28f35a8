//! An emulated machine for one test. The emulated library finds the machine it
//! is installed on by its own path, so tests with machines of their own run
//! side by side.

use std::path::Path;
use std::time::{Duration, Instant};

use kerf_dra_driver::hardware::Hardware;
use kerf_dra_driver::names::PciAddress;
use kerf_emulator::install::{DriverSources, Plan, Slot, install};
use kerf_emulator::model::built_in;
use kerf_gpu::{NvmlHardware, Roots};

/// A machine, gone when it is dropped.
pub(crate) struct Machine {
    root: tempfile::TempDir,
}

impl Machine {
    pub(crate) fn roots(&self) -> Roots {
        Roots {
            driver: self.root.path().join("driver"),
            host_driver: "/host/driver".into(),
            dev: self.root.path().join("dev"),
            host_dev: "/host/dev".into(),
            proc: self.root.path().join("proc"),
            sys: self.root.path().join("sys"),
        }
    }

    pub(crate) fn hardware(&self) -> NvmlHardware {
        NvmlHardware::new(self.roots())
    }

    /// The same machine from the side of its control command.
    pub(crate) fn control(&self) -> kerf_emulator::machine::Machine {
        kerf_emulator::machine::Machine::host(self.root.path()).expect("the machine of this test")
    }

    /// The addresses of its GPUs, in order.
    pub(crate) fn addresses(&self) -> Vec<PciAddress> {
        let inventory = self.hardware().inventory().expect("an inventory");
        inventory.gpus.iter().map(|gpu| gpu.pci).collect()
    }
}

/// Runs a test on a machine with these GPUs.
pub(crate) fn on_machine(gpus: &[&str], test: impl FnOnce(&Machine)) {
    let root = tempfile::tempdir().expect("a folder");
    make(root.path(), gpus);
    test(&Machine { root });
}

fn make(root: &Path, gpus: &[&str]) {
    let program = std::env::current_exe().expect("this program");
    let library = program.with_file_name("libkerf_emulator.so");
    assert!(library.is_file(), "{} is built with this test", library.display());
    let gpus = gpus.iter().map(|gpu| gpu.parse::<Slot>().expect("a GPU")).collect();
    let plan = Plan {
        gpus,
        numa_nodes: 2,
        seed: "kerf-gpu".to_owned(),
        driver_version: "580.95.05".to_owned(),
        cuda_version: 13_000,
        models: built_in().expect("the built-in models"),
    };
    // The program to copy as nvidia-smi is not run here.
    let sources = DriverSources { library, smi: program };
    install(root, &plan, &sources).expect("an emulated machine");
}

/// Waits until something is there, and tells how long that took.
pub(crate) fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = look() {
            println!("note: {what} after {:?}", start.elapsed());
            return found;
        }
        assert!(start.elapsed() < Duration::from_mins(1), "{what}: not within a minute");
        std::thread::sleep(Duration::from_millis(5));
    }
}
