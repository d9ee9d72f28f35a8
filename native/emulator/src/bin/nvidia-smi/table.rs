//! The table that `nvidia-smi` prints without arguments, compact.

use crate::library::{Failure, Gpu, Library};

const RULE: &str =
    "+-----------------------------------------+------------------------+----------------------+\n";

/// The table; empty where there are no GPUs.
pub(crate) fn table(library: &Library) -> Result<String, Failure> {
    let gpus = library.gpus()?;
    if gpus.is_empty() {
        return Ok(String::new());
    }
    let (driver, cuda) = (library.driver_version()?, library.cuda_version()?);
    let mut text = wide_rule();
    text += &wide(&format!("NVIDIA-SMI {driver:<20} Driver Version: {driver:<20} CUDA Version: {cuda}"));
    text += RULE;
    text += &row("GPU  Name", "Bus-Id", "MIG M.");
    text += &row("Temp    Pwr:Usage/Cap", "Memory-Usage", "Compute M.");
    text += &RULE.replace('-', "=");
    for (index, gpu) in gpus.iter().enumerate() {
        text += &gpu_rows(index, gpu);
        text += RULE;
    }
    text += "\n";
    text += &mig_part(&gpus);
    text += &process_part(&gpus);
    Ok(text)
}

fn row(left: &str, middle: &str, right: &str) -> String {
    format!("| {left:<39.39} | {middle:>22.22} | {right:>20.20} |\n")
}

/// A line over all columns.
fn wide(text: &str) -> String {
    format!("| {text:<87} |\n")
}

fn wide_rule() -> String {
    format!("+{}+\n", "-".repeat(89))
}

fn gpu_rows(index: usize, gpu: &Gpu) -> String {
    let celsius = gpu.celsius.map_or("N/A".to_owned(), |celsius| format!("{celsius}C"));
    let watts = gpu.watts.map_or("N/A".to_owned(), |(usage, limit)| format!("{usage}W / {limit}W"));
    let mig = match gpu.mig {
        None => "N/A",
        Some(true) => "Enabled",
        Some(false) => "Disabled",
    };
    row(&format!("{index:>3}  {}", gpu.name), &gpu.bus, mig)
        + &row(
            &format!("{celsius:<6}  {watts}"),
            &format!("{}MiB / {}MiB", gpu.used_mib, gpu.memory_mib),
            "Default",
        )
}

fn mig_part(gpus: &[Gpu]) -> String {
    if gpus.iter().all(|gpu| gpu.mig_devices.is_empty()) {
        return String::new();
    }
    let mut text = wide_rule() + &wide("MIG devices:");
    text += &wide("GPU  GI ID  CI ID  Dev  Profile               Memory");
    for (index, gpu) in gpus.iter().enumerate() {
        for (device, mig) in gpu.mig_devices.iter().enumerate() {
            text += &wide(&format!(
                "{index:>3}  {:>5}  {:>5}  {device:>3}  {:<16}{:>9}MiB",
                mig.instance, mig.compute, mig.profile, mig.memory_mib
            ));
        }
    }
    text + &wide_rule() + "\n"
}

fn process_part(gpus: &[Gpu]) -> String {
    let id = |id: u32| if id == u32::MAX { "N/A".to_owned() } else { id.to_string() };
    let mut text = wide_rule() + &wide("Processes:");
    text += &wide("GPU  GI ID  CI ID        PID   Type       Memory");
    for (index, gpu) in gpus.iter().enumerate() {
        for process in &gpu.processes {
            text += &wide(&format!(
                "{index:>3}  {:>5}  {:>5}  {:>9}   {:<4}  {:>8}MiB",
                id(process.gpuInstanceId),
                id(process.computeInstanceId),
                process.pid,
                "C",
                process.usedGpuMemory >> 20
            ));
        }
    }
    if gpus.iter().all(|gpu| gpu.processes.is_empty()) {
        text += &wide("No running processes found");
    }
    text + &wide_rule()
}
