//! Runs checks one after another. What happens to one is its own failure.

use std::panic::AssertUnwindSafe;
use std::time::{Duration, Instant};

use futures::FutureExt as _;

use crate::check::{Check, NotApplicable};
use crate::context::Context;
use crate::report::{Finding, Verdict};

/// Only a hang takes this long.
const LIMIT: Duration = Duration::from_mins(10);

/// Runs the checks, and says each result as soon as it is known.
pub async fn run<'a>(
    context: &mut Context,
    checks: impl IntoIterator<Item = &'a Check>,
    mut told: impl FnMut(&Finding),
) -> Vec<Finding> {
    let mut findings = Vec::new();
    for check in checks {
        let started = Instant::now();
        let verdict = match context.missing(check) {
            Some(reason) => Verdict::NotApplicable(reason.to_owned()),
            None => judge(context, check).await,
        };
        let finding = Finding {
            id: check.id,
            says: check.says,
            reference: check.reference,
            verdict,
            seconds: started.elapsed().as_secs_f64(),
        };
        told(&finding);
        findings.push(finding);
    }
    context.end().await;
    findings
}

async fn judge(context: &mut Context, check: &Check) -> Verdict {
    let work = async {
        context.begin().await?;
        (check.run)(context).await
    };
    let ended = tokio::time::timeout(LIMIT, AssertUnwindSafe(work).catch_unwind()).await;
    context.tidy().await;
    match ended {
        Err(_) => Verdict::Fail(format!("the check has not ended in {} s", LIMIT.as_secs())),
        Ok(Err(panic)) => {
            let said =
                panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
            Verdict::Fail(format!("the check itself failed: {}", said.unwrap_or("a panic")))
        }
        Ok(Ok(Ok(()))) => Verdict::Pass,
        Ok(Ok(Err(error))) => match error.downcast_ref::<NotApplicable>() {
            Some(reason) => Verdict::NotApplicable(reason.to_string()),
            None => Verdict::Fail(format!("{error:#}")),
        },
    }
}
