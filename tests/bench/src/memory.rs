//! A process's memory, from `/proc/<pid>/smaps`.

use anyhow::{Context as _, Result};

/// Bytes.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    /// Everything that is resident.
    pub(crate) resident: u64,
    /// Of it, what no file backs.
    pub(crate) anonymous: u64,
    /// Of it, what lies in mappings of the driver's library.
    pub(crate) library: u64,
}

pub(crate) fn of(pid: u32) -> Result<Memory> {
    let path = format!("/proc/{pid}/smaps");
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    let mut memory = Memory::default();
    let mut in_library = false;
    for line in text.lines() {
        let mut fields = line.split_whitespace();
        let (Some(key), Some(value)) = (fields.next(), fields.next()) else { continue };
        let Some(key) = key.strip_suffix(':') else {
            in_library = line.contains("libnvidia-ml");
            continue;
        };
        let bytes = value.parse::<u64>().unwrap_or(0) * 1024;
        match key {
            "Rss" => {
                memory.resident += bytes;
                memory.library += if in_library { bytes } else { 0 };
            }
            "Anonymous" => memory.anonymous += bytes,
            _ => {}
        }
    }
    Ok(memory)
}
