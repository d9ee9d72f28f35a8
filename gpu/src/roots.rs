//! Where the host's trees are seen from this process, and how a path below
//! one of them is followed without leaving it.
//!
//! It never looks at what a file contains.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::path::{Component, Path, PathBuf};

/// The trees that everything in this crate is found under.
///
/// A tree may be mounted elsewhere in this process's mount namespace than it
/// is on the host. What is handed to a container runtime names the host's
/// path, hence the `host_` twins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Roots {
    /// The driver's root as this process sees it: libraries and programs.
    pub driver: PathBuf,
    /// The same root as the container runtime sees it.
    pub host_driver: PathBuf,
    /// The folder of device nodes as this process sees it.
    pub dev: PathBuf,
    /// The same folder as the container runtime sees it.
    pub host_dev: PathBuf,
    /// The mount of procfs.
    pub proc: PathBuf,
    /// The mount of sysfs.
    pub sys: PathBuf,
}

impl Default for Roots {
    /// A host's own paths.
    fn default() -> Self {
        Self {
            driver: PathBuf::from("/"),
            host_driver: PathBuf::from("/"),
            dev: PathBuf::from("/dev"),
            host_dev: PathBuf::from("/dev"),
            proc: PathBuf::from("/proc"),
            sys: PathBuf::from("/sys"),
        }
    }
}

impl Roots {
    /// A message for people, who know the host's paths: one that names the
    /// driver's root as this process sees it says which folder that is.
    pub(crate) fn explained(&self, message: String) -> String {
        let (seen, host) = (self.driver.display().to_string(), self.host_driver.display());
        if self.driver == self.host_driver || !message.contains(&seen) {
            return message;
        }
        format!("{message} (`{seen}` is `{host}` of the host)")
    }

    /// All trees under one folder, which is the driver root too.
    #[cfg(test)]
    pub(crate) fn under(root: &Path) -> Self {
        Self {
            driver: root.to_owned(),
            host_driver: root.to_owned(),
            dev: root.join("dev"),
            host_dev: root.join("dev"),
            proc: root.join("proc"),
            sys: root.join("sys"),
        }
    }
}

/// Links followed before a path counts as a loop, as in the kernel.
const MAX_LINKS: usize = 40;

/// Follows every link of a path as a process would whose root folder is
/// `root`: an absolute target starts at `root` again, and `..` stops there.
///
/// The answer is relative to `root`; `None` where nothing is there.
pub(crate) fn resolve_in(root: &Path, path: &Path) -> Option<PathBuf> {
    let mut resolved = PathBuf::new();
    let mut pending = components(path);
    let mut links = 0;
    while let Some(name) = pending.pop_front() {
        if name == ".." {
            resolved.pop();
            continue;
        }
        let candidate = resolved.join(&name);
        let metadata = root.join(&candidate).symlink_metadata().ok()?;
        if !metadata.is_symlink() {
            resolved = candidate;
            continue;
        }
        links += 1;
        if links > MAX_LINKS {
            return None;
        }
        let target = root.join(&candidate).read_link().ok()?;
        if target.is_absolute() {
            resolved = PathBuf::new();
        }
        let mut next = components(&target);
        next.append(&mut pending);
        pending = next;
    }
    Some(resolved)
}

fn components(path: &Path) -> VecDeque<OsString> {
    path.components()
        .filter_map(|component| match component {
            Component::Normal(name) => Some(name.to_owned()),
            Component::ParentDir => Some(OsString::from("..")),
            Component::Prefix(_) | Component::RootDir | Component::CurDir => None,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_message_with_a_path_of_this_process_names_the_hosts() {
        let roots = Roots { driver: "/driver-root".into(), ..Roots::default() };
        let text = "no libnvidia-ml.so.1 under `/driver-root`".to_owned();
        assert_eq!(roots.explained(text.clone()), format!("{text} (`/driver-root` is `/` of the host)"));
        assert_eq!(roots.explained("the driver hangs".to_owned()), "the driver hangs");
        let text = "`/usr/lib64` cannot be listed".to_owned();
        assert_eq!(Roots::default().explained(text.clone()), text);
    }

    #[test]
    fn a_link_that_leaves_the_root_is_followed_inside_it() {
        let root = tempfile::tempdir().expect("a folder");
        fs::create_dir_all(root.path().join("usr/lib64")).expect("a folder");
        fs::write(root.path().join("usr/lib64/real"), "x").expect("a file");
        symlink("/usr/lib64", root.path().join("lib64")).expect("a link");
        symlink("../../../../../usr/lib64/real", root.path().join("usr/lib64/escaping")).expect("a link");
        symlink("/etc/passwd", root.path().join("usr/lib64/outside")).expect("a link");
        symlink("loop", root.path().join("usr/lib64/loop")).expect("a link");

        let resolve = |path: &str| resolve_in(root.path(), Path::new(path));
        let real = Some(PathBuf::from("usr/lib64/real"));
        assert_eq!(resolve("lib64/real"), real);
        assert_eq!(resolve("/lib64/real"), real);
        assert_eq!(resolve("lib64/escaping"), real);
        assert_eq!(resolve("lib64/outside"), None);
        assert_eq!(resolve("lib64/loop"), None);
        assert_eq!(resolve("lib64/missing"), None);
    }
}
