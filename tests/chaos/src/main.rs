//! Prints the whole table, or that of the works with all given words in their
//! names; fails where a point was not survived.

#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, reason = "the table is what this is for")]

use std::process::ExitCode;
use std::time::Instant;

use kerf_chaos::{Sabotage, Selection, table};

fn main() -> ExitCode {
    let started = Instant::now();
    let words: Vec<String> = std::env::args().skip(1).collect();
    let all = table(Sabotage::None, Selection { seed: 0, share: 1.0 }, |scenario, work| {
        let name = format!("{}: {}", scenario.name, work.name());
        words.iter().all(|word| name.contains(word.as_str()))
    });
    println!("{all}took {:.0} s", started.elapsed().as_secs_f64());
    if all.total().1 == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
