//! The table: point → survived.

use std::fmt;

use kerf_kubelet_plugin::testing::Strike;

use crate::run::Job;

/// What strikes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Column {
    /// The process is killed before the call has its effect.
    KilledBefore,
    /// The process is killed after that.
    KilledAfter,
    /// The power is cut after the call, and what was not synced may be lost.
    PowerCut,
    /// The call fails once.
    Fails,
    /// The call and all like it fail for the rest of the work.
    FailsOn,
    /// The file system of the call can only be read for the rest of the work.
    ReadOnly,
    /// No file can be opened for the rest of the work.
    NoFiles,
    /// The call has its effect, and its answer comes too late.
    Late,
}

impl Column {
    /// All of them, in order.
    pub const ALL: [Self; 8] = [
        Self::KilledBefore,
        Self::KilledAfter,
        Self::PowerCut,
        Self::Fails,
        Self::FailsOn,
        Self::ReadOnly,
        Self::NoFiles,
        Self::Late,
    ];

    /// Those that strike a call of the process.
    pub(crate) const STRIKES: [(Self, Strike); 7] = [
        (Self::KilledBefore, Strike::KilledBefore),
        (Self::KilledAfter, Strike::KilledAfter),
        (Self::Fails, Strike::Fails),
        (Self::FailsOn, Strike::FailsOn),
        (Self::ReadOnly, Strike::ReadOnly),
        (Self::NoFiles, Strike::NoFiles),
        (Self::Late, Strike::Late),
    ];

    /// Whether there is such a thing at a point: what only reads leaves nothing
    /// that a death could find, a full or dying disk answers differently.
    pub(crate) fn applies(self, point: &str) -> bool {
        let is = |kinds: &[&str]| kinds.iter().any(|kind| point.starts_with(kind));
        let reads = is(&["read ", "list "]);
        let is_hardware = is(&["set ", "create ", "destroy "]);
        match self {
            Self::KilledBefore | Self::KilledAfter | Self::PowerCut => !reads,
            Self::Fails | Self::FailsOn => true,
            Self::ReadOnly => !reads && !is_hardware && !is(&["sync "]),
            Self::NoFiles => reads || is(&["write "]),
            Self::Late => is_hardware,
        }
    }

    /// What it is called.
    pub fn name(self) -> &'static str {
        match self {
            Self::KilledBefore => "killed <",
            Self::KilledAfter => "killed >",
            Self::PowerCut => "power cut",
            Self::Fails => "fails",
            Self::FailsOn => "fails on",
            Self::ReadOnly => "read-only",
            Self::NoFiles => "no files",
            Self::Late => "late",
        }
    }
}

/// The runs of a point that was struck in one way.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cell {
    /// How many.
    pub runs: usize,
    /// What did not hold in those that were not survived.
    pub failures: Vec<String>,
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.runs, self.failures.len()) {
            (0, _) => f.pad("-"),
            (runs, 0) => f.pad(&format!("{runs} ok")),
            (runs, failed) => f.pad(&format!("{failed}/{runs} LOST")),
        }
    }
}

/// A point.
#[derive(Debug, Clone)]
pub struct Row {
    /// What is claimed.
    pub scenario: &'static str,
    /// What is being done.
    pub work: &'static str,
    /// Which call of it.
    pub number: usize,
    /// What that call is.
    pub point: String,
    /// In the order of [`Column::ALL`].
    pub cells: [Cell; 8],
}

impl Row {
    pub(crate) fn new(job: &Job<'_>, number: usize, point: &str) -> Self {
        Self {
            scenario: job.scenario.name,
            work: job.work.name(),
            number,
            point: point.to_owned(),
            cells: Default::default(),
        }
    }

    pub(crate) fn count(&mut self, column: Column, result: Result<(), String>) {
        let cell = &mut self.cells[column as usize];
        cell.runs += 1;
        cell.failures.extend(result.err());
    }
}

/// All points.
#[derive(Debug, Clone, Default)]
pub struct Table {
    /// In the order of scenarios and works.
    pub rows: Vec<Row>,
}

impl Table {
    /// How many runs there were of a column, and what did not hold in them.
    pub fn of(&self, column: Column) -> (usize, Vec<&str>) {
        let cells = self.rows.iter().map(|row| &row.cells[column as usize]);
        let runs = cells.clone().map(|cell| cell.runs).sum();
        (runs, cells.flat_map(|cell| cell.failures.iter().map(String::as_str)).collect())
    }

    /// How many runs there were, and how many were not survived.
    pub fn total(&self) -> (usize, usize) {
        let all = Column::ALL.map(|column| self.of(column));
        (all.iter().map(|(runs, _)| runs).sum(), all.iter().map(|(_, failures)| failures.len()).sum())
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut last = ("", "");
        for row in &self.rows {
            if last != (row.scenario, row.work) {
                last = (row.scenario, row.work);
                writeln!(f, "\n{}: {}", row.scenario, row.work)?;
                write!(f, "  {:>3}  {:<76}", "", "point")?;
                Column::ALL.iter().try_for_each(|column| write!(f, " {:>10}", column.name()))?;
                writeln!(f)?;
            }
            write!(f, "  {:>3}  {:<76}", row.number, row.point)?;
            row.cells.iter().try_for_each(|cell| write!(f, " {cell:>10}"))?;
            writeln!(f)?;
        }
        for row in &self.rows {
            for (column, cell) in Column::ALL.iter().zip(&row.cells) {
                for failure in &cell.failures {
                    let Row { scenario, work, number, point, .. } = row;
                    writeln!(
                        f,
                        "\nLOST: {scenario}, {work}, {number} {point}, {}: {failure}",
                        column.name()
                    )?;
                }
            }
        }
        let (runs, failures) = self.total();
        writeln!(f, "\n{} points, {runs} runs, {failures} not survived", self.rows.len())
    }
}
