//! A copy's files: written beside their place and renamed into it together.

use std::collections::BTreeMap;
use std::fs::{self, File, Permissions};
use std::hash::{DefaultHasher, Hasher};
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{StatVfsMountFlags, statvfs};

/// What everybody may read, run and pass through, but not change.
const MODE: u32 = 0o755;

/// Another instance may write the same copy: names of drafts are drawn.
pub(super) fn draft_name(copy: &str) -> String {
    format!(".{copy}.{:016x}", fastrand::u64(..))
}

pub(super) fn is_draft(name: &str) -> bool {
    name.starts_with('.')
}

/// A number that is another one for other files. It need not be hard to forge:
/// the files are our own.
pub(super) fn content<'a>(parts: impl Iterator<Item = (&'a String, &'a Path)>) -> io::Result<u64> {
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

/// A file of a copy, as it was when this process began: an upgrade may replace
/// it under a process that goes on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) path: PathBuf,
    pub(crate) length: u64,
}

/// Whether a copy has all its files, as far as the folder tells.
pub(super) fn is_there(folder: &Path, parts: &BTreeMap<String, Part>) -> bool {
    let is_open = |metadata: &fs::Metadata| metadata.permissions().mode() & 0o7777 == MODE;
    fs::symlink_metadata(folder).is_ok_and(|found| found.is_dir() && is_open(&found))
        && parts.iter().all(|(name, part)| {
            fs::symlink_metadata(folder.join(name))
                .is_ok_and(|found| found.is_file() && is_open(&found) && found.len() == part.length)
        })
}

/// Whether a copy has all its files and every byte of them.
pub(super) fn is_intact(folder: &Path, parts: &BTreeMap<String, Part>, wanted: u64) -> bool {
    let files: Vec<(&String, PathBuf)> = parts.keys().map(|name| (name, folder.join(name))).collect();
    is_there(folder, parts)
        && content(files.iter().map(|(name, path)| (*name, path.as_path())))
            .is_ok_and(|found| found == wanted)
}

/// Writes a copy. What is in its place and not the same is replaced.
pub(super) fn write(
    copies: &Path,
    copy: &str,
    parts: &BTreeMap<String, Part>,
    wanted: u64,
) -> io::Result<()> {
    make_open(copies)?;
    if statvfs(copies)?.f_flag.contains(StatVfsMountFlags::NOEXEC) {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            "it is on a file system that is mounted `noexec`",
        ));
    }
    let draft = copies.join(draft_name(copy));
    let written = fill(&draft, parts).and_then(|()| {
        if !is_intact(&draft, parts, wanted) {
            return Err(io::Error::other("this program's files were replaced since it began; restart kerf"));
        }
        place(copies, copy, &draft, parts, wanted)
    });
    if written.is_err() {
        let _ = fs::remove_dir_all(&draft);
    }
    written
}

/// Makes a folder, and lets everybody pass through what was made: the umask may
/// say otherwise. What somebody else has put there, a link too, stays his.
fn make_open(copies: &Path) -> io::Result<()> {
    let is_new = |folder: &&Path| folder.symlink_metadata().is_err();
    let new: Vec<&Path> = copies.ancestors().take_while(is_new).collect();
    fs::create_dir_all(copies)?;
    let own = fs::symlink_metadata(copies)?.is_dir().then_some(copies);
    for folder in new.into_iter().chain(own) {
        fs::set_permissions(folder, Permissions::from_mode(MODE))?;
    }
    Ok(())
}

fn fill(draft: &Path, parts: &BTreeMap<String, Part>) -> io::Result<()> {
    fs::create_dir(draft)?;
    fs::set_permissions(draft, Permissions::from_mode(MODE))?;
    for (name, part) in parts {
        let file = draft.join(name);
        let mut to = File::create_new(&file)?;
        io::copy(&mut File::open(&part.path)?, &mut to)?;
        to.set_permissions(Permissions::from_mode(MODE))?;
        to.sync_all()?;
    }
    File::open(draft)?.sync_all()
}

/// Gives a draft its name. The kernel refuses a folder that has something in
/// it, so what is there steps aside first, unless it is as good.
fn place(
    copies: &Path,
    copy: &str,
    draft: &Path,
    parts: &BTreeMap<String, Part>,
    wanted: u64,
) -> io::Result<()> {
    let folder = copies.join(copy);
    let named = |result: io::Result<()>| match result {
        // Another instance of the same version was quicker.
        Err(_) if is_intact(&folder, parts, wanted) => fs::remove_dir_all(draft),
        Err(error) => Err(error),
        Ok(()) => File::open(copies)?.sync_all(),
    };
    let first = fs::rename(draft, &folder);
    if first.is_ok() || is_intact(&folder, parts, wanted) {
        return named(first);
    }
    let aside = copies.join(draft_name(copy));
    match fs::rename(&folder, &aside) {
        Ok(()) => remove(&aside)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(_) => return first,
    }
    named(fs::rename(draft, &folder))
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => fs::remove_file(path),
        removed => removed,
    }
}
