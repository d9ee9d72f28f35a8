//! `/etc/ld.so.cache`, the file by which glibc's loader knows libraries: read
//! from an image, added to, written again.
//!
//! The format is that of glibc's `sysdeps/generic/dl-cache.h`: entries sorted
//! for a binary search, names at offsets from the start, and since 2.33 an
//! extension with the names of `glibc-hwcaps` folders. Images before 2.32 have
//! a table of the former format in front of it, which nothing reads any more.

use std::cell::Cell;
use std::cmp::Ordering;
use std::collections::HashMap;
use std::path::Path;

const FORMER_MAGIC: &[u8] = b"ld.so-1.7.0";
const MAGIC: &[u8] = b"glibc-ld.so.cache1.1";
const HEADER: usize = 48;
const ENTRY: usize = 24;
const FORMER_HEADER: usize = 16;
const FORMER_ENTRY: usize = 12;
const LITTLE_ENDIAN: u32 = 2;

const EXTENSION_MAGIC: u32 = 0xeaa4_2174;
/// The section with the names of `glibc-hwcaps` folders.
const HWCAPS: u32 = 1;
/// The bit of an entry's hwcap that says that the rest is an index into them.
const IS_INDEX: u64 = 1 << 62;

/// What is written to an entry of a library for this machine: ELF of glibc 2,
/// and the architecture.
const FLAGS: u32 = if cfg!(target_arch = "aarch64") { 0x0a03 } else { 0x0303 };

/// Why a cache is not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum CacheError {
    /// It begins as no cache does.
    #[error("it is not a cache of glibc's loader")]
    Unknown,
    /// Something in it lies outside of it.
    #[error("it is broken")]
    Broken,
}

/// A library that a loader finds by name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Library {
    name: Vec<u8>,
    path: Vec<u8>,
    flags: u32,
    os_version: u32,
    hwcap: u64,
}

impl Library {
    /// The library under an absolute path, for this machine.
    pub(super) fn at(path: &str) -> Option<Self> {
        let name = Path::new(path).file_name()?.to_str()?;
        let (name, path) = (name.as_bytes().to_vec(), path.as_bytes().to_vec());
        Some(Self { name, path, flags: FLAGS, os_version: 0, hwcap: 0 })
    }
}

/// All that is kept of a cache.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Cache {
    libraries: Vec<Library>,
    hwcaps: Vec<Vec<u8>>,
}

impl Cache {
    /// Reads a cache, which may be hostile.
    pub(super) fn decode(file: &[u8]) -> Result<Self, CacheError> {
        let bytes = Bytes::of(current(file)?);
        let count = bytes.u32(20)? as usize;
        if count > bytes.all.len() / ENTRY {
            return Err(CacheError::Broken);
        }
        let mut cache = Self::default();
        for at in (0..count).map(|index| HEADER + index * ENTRY) {
            cache.libraries.push(Library {
                flags: bytes.u32(at)?,
                name: bytes.text(bytes.u32(at + 4)?)?,
                path: bytes.text(bytes.u32(at + 8)?)?,
                os_version: bytes.u32(at + 12)?,
                hwcap: u64::from(bytes.u32(at + 16)?) | u64::from(bytes.u32(at + 20)?) << 32,
            });
        }
        cache.hwcaps = bytes.hwcaps()?;
        let known = cache.hwcaps.len() as u64;
        let wrong = |hwcap: u64| hwcap & IS_INDEX != 0 && (hwcap & 0xffff_ffff) >= known;
        if cache.libraries.iter().any(|library| wrong(library.hwcap)) {
            return Err(CacheError::Broken);
        }
        Ok(cache)
    }

    /// Adds libraries. Those of the same name and machine go: the driver that
    /// runs is the only one that works.
    pub(super) fn add(&mut self, added: impl Iterator<Item = Library>) {
        let added: Vec<Library> = added.collect();
        self.libraries.retain(|old| {
            !added.iter().any(|library| library.name == old.name && library.flags == old.flags)
        });
        self.libraries.extend(added);
        // Stable: libraries of one name stay in the order of their hwcaps.
        self.libraries.sort_by(|one, other| compare(&other.name, &one.name));
    }

    /// The file.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut strings = Strings { from: HEADER + self.libraries.len() * ENTRY, ..Strings::default() };
        let mut entries = Vec::new();
        for library in &self.libraries {
            let (name, path) = (strings.offset(&library.name), strings.offset(&library.path));
            for word in [library.flags, name, path, library.os_version] {
                entries.extend(word.to_le_bytes());
            }
            entries.extend(library.hwcap.to_le_bytes());
        }
        let hwcaps: Vec<u32> = self.hwcaps.iter().map(|name| strings.offset(name)).collect();
        let length = strings.bytes.len();
        strings.bytes.resize((strings.from + length).next_multiple_of(4) - strings.from, 0);
        let extension = if hwcaps.is_empty() { 0 } else { strings.from + strings.bytes.len() };

        let mut file = MAGIC.to_vec();
        for word in [word(self.libraries.len()), word(length), LITTLE_ENDIAN, word(extension), 0, 0, 0] {
            file.extend(word.to_le_bytes());
        }
        file.extend(entries);
        file.extend(strings.bytes);
        if extension > 0 {
            let section = [HWCAPS, 0, word(extension + 24), word(hwcaps.len() * 4)];
            for word in [EXTENSION_MAGIC, 1].into_iter().chain(section).chain(hwcaps) {
                file.extend(word.to_le_bytes());
            }
        }
        file
    }
}

/// The strings of a file, each once.
#[derive(Default)]
struct Strings {
    /// Where they begin.
    from: usize,
    bytes: Vec<u8>,
    known: HashMap<Vec<u8>, u32>,
}

impl Strings {
    fn offset(&mut self, text: &[u8]) -> u32 {
        if let Some(offset) = self.known.get(text) {
            return *offset;
        }
        let offset = word(self.from + self.bytes.len());
        self.bytes.extend(text);
        self.bytes.push(0);
        self.known.insert(text.to_vec(), offset);
        offset
    }
}

/// A length or offset. What is read is bounded far below.
fn word(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}

/// The part of a file in the current format.
fn current(file: &[u8]) -> Result<&[u8], CacheError> {
    let mut file = file;
    if file.starts_with(FORMER_MAGIC) {
        let count = Bytes::of(file).u32(12)? as usize;
        let end = count.checked_mul(FORMER_ENTRY).and_then(|length| length.checked_add(FORMER_HEADER));
        let start = end.ok_or(CacheError::Broken)?.next_multiple_of(8);
        file = file.get(start..).ok_or(CacheError::Broken)?;
    }
    if file.starts_with(MAGIC) { Ok(file) } else { Err(CacheError::Unknown) }
}

/// Bytes in which nothing is where it says.
struct Bytes<'a> {
    all: &'a [u8],
    /// How much text may still be read: in a real cache hardly any two entries
    /// share a string, while a hostile one could name the same a million times.
    budget: Cell<usize>,
}

impl<'a> Bytes<'a> {
    fn of(all: &'a [u8]) -> Self {
        Self { all, budget: Cell::new(4 * all.len()) }
    }

    fn u32(&self, at: usize) -> Result<u32, CacheError> {
        let bytes = self.all.get(at..).and_then(|rest| rest.first_chunk()).ok_or(CacheError::Broken)?;
        Ok(u32::from_le_bytes(*bytes))
    }

    fn text(&self, at: u32) -> Result<Vec<u8>, CacheError> {
        let rest = self.all.get(at as usize..).ok_or(CacheError::Broken)?;
        // No path is longer.
        let rest = rest.get(..4096).unwrap_or(rest);
        let length = rest.iter().position(|byte| *byte == 0).ok_or(CacheError::Broken)?;
        self.budget.set(self.budget.get().checked_sub(length).ok_or(CacheError::Broken)?);
        Ok(rest.get(..length).unwrap_or_default().to_vec())
    }

    fn hwcaps(&self) -> Result<Vec<Vec<u8>>, CacheError> {
        let start = self.u32(32)? as usize;
        if start == 0 {
            return Ok(Vec::new());
        }
        if self.u32(start)? != EXTENSION_MAGIC {
            return Err(CacheError::Broken);
        }
        // A section is 16 bytes.
        let sections = (self.u32(start + 4)? as usize).min(self.all.len() / 16);
        for section in (0..sections).map(|index| start + 8 + index * 16) {
            if self.u32(section)? == HWCAPS {
                let (from, size) = (self.u32(section + 8)? as usize, self.u32(section + 12)? as usize);
                let names = size.min(self.all.len()) / 4;
                return (0..names).map(|index| self.text(self.u32(from + index * 4)?)).collect();
            }
        }
        Ok(Vec::new())
    }
}

/// The order of the loader's search, `_dl_cache_libcmp`: runs of digits count
/// as numbers, and come after everything else.
fn compare(one: &[u8], other: &[u8]) -> Ordering {
    let (mut one, mut other) = (one, other);
    loop {
        match (one.first(), other.first()) {
            (None, None) => return Ordering::Equal,
            (None, Some(_)) => return Ordering::Less,
            (Some(_), None) => return Ordering::Greater,
            (Some(a), Some(b)) if a.is_ascii_digit() && b.is_ascii_digit() => {
                let (value, rest) = number(one);
                let (other_value, other_rest) = number(other);
                if value != other_value {
                    return value.cmp(&other_value);
                }
                (one, other) = (rest, other_rest);
            }
            (Some(a), Some(_)) if a.is_ascii_digit() => return Ordering::Greater,
            (Some(_), Some(b)) if b.is_ascii_digit() => return Ordering::Less,
            (Some(a), Some(b)) if a != b => return a.cmp(b),
            _ => {
                one = one.get(1..).unwrap_or_default();
                other = other.get(1..).unwrap_or_default();
            }
        }
    }
}

fn number(text: &[u8]) -> (u64, &[u8]) {
    let length = text.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let (digits, rest) = text.split_at(length);
    let value = digits
        .iter()
        .fold(0_u64, |value, digit| value.saturating_mul(10).saturating_add(u64::from(digit - b'0')));
    (value, rest)
}

#[cfg(test)]
mod tests;
