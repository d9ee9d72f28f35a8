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

#[cfg(test)]
mod tests {
    use super::*;

    fn findings() -> Vec<Finding> {
        let finding =
            |id, verdict| Finding { id, says: "It \"holds\".", reference: "A & B", verdict, seconds: 0.25 };
        vec![
            finding("A-001", Verdict::Pass),
            finding("A-002", Verdict::Fail("was <1>\nand \u{1}is 2".to_owned())),
            finding("A-003", Verdict::NotApplicable("no claims".to_owned())),
        ]
    }

    #[test]
    fn a_person_reads_what_was_seen_and_whose_word_it_is() {
        let told: String = findings().iter().map(text).collect();
        let expected = "\
pass  A-001        It \"holds\". (0.2 s)
FAIL  A-002        It \"holds\". (0.2 s)
      was <1>
and \u{1}is 2
      reference: A & B
n/a   A-003        It \"holds\". (0.2 s)
      no claims
";
        assert_eq!(told, expected);
        assert_eq!(summary(&findings()), "1 passed, 1 failed, 1 not applicable");
    }

    #[test]
    fn a_program_reads_counts_and_results() {
        let value: serde_json::Value = serde_json::from_str(&json("example.com", &findings())).expect("JSON");
        assert_eq!(
            (&value["passed"], &value["failed"], &value["notApplicable"]),
            (&json!(1), &json!(1), &json!(1))
        );
        assert_eq!(value["checks"][0]["result"], "pass");
        assert_eq!(
            (&value["checks"][2]["result"], &value["checks"][2]["reason"]),
            (&json!("not-applicable"), &json!("no claims"))
        );
    }

    #[test]
    fn junit_is_xml_whatever_a_driver_says() {
        let expected = r#"<?xml version="1.0" encoding="UTF-8"?>
<testsuite name="dra-conformance example.com" tests="3" failures="1" skipped="1">
  <testcase classname="A-001" name="It &quot;holds&quot;." time="0.250"/>
  <testcase classname="A-002" name="It &quot;holds&quot;." time="0.250"><failure message="was &lt;1&gt;&#10;and is 2">A &amp; B</failure></testcase>
  <testcase classname="A-003" name="It &quot;holds&quot;." time="0.250"><skipped message="no claims"/></testcase>
</testsuite>
"#;
        assert_eq!(junit("example.com", &findings()), expected);
    }
}
