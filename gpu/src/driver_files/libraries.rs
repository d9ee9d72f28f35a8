//! The libraries of one driver version: every `lib*.so.<version>` in the
//! folders of libraries, with the links that the installation has for it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::places::{
    DEVELOPMENT_LINKS, ESSENTIAL, LIBRARY_FOLDERS, NOT_FOR_CONTAINERS, OF_OWN_VERSION, SONAMES, VDPAU,
};
use super::{FilesError, is_file};
use crate::roots::resolve_in;

/// A library, its paths relative to the driver root.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Library {
    /// The file, links resolved.
    pub(super) file: PathBuf,
    /// The folder in which containers get it.
    pub(super) folder: PathBuf,
    /// The name of the file there.
    pub(super) name: String,
    /// The other names it has, the SONAME first.
    pub(super) links: Vec<String>,
    /// Whether loaders ask for it by name.
    pub(super) by_name: bool,
}

impl Library {
    /// The name that loaders ask for.
    pub(super) fn soname(&self) -> &str {
        let is_soname = |link: &&String| number(link).is_some() && stem(link) == self.stem();
        self.links.iter().find(is_soname).unwrap_or(&self.name)
    }

    fn stem(&self) -> &str {
        stem(&self.name)
    }
}

/// A folder of libraries and what is in it.
struct Shelf {
    folder: PathBuf,
    container: PathBuf,
    names: Vec<String>,
    by_name: bool,
}

/// The management library, links resolved, and the folder in which containers
/// get what lies where its name was found.
pub(super) fn management(driver: &Path) -> Option<(PathBuf, &'static str)> {
    LIBRARY_FOLDERS.iter().find_map(|(folder, container)| {
        Some((resolve_in(driver, &Path::new(folder).join("libnvidia-ml.so.1"))?, *container))
    })
}

/// All libraries of a version, in the order of their names.
pub(super) fn find(driver: &Path, version: &str) -> Result<Vec<Library>, FilesError> {
    let shelves = shelves(driver)?;
    let mut found: BTreeMap<String, Library> = BTreeMap::new();
    let mut files: BTreeSet<PathBuf> = BTreeSet::new();
    let mut take = |shelf: &Shelf, name: &str, file: PathBuf| {
        if !found.contains_key(name) && files.insert(file.clone()) {
            let library = Library {
                file,
                folder: shelf.container.clone(),
                name: name.to_owned(),
                links: Vec::new(),
                by_name: shelf.by_name,
            };
            found.insert(name.to_owned(), library);
        }
    };
    let suffix = format!(".so.{version}");
    for shelf in &shelves {
        for name in &shelf.names {
            let versioned = name.strip_suffix(&suffix);
            if versioned.is_some_and(|stem| !NOT_FOR_CONTAINERS.contains(&stem))
                && let Some(file) = shelf.file(driver, name)
            {
                take(shelf, name, file);
            }
        }
    }
    let sonames = SONAMES.iter().map(|(stem, number)| format!("{stem}.so.{number}"));
    let own = OF_OWN_VERSION.iter().map(|name| (*name).to_owned());
    for (name, own) in sonames.map(|name| (name, false)).chain(own.map(|name| (name, true))) {
        for shelf in shelves.iter().filter(|shelf| shelf.names.contains(&name)) {
            let Some(file) = shelf.file(driver, &name) else { continue };
            let real = file.file_name().and_then(|name| name.to_str()).unwrap_or(&name).to_owned();
            if own {
                take(shelf, &real, file);
            } else if !tells_version(&real, stem(&name)) {
                // A tree without versioned names serves the SONAME alone.
                take(shelf, &name, file);
            }
        }
    }
    check(&shelves, &found, version)?;
    let mut libraries: Vec<Library> = found.into_values().collect();
    link(driver, &shelves, &mut libraries);
    Ok(libraries)
}

/// The folders of libraries that there are, each once.
fn shelves(driver: &Path) -> Result<Vec<Shelf>, FilesError> {
    let table = LIBRARY_FOLDERS.iter().map(|(folder, container)| (PathBuf::from(folder), *container));
    // Where the management library's links lead is a folder of the driver too,
    // wherever it is: Debian's `nvidia/tesla-535`.
    let led_to =
        management(driver).and_then(|(file, container)| Some((file.parent()?.to_owned(), container)));
    let mut shelves: Vec<Shelf> = Vec::new();
    for (folder, container) in table.chain(led_to) {
        for (folder, container, by_name) in [
            (folder.join(VDPAU), Path::new(container).join(VDPAU), false),
            (folder, PathBuf::from(container), true),
        ] {
            let Some(folder) = resolve_in(driver, &folder) else { continue };
            if shelves.iter().any(|shelf| shelf.folder == folder) {
                continue;
            }
            let names = names(&driver.join(&folder))
                .map_err(|source| FilesError::Unreadable { path: driver.join(&folder), source })?;
            shelves.push(Shelf { folder, container, names, by_name });
        }
    }
    Ok(shelves)
}

/// The libraries in a folder, in order; none where it is none.
fn names(folder: &Path) -> io::Result<Vec<String>> {
    let entries = match fs::read_dir(folder) {
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(Vec::new());
        }
        entries => entries?,
    };
    let mut names = Vec::new();
    for entry in entries {
        let name = entry?.file_name();
        // The version becomes part of paths and of an answer in UTF-8.
        if let Some(name) = name.to_str().filter(|name| name.starts_with("lib") && name.contains(".so")) {
            names.push(name.to_owned());
        }
    }
    names.sort_unstable();
    Ok(names)
}

impl Shelf {
    fn file(&self, driver: &Path, name: &str) -> Option<PathBuf> {
        resolve_in(driver, &self.folder.join(name)).filter(|file| is_file(driver, file))
    }
}

/// That what nothing computes without is not there in another version alone: an
/// upgrade is under way then, or was not followed by a reboot.
fn check(shelves: &[Shelf], found: &BTreeMap<String, Library>, version: &str) -> Result<(), FilesError> {
    for essential in ESSENTIAL {
        if found.values().any(|library| library.stem() == *essential) {
            continue;
        }
        let names = shelves.iter().flat_map(|shelf| &shelf.names);
        let other = names
            .filter(|name| tells_version(name, essential))
            .find(|name| !name.ends_with(&format!(".so.{version}")));
        if let Some(other) = other {
            return Err(FilesError::OtherVersion { version: version.to_owned(), found: other.clone() });
        }
    }
    if !found.values().any(|library| library.stem() == "libnvidia-ml") {
        return Err(FilesError::NoLibrary { version: version.to_owned() });
    }
    Ok(())
}

/// Gives libraries the names they have in the tree, and those they need.
fn link(driver: &Path, shelves: &[Shelf], libraries: &mut [Library]) {
    let of_file: BTreeMap<PathBuf, usize> =
        libraries.iter().enumerate().map(|(index, library)| (library.file.clone(), index)).collect();
    for shelf in shelves {
        for name in shelf.names.iter().filter(|name| number(name).is_some() || is_development(name)) {
            let library = shelf.file(driver, name).and_then(|file| of_file.get(&file));
            if let Some(library) = library.and_then(|index| libraries.get_mut(*index))
                && library.name != *name
                && !library.links.contains(name)
            {
                library.links.push(name.clone());
            }
        }
    }
    for library in libraries {
        let stem = library.stem().to_owned();
        let soname = SONAMES.iter().find(|(known, _)| *known == stem);
        if let Some((_, number)) = soname
            && !library.links.iter().chain([&library.name]).any(|name| self::number(name) == Some(*number))
        {
            library.links.push(format!("{stem}.so.{number}"));
        }
        let development = format!("{stem}.so");
        if DEVELOPMENT_LINKS.contains(&stem.as_str()) && !library.links.contains(&development) {
            library.links.push(development);
        }
        // The library's own SONAME, other SONAMEs that lead to it, the rest.
        library.links.sort_by_key(|name| (number(name).is_none(), self::stem(name) != stem, name.clone()));
    }
}

/// `libcuda` of `libcuda.so.1`.
fn stem(name: &str) -> &str {
    name.split_once(".so").map_or(name, |(stem, _)| stem)
}

/// 1 of `libcuda.so.1`; none where the name has no number, or a version.
fn number(name: &str) -> Option<u32> {
    name.split_once(".so.")?.1.parse().ok()
}

/// Whether programs are linked with this name.
pub(super) fn is_development(name: &str) -> bool {
    name.split_once(".so").is_some_and(|(_, rest)| rest.is_empty())
}

/// Whether a name is that of a library with a version, and not only a number.
fn tells_version(name: &str, stem: &str) -> bool {
    name.strip_prefix(stem).and_then(|rest| rest.strip_prefix(".so.")).is_some_and(|rest| rest.contains('.'))
}
