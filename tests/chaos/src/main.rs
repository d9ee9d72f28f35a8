//! Prints the whole table, or that of the works with all given words in their
//! names; fails where a point was not survived. With `--list`, those names alone.

#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, reason = "the table is what this is for")]

use std::io::Write as _;
use std::process::ExitCode;
use std::time::Instant;

use kerf_chaos::{Sabotage, Scenario, Selection, Work, scenarios, table};

const LIST: &str = "--list";

fn main() -> ExitCode {
    let started = Instant::now();
    let (lists, words): (Vec<String>, Vec<String>) = std::env::args().skip(1).partition(|word| word == LIST);
    let name = |scenario: &Scenario, work: Work| format!("{}: {}", scenario.name, work.name());
    let is_wanted = |name: &str| words.iter().all(|word| name.contains(word.as_str()));
    let names: Vec<String> = scenarios()
        .iter()
        .flat_map(|scenario| Work::ALL.map(|work| name(scenario, work)))
        .filter(|name| is_wanted(name))
        .collect();
    if names.is_empty() {
        return nothing(&words);
    }
    if !lists.is_empty() {
        // Nobody may read to the end of it.
        let _ = writeln!(std::io::stdout(), "{}", names.join("\n"));
        return ExitCode::SUCCESS;
    }
    let selection = Selection { seed: 0, share: 1.0 };
    let all = table(Sabotage::None, selection, |scenario, work| is_wanted(&name(scenario, work)));
    if all.rows.is_empty() {
        // There is not every work in every scenario.
        return nothing(&words);
    }
    println!("{all}took {:.0} s", started.elapsed().as_secs_f64());
    if all.total().1 == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn nothing(words: &[String]) -> ExitCode {
    eprintln!("error: nothing has all of {words:?} in its name and can be struck; {LIST} prints the names");
    ExitCode::from(2)
}
