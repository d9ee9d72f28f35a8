//! What is typed and what comes of it.

use std::process::{Command, Output};

fn chaos(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kerf-chaos")).args(words).output().expect("it runs")
}

#[test]
fn words_that_choose_nothing_are_an_error_that_says_where_the_names_are() {
    // The second is a work that this scenario does not have.
    for words in [&["prepair"][..], &["a whole GPU: ", "destroyed by hand"]] {
        let Output { status, stdout, stderr } = chaos(words);
        let said = String::from_utf8_lossy(&stderr);
        assert_eq!((status.code(), stdout.is_empty()), (Some(2), true), "{said}");
        assert!(said.contains(&format!("{words:?}")) && said.contains("--list"), "{said}");
    }
}

#[test]
fn the_list_has_every_scenario_and_work_or_the_chosen_ones() {
    let lines = |words: &[&str]| -> Vec<String> {
        let text = String::from_utf8(chaos(words).stdout).expect("text");
        text.lines().map(str::to_owned).collect()
    };
    assert_eq!(lines(&["--list"]).len(), kerf_chaos::scenarios().len() * kerf_chaos::Work::ALL.len());
    assert_eq!(lines(&["--list", "several", "publish"]), ["several GPUs: publish"]);
}
