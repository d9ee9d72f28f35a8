//! `/etc/ld.so.cache`, the file by which glibc's loader knows libraries: read
//! from an image, added to, written again.
//!
//! The format is that of glibc's `sysdeps/generic/dl-cache.h`: entries sorted
//! for a binary search, names at offsets from the start, and since 2.33 an
//! extension with the names of `glibc-hwcaps` folders. Images before 2.32 have
//! a table of the former format in front of it, which nothing reads any more.
//!
//! The strings of a cache are kept as one piece and never copied one by one: a
//! hostile cache can name the same string in every entry, and what is made of
//! it must not be larger than it is.

mod order;

use std::cell::Cell;
use std::cmp::Ordering;
use std::collections::{HashMap, HashSet};
use std::path::Path;

use self::order::compare;

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

/// A library that a loader finds by name. What it is called lies in the text.
#[derive(Debug, Clone, Copy)]
struct Entry {
    flags: u32,
    name: u32,
    path: u32,
    os_version: u32,
    hwcap: u64,
}

impl Entry {
    /// Whether an entry that kerf makes would say the same but for its names.
    fn is_plain(&self) -> bool {
        self.flags == FLAGS && self.os_version == 0 && self.hwcap == 0
    }
}

/// All that is kept of a cache. Offsets are into `text`, where each string
/// ends with a NUL.
#[derive(Debug, Clone, Default)]
pub(super) struct Cache {
    entries: Vec<Entry>,
    text: Vec<u8>,
    hwcaps: Vec<u32>,
}

impl Cache {
    /// Reads a cache, which may be hostile. An empty file is one of nothing.
    pub(super) fn decode(file: &[u8]) -> Result<Self, CacheError> {
        if file.is_empty() {
            return Ok(Self::default());
        }
        let parts = Parts::of(file)?;
        let mut entries = Vec::with_capacity(parts.count);
        for at in (0..parts.count).map(|index| HEADER + index * ENTRY) {
            entries.push(Entry {
                flags: u32_at(parts.all, at)?,
                name: parts.string(u32_at(parts.all, at + 4)?)?,
                path: parts.string(u32_at(parts.all, at + 8)?)?,
                os_version: u32_at(parts.all, at + 12)?,
                hwcap: u64::from(u32_at(parts.all, at + 16)?) | u64::from(u32_at(parts.all, at + 20)?) << 32,
            });
        }
        let hwcaps = parts.hwcaps()?;
        let known = hwcaps.len() as u64;
        let wrong = |hwcap: u64| hwcap & IS_INDEX != 0 && (hwcap & 0xffff_ffff) >= known;
        if entries.iter().any(|entry| wrong(entry.hwcap)) {
            return Err(CacheError::Broken);
        }
        Ok(Self { entries, text: parts.text.to_vec(), hwcaps })
    }

    /// Adds the libraries under absolute paths, for this machine. Those of the
    /// same name and machine go: the driver that runs is the only one that
    /// works.
    ///
    /// The others stay in their order, which `ldconfig` gave them. Where an
    /// image has them in another, its loader does not find them, and may not
    /// find those added.
    pub(super) fn add<'a>(&mut self, paths: impl Iterator<Item = &'a str>) {
        let added: Vec<(&[u8], &[u8])> = paths
            .filter_map(|path| Some((Path::new(path).file_name()?.to_str()?.as_bytes(), path.as_bytes())))
            .collect();
        let names: HashSet<&[u8]> = added.iter().map(|(name, _)| *name).collect();
        let by_path: HashMap<&[u8], &[u8]> = added.iter().map(|(name, path)| (*path, *name)).collect();
        // What a former run added has its names in the text already.
        let mut former: HashMap<&[u8], Entry> = HashMap::new();
        let text = &self.text;
        self.entries.retain(|entry| {
            let name = string(text, entry.name);
            let goes = entry.flags == FLAGS && names.contains(name);
            if let Some((path, of)) = by_path.get_key_value(string(text, entry.path))
                && entry.is_plain()
                && *of == name
            {
                former.insert(path, *entry);
            }
            !goes
        });
        let mut places: Vec<(usize, Entry)> = Vec::with_capacity(added.len());
        for (name, path) in added {
            let entry = former.remove(path).unwrap_or_else(|| Entry {
                flags: FLAGS,
                name: self.put(name),
                path: self.put(path),
                os_version: 0,
                hwcap: 0,
            });
            let before = |other: &Entry| compare(string(&self.text, other.name), name) != Ordering::Less;
            let place = self.entries.partition_point(before);
            let among = places.partition_point(|(at, other)| *at < place || (*at == place && before(other)));
            places.insert(among, (place, entry));
        }
        let old = std::mem::take(&mut self.entries);
        self.entries.reserve_exact(old.len() + places.len());
        let mut places = places.into_iter().peekable();
        for (index, entry) in old.into_iter().enumerate() {
            while let Some((_, added)) = places.next_if(|(place, _)| *place <= index) {
                self.entries.push(added);
            }
            self.entries.push(entry);
        }
        self.entries.extend(places.map(|(_, added)| added));
    }

    fn put(&mut self, text: &[u8]) -> u32 {
        let offset = word(self.text.len());
        self.text.extend(text);
        self.text.push(0);
        offset
    }

    /// The file.
    pub(super) fn encode(&self) -> Vec<u8> {
        let from = HEADER + self.entries.len() * ENTRY;
        let end = (from + self.text.len()).next_multiple_of(4);
        let extension = if self.hwcaps.is_empty() { 0 } else { end };
        let in_file = |offset: u32| offset.saturating_add(word(from));

        let mut file = Vec::with_capacity(end + 24 + 4 * self.hwcaps.len());
        file.extend(MAGIC);
        let length = word(end - from);
        for word in [word(self.entries.len()), length, LITTLE_ENDIAN, word(extension), 0, 0, 0] {
            file.extend(word.to_le_bytes());
        }
        for entry in &self.entries {
            for word in [entry.flags, in_file(entry.name), in_file(entry.path), entry.os_version] {
                file.extend(word.to_le_bytes());
            }
            file.extend(entry.hwcap.to_le_bytes());
        }
        file.extend(&self.text);
        file.resize(end, 0);
        if extension > 0 {
            let section = [HWCAPS, 0, word(extension + 24), word(self.hwcaps.len() * 4)];
            let names = self.hwcaps.iter().map(|name| in_file(*name));
            for word in [EXTENSION_MAGIC, 1].into_iter().chain(section).chain(names) {
                file.extend(word.to_le_bytes());
            }
        }
        file
    }
}

/// A string of a text, which is known to have one there.
fn string(text: &[u8], offset: u32) -> &[u8] {
    let rest = text.get(offset as usize..).unwrap_or_default();
    rest.split(|byte| *byte == 0).next().unwrap_or_default()
}

/// A length or offset. What is read is bounded far below.
fn word(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}

fn u32_at(bytes: &[u8], at: usize) -> Result<u32, CacheError> {
    let bytes = bytes.get(at..).and_then(|rest| rest.first_chunk()).ok_or(CacheError::Broken)?;
    Ok(u32::from_le_bytes(*bytes))
}

/// Where a file's part in the current format begins.
fn current(file: &[u8]) -> Result<usize, CacheError> {
    let mut front = 0;
    if file.starts_with(FORMER_MAGIC) {
        let count = u32_at(file, 12)? as usize;
        let end = count.checked_mul(FORMER_ENTRY).and_then(|length| length.checked_add(FORMER_HEADER));
        front = end.ok_or(CacheError::Broken)?.next_multiple_of(8);
    }
    let rest = file.get(front..).ok_or(CacheError::Broken)?;
    if rest.starts_with(MAGIC) { Ok(front) } else { Err(CacheError::Unknown) }
}

/// The parts of a file in the current format, in which nothing is where it says.
struct Parts<'a> {
    all: &'a [u8],
    /// What lies in front of it. Strings are at offsets from here, while the
    /// extension's are from the start of the file.
    front: usize,
    /// How many entries there are room for, and said to be.
    count: usize,
    /// What lies between the entries and the extension.
    text: &'a [u8],
    /// How much text may still be looked at: in a real cache hardly any two
    /// entries share a string, while a hostile one could name the same a
    /// million times.
    budget: Cell<usize>,
}

impl<'a> Parts<'a> {
    fn of(file: &'a [u8]) -> Result<Self, CacheError> {
        let front = current(file)?;
        let all = file.get(front..).unwrap_or_default();
        let count = u32_at(all, 20)? as usize;
        let mut parts = Self { all, front, count, text: &[], budget: Cell::new(4 * all.len()) };
        let from = count.checked_mul(ENTRY).and_then(|length| length.checked_add(HEADER));
        let end = parts.extension()?.unwrap_or(all.len());
        parts.text = all.get(from.ok_or(CacheError::Broken)?..end).ok_or(CacheError::Broken)?;
        Ok(parts)
    }

    /// An offset from the start of the file as one from ours.
    fn file_offset(&self, at: usize) -> Result<usize, CacheError> {
        u32_at(self.all, at)
            .and_then(|offset| (offset as usize).checked_sub(self.front).ok_or(CacheError::Broken))
    }

    fn extension(&self) -> Result<Option<usize>, CacheError> {
        if u32_at(self.all, 32)? == 0 { Ok(None) } else { self.file_offset(32).map(Some) }
    }

    /// Where a string that is at an offset in the file is in the text.
    fn string(&self, at: u32) -> Result<u32, CacheError> {
        let offset = (at as usize).checked_sub(HEADER + self.count * ENTRY).ok_or(CacheError::Broken)?;
        let rest = self.text.get(offset..).ok_or(CacheError::Broken)?;
        // No path is longer.
        let rest = rest.get(..4096).unwrap_or(rest);
        let length = rest.iter().position(|byte| *byte == 0).ok_or(CacheError::Broken)?;
        self.budget.set(self.budget.get().checked_sub(length).ok_or(CacheError::Broken)?);
        Ok(word(offset))
    }

    fn hwcaps(&self) -> Result<Vec<u32>, CacheError> {
        let Some(start) = self.extension()? else { return Ok(Vec::new()) };
        if u32_at(self.all, start)? != EXTENSION_MAGIC {
            return Err(CacheError::Broken);
        }
        // A section is 16 bytes.
        let sections = (u32_at(self.all, start + 4)? as usize).min(self.all.len() / 16);
        for section in (0..sections).map(|index| start + 8 + index * 16) {
            if u32_at(self.all, section)? == HWCAPS {
                let from = self.file_offset(section + 8)?;
                let names = u32_at(self.all, section + 12)? as usize / 4;
                if from < start || names > self.all.len() / 4 {
                    return Err(CacheError::Broken);
                }
                return (0..names).map(|index| self.string(u32_at(self.all, from + index * 4)?)).collect();
            }
        }
        Ok(Vec::new())
    }
}

#[cfg(test)]
mod tests;
