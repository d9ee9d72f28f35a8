//! Results, as text, JSON and `JUnit`, and the table of all checks.

use std::fmt::Write as _;

use serde::Serialize;
use serde_json::json;

use crate::check::Check;

/// What came of a check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "result", content = "reason", rename_all = "kebab-case")]
pub enum Verdict {
    /// It holds.
    Pass,
    /// It does not, and why.
    Fail(String),
    /// It was not looked at, and why.
    NotApplicable(String),
}

/// A check and what came of it.
#[derive(Debug, Clone, Serialize)]
pub struct Finding {
    /// The check's id.
    pub id: &'static str,
    /// What must hold.
    pub says: &'static str,
    /// Whose word that is.
    pub reference: &'static str,
    /// Whether it does.
    #[serde(flatten)]
    pub verdict: Verdict,
    /// How long it took to find out.
    pub seconds: f64,
}

/// How many passed, failed and did not apply.
fn counts(findings: &[Finding]) -> [usize; 3] {
    let count = |is: fn(&Verdict) -> bool| findings.iter().filter(|finding| is(&finding.verdict)).count();
    [
        count(|verdict| matches!(verdict, Verdict::Pass)),
        count(|verdict| matches!(verdict, Verdict::Fail(_))),
        count(|verdict| matches!(verdict, Verdict::NotApplicable(_))),
    ]
}

/// A result in words: two lines where there is a reason.
pub fn text(finding: &Finding) -> String {
    let (word, reason) = match &finding.verdict {
        Verdict::Pass => ("pass", None),
        Verdict::Fail(reason) => ("FAIL", Some(reason)),
        Verdict::NotApplicable(reason) => ("n/a ", Some(reason)),
    };
    let mut text = format!("{word}  {:<12} {} ({:.1} s)\n", finding.id, finding.says, finding.seconds);
    if let Some(reason) = reason {
        let _ = writeln!(text, "      {reason}");
    }
    if matches!(finding.verdict, Verdict::Fail(_)) {
        let _ = writeln!(text, "      reference: {}", finding.reference);
    }
    text
}

/// All results in one sentence.
pub fn summary(findings: &[Finding]) -> String {
    let [passed, failed, other] = counts(findings);
    format!("{passed} passed, {failed} failed, {other} not applicable")
}

/// All results as a JSON object.
pub fn json(driver: &str, findings: &[Finding]) -> String {
    let [passed, failed, not_applicable] = counts(findings);
    let value = json!({
        "driver": driver,
        "passed": passed,
        "failed": failed,
        "notApplicable": not_applicable,
        "checks": findings,
    });
    format!("{value:#}\n")
}

/// All results as a `JUnit` test suite.
pub fn junit(driver: &str, findings: &[Finding]) -> String {
    let [_, failed, skipped] = counts(findings);
    let mut text = format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuite name=\"dra-conformance {}\" tests=\"{}\" failures=\"{failed}\" skipped=\"{skipped}\">\n",
        escaped(driver),
        findings.len()
    );
    for finding in findings {
        let _ = write!(
            text,
            "  <testcase classname=\"{}\" name=\"{}\" time=\"{:.3}\"",
            finding.id,
            escaped(finding.says),
            finding.seconds
        );
        let _ = match &finding.verdict {
            Verdict::Pass => writeln!(text, "/>"),
            Verdict::Fail(reason) => {
                writeln!(
                    text,
                    "><failure message=\"{}\">{}</failure></testcase>",
                    escaped(reason),
                    escaped(finding.reference)
                )
            }
            Verdict::NotApplicable(reason) => {
                writeln!(text, "><skipped message=\"{}\"/></testcase>", escaped(reason))
            }
        };
    }
    text + "</testsuite>\n"
}

/// Text for XML. Characters that XML cannot have at all are left out.
fn escaped(text: &str) -> String {
    let mut out = String::new();
    for character in text.chars() {
        match character {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\n' => out.push_str("&#10;"),
            character if character.is_control() => {}
            character => out.push(character),
        }
    }
    out
}

/// All checks as a table in Markdown.
pub fn table<'a>(checks: impl IntoIterator<Item = &'a Check>) -> String {
    let mut text = "| id | what must hold | reference | needs |\n| --- | --- | --- | --- |\n".to_owned();
    for check in checks {
        let needs: Vec<String> = check.needs.iter().map(|need| format!("{need:?}").to_lowercase()).collect();
        let _ =
            writeln!(text, "| {} | {} | {} | {} |", check.id, check.says, check.reference, needs.join(", "));
    }
    text
}
