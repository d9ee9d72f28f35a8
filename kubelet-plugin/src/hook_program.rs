//! The program that CDI specs name as their hook: a copy of this one on the
//! host, in a folder named by its content.
//!
//! The host's C library may be older than ours, or another one (Talos has
//! musl): the copy brings the loader and libraries that this process runs
//! with, and is started by that loader. Containers restart with the specs they
//! were made with, so a former copy stays as long as a spec names it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hasher};
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use tracing::{info, warn};

const PROGRAM: &str = "kerf";
const SUBCOMMAND: &str = "cdi-hook";

/// A hook's program on the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HookProgram {
    /// The folder of all copies.
    pub(crate) copies: PathBuf,
    /// The name of this copy's folder.
    pub(crate) copy: String,
    /// What the container runtime runs.
    pub(crate) path: String,
    /// Its arguments, its own name first.
    pub(crate) arguments: Vec<String>,
}

impl HookProgram {
    /// Puts a copy of this process's program below the plugin's folder, which
    /// has the same path on the host. To be called before the process loads
    /// libraries that it was not linked with.
    pub fn install(plugin_dir: &Path) -> io::Result<Self> {
        // This process's own, not those of the `/proc` that describes hardware.
        let maps = fs::read_to_string("/proc/self/maps")?;
        let mut parts = libraries(&maps, &std::env::current_exe()?);
        parts.insert(PROGRAM.to_owned(), PathBuf::from("/proc/self/exe"));
        let copy = format!("{PROGRAM}-{}-{:016x}", env!("CARGO_PKG_VERSION"), content(&parts)?);
        let copies = plugin_dir.join("bin");
        if !is_complete(&copies.join(&copy), &parts) {
            write(&copies, &copy, &parts)?;
            info!(folder = %copies.join(&copy).display(), "the hook's program is in place");
        }
        Ok(Self::of(copies, copy, parts.keys()))
    }

    /// How the parts of a copy are started.
    fn of<'a>(copies: PathBuf, copy: String, mut parts: impl Iterator<Item = &'a String>) -> Self {
        let folder = copies.join(&copy);
        let in_folder = |name: &str| folder.join(name).display().to_string();
        let (path, arguments) = match parts.find(|name| name.starts_with("ld-")) {
            Some(loader) => (
                in_folder(loader),
                vec![
                    loader.clone(),
                    "--library-path".to_owned(),
                    folder.display().to_string(),
                    in_folder(PROGRAM),
                    SUBCOMMAND.to_owned(),
                ],
            ),
            None => (in_folder(PROGRAM), vec![PROGRAM.to_owned(), SUBCOMMAND.to_owned()]),
        };
        Self { copies, copy, path, arguments }
    }

    /// Removes the copies of former versions that `is_named` does not know, and
    /// what a crash left half written. Only while nobody else uses the folder.
    pub(crate) fn sweep(&self, is_named: impl Fn(&str) -> bool) {
        let Ok(entries) = fs::read_dir(&self.copies) else { return };
        let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
        for name in names.filter(|name| *name != self.copy && !is_named(name)) {
            match fs::remove_dir_all(self.copies.join(&name)) {
                Ok(()) => info!(name, "removed a former copy of the hook's program"),
                Err(error) => warn!(name, %error, "a former copy of the hook's program stays"),
            }
        }
    }
}

/// The files that a process runs with beside its program, by their names.
fn libraries(maps: &str, program: &Path) -> BTreeMap<String, PathBuf> {
    maps.lines()
        .filter_map(|line| {
            let mut fields = line.splitn(6, ' ');
            let may_run = fields.nth(1)?.contains('x');
            let path = Path::new(fields.last()?.trim_start());
            (may_run && path.is_absolute() && path != program)
                .then(|| Some((path.file_name()?.to_str()?.to_owned(), path.to_owned())))?
        })
        .collect()
}

/// A number that is another one for other files. It need not be hard to forge:
/// the files are our own.
fn content(parts: &BTreeMap<String, PathBuf>) -> io::Result<u64> {
    let mut hasher = DefaultHasher::new();
    let mut buffer = vec![0; 1 << 16];
    for (name, path) in parts {
        hasher.write(name.as_bytes());
        let mut file = File::open(path)?;
        loop {
            let length = file.read(&mut buffer)?;
            hasher.write(buffer.get(..length).unwrap_or_default());
            if length == 0 {
                break;
            }
        }
    }
    Ok(hasher.finish())
}

/// Whether a copy has all its files. They are renamed into place together, so
/// that only somebody else can have taken one.
fn is_complete(folder: &Path, parts: &BTreeMap<String, PathBuf>) -> bool {
    let length = |path: &Path| fs::metadata(path).ok().map(|metadata| metadata.len());
    parts.iter().all(|(name, path)| {
        let there = length(&folder.join(name));
        there.is_some() && there == length(path)
    })
}

fn write(copies: &Path, copy: &str, parts: &BTreeMap<String, PathBuf>) -> io::Result<()> {
    let remove = |folder: &Path| match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    };
    let draft = copies.join(format!(".{copy}.{}", std::process::id()));
    remove(&draft)?;
    fs::create_dir_all(&draft)?;
    for (name, path) in parts {
        let file = draft.join(name);
        io::copy(&mut File::open(path)?, &mut File::create(&file)?)?;
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755))?;
        File::open(&file)?.sync_all()?;
    }
    File::open(&draft)?.sync_all()?;
    let folder = copies.join(copy);
    remove(&folder)?;
    match fs::rename(&draft, &folder) {
        // Another instance of the same version was quicker.
        Err(_) if is_complete(&folder, parts) => remove(&draft),
        renamed => renamed,
    }?;
    File::open(copies)?.sync_all()
}

/// The copies that texts name.
pub(crate) fn named(texts: &[Vec<u8>]) -> BTreeSet<String> {
    let marker = format!("/{PROGRAM}-");
    texts
        .iter()
        .flat_map(|text| {
            let text = String::from_utf8_lossy(text);
            let ends: Vec<String> = text
                .match_indices(&marker)
                .filter_map(|(at, _)| text.get(at + 1..)?.split(['/', '"', '\\']).next().map(str::to_owned))
                .collect();
            ends
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn the_copy_runs_with_its_own_loader_and_libraries() {
        let folder = tempfile::tempdir().expect("a folder");
        let hook = HookProgram::install(folder.path()).expect("a copy");
        assert_eq!(HookProgram::install(folder.path()).expect("the same copy"), hook);
        // Its program is this test here, which can list what is in it.
        let (last, first) = hook.arguments.split_last().expect("arguments");
        assert_eq!(last, SUBCOMMAND);
        let output = Command::new(&hook.path)
            .args(&first[1..])
            .args(["--list", "--format", "terse"])
            .env_clear()
            .output()
            .expect("it runs");
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("the_copy_runs_with_its_own"), "{output:?}");
        let mapped = Command::new(&hook.path).args(["--list"]).args(&first[1..]).output().expect("a list");
        let mapped = String::from_utf8_lossy(&mapped.stdout).into_owned();
        let libc = mapped.lines().find(|line| line.contains("libc.so.6 =>")).expect("a C library");
        assert!(libc.contains(&folder.path().display().to_string()), "{libc}");
    }

    #[test]
    fn a_copy_that_lost_a_file_is_made_again() {
        let folder = tempfile::tempdir().expect("a folder");
        let hook = HookProgram::install(folder.path()).expect("a copy");
        fs::write(&hook.path, "").expect("an empty file");
        assert_eq!(HookProgram::install(folder.path()).expect("a copy"), hook);
        assert!(fs::metadata(&hook.path).expect("a file").len() > 0);
        assert_eq!(fs::read_dir(&hook.copies).expect("a folder").count(), 1, "a draft is left");
    }

    #[test]
    fn only_what_is_mapped_to_run_is_copied() {
        let maps = "55d0-55d1 r-xp 00000000 fe:00 1   /usr/bin/kerf\n\
                    7f00-7f01 r--p 00000000 fe:00 2   /usr/lib/libc.so.6\n\
                    7f01-7f02 r-xp 00001000 fe:00 2   /usr/lib/libc.so.6\n\
                    7f02-7f03 r-xp 00000000 fe:00 3   /usr/lib/ld-linux-x86-64.so.2\n\
                    7f03-7f04 r--p 00000000 fe:00 4   /usr/lib/locale/C.utf8/LC_CTYPE\n\
                    7ffc-7ffd r-xp 00000000 00:00 0   [vdso]\n\
                    7ffd-7ffe rw-p 00000000 00:00 0 \n";
        let found = libraries(maps, Path::new("/usr/bin/kerf"));
        let names: Vec<_> = found.keys().map(String::as_str).collect();
        assert_eq!(names, ["ld-linux-x86-64.so.2", "libc.so.6"]);
        let hook = HookProgram::of("/p/bin".into(), "kerf-1".to_owned(), found.keys());
        assert_eq!(hook.path, "/p/bin/kerf-1/ld-linux-x86-64.so.2");
        let expected =
            ["ld-linux-x86-64.so.2", "--library-path", "/p/bin/kerf-1", "/p/bin/kerf-1/kerf", "cdi-hook"];
        assert_eq!(hook.arguments, expected);
        let hook = HookProgram::of("/p/bin".into(), "kerf-1".to_owned(), std::iter::empty());
        assert_eq!((hook.path.as_str(), hook.arguments.len()), ("/p/bin/kerf-1/kerf", 2));
    }
}
