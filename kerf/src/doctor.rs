//! `kerf doctor`: what keeps a node from serving GPUs, why, and what to do.
//!
//! It looks and changes nothing. What it can find stands in one table
//! ([`finding`]); the other modules look, each at one side of the node.

mod api;
mod dump;
mod finding;
mod gpus;
mod kubelet;
mod runtime;

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;

use rustix::fs::{Access, access};
use serde_json::json;

use self::finding::{Finding, Kind, Row, Severity};
use crate::arguments::DoctorArguments;
use crate::status;

/// Prints what is found. The code is 1 where an error was found.
pub(crate) fn run(arguments: &DoctorArguments) -> ExitCode {
    if arguments.dump_nvml {
        return match dump::dump(arguments.roots.hardware()) {
            Ok(text) if std::io::stdout().lock().write_all(text.as_bytes()).is_ok() => ExitCode::SUCCESS,
            Ok(_) => ExitCode::FAILURE,
            Err(error) => {
                eprintln!("kerf: {error:#}");
                ExitCode::FAILURE
            }
        };
    }
    let report = examine(arguments);
    let text = if arguments.json { report.json() } else { report.text() };
    let written = std::io::stdout().lock().write_all(text.as_bytes());
    let error = |finding: &Finding| finding.kind.row().severity == Severity::Error;
    if written.is_err() || report.findings.iter().any(error) { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

fn examine(arguments: &DoctorArguments) -> Report {
    let mut report = Report::default();
    let status = status::ask(&arguments.kubelet).and_then(|text| status::parse(&text));
    gpus::examine(&mut report, &arguments.roots, status.as_ref().ok());
    kubelet::examine(&mut report, arguments, &status);
    runtime::examine(&mut report, arguments);
    api::examine(&mut report, arguments);
    report
}

/// What was found, and what could not be looked at.
#[derive(Debug, Default)]
struct Report {
    findings: Vec<Finding>,
    skipped: Vec<String>,
}

impl Report {
    fn found(&mut self, kind: Kind, detail: impl Into<String>) {
        self.findings.push(Finding { kind, detail: detail.into() });
    }

    fn skipped(&mut self, reason: impl Into<String>) {
        self.skipped.push(reason.into());
    }

    fn json(&self) -> String {
        let findings: Vec<_> = self
            .findings
            .iter()
            .map(|Finding { kind, detail }| {
                let Row { id, severity, what, why, remedy } = kind.row();
                let severity = severity.as_str();
                json!({"id": id, "severity": severity, "what": what, "detail": detail, "why": why, "remedy": remedy})
            })
            .collect();
        format!("{:#}\n", json!({"findings": findings, "skipped": self.skipped}))
    }

    fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a String cannot fail.
        for Finding { kind, detail } in &self.findings {
            let Row { id, severity, what, why, remedy } = kind.row();
            let severity = severity.as_str();
            let _ = write!(
                text,
                "{severity} {id}: {what}\n  found:      {detail}\n  why:        {why}\n  what to do: {remedy}\n\n"
            );
        }
        for reason in &self.skipped {
            let _ = writeln!(text, "skipped: {reason}");
        }
        text.push_str(if self.findings.is_empty() { "nothing was found to be wrong\n" } else { "" });
        text
    }
}

/// Why a folder cannot be written to; none where it can.
fn unwritable(folder: &Path) -> Option<String> {
    let because = |reason: String| Some(format!("{}: {reason}", folder.display()));
    match folder.metadata() {
        Err(error) => because(error.to_string()),
        Ok(metadata) if !metadata.is_dir() => because("it is not a folder".to_owned()),
        Ok(_) => match access(folder, Access::WRITE_OK | Access::EXEC_OK) {
            Ok(()) => None,
            Err(errno) => because(std::io::Error::from(errno).to_string()),
        },
    }
}
