//! `docs/what-happens-when.md` names a test for everything that it says.

use std::path::Path;

/// The text of every Rust file below a folder.
fn sources(folder: &Path, text: &mut String) {
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() && path.file_name().is_some_and(|name| name != "target" && name != ".git") {
            sources(&path, text);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            text.push_str(&std::fs::read_to_string(&path).expect("a source"));
        }
    }
}

#[test]
fn every_test_that_the_page_names_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let page = std::fs::read_to_string(root.join("docs/what-happens-when.md")).expect("the page");
    let mut text = String::new();
    sources(&root, &mut text);
    let mut rows = 0;
    for line in page.lines().filter(|line| line.starts_with("| ")) {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let [event, _, _, shown] = cells[..] else { panic!("{line}") };
        if event == "event" || event.starts_with("---") {
            continue;
        }
        rows += 1;
        let named: Vec<&str> = shown.split('`').skip(1).step_by(2).collect();
        assert!(!named.is_empty(), "{event} names no test");
        for name in named {
            let exists = text.contains(&format!("fn {name}(")) || text.contains(&format!("\"{name}\""));
            assert!(exists, "{event}: there is no test or case `{name}`");
        }
    }
    assert!(rows > 20, "the page has only {rows} rows");
}
