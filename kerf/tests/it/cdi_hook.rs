//! `kerf cdi-hook` on roots of images: what it leaves there, and what the C
//! library's own programs say to it.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::bundle::{Bundle, CUDA, cached, is_root};

#[test]
fn a_glibc_image_of_any_layout_gets_links_a_cache_and_its_configuration() {
    for libc in ["usr/lib/x86_64-linux-gnu/libc.so.6", "usr/lib64/libc.so.6", "lib64/libc.so.6"] {
        let bundle = Bundle::new(&[libc, "usr/lib64/libcuda.so.580.1"]);
        for _ in 0..2 {
            bundle.hooked(CUDA);
        }
        let links = ["libcuda.so.1", "libcuda.so"].map(|name| {
            fs::read_link(bundle.root().join("usr/lib64").join(name)).unwrap().display().to_string()
        });
        assert_eq!(links, ["libcuda.so.580.1", "libcuda.so.1"]);
        let cached = cached(&bundle);
        assert!(cached.contains("=> /usr/lib64/libcuda.so.1") && cached.contains("2 libs"), "{cached}");
        let configuration = fs::read_to_string(bundle.root().join("etc/ld.so.conf.d/00-kerf.conf")).unwrap();
        assert_eq!(configuration, "/usr/lib64\n");
    }
}

#[test]
fn an_image_without_glibc_gets_links_and_no_cache() {
    let bundle = Bundle::new(&["lib/ld-musl-x86_64.so.1", "usr/lib64/libcuda.so.580.1"]);
    bundle.hooked(CUDA);
    assert!(bundle.root().join("usr/lib64/libcuda.so.1").is_symlink());
    assert!(!bundle.root().join("etc").exists());
}

#[test]
fn a_cache_that_is_none_stays_and_the_container_starts() {
    let bundle = Bundle::new(&["usr/lib64/libc.so.6", "etc/ld.so.cache"]);
    let output = bundle.hook(&[], CUDA);
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("is left as it is"), "{output:?}");
    assert_eq!(fs::read(bundle.root().join("etc/ld.so.cache")).unwrap(), b"x");
}

#[test]
fn a_folder_in_the_place_of_a_link_is_told_to_whoever_waits_for_the_container() {
    let bundle = Bundle::new(&["usr/lib64/libcuda.so.1/a-file"]);
    let output = bundle.hook(&[], CUDA);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && text.contains("/usr/lib64/libcuda.so.1 cannot be made a link"),
        "{text}"
    );
}

#[test]
fn a_loader_finds_by_name_what_lies_in_no_folder_of_its_own() {
    if !is_root() {
        return;
    }
    let bundle = Bundle::new(&[]);
    finds_only_by_the_cache(&bundle, "libcuda.so.1");
}

#[test]
fn a_loader_finds_in_this_machines_own_cache_what_was_added_and_all_else() {
    if !is_root() {
        return;
    }
    let bundle = Bundle::new(&[]);
    match fs::read("/etc/ld.so.cache") {
        Ok(own) => bundle.put("etc/ld.so.cache", &own),
        Err(error) => return eprintln!("skipped: there is no /etc/ld.so.cache ({error})"),
    }
    let lines = |text: &str| -> Vec<String> {
        text.lines().filter(|line| line.contains(" => ")).map(str::to_owned).collect()
    };
    let before = lines(&cached(&bundle));
    // One is the first of its cache, the other the last.
    for name in ["libzzz.so.1", "liba-first.so.1"] {
        finds_only_by_the_cache(&bundle, name);
    }
    let after = lines(&cached(&bundle));
    assert_eq!(after.len(), before.len() + 2, "{after:?}");
    let kept: Vec<_> = after.iter().filter(|line| !line.contains("/opt/driver/")).cloned().collect();
    assert_eq!(kept, before);
}

/// Makes sure that the C library's own loader finds a library in a folder that
/// it does not know, once the hook has told it.
fn finds_only_by_the_cache(bundle: &Bundle, name: &str) {
    let mut loader = String::new();
    let listed = Command::new("/usr/bin/ldd").arg("/bin/true").output().unwrap();
    for word in
        String::from_utf8(listed.stdout).unwrap().split_whitespace().filter(|word| word.starts_with('/'))
    {
        bundle.copy(Path::new(word));
        if word.contains("/ld-") {
            word.clone_into(&mut loader);
        }
    }
    bundle.copy(Path::new("/bin/true"));
    // Any library will do; its name is the driver's.
    let libc = fs::canonicalize("/lib/x86_64-linux-gnu/libc.so.6")
        .or_else(|_| fs::canonicalize("/lib64/libc.so.6"))
        .or_else(|_| fs::canonicalize("/lib/aarch64-linux-gnu/libc.so.6"))
        .unwrap();
    bundle.put("opt/driver/libcuda.so.580.1", &fs::read(libc).unwrap());
    let preload = || {
        let mut command = Command::new("chroot");
        command.arg(bundle.root()).args([&loader, "--preload", name, "/bin/true"]);
        String::from_utf8(command.output().unwrap().stderr).unwrap()
    };
    let before = preload();
    assert!(before.contains(name), "it was found before: {before}");
    bundle.hooked(&[
        &format!("--link=libcuda.so.580.1::/opt/driver/{name}"),
        &format!("--library=/opt/driver/{name}"),
    ]);
    assert_eq!(preload(), "");
}

/// What may lie in the place of a cache, by a shell command that puts it there.
const NO_CACHES: &[(&str, &str)] = &[
    ("a folder", "mkdir etc/ld.so.cache"),
    ("a FIFO", "mkfifo etc/ld.so.cache"),
    ("a link to itself", "ln -s ld.so.cache etc/ld.so.cache"),
    ("a large file", "truncate -s 4194305 etc/ld.so.cache"),
    ("a large file of no content", "truncate -s 1T etc/ld.so.cache"),
    ("text", "echo text > etc/ld.so.cache"),
    ("a file for /etc", "rmdir etc && touch etc"),
    ("a loop for /etc", "rmdir etc && ln -s etc etc"),
];

#[test]
fn whatever_lies_in_the_place_of_a_cache_stays_and_the_container_starts() {
    let device = ("a device", "mknod etc/ld.so.cache c 60 0");
    for (what, command) in NO_CACHES.iter().chain(is_root().then_some(&device)) {
        let bundle = Bundle::new(&["usr/lib64/libc.so.6"]);
        fs::create_dir(bundle.root().join("etc")).unwrap();
        let done = Command::new("sh").args(["-ec", command]).current_dir(bundle.root()).status().unwrap();
        assert!(done.success(), "{what}");
        let kind =
            |path: &str| fs::symlink_metadata(bundle.root().join(path)).map(|found| found.file_type()).ok();
        let before = (kind("etc"), kind("etc/ld.so.cache"));
        let output = bundle.hook(&[], CUDA);
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{what}: {text}");
        assert!(text.contains("note: /etc/ld.so.cache is left as it is"), "{what}: {text}");
        assert_eq!((kind("etc"), kind("etc/ld.so.cache")), before, "{what}");
        assert!(bundle.root().join("usr/lib64/libcuda.so.1").is_symlink(), "{what}");
    }
}

#[test]
fn an_empty_cache_is_one_of_nothing() {
    let bundle = Bundle::new(&["usr/lib64/libc.so.6"]);
    bundle.put("etc/ld.so.cache", b"");
    bundle.hooked(CUDA);
    assert!(cached(&bundle).contains("2 libs"), "{}", cached(&bundle));
}

#[test]
fn what_is_in_the_place_of_the_configuration_is_a_note() {
    let bundle = Bundle::new(&["usr/lib64/libc.so.6", "etc/ld.so.conf.d/00-kerf.conf/a-file"]);
    let output = bundle.hook(&[], CUDA);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("00-kerf.conf cannot be written"), "{text}");
    assert!(cached(&bundle).contains("2 libs"));
}

/// The largest cache that is read, of as many entries as there is room for,
/// whose names are all within one text.
fn hostile_cache() -> Vec<u8> {
    const TEXT: usize = 256 << 10;
    let count = ((4 << 20) - 48 - TEXT) / 24;
    let mut file = b"glibc-ld.so.cache1.1".to_vec();
    for word in [count, TEXT, 2, 0, 0, 0, 0] {
        file.extend(u32::try_from(word).unwrap().to_le_bytes());
    }
    let from = 48 + 24 * count;
    for index in 0..count {
        // A text that hardly any other entry has, of some 30 bytes.
        let at = |number: usize| u32::try_from(from + number % (TEXT - 64)).unwrap();
        for word in [0x0303, at(index), at(7 * index + 3), 0, 0, 0] {
            file.extend(word.to_le_bytes());
        }
    }
    let text = (0..TEXT).map(|index| if index % 64 == 63 { 0 } else { b'a' });
    file.extend(text);
    file
}

#[test]
fn a_hostile_cache_takes_little_memory() {
    let bundle = Bundle::new(&["usr/lib64/libc.so.6"]);
    let cache = hostile_cache();
    assert!(((4 << 20) - 24..=4 << 20).contains(&cache.len()), "{}", cache.len());
    bundle.put("etc/ld.so.cache", &cache);
    // KiB of all that the process may write to: four times the file, and its own.
    let limited = ["sh", "-c", "ulimit -d 24576 && exec \"$@\"", "sh"];
    let output = bundle.hook(&limited, CUDA);
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    let merged = fs::read(bundle.root().join("etc/ld.so.cache")).unwrap();
    assert!((cache.len()..cache.len() + 1024).contains(&merged.len()), "{}", merged.len());
}

#[test]
fn a_config_that_may_not_be_read_leaves_the_bundles_own_root() {
    if !is_root() {
        return;
    }
    let bundle = Bundle::new(&["usr/lib64/libc.so.6"]);
    let (config, root) = (bundle.path().join("config.json"), bundle.root());
    let owned = Command::new("sh")
        .args(["-ec", "chmod 600 $0; chmod 711 $2; chown -R 65534:65534 $1"])
        .args([&config, &root, bundle.path()])
        .status()
        .unwrap();
    assert!(owned.success());
    let output = bundle.hook(&["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"], CUDA);
    assert!(output.status.success(), "{output:?}");
    assert!(cached(&bundle).contains("2 libs"));
    fs::rename(&root, bundle.path().join("elsewhere")).unwrap();
    let output = bundle.hook(&["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"], CUDA);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && text.contains("config.json cannot be opened"), "{text}");
}

#[test]
fn a_read_only_root_starts_with_a_note() {
    if !is_root() {
        return;
    }
    let bundle = Bundle::new(&[]);
    let root = bundle.root().display().to_string();
    let mount = format!(
        "mount -t tmpfs none {root} && mkdir -p {root}/usr/lib64 && touch {root}/usr/lib64/libc.so.6 && \
         mount -o remount,ro {root} && exec \"$@\""
    );
    let output = bundle.hook(&["unshare", "--mount", "sh", "-c", &mount, "sh"], CUDA);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    assert!(
        text.contains("note: /usr/lib64/libcuda.so.1 cannot be made a link") && text.contains("Read-only"),
        "{text}"
    );
}

#[test]
fn a_volume_in_the_place_of_etc_is_never_written_to() {
    if !is_root() {
        return;
    }
    let bundle = Bundle::new(&["usr/lib64/libc.so.6", "etc/hostname"]);
    let volume = tempfile::tempdir().unwrap();
    let root = bundle.root().display().to_string();
    let mount = format!("mount --bind {} {root}/etc && exec \"$@\"", volume.path().display());
    let output = bundle.hook(&["unshare", "--mount", "sh", "-c", &mount, "sh"], CUDA);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("the container's loader is not told"), "{text}");
    assert_eq!(fs::read_dir(volume.path()).unwrap().count(), 0);
    assert!(bundle.root().join("usr/lib64/libcuda.so.1").is_symlink());
}
