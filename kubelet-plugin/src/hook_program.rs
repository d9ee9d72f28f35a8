//! The program that CDI specs name as their hook: a copy of this one on the
//! host, in a folder named by its content.
//!
//! The host's C library may be older than ours, or another one (Talos has
//! musl): the copy brings the loader and libraries that this process runs
//! with, and is started by that loader. Containers restart with the specs they
//! were made with, so a former copy stays as long as a spec names it, and an
//! hour longer for containers that are made and not started yet.
//!
//! The runtime starts a hook as the container's root, which is nobody on the
//! host where the pod has a user namespace: everybody may read and run a copy.

mod copy;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tracing::{info, warn};

use self::copy::{Part, is_intact, is_there, write};

const PROGRAM: &str = "kerf";
const SUBCOMMAND: &str = "cdi-hook";

/// What marks a copy that no spec names, and since when.
const FORMER: &str = ".former";
/// How long such a copy stays.
const GRACE: Duration = Duration::from_hours(1);

/// A hook's program on the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HookProgram {
    /// The folder of all copies.
    pub(crate) copies: PathBuf,
    /// The name of this copy's folder.
    pub(crate) copy: String,
    /// Its files, and of what they are copies.
    pub(crate) parts: BTreeMap<String, Part>,
    /// What all of them have together, see [`copy::content`].
    pub(crate) content: u64,
    /// What the container runtime runs.
    pub(crate) path: String,
    /// Its arguments, its own name first.
    pub(crate) arguments: Vec<String>,
}

/// Why a hook's program is not where CDI specs say.
#[derive(Debug, thiserror::Error)]
#[error(
    "the program of the CDI hook, which every container with a GPU starts, cannot be put into {}; that must be a \
     folder that is writable, has 40 MB free and is not mounted `noexec` (--hook-root, chart value hookRoot)",
    folder.display()
)]
pub struct HookProgramError {
    /// The folder of copies.
    pub folder: PathBuf,
    /// Why.
    #[source]
    pub source: io::Error,
}

impl HookProgram {
    /// The program of this process, to be copied below a folder that has the
    /// same path on the host. To be called before the process loads libraries
    /// that it was not linked with.
    ///
    /// # Errors
    /// Its own files cannot be read.
    pub fn of_this_process(copies: PathBuf) -> io::Result<Self> {
        // This process's own, not those of the `/proc` that describes hardware.
        let maps = fs::read_to_string("/proc/self/maps")?;
        let mut parts = libraries(&maps, &std::env::current_exe()?);
        parts.insert(PROGRAM.to_owned(), PathBuf::from("/proc/self/exe"));
        let content = copy::content(parts.iter().map(|(name, path)| (name, path.as_path())))?;
        let part =
            |path: PathBuf| -> io::Result<Part> { Ok(Part { length: fs::metadata(&path)?.len(), path }) };
        let parts =
            parts.into_iter().map(|(name, path)| Ok((name, part(path)?))).collect::<io::Result<_>>()?;
        Ok(Self::of(copies, content, parts))
    }

    /// A program without files, for tests of what names it.
    #[cfg(feature = "testing")]
    pub(crate) fn of_nothing(copies: PathBuf) -> Self {
        Self::of(copies, copy::content(std::iter::empty()).unwrap_or_default(), BTreeMap::new())
    }

    /// How the parts of a copy are started.
    fn of(copies: PathBuf, content: u64, parts: BTreeMap<String, Part>) -> Self {
        let copy = format!("{PROGRAM}-{}-{content:016x}", env!("CARGO_PKG_VERSION"));
        let folder = copies.join(&copy);
        let in_folder = |name: &str| folder.join(name).display().to_string();
        let (path, arguments) = match parts.keys().find(|name| name.starts_with("ld-")) {
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
        Self { copies, copy, parts, content, path, arguments }
    }

    /// Makes the copy where it is not there: before a spec names it.
    pub(crate) fn ensure(&self) -> Result<(), HookProgramError> {
        if is_there(&self.copies.join(&self.copy), &self.parts) { Ok(()) } else { self.install() }
    }

    /// Looks at every byte of the copy, and makes it anew where one is another.
    pub(crate) fn verify(&self) -> Result<(), HookProgramError> {
        let folder = self.copies.join(&self.copy);
        // Of when another version was here in between.
        let _ = fs::remove_file(folder.join(FORMER));
        if is_intact(&folder, &self.parts, self.content) { Ok(()) } else { self.install() }
    }

    fn install(&self) -> Result<(), HookProgramError> {
        write(&self.copies, &self.copy, &self.parts, self.content)
            .map_err(|source| HookProgramError { folder: self.copies.clone(), source })?;
        info!(folder = %self.copies.join(&self.copy).display(), "the hook's program is in place");
        Ok(())
    }

    /// Removes the copies of former versions that `is_named` has not known for
    /// an hour, and what a crash left half written.
    pub(crate) fn sweep(&self, is_named: impl Fn(&str) -> bool) {
        let Ok(entries) = fs::read_dir(&self.copies) else { return };
        let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
        for name in names.filter(|name| *name != self.copy) {
            let folder = self.copies.join(&name);
            let is_over = if copy::is_draft(&name) {
                is_old(&folder)
            } else if !name.starts_with(&format!("{PROGRAM}-")) {
                false
            } else if is_named(&name) {
                let _ = fs::remove_file(folder.join(FORMER));
                false
            } else {
                let mark = folder.join(FORMER);
                let new = File::options().write(true).create_new(true).open(&mark);
                new.is_err_and(|error| error.kind() == io::ErrorKind::AlreadyExists) && is_old(&mark)
            };
            if is_over {
                match fs::remove_dir_all(&folder) {
                    Ok(()) => info!(name, "removed a former copy of the hook's program"),
                    Err(error) => warn!(name, %error, "a former copy of the hook's program stays"),
                }
            }
        }
    }
}

/// Whether something has been as it is for longer than the grace.
fn is_old(path: &Path) -> bool {
    let modified = fs::symlink_metadata(path).and_then(|metadata| metadata.modified());
    modified.is_ok_and(|modified| modified.elapsed().is_ok_and(|age| age > GRACE))
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
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::process::Command;
    use std::time::SystemTime;

    use super::*;

    fn installed(folder: &Path) -> HookProgram {
        let hook = HookProgram::of_this_process(folder.to_owned()).expect("a program");
        hook.ensure().expect("a copy");
        hook
    }

    #[test]
    fn the_copy_runs_with_its_own_loader_and_libraries() {
        let folder = tempfile::tempdir().expect("a folder");
        let hook = installed(folder.path());
        assert_eq!(installed(folder.path()), hook);
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
    fn a_copy_that_was_damaged_is_made_again() {
        let folder = tempfile::tempdir().expect("a folder");
        let hook = installed(folder.path());
        let program = PathBuf::from(&hook.path);
        let mode = |path: &Path| fs::metadata(path).expect("it is there").permissions().mode() & 0o7777;
        let damage: [&dyn Fn(); 5] = [
            &|| fs::write(&program, "").expect("an empty file"),
            &|| fs::remove_file(&program).expect("no file"),
            &|| fs::set_permissions(&program, fs::Permissions::from_mode(0o644)).expect("not to be run"),
            &|| {
                fs::set_permissions(program.parent().expect("a folder"), fs::Permissions::from_mode(0o700))
                    .expect("only for the owner");
            },
            &|| {
                fs::remove_file(&program).expect("no file");
                symlink("/proc/self/exe", &program).expect("a link");
            },
        ];
        for (number, damage) in damage.iter().enumerate() {
            damage();
            hook.ensure().expect("a copy");
            assert!(fs::symlink_metadata(&program).expect("a file").is_file(), "damage {number}");
            assert_eq!((mode(&program), mode(program.parent().expect("a folder"))), (0o755, 0o755));
        }
        // As long as before: only the content tells.
        let length = fs::metadata(&program).expect("a file").len();
        fs::write(&program, vec![0; usize::try_from(length).expect("small")]).expect("zeroes");
        hook.verify().expect("a copy");
        assert_ne!(fs::read(&program).expect("a file")[..4], [0; 4]);
        assert_eq!(fs::read_dir(&hook.copies).expect("a folder").count(), 1, "a draft is left");
    }

    #[test]
    fn everybody_may_run_a_copy_whatever_the_umask_was_for_its_folders() {
        let folder = tempfile::tempdir().expect("a folder");
        let copies = folder.path().join("copies");
        fs::create_dir(&copies).expect("a folder");
        fs::set_permissions(&copies, fs::Permissions::from_mode(0o700)).expect("only for the owner");
        let hook = installed(&copies);
        for path in [&copies, &copies.join(&hook.copy), Path::new(&hook.path)] {
            let mode = fs::metadata(path).expect("it is there").permissions().mode();
            assert_eq!(mode & 0o7777, 0o755, "{}", path.display());
        }
    }

    #[test]
    fn a_copy_that_cannot_be_made_is_an_error_that_leaves_nothing() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut hook = HookProgram::of_this_process(folder.path().to_owned()).expect("a program");
        hook.parts.insert("libzz.so".to_owned(), Part { path: folder.path().join("nowhere"), length: 1 });
        let error = hook.ensure().expect_err("a file is missing");
        assert!(error.to_string().contains("--hook-root"), "{error}");
        assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 0, "a draft is left");
    }

    #[test]
    fn files_that_were_replaced_since_the_start_make_no_copy() {
        let folder = tempfile::tempdir().expect("a folder");
        let library = folder.path().join("libx.so");
        fs::write(&library, "old").expect("a file");
        let copies = folder.path().join("copies");
        let name = "libx.so".to_owned();
        let content = copy::content([(&name, library.as_path())].into_iter()).expect("content");
        let parts = BTreeMap::from([(name, Part { path: library.clone(), length: 3 })]);
        let hook = HookProgram::of(copies.clone(), content, parts);
        fs::write(&library, "new").expect("a file");
        let error = hook.ensure().expect_err("another file");
        assert!(error.source.to_string().contains("restart kerf"), "{error:?}");
        assert_eq!(fs::read_dir(&copies).expect("a folder").count(), 0, "a draft is left");
        fs::write(&library, "old").expect("a file");
        hook.ensure().expect("a copy");
    }

    #[test]
    fn what_a_link_leads_to_stays_as_it_is() {
        let folder = tempfile::tempdir().expect("a folder");
        let [target, link] = ["target", "link"].map(|name| folder.path().join(name));
        fs::create_dir(&target).expect("a folder");
        fs::set_permissions(&target, fs::Permissions::from_mode(0o700)).expect("only for the owner");
        symlink(&target, &link).expect("a link");
        installed(&link);
        assert_eq!(fs::metadata(&target).expect("a folder").permissions().mode() & 0o7777, 0o700);
    }

    #[test]
    fn many_who_make_the_same_copy_at_once_all_have_it() {
        let folder = tempfile::tempdir().expect("a folder");
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(|| installed(folder.path()))).collect();
            for thread in threads {
                let hook = thread.join().expect("no panic");
                assert!(is_intact(&hook.copies.join(&hook.copy), &hook.parts, hook.content));
            }
        });
        assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 1, "a draft is left");
    }

    #[test]
    fn a_former_copy_goes_an_hour_after_no_spec_names_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let hook = installed(folder.path());
        let [former, draft, other] = ["kerf-0.0.1-00", &copy::draft_name("kerf-0.0.1-00"), "other"]
            .map(|name| folder.path().join(name));
        for folder in [&former, &draft, &other] {
            fs::create_dir(folder).expect("a folder");
        }
        let age = |path: &Path, seconds| {
            let then = SystemTime::now() - Duration::from_secs(seconds);
            File::open(path).and_then(|file| file.set_modified(then)).expect("a time");
        };
        age(&former, 100_000);
        hook.sweep(|_| false);
        assert!(former.exists() && draft.exists(), "a container may be made and not started");
        age(&former.join(FORMER), 3_500);
        hook.sweep(|_| false);
        assert!(former.exists());
        age(&former.join(FORMER), 3_700);
        hook.sweep(|name| name == "kerf-0.0.1-00");
        assert!(former.exists(), "a spec names it again");
        hook.sweep(|_| false);
        assert!(former.exists(), "and the hour begins anew");
        age(&former.join(FORMER), 3_700);
        age(&draft, 3_700);
        age(&other, 3_700);
        hook.sweep(|_| false);
        assert!(!former.exists() && !draft.exists());
        assert!(other.exists() && folder.path().join(&hook.copy).exists());
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
        let parts = found.into_iter().map(|(name, path)| (name, Part { path, length: 1 })).collect();
        let hook = HookProgram::of("/p/bin".into(), 1, parts);
        let folder = format!("/p/bin/kerf-{}-0000000000000001", env!("CARGO_PKG_VERSION"));
        assert_eq!(hook.path, format!("{folder}/ld-linux-x86-64.so.2"));
        let program = format!("{folder}/kerf");
        let expected = ["ld-linux-x86-64.so.2", "--library-path", &folder, &program, "cdi-hook"];
        assert_eq!(hook.arguments, expected);
        let hook = HookProgram::of("/p/bin".into(), 1, BTreeMap::new());
        assert_eq!((hook.path, hook.arguments.len()), (program, 2));
    }
}
