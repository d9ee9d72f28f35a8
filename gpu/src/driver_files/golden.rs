//! Installations as distributions make them, from lists of their files, and
//! what containers get of each; then trees that nobody should have.

use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::Path;

use super::*;

const VERSION: &str = "580.95.05";

/// The tree that a list describes: a path a line, `-> target` for a link,
/// `socket` for a socket.
fn tree(list: &str) -> (tempfile::TempDir, Roots) {
    let root = tempfile::tempdir().expect("a folder");
    for line in list.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let (path, what) = line.split_once(' ').unwrap_or((line, ""));
        let path = root.path().join(path.trim_start_matches('/'));
        fs::create_dir_all(path.parent().expect("a parent")).expect("a folder");
        match what.strip_prefix("-> ") {
            Some(target) => symlink(target, path).expect("a link"),
            None if what == "socket" => drop(UnixListener::bind(path).expect("a socket")),
            None => fs::write(path, "x").expect("a file"),
        }
    }
    let roots = Roots { host_driver: "/host".into(), ..Roots::under(root.path()) };
    (root, roots)
}

fn files(list: &str) -> Result<DriverFiles, String> {
    let (_root, roots) = tree(list);
    driver_files(&roots, VERSION).map_err(|error| error.to_string())
}

/// All that a container gets, a line each.
fn text(files: &DriverFiles) -> String {
    let mounts = files.mounts.iter().map(|file| {
        let (host, container) = (&file.host_path, &file.container_path);
        let same = host.strip_prefix("/host") == Some(container);
        if same { format!("  {container}") } else { format!("  {container} from {host}") }
    });
    let mut lines = vec![format!("{} mounts", files.mounts.len())];
    lines.extend(mounts);
    lines.push(format!("{} links", files.links.len()));
    lines.extend(files.links.iter().map(|link| format!("  {} -> {}", link.path, link.target)));
    lines.push(format!("{} libraries by name", files.libraries.len()));
    lines.extend(files.libraries.iter().map(|path| format!("  {path}")));
    lines.join("\n")
}

macro_rules! layout {
    ($test:ident, $list:literal) => {
        #[test]
        fn $test() {
            let files = files(include_str!(concat!("trees/", $list, ".txt"))).expect("files");
            sound(&files);
            insta::assert_snapshot!($list, text(&files));
        }
    };
}

layout!(ubuntu, "ubuntu-24.04-server");
layout!(debian_with_alternatives, "debian-12");
layout!(rhel, "rhel-9");
layout!(sles, "sles-15");
layout!(the_driver_container_of_the_gpu_operator, "gpu-operator");
layout!(gke, "gke-cos");
layout!(talos, "talos");

/// What must hold of every layout.
fn sound(files: &DriverFiles) {
    let mounted: BTreeSet<&str> = files.mounts.iter().map(|file| file.container_path.as_str()).collect();
    let real: BTreeSet<&str> = files.mounts.iter().map(|file| file.host_path.as_str()).collect();
    assert_eq!(
        (mounted.len(), real.len()),
        (files.mounts.len(), files.mounts.len()),
        "a file is there twice"
    );
    let mut there: BTreeSet<String> = mounted.iter().map(|path| (*path).to_owned()).collect();
    for link in &files.links {
        let folder = Path::new(&link.path).parent().expect("a folder");
        let target = match link.target.strip_prefix("../") {
            Some(target) => folder.parent().expect("a folder").join(target),
            None => folder.join(&link.target),
        };
        assert!(there.contains(&target.display().to_string()), "{link:?} leads to nothing");
        assert!(there.insert(link.path.clone()), "{link:?} is there twice");
    }
    for library in &files.libraries {
        assert!(there.contains(library), "{library} is not there");
    }
}

const LINKED: &str =
    "/usr/lib64/libnvidia-ml.so.580.95.05\n/usr/lib64/libnvidia-ml.so.1 -> libnvidia-ml.so.580.95.05";

#[test]
fn a_tree_that_has_only_the_soname_serves_it() {
    let found = files("/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1").expect("files");
    insta::assert_snapshot!(text(&found), @r"
    1 mounts
      /usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1
    0 links
    1 libraries by name
      /usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1
    ");
}

#[test]
fn a_tree_without_links_gets_those_that_programs_need() {
    let found =
        files("/usr/lib64/libnvidia-ml.so.580.95.05\n/usr/lib64/libcuda.so.580.95.05").expect("files");
    sound(&found);
    let links: Vec<_> = found.links.iter().map(|link| (link.path.as_str(), link.target.as_str())).collect();
    let expected = [
        ("/usr/lib64/libcuda.so.1", "libcuda.so.580.95.05"),
        ("/usr/lib64/libcuda.so", "libcuda.so.1"),
        ("/usr/lib64/libnvidia-ml.so.1", "libnvidia-ml.so.580.95.05"),
    ];
    assert_eq!(links, expected);
}

#[test]
fn the_libraries_are_found_where_the_management_library_leads() {
    let found = files(
        "/opt/nvidia/libnvidia-ml.so.580.95.05\n/opt/nvidia/libcuda.so.580.95.05\n\
         /usr/lib64/libnvidia-ml.so.1 -> /opt/nvidia/libnvidia-ml.so.580.95.05",
    )
    .expect("files");
    sound(&found);
    let first = &found.mounts[0];
    assert_eq!(first.container_path, "/usr/lib64/libcuda.so.580.95.05");
    assert_eq!(first.host_path, "/host/opt/nvidia/libcuda.so.580.95.05");
    let (root, _roots) =
        tree("/opt/libnvidia-ml.so.1\n/usr/lib64/libnvidia-ml.so.1 -> /opt/libnvidia-ml.so.1");
    assert_eq!(management_library(root.path()), Some(PathBuf::from("opt/libnvidia-ml.so.1")));
}

#[test]
fn no_container_gets_half_of_an_upgrade() {
    let error = files(&format!(
        "{LINKED}\n/usr/lib64/libcuda.so.1 -> libcuda.so.590.10.01\n/usr/lib64/libcuda.so.590.10.01"
    ))
    .expect_err("two versions");
    assert!(error.contains("580.95.05 is loaded") && error.contains("`libcuda.so.590.10.01`"), "{error}");
    assert!(error.contains("reboot"), "{error}");
    let error = files(
        "/usr/lib64/libnvidia-ml.so.1 -> libnvidia-ml.so.590.10.01\n/usr/lib64/libnvidia-ml.so.590.10.01",
    )
    .expect_err("another version");
    assert!(error.contains("`libnvidia-ml.so.590.10.01`"), "{error}");
    let error = files("/usr/lib64/libcuda.so.580.95.05").expect_err("no management library");
    assert!(error.contains("no libnvidia-ml.so"), "{error}");
}

#[test]
fn files_of_another_version_beside_the_right_ones_are_left_out() {
    let found = files(&format!("{LINKED}\n/usr/lib64/libcuda.so.580.95.05\n/usr/lib64/libcuda.so.470.1"));
    let found = found.expect("files");
    assert!(found.mounts.iter().all(|file| !file.host_path.contains("470")), "{found:?}");
}

#[test]
fn no_link_leads_out_of_the_root_or_on_for_ever() {
    let outside = tempfile::tempdir().expect("a folder");
    fs::write(outside.path().join("libcuda.so.580.95.05"), "x").expect("a file");
    let outside = outside.path().display();
    let found = files(&format!(
        "{LINKED}\n\
         /usr/lib64/libcuda.so.580.95.05 -> {outside}/libcuda.so.580.95.05\n\
         /usr/lib64/libnvcuvid.so.580.95.05 -> ../../../../../../..{outside}/libcuda.so.580.95.05\n\
         /usr/lib64/libnvoptix.so.580.95.05 -> libnvoptix.so.1\n\
         /usr/lib64/libnvoptix.so.1 -> libnvoptix.so.580.95.05\n\
         /usr/lib64/libnvidia-tls.so.580.95.05/a-folder\n\
         /usr/lib64/libnvidia-encode.so.1 -> /etc/shadow\n\
         /usr/lib -> lib\n\
         /lib -> /lib64\n\
         /lib64 -> lib\n\
         /usr/bin/nvidia-smi -> {outside}/libcuda.so.580.95.05\n\
         /etc/OpenCL/vendors/nvidia.icd -> {outside}/libcuda.so.580.95.05"
    ))
    .expect("files");
    sound(&found);
    assert_eq!(found.mounts.len(), 1, "{found:?}");
    assert_eq!(found.libraries, ["/usr/lib64/libnvidia-ml.so.1"]);
}

#[test]
fn thousands_of_other_files_cost_nothing_but_their_names() {
    let (root, roots) = tree(LINKED);
    for number in 0..5_000 {
        fs::write(root.path().join(format!("usr/lib64/libother{number}.so.1.2.3")), "").expect("a file");
    }
    let started = std::time::Instant::now();
    let found = driver_files(&roots, VERSION).expect("files");
    println!("note: found in {:?}", started.elapsed());
    assert_eq!(found.mounts.len(), 1, "{found:?}");
}

#[test]
fn a_folder_that_cannot_be_listed_is_told_and_nothing_is_left_out_for_it() {
    use std::os::unix::fs::PermissionsExt;
    let (root, roots) = tree(&format!("{LINKED}\n/lib/x86_64-linux-gnu/libcuda.so.580.95.05"));
    let folder = root.path().join("lib/x86_64-linux-gnu");
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o000)).expect("permissions");
    if fs::read_dir(&folder).is_ok() {
        eprintln!("skipped: this user reads every folder (CAP_DAC_OVERRIDE)");
        return;
    }
    let error = driver_files(&roots, VERSION).expect_err("unreadable").to_string();
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).expect("permissions");
    assert!(error.contains("x86_64-linux-gnu` cannot be listed"), "{error}");
}
