//! A stand-in for `nvidia-smi`: what it lists and how it ends, over whatever
//! `libnvidia-ml.so.1` the process finds, as the real one does.

mod library;
mod table;

use std::process::ExitCode;

use library::{Failure, Library};

const USAGE: &str = "usage: nvidia-smi [-L | --list-gpus | --version | -h | --help]";
/// Exit status of a wrong argument.
const WRONG_ARGUMENT: u8 = 2;
/// Exit status without devices: `NVML_ERROR_NOT_FOUND`.
const NO_DEVICES: u8 = 6;

/// Prints what the caller asked for. A closed pipe is the reader's choice.
fn say(text: &str) {
    use std::io::Write;
    let _ = std::io::stdout().write_all(text.as_bytes());
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let show: fn(&Library) -> Result<String, Failure> =
        match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
            [] => table::table,
            ["-L" | "--list-gpus"] => list,
            ["--version"] => version,
            ["-h" | "--help"] => {
                say(&format!("{USAGE}\n"));
                return ExitCode::SUCCESS;
            }
            _ => {
                say(&format!("Invalid combination of input arguments. {USAGE}\n"));
                return ExitCode::from(WRONG_ARGUMENT);
            }
        };
    match Library::open().and_then(|library| show(&library)) {
        Ok(text) if text.is_empty() => {
            say("No devices were found\n");
            ExitCode::from(NO_DEVICES)
        }
        Ok(text) => {
            say(&text);
            ExitCode::SUCCESS
        }
        Err(failure) => {
            say(&format!("{failure}\n"));
            ExitCode::from(failure.status())
        }
    }
}

/// `-L`: a line for each GPU and MIG device.
fn list(library: &Library) -> Result<String, Failure> {
    let mut lines = Vec::new();
    for (index, gpu) in library.gpus()?.iter().enumerate() {
        lines.push(format!("GPU {index}: {} (UUID: {})\n", gpu.name, gpu.uuid));
        lines.extend(gpu.mig_devices.iter().enumerate().map(|(index, mig)| {
            format!("  MIG {:<11} Device {index:>2}: (UUID: {})\n", mig.profile, mig.uuid)
        }));
    }
    Ok(lines.concat())
}

/// `--version`.
fn version(library: &Library) -> Result<String, Failure> {
    let driver = library.driver_version()?;
    Ok(format!(
        "NVIDIA-SMI version  : {driver}\nNVML version        : {}\nDRIVER version      : {driver}\nCUDA Version        : {}\n",
        library.nvml_version()?,
        library.cuda_version()?
    ))
}
