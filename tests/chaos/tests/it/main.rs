//! A sample of the table, the same every time, and that the table can fail.

#![expect(clippy::expect_used, reason = "a test fails by panicking")]

mod page;
mod program;

use kerf_chaos::{Column, Sabotage, Selection, Table, Work, scenarios, table};

/// All of a work with two partitions on one GPU.
fn partitions(wanted: Work, sabotage: Sabotage, share: f64) -> Table {
    let name = "two partitions of one GPU";
    table(sabotage, Selection { seed: 0, share }, |scenario, work| scenario.name == name && work == wanted)
}

#[test]
fn a_sample_of_all_points_is_survived() {
    let sample = Selection { seed: 20_261_130, share: 0.04 };
    let table = table(Sabotage::None, sample, |_, _| true);
    eprintln!("{table}seed {}", sample.seed);
    assert_eq!(table.total().1, 0, "cargo xtask chaos prints the whole table");
    for scenario in scenarios() {
        for work in [Work::Prepare, Work::Unprepare, Work::JournalLost] {
            let points =
                table.rows.iter().filter(|row| (row.scenario, row.work) == (scenario.name, work.name()));
            assert!(points.count() > 4, "{}, {work:?}", scenario.name);
        }
    }
    for column in Column::ALL {
        assert!(table.of(column).0 > 4, "{column:?}");
    }
}

#[test]
fn points_have_the_names_of_what_is_done() {
    let table = partitions(Work::Prepare, Sabotage::None, 0.0);
    let (reads, names): (Vec<&str>, Vec<&str>) = table
        .rows
        .iter()
        .map(|row| row.point.as_str())
        .partition(|name| name.starts_with("read ") || name.starts_with("list "));
    assert!(reads.contains(&"list plugin/state/claims"), "{reads:?}");
    let entry = "plugin/state/claims/.c-uid_0000-01-00-0.json.tmp";
    assert_eq!(names.len(), 11, "{names:?}");
    assert_eq!(names[0], format!("write and sync {entry}"));
    assert_eq!(names[1], "rename to plugin/state/claims/c-uid_0000-01-00-0.json");
    assert_eq!(names[2], "create GPU instance at 4 of 0000:01:00.0");
}

#[test]
fn names_that_are_not_synced_are_seen() {
    let table = partitions(Work::Unprepare, Sabotage::NoSync, 0.5);
    assert!(!table.of(Column::PowerCut).1.is_empty());
}

#[test]
fn instances_that_are_not_destroyed_are_seen() {
    let table = partitions(Work::Prepare, Sabotage::NoDestroy, 0.3);
    for column in [Column::KilledBefore, Column::KilledAfter, Column::Fails] {
        assert!(!table.of(column).1.is_empty(), "{column:?}");
    }
}
