//! The oracle is the C library's own `ldconfig`.

use std::process::Command;

use super::*;

/// What `ldconfig` reads in a cache: name, kind and path, a line each.
fn listed(file: &[u8]) -> Option<Vec<String>> {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("cache");
    std::fs::write(&path, file).expect("a file");
    let output = match Command::new("/sbin/ldconfig").arg("-p").arg("-C").arg(&path).output() {
        Ok(output) => output,
        Err(error) => {
            eprintln!("skipped: there is no /sbin/ldconfig ({error})");
            return None;
        }
    };
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).expect("text");
    Some(text.lines().filter(|line| line.contains(" => ")).map(|line| line.trim().to_owned()).collect())
}

/// This machine's own cache, or one that `ldconfig` makes of its libraries.
fn real() -> Option<Vec<u8>> {
    std::fs::read("/etc/ld.so.cache")
        .inspect_err(|error| eprintln!("skipped: there is no /etc/ld.so.cache ({error})"))
        .ok()
}

fn library(path: &str) -> Library {
    Library::at(path).expect("a path")
}

#[test]
fn a_cache_is_written_as_it_was_read() {
    let Some(file) = real() else { return };
    let cache = Cache::decode(&file).expect("a cache");
    assert!(cache.libraries.len() > 10, "{}", cache.libraries.len());
    let again = cache.encode();
    assert_eq!(Cache::decode(&again).as_ref(), Ok(&cache));
    let (Some(before), Some(after)) = (listed(&file), listed(&again)) else { return };
    assert_eq!(after, before);
    // What ldconfig sorted is sorted here too.
    let mut sorted = cache.clone();
    sorted.add(std::iter::empty());
    assert_eq!(sorted, cache);
}

#[test]
fn added_libraries_are_found_beside_all_others() {
    let Some(file) = real() else { return };
    let mut cache = Cache::decode(&file).expect("a cache");
    let paths = ["/opt/driver/libcuda.so.1", "/opt/driver/libnvidia-tls.so.580.95.05"];
    cache.add(paths.iter().map(|path| library(path)));
    let file_after = cache.encode();
    let (Some(before), Some(after)) = (listed(&file), listed(&file_after)) else { return };
    assert_eq!(after.len(), before.len() + paths.len());
    for path in paths {
        let line = after.iter().find(|line| line.ends_with(path)).expect("the library");
        assert!(line.contains("(libc6,x86-64)") || line.contains("(libc6,AArch64)"), "{line}");
    }
    assert!(before.iter().all(|line| after.contains(line)));
}

#[test]
fn a_library_of_the_same_name_gives_way() {
    let mut cache = Cache::default();
    cache.add([library("/usr/lib/libcuda.so.1"), library("/usr/lib/libz.so.1")].into_iter());
    cache.libraries.push(Library { flags: 3, ..library("/usr/lib32/libcuda.so.1") });
    cache.add([library("/opt/libcuda.so.1")].into_iter());
    let paths: Vec<_> =
        cache.libraries.iter().map(|library| String::from_utf8_lossy(&library.path)).collect();
    assert_eq!(paths, ["/usr/lib/libz.so.1", "/usr/lib32/libcuda.so.1", "/opt/libcuda.so.1"]);
}

#[test]
fn a_fresh_cache_is_one() {
    let mut cache = Cache::default();
    cache.add([library("/usr/lib64/libcuda.so.1"), library("/usr/lib64/libnvidia-ml.so.1")].into_iter());
    let Some(lines) = listed(&cache.encode()) else { return };
    assert_eq!(lines.len(), 2, "{lines:?}");
    assert!(lines[0].ends_with("/usr/lib64/libnvidia-ml.so.1"), "{lines:?}");
}

#[test]
fn folders_of_hwcaps_stay() {
    let better = Library { hwcap: IS_INDEX | 1, ..library("/usr/lib/glibc-hwcaps/x86-64-v3/libz.so.1") };
    let cache = Cache {
        libraries: vec![better, library("/usr/lib/libz.so.1")],
        hwcaps: vec![b"x86-64-v2".to_vec(), b"x86-64-v3".to_vec()],
    };
    let mut read = Cache::decode(&cache.encode()).expect("a cache");
    assert_eq!(read, cache);
    read.add([library("/opt/libcuda.so.1")].into_iter());
    let Some(lines) = listed(&read.encode()) else { return };
    assert!(lines[0].contains("hwcap: \"x86-64-v3\""), "{lines:?}");
    assert!(lines[1].ends_with("/usr/lib/libz.so.1") && lines[2].ends_with("/opt/libcuda.so.1"), "{lines:?}");
}

#[test]
fn an_image_before_glibc_2_32_has_a_former_table_in_front() {
    let mut cache = Cache::default();
    cache.add([library("/usr/lib/libz.so.1")].into_iter());
    for count in 0..4_u32 {
        let mut file = FORMER_MAGIC.to_vec();
        file.push(0);
        file.extend(count.to_le_bytes());
        file.resize(file.len() + count as usize * FORMER_ENTRY, 7);
        file.resize(file.len().next_multiple_of(8), 0);
        file.extend(cache.encode());
        assert_eq!(Cache::decode(&file).as_ref(), Ok(&cache), "{count}");
    }
}

#[test]
fn names_are_in_the_order_of_the_loaders_search() {
    let ascending = ["lib", "liba.so", "libb.so.1", "libb.so.2", "libb.so.10", "libb1.so"];
    for pair in ascending.windows(2) {
        assert_eq!(compare(pair[0].as_bytes(), pair[1].as_bytes()), Ordering::Less, "{pair:?}");
        assert_eq!(compare(pair[1].as_bytes(), pair[0].as_bytes()), Ordering::Greater, "{pair:?}");
    }
    assert_eq!(compare(b"lib01.so", b"lib1.so"), Ordering::Equal);
}

#[test]
fn one_string_named_a_million_times_is_no_cache() {
    let path = format!("/usr/lib/{}", "x".repeat(4_000));
    let cache = Cache { libraries: vec![library(&path); 100_000], hwcaps: Vec::new() };
    let file = cache.encode();
    println!("note: {} bytes would become {}", file.len(), 2 * 100_000 * path.len());
    assert_eq!(Cache::decode(&file), Err(CacheError::Broken));
}

#[test]
fn no_byte_of_a_cache_is_trusted() {
    assert_eq!(Cache::decode(b""), Err(CacheError::Unknown));
    assert_eq!(Cache::decode(b"\x7fELF"), Err(CacheError::Unknown));
    let cache = Cache {
        libraries: vec![
            Library { hwcap: IS_INDEX, ..library("/usr/lib/glibc-hwcaps/x86-64-v3/libz.so.1") },
            library("/usr/lib/libz.so.1"),
        ],
        hwcaps: vec![b"x86-64-v3".to_vec()],
    };
    let good = cache.encode();
    for length in 0..good.len() {
        // Whatever is left of it is an error or a cache, and never a panic.
        let _ = Cache::decode(&good[..length]);
    }
    assert_eq!(Cache::decode(&good[..HEADER + 8]), Err(CacheError::Broken));
    for at in 0..good.len() {
        for value in [0, 1, 0x7f, 0x80, 0xff] {
            let mut bad = good.clone();
            bad[at] = value;
            if let Ok(cache) = Cache::decode(&bad) {
                assert!(Cache::decode(&cache.encode()).is_ok());
            }
        }
    }
}
