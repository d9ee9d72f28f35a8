use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;

use super::*;

/// A root with a neighbour that nothing in it may reach.
fn root() -> (tempfile::TempDir, PathBuf, Rootfs) {
    let folder = tempfile::tempdir().expect("a folder");
    let root = folder.path().join("root");
    fs::create_dir(&root).expect("a folder");
    fs::create_dir(folder.path().join("outside")).expect("a folder");
    let rootfs = Rootfs::open(&root).expect("a root");
    (folder, root, rootfs)
}

#[test]
fn links_are_made_below_folders_that_were_not_there() {
    let (_folder, root, rootfs) = root();
    for _ in 0..2 {
        rootfs.link(Path::new("/usr/lib64/libcuda.so.1"), "libcuda.so.580.1").expect("a link");
    }
    let link = fs::read_link(root.join("usr/lib64/libcuda.so.1")).expect("a link");
    assert_eq!(link, Path::new("libcuda.so.580.1"));
    fs::write(root.join("usr/lib64/libcuda.so"), "a stub").expect("a file");
    rootfs.link(Path::new("/usr/lib64/libcuda.so"), "libcuda.so.1").expect("a link");
    assert_eq!(fs::read_link(root.join("usr/lib64/libcuda.so")).expect("a link"), Path::new("libcuda.so.1"));
    assert_eq!(fs::read_dir(root.join("usr/lib64")).expect("a folder").count(), 2, "a draft is left");
}

#[test]
fn a_merged_usr_is_followed() {
    let (_folder, root, rootfs) = root();
    fs::create_dir_all(root.join("usr/lib64")).expect("a folder");
    symlink("/usr/lib64", root.join("lib64")).expect("a link");
    rootfs.link(Path::new("/lib64/libcuda.so.1"), "libcuda.so.580.1").expect("a link");
    assert!(root.join("usr/lib64/libcuda.so.1").is_symlink());
}

#[test]
fn nothing_outside_the_root_is_ever_written_or_read() {
    let (folder, root, rootfs) = root();
    let outside = folder.path().join("outside");
    fs::write(outside.join("ld.so.cache"), "secret").expect("a file");
    let attacks = [outside.display().to_string(), "../outside".to_owned(), "/proc/self/cwd".to_owned()];
    for (number, target) in attacks.iter().enumerate() {
        let etc = format!("etc{number}");
        symlink(target, root.join(&etc)).expect("a link");
        symlink(outside.join("ld.so.cache"), root.join(format!("file{number}"))).expect("a link");
        let in_etc = Path::new(&etc).join("ld.so.cache");
        assert!(!rootfs.has(&in_etc));
        assert_eq!(rootfs.read(&in_etc).ok().flatten(), None);
        assert_eq!(rootfs.read(Path::new(&format!("file{number}"))).ok().flatten(), None);
        let _ = rootfs.write(&in_etc, b"mine");
        let _ = rootfs.link(&Path::new(&etc).join("libcuda.so.1"), "mine");
        // A link in the place of a file is replaced, not written through.
        rootfs.write(Path::new(&format!("file{number}")), b"mine").expect("a file");
        rootfs.link(Path::new("../../../outside/ld.so.cache"), "mine").expect("a link in the root");
    }
    assert_eq!(fs::read_to_string(outside.join("ld.so.cache")).expect("a file"), "secret");
    assert_eq!(fs::read_dir(&outside).expect("a folder").count(), 1, "something was made outside");
}

#[test]
fn loops_and_folders_in_the_way_are_errors() {
    let (_folder, root, rootfs) = root();
    symlink("loop", root.join("loop")).expect("a link");
    assert!(rootfs.link(Path::new("/loop/libcuda.so.1"), "x").is_err());
    fs::create_dir_all(root.join("lib/libcuda.so.1/kept")).expect("a folder");
    assert!(rootfs.link(Path::new("/lib/libcuda.so.1"), "x").is_err());
    assert!(root.join("lib/libcuda.so.1/kept").is_dir());
    assert_eq!(fs::read_dir(root.join("lib")).expect("a folder").count(), 1, "a draft is left");
}

fn node(path: &Path, kind: FileType, device: u64) -> Result<(), Errno> {
    rustix::fs::mknodat(rustix::fs::CWD, path, kind, Mode::from_raw_mode(0o644), device)
}

#[test]
fn what_is_no_file_is_never_opened() {
    let (_folder, root, rootfs) = root();
    let refused = |name: &str| {
        let error = rootfs.read(Path::new(name)).expect_err("no file");
        assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{name}: {error}");
    };
    fs::create_dir(root.join("folder")).expect("a folder");
    refused("folder");
    std::os::unix::net::UnixListener::bind(root.join("socket")).expect("a socket");
    refused("socket");
    node(&root.join("fifo"), FileType::Fifo, 0).expect("a FIFO");
    refused("fifo");
    // No driver has this number: whoever opens the node gets ENXIO (or
    // EACCES, where the folder's mount allows no devices).
    let nobodys = rustix::fs::makedev(60, 0);
    for (name, kind) in [("character", FileType::CharacterDevice), ("block", FileType::BlockDevice)] {
        match node(&root.join(name), kind, nobodys) {
            Ok(()) => {
                fs::File::open(root.join(name)).expect_err("a driver has the number 60");
                refused(name);
            }
            Err(error) => eprintln!("skipped: a {name} device cannot be made here ({error})"),
        }
    }
}

#[test]
fn files_are_read_up_to_a_limit() {
    let (_folder, root, rootfs) = root();
    let file = fs::File::create(root.join("file")).expect("a file");
    file.set_len(MAX_FILE).expect("a length");
    let content = rootfs.read(Path::new("file")).expect("a file");
    assert_eq!(content.map(|content| content.len() as u64), Some(MAX_FILE));
    file.set_len(MAX_FILE + 1).expect("a length");
    assert_eq!(rootfs.read(Path::new("file")).expect_err("large").kind(), io::ErrorKind::InvalidData);
    assert_eq!(rootfs.read(Path::new("none")).expect("nothing"), None);
}

#[test]
fn what_has_a_drafts_name_stays_and_another_is_taken() {
    let (_folder, root, rootfs) = root();
    fs::create_dir(root.join("folder")).expect("a folder");
    fs::write(root.join("file"), "another's").expect("a file");
    let drafts = || ["folder", "file", "free"].map(str::to_owned).into_iter();
    let make = |folder: &OwnedFd, draft: &str| Ok(rustix::fs::symlinkat("target", folder, draft)?);
    rootfs.replace_by(Path::new("link"), drafts(), make).expect("a link");
    assert_eq!(fs::read_link(root.join("link")).expect("a link"), Path::new("target"));
    let error = rootfs.replace_by(Path::new("other"), drafts().take(2), make).expect_err("no name");
    assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
    assert_eq!(fs::read_to_string(root.join("file")).expect("a file"), "another's");
    // A draft of ours goes where its place is taken.
    rootfs.replace_by(Path::new("folder"), drafts(), make).expect_err("a folder in its place");
    assert!(!root.join("free").is_symlink());
}

#[test]
fn no_draft_can_be_foreseen() {
    let names: std::collections::BTreeSet<String> = std::iter::repeat_with(draft_name).take(100).collect();
    assert_eq!(names.len(), 100);
    assert!(names.iter().all(|name| !name.ends_with(&std::process::id().to_string())), "{names:?}");
}
