//! The order in which glibc's loader looks for a name: `_dl_cache_libcmp` of
//! its `elf/dl-cache.c`, down to what C makes of it.

use std::cmp::Ordering;
use std::ffi::c_char;

/// Compares two names. Runs of digits count as numbers and come after all else.
///
/// A number that is too large for an `int` wraps, and so does the difference of
/// two: this is no total order, so nothing may be given to a sort with it (the
/// standard library's may panic).
pub(super) fn compare(one: &[u8], other: &[u8]) -> Ordering {
    let (mut one, mut other) = (one, other);
    loop {
        // The end of a name is the NUL behind it.
        let (a, b) = (first(one), first(other));
        match (a.is_ascii_digit(), b.is_ascii_digit()) {
            _ if a == 0 => return character(a).cmp(&character(b)),
            (true, true) => {
                let (value, rest) = number(one);
                let (other_value, other_rest) = number(other);
                if value != other_value {
                    return value.wrapping_sub(other_value).cmp(&0);
                }
                (one, other) = (rest, other_rest);
            }
            (true, false) => return Ordering::Greater,
            (false, true) => return Ordering::Less,
            (false, false) if a != b => return character(a).cmp(&character(b)),
            (false, false) => {
                one = one.get(1..).unwrap_or_default();
                other = other.get(1..).unwrap_or_default();
            }
        }
    }
}

fn first(text: &[u8]) -> u8 {
    text.first().copied().unwrap_or_default()
}

/// A byte as C sees it: below zero from 128 on where `char` is signed (x86-64),
/// and not where it is unsigned (aarch64).
fn character(byte: u8) -> c_char {
    c_char::from_ne_bytes([byte])
}

fn number(text: &[u8]) -> (i32, &[u8]) {
    let length = text.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let (digits, rest) = text.split_at(length);
    let value = digits
        .iter()
        .fold(0_i32, |value, digit| value.wrapping_mul(10).wrapping_add(i32::from(digit - b'0')));
    (value, rest)
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt;
    use std::path::Path;
    use std::process::Command;

    use super::*;

    const PAIRS: &[(&[u8], &[u8], Ordering)] = &[
        (b"lib", b"liba.so", Ordering::Less),
        (b"liba.so", b"libb.so.1", Ordering::Less),
        (b"libb.so.1", b"libb.so.2", Ordering::Less),
        (b"libb.so.2", b"libb.so.10", Ordering::Less),
        (b"libb.so.10", b"libb1.so", Ordering::Less),
        (b"libb.so", b"libb.so.1", Ordering::Less),
        (b"libh\xc3\xa9.so", b"libh1.so", Ordering::Less),
        (b"lib01.so", b"lib1.so", Ordering::Equal),
        (b"libx20240101.so", b"libx20231231.so", Ordering::Greater),
        // 2^32 + 1 wraps to 1, 2^31 to the least number; the least less 1 is
        // the greatest.
        (b"libw4294967297.so", b"libw1.so", Ordering::Equal),
        (b"libw4294967297.so", b"libw2.so", Ordering::Less),
        (b"libw2147483648.so", b"libw1.so", Ordering::Greater),
        (b"libw2147483647.so", b"libw2147483648.so", Ordering::Less),
        (b"libw99999999999999999999.so", b"libw99999999999999999998.so", Ordering::Greater),
    ];

    /// Where `char` is signed; elsewhere it is the other way round.
    const SIGNED: &[(&[u8], &[u8], Ordering)] = &[
        (b"lib\xc3\xa9.so", b"libe.so", Ordering::Less),
        (b"lib\xff.so", b"lib\x7f.so", Ordering::Less),
        (b"libh.so\xc3\xa9", b"libh.so", Ordering::Less),
    ];

    fn pairs() -> impl Iterator<Item = (&'static [u8], &'static [u8], Ordering)> {
        let turned = |order: Ordering| if c_char::MIN == 0 { order.reverse() } else { order };
        let signed = SIGNED.iter().map(move |(one, other, order)| (*one, *other, turned(*order)));
        PAIRS.iter().copied().chain(signed)
    }

    #[test]
    fn names_are_in_the_order_of_the_loaders_search() {
        for (one, other, order) in pairs() {
            let names = (String::from_utf8_lossy(one), String::from_utf8_lossy(other));
            assert_eq!(compare(one, other), order, "{names:?}");
            assert_eq!(compare(other, one), order.reverse(), "{names:?}");
        }
    }

    /// A library without anything in it: a header, a segment, no SONAME.
    fn elf() -> Vec<u8> {
        let machine: u16 = if cfg!(target_arch = "aarch64") { 183 } else { 62 };
        let mut file = b"\x7fELF\x02\x01\x01".to_vec();
        file.resize(16, 0);
        file.extend([3_u16.to_le_bytes(), machine.to_le_bytes()].concat());
        file.extend(1_u32.to_le_bytes());
        file.extend([0_u64, 64, 0].map(u64::to_le_bytes).concat());
        file.extend(0_u32.to_le_bytes());
        file.extend([64_u16, 56, 2, 64, 0, 0].map(u16::to_le_bytes).concat());
        for (kind, from, length) in [(1_u32, 0_u64, 208_u64), (2, 176, 32)] {
            file.extend([kind.to_le_bytes(), 4_u32.to_le_bytes()].concat());
            file.extend([from, from, from, length, length, 8].map(u64::to_le_bytes).concat());
        }
        // DT_STRTAB, which lies where the dynamic section ends; DT_NULL.
        file.extend([5_u64, 200, 0, 0].map(u64::to_le_bytes).concat());
        file
    }

    #[test]
    fn ldconfig_orders_names_likewise() {
        if !Path::new("/sbin/ldconfig").exists() {
            eprintln!("skipped: there is no /sbin/ldconfig");
            return;
        }
        let mut asked = 0;
        for (one, other, order) in pairs().filter(|(_, _, order)| order.is_ne()) {
            let root = tempfile::tempdir().expect("a folder");
            let libraries = root.path().join("libraries");
            std::fs::create_dir(&libraries).expect("a folder");
            for name in [one, other] {
                std::fs::write(libraries.join(std::ffi::OsStr::from_bytes(name)), elf()).expect("a file");
            }
            let configuration = root.path().join("ld.so.conf");
            std::fs::write(&configuration, libraries.as_os_str().as_bytes()).expect("a file");
            let cache = root.path().join("cache");
            let output = Command::new("/sbin/ldconfig")
                .args(["-X", "-f"])
                .arg(&configuration)
                .arg("-C")
                .arg(&cache)
                .output()
                .expect("ldconfig");
            assert!(output.status.success(), "{output:?}");
            let listed =
                Command::new("/sbin/ldconfig").arg("-p").arg("-C").arg(&cache).output().expect("a list");
            let position = |name: &[u8]| {
                let line = [b"\t", name, b" ("].concat();
                listed.stdout.windows(line.len()).position(|window| window == line)
            };
            // A name without `.so` is no library to ldconfig.
            let (Some(first), Some(second)) = (position(one), position(other)) else { continue };
            let names = (String::from_utf8_lossy(one), String::from_utf8_lossy(other));
            // The file has the greatest first.
            assert_eq!(second.cmp(&first), order, "{names:?}");
            asked += 1;
        }
        assert!(asked > 10, "ldconfig took only {asked} pairs for libraries");
    }
}
