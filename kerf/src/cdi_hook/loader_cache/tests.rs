//! The oracle is the C library's own `ldconfig`.

mod fuzz;

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

/// All that a cache says of a library.
type Row = (String, String, u32, u32, u64);

fn rows(cache: &Cache) -> Vec<Row> {
    let text = |offset| String::from_utf8_lossy(string(&cache.text, offset)).into_owned();
    let row =
        |entry: &Entry| (text(entry.name), text(entry.path), entry.flags, entry.os_version, entry.hwcap);
    cache.entries.iter().map(row).collect()
}

fn paths(cache: &Cache) -> Vec<String> {
    rows(cache).into_iter().map(|(_, path, ..)| path).collect()
}

fn hwcaps(cache: &Cache) -> Vec<String> {
    let text = |offset: &u32| String::from_utf8_lossy(string(&cache.text, *offset)).into_owned();
    cache.hwcaps.iter().map(text).collect()
}

/// Whether two caches say the same.
fn assert_same(one: &Cache, other: &Cache) {
    assert_eq!((rows(one), hwcaps(one)), (rows(other), hwcaps(other)));
}

/// A cache of libraries as they come.
fn cache(libraries: &[&str]) -> Cache {
    let mut cache = Cache::default();
    for path in libraries {
        let name = path.rsplit('/').next().unwrap_or_default().as_bytes();
        let (name, path) = (cache.put(name), cache.put(path.as_bytes()));
        cache.entries.push(Entry { flags: FLAGS, name, path, os_version: 0, hwcap: 0 });
    }
    cache
}

/// A cache with a library for better processors and the plain one.
fn with_hwcaps() -> Cache {
    let mut cache = cache(&["/usr/lib/glibc-hwcaps/x86-64-v3/libz.so.1", "/usr/lib/libz.so.1"]);
    cache.hwcaps = vec![cache.put(b"x86-64-v2"), cache.put(b"x86-64-v3")];
    cache.entries[0].hwcap = IS_INDEX | 1;
    cache
}

#[test]
fn a_cache_is_written_as_it_was_read() {
    let Some(file) = real() else { return };
    let cache = Cache::decode(&file).expect("a cache");
    assert!(cache.entries.len() > 10, "{}", cache.entries.len());
    let again = cache.encode();
    assert_same(&Cache::decode(&again).expect("a cache"), &cache);
    let (Some(before), Some(after)) = (listed(&file), listed(&again)) else { return };
    assert_eq!(after, before);
    // What ldconfig sorted is in the order that is searched here.
    let name = |entry: &Entry| string(&cache.text, entry.name);
    for pair in cache.entries.windows(2) {
        assert_ne!(compare(name(&pair[0]), name(&pair[1])), Ordering::Less, "{pair:?}");
    }
}

#[test]
fn added_libraries_are_found_beside_all_others() {
    let Some(file) = real() else { return };
    let mut cache = Cache::decode(&file).expect("a cache");
    let paths = ["/opt/driver/libcuda.so.1", "/opt/driver/libnvidia-tls.so.580.95.05"];
    cache.add(paths.into_iter());
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
    let mut cache = cache(&["/usr/lib/libz.so.1", "/usr/lib/libcuda.so.1", "/usr/lib32/libcuda.so.1"]);
    cache.entries[2].flags = 3;
    cache.add(["/opt/libcuda.so.1"].into_iter());
    assert_eq!(paths(&cache), ["/usr/lib/libz.so.1", "/usr/lib32/libcuda.so.1", "/opt/libcuda.so.1"]);
}

#[test]
fn libraries_are_added_where_the_search_looks() {
    let mut cache = cache(&["/l/libm.so", "/l/libk.so", "/l/libd.so"]);
    cache.add(
        ["/d/libe.so", "/d/liba.so", "/d/libz.so", "/d/libl.so.2", "/d/libl.so.10", "/d/libc.so"].into_iter(),
    );
    let expected = [
        "/d/libz.so",
        "/l/libm.so",
        "/d/libl.so.10",
        "/d/libl.so.2",
        "/l/libk.so",
        "/d/libe.so",
        "/l/libd.so",
        "/d/libc.so",
        "/d/liba.so",
    ];
    assert_eq!(paths(&cache), expected);
}

#[test]
fn what_was_added_before_is_not_added_again() {
    let added = ["/usr/lib64/libcuda.so.1", "/usr/lib64/libnvidia-ml.so.1"];
    let mut first = cache(&["/usr/lib/libz.so.1"]);
    first.add(added.into_iter());
    let file = first.encode();
    let mut second = Cache::decode(&file).expect("a cache");
    second.add(added.into_iter());
    assert_eq!(second.encode(), file);
}

#[test]
fn a_fresh_cache_is_one() {
    let mut cache = Cache::decode(b"").expect("none is a cache of nothing");
    cache.add(["/usr/lib64/libcuda.so.1", "/usr/lib64/libnvidia-ml.so.1"].into_iter());
    let Some(lines) = listed(&cache.encode()) else { return };
    assert_eq!(lines.len(), 2, "{lines:?}");
    assert!(lines[0].ends_with("/usr/lib64/libnvidia-ml.so.1"), "{lines:?}");
}

#[test]
fn folders_of_hwcaps_stay() {
    let cache = with_hwcaps();
    let mut read = Cache::decode(&cache.encode()).expect("a cache");
    assert_same(&read, &cache);
    read.add(["/opt/libcuda.so.1"].into_iter());
    let Some(lines) = listed(&read.encode()) else { return };
    assert!(lines[0].contains("hwcap: \"x86-64-v3\""), "{lines:?}");
    assert!(lines[1].ends_with("/usr/lib/libz.so.1") && lines[2].ends_with("/opt/libcuda.so.1"), "{lines:?}");
}

#[test]
fn an_image_before_glibc_2_32_has_a_former_table_in_front() {
    let cache = cache(&["/usr/lib/libz.so.1"]);
    for count in 0..4_u32 {
        let mut file = FORMER_MAGIC.to_vec();
        file.push(0);
        file.extend(count.to_le_bytes());
        file.resize(file.len() + count as usize * FORMER_ENTRY, 7);
        file.resize(file.len().next_multiple_of(8), 0);
        file.extend(cache.encode());
        assert_same(&Cache::decode(&file).expect("a cache"), &cache);
    }
}

#[test]
fn ldconfig_writes_both_tables_where_they_are_looked_for() {
    let folder = tempfile::tempdir().expect("a folder");
    let made = |format: &str| {
        let path = folder.path().join(format);
        let output = Command::new("/sbin/ldconfig").args(["-X", "-c", format, "-C"]).arg(&path).output();
        match output {
            Ok(output) if output.status.success() => std::fs::read(path).ok(),
            other => {
                eprintln!("skipped: /sbin/ldconfig does not write the format {format}: {other:?}");
                None
            }
        }
    };
    let (Some(both), Some(new)) = (made("compat"), made("new")) else { return };
    assert!(both.starts_with(FORMER_MAGIC) && new.starts_with(MAGIC));
    let both = Cache::decode(&both).expect("a cache");
    assert!(!both.entries.is_empty());
    assert_same(&both, &Cache::decode(&new).expect("a cache"));
    let Some(former) = made("old") else { return };
    assert_eq!(Cache::decode(&former).err(), Some(CacheError::Unknown));
}

#[test]
fn one_string_named_a_million_times_is_no_cache() {
    let mut cache = cache(&[&format!("/usr/lib/{}", "x".repeat(4_000))]);
    cache.entries = vec![cache.entries[0]; 100_000];
    assert_eq!(Cache::decode(&cache.encode()).err(), Some(CacheError::Broken));
}

#[test]
fn no_byte_of_a_cache_is_trusted() {
    assert_eq!(Cache::decode(b"\x7fELF").err(), Some(CacheError::Unknown));
    let good = with_hwcaps().encode();
    for length in 1..good.len() {
        // Whatever is left of it is an error or a cache, and never a panic.
        let _ = Cache::decode(&good[..length]);
    }
    assert_eq!(Cache::decode(&good[..HEADER + 8]).err(), Some(CacheError::Broken));
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

#[test]
fn the_time_of_a_merge_is_not_entries_times_libraries() {
    let took = |libraries: usize| {
        let added: Vec<String> =
            (1_000..).take(libraries).map(|number| format!("/d/libnvidia-{number}.so.1")).collect();
        let mut cache = cache(&["/usr/lib/libnvidia-none.so.1"]);
        cache.entries = vec![cache.entries[0]; 100_000];
        let from = std::time::Instant::now();
        cache.add(added.iter().map(String::as_str));
        assert_eq!(cache.entries.len(), 100_000 + libraries);
        from.elapsed()
    };
    let (few, many) = (took(2), took(2_000));
    // A thousand times as many. The rest is what a busy machine does.
    assert!(many < few * 4 + std::time::Duration::from_millis(500), "{few:?}, then {many:?}");
}
