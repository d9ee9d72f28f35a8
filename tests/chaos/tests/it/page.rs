//! `docs/what-happens-when.md` names a test for everything that it says.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use kerf_chaos::{Column, Work, scenarios};

type Names = BTreeSet<String>;

/// The Rust files below a folder.
fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() && path.file_name().is_some_and(|name| name != "target" && name != ".git") {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// The functions that are marked as tests.
fn tests(text: &str) -> impl Iterator<Item = String> {
    let mut is_marked = false;
    text.lines().map(str::trim).filter_map(move |line| {
        is_marked |= line.starts_with("#[test]") || line.starts_with("#[tokio::test");
        let name = line.trim_start_matches("async ").strip_prefix("fn ")?.split('(').next()?;
        std::mem::take(&mut is_marked).then(|| name.to_owned())
    })
}

/// The cases of the end-to-end tests: a literal after `name:`.
fn cases(text: &str) -> impl Iterator<Item = String> {
    text.split("name: \"").skip(1).filter_map(|rest| Some(rest.split('"').next()?.to_owned()))
}

/// Names a page can use: of columns, and of all else that shows something.
struct Known {
    columns: Names,
    others: Names,
}

impl Known {
    fn of(root: &Path) -> Self {
        let mut paths = Vec::new();
        sources(root, &mut paths);
        let end_to_end = root.join("tests/e2e/tests/it");
        let mut others: Names = Work::ALL.iter().map(|work| work.name().to_owned()).collect();
        others.extend(scenarios().iter().map(|scenario| scenario.name.to_owned()));
        for path in paths {
            let text = std::fs::read_to_string(&path).expect("a source");
            others.extend(tests(&text));
            if path.starts_with(&end_to_end) {
                others.extend(cases(&text));
            }
        }
        Self { columns: Column::ALL.iter().map(|column| column.name().to_owned()).collect(), others }
    }

    /// What is wrong with what shows an event: "the columns `a` and `b` of all
    /// works, `c`".
    fn wrong(&self, shown: &str) -> Option<String> {
        let mut known = &self.others;
        let mut named = 0;
        for (index, part) in shown.split('`').enumerate() {
            if index % 2 == 0 {
                let is_next = part.trim() == "and";
                known = if part.contains("column") || is_next { &self.columns } else { &self.others };
            } else if known.contains(part) {
                named += 1;
            } else {
                return Some(format!("there is no `{part}`"));
            }
        }
        (named == 0).then(|| "no test is named".to_owned())
    }
}

/// What is wrong with a page, and how many rows it has.
fn faults(page: &str, known: &Known) -> (Vec<String>, usize) {
    let (mut faults, mut events) = (Vec::new(), Names::new());
    for line in page.lines().filter(|line| line.starts_with("| ")) {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let [event, _, _, shown] = cells[..] else { panic!("{line}") };
        if event == "event" || event.starts_with("---") {
            continue;
        }
        faults.extend(known.wrong(shown).map(|fault| format!("{event}: {fault}")));
        if !events.insert(event.to_owned()) {
            faults.push(format!("{event}: is there twice"));
        }
    }
    (faults, events.len())
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

#[test]
fn every_test_that_the_page_names_exists() {
    let page = std::fs::read_to_string(root().join("docs/what-happens-when.md")).expect("the page");
    let (faults, rows) = faults(&page, &Known::of(&root()));
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    assert!(rows > 20, "the page has only {rows} rows");
}

#[test]
fn a_page_that_names_what_shows_nothing_is_found_out() {
    let known = Known::of(&root());
    for (shown, fault) in [
        // Literals of no case, and functions that are no tests.
        ("`gpu`", "there is no `gpu`"),
        ("`partitions`", "there is no `partitions`"),
        // A column is no test, and a work is no column.
        ("`late`", "there is no `late`"),
        ("the columns `fails` and `publish` of all works", "there is no `publish`"),
        ("nothing", "no test is named"),
    ] {
        let (faults, _) = faults(&format!("| an event | does | sees | {shown} |"), &known);
        assert_eq!(faults, [format!("an event: {fault}")]);
    }
    let row = "| an event | does | sees | the column `late` of all works, `publish` |\n";
    assert_eq!(faults(row, &known), (Vec::new(), 1));
    assert_eq!(faults(&row.repeat(2), &known).0, ["an event: is there twice"]);
}
