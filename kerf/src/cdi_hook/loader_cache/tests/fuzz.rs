//! Files that nobody thought of.

use proptest::prelude::*;

use super::*;

/// What holds of a file, whatever it is: what is made of it is not larger than
/// it is but for what is added, and is a cache again that says the same.
fn holds(file: &[u8]) {
    let Ok(mut cache) = Cache::decode(file) else { return };
    let kept = cache.entries.capacity() * size_of::<Entry>() + cache.text.capacity() + 4 * cache.hwcaps.len();
    assert!(kept <= file.len(), "{kept} bytes are kept of {}", file.len());
    let before = paths(&cache);
    let added = ["/opt/driver/libcuda.so.1", "/opt/driver/libnvidia-ml.so.1"];
    cache.add(added.into_iter());
    let merged = cache.encode();
    assert!(merged.len() <= file.len() + 256, "{} bytes became {}", file.len(), merged.len());
    let again = Cache::decode(&merged).expect("a merged cache is one");
    assert_same(&again, &cache);
    let after = paths(&again);
    assert!(added.iter().all(|path| after.iter().any(|other| other == path)), "{after:?}");
    assert!(after.len() <= before.len() + added.len());
}

/// Files to change bytes of.
fn seeds() -> Vec<Vec<u8>> {
    let plain = cache(&["/usr/lib/libz.so.1", "/usr/lib/libm.so.6", "/usr/lib/libcuda.so.1"]).encode();
    let mut combined = FORMER_MAGIC.to_vec();
    combined.extend([0, 1, 0, 0, 0]);
    combined.resize(FORMER_HEADER + FORMER_ENTRY + 4, 0);
    combined.extend(&plain);
    let own = std::fs::read("/etc/ld.so.cache").ok();
    [plain, combined, with_hwcaps().encode()].into_iter().chain(own).collect()
}

proptest! {
    #[test]
    fn any_bytes_are_no_cache_or_one(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        holds(&bytes);
        holds(&[MAGIC, &bytes].concat());
    }

    #[test]
    fn a_cache_of_which_anything_was_changed_is_none_or_one(
        seed in any::<prop::sample::Index>(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), any::<bool>()), 1..8),
        length in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let seeds = seeds();
        let mut file = seeds[seed.index(seeds.len())].clone();
        for (at, value, in_front) in changes {
            // The header and the first entries lead everywhere.
            let end = if in_front { file.len().min(160) } else { file.len() };
            file[at.index(end)] = value;
        }
        if let Some(length) = length {
            file.truncate(length.index(file.len()));
        }
        holds(&file);
    }

    #[test]
    fn entries_of_any_offsets_are_no_cache_or_one(
        entries in prop::collection::vec((0_u32..2, 0_u32..400, 0_u32..400, any::<bool>()), 0..8),
        extension in prop::option::of((0_u32..400, 0_u32..400, 0_u32..80)),
        text in prop::collection::vec(prop_oneof![Just(0_u8), Just(b'1'), any::<u8>()], 0..300),
    ) {
        let at = extension.map_or(0, |(at, ..)| at);
        let mut file = MAGIC.to_vec();
        for word in [word(entries.len()), 0, LITTLE_ENDIAN, at, 0, 0, 0] {
            file.extend(word.to_le_bytes());
        }
        for (flags, name, path, is_index) in entries {
            for word in [flags * FLAGS, name, path, 0, 0, u32::from(is_index) << 30] {
                file.extend(word.to_le_bytes());
            }
        }
        file.extend(text);
        if let Some((_, from, size)) = extension
            && let Some(place) = file.get_mut(at as usize..).and_then(|rest| rest.first_chunk_mut::<24>())
        {
            let words = [EXTENSION_MAGIC, 1, HWCAPS, 0, from, size].map(u32::to_le_bytes);
            place.copy_from_slice(words.as_flattened());
        }
        holds(&file);
    }

    #[test]
    fn no_names_make_the_merge_panic(
        names in prop::collection::vec("lib[0-9]{0,12}[a-z\u{e9}]?[0-9]{0,12}", 0..40),
        added in prop::collection::vec("/d/lib[0-9]{0,12}[a-z]?[0-9]{0,12}", 0..40),
    ) {
        // Numbers wrap: names can be in a circle.
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let mut cache = cache(&names);
        cache.add(added.iter().map(String::as_str));
        let after = paths(&cache);
        prop_assert!(added.iter().all(|path| after.contains(path)));
    }
}
