//! Runs checks one after another. What happens to one is its own failure.

use std::panic::AssertUnwindSafe;
use std::time::{Duration, Instant};

use futures::FutureExt as _;

use crate::check::{Check, NotApplicable};
use crate::context::Context;
use crate::profile::seconds;
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
    // What is collected late is no hang.
    let limit = LIMIT + seconds(context.profile.limits.collect.unwrap_or_default());
    let work = async {
        context.begin().await?;
        (check.run)(context).await
    };
    let ended = tokio::time::timeout(limit, AssertUnwindSafe(work).catch_unwind()).await;
    let verdict = match ended {
        Err(_) => Verdict::Fail(format!("the check has not ended in {} s", limit.as_secs())),
        Ok(Err(panic)) => {
            let said = panic.downcast_ref::<String>().map(String::as_str);
            let said = said.or(panic.downcast_ref::<&str>().copied());
            Verdict::Fail(format!("the check itself failed: {}", said.unwrap_or("a panic")))
        }
        Ok(Ok(Ok(()))) => Verdict::Pass,
        Ok(Ok(Err(error))) => match error.downcast_ref::<NotApplicable>() {
            Some(reason) => Verdict::NotApplicable(reason.to_string()),
            None => Verdict::Fail(format!("{error:#}")),
        },
    };
    if matches!(verdict, Verdict::Fail(_)) {
        context.renew().await;
    }
    context.tidy().await;
    verdict
}

#[cfg(test)]
mod tests {
    use anyhow::bail;

    use super::*;
    use crate::check::Need;
    use crate::profile::Profile;

    fn context() -> Context {
        let nobody = tower::service_fn(|_: tonic::codegen::http::Request<kube::client::Body>| {
            std::future::ready(Err::<tonic::codegen::http::Response<kube::client::Body>, _>("no API server"))
        });
        let profile = Profile::parse("driver: example.com\nnode: n\n").expect("a profile");
        Context::new(profile, kube::Client::new(nobody, "default"), None)
    }

    const fn check(id: &'static str, needs: &'static [Need], run: Run) -> Check {
        Check { id, says: "", reference: "", needs, run }
    }

    type Run = for<'a> fn(&'a mut Context) -> futures::future::LocalBoxFuture<'a, anyhow::Result<()>>;

    #[tokio::test]
    async fn what_happens_to_a_check_is_its_own_failure() {
        let checks = [
            check("PANIC", &[], |_| async { panic!("made {}", "up") }.boxed_local()),
            check("ERROR", &[], |_| async { bail!("made up") }.boxed_local()),
            check("NOT", &[], |_| async { bail!(NotApplicable("made up".to_owned())) }.boxed_local()),
            check("NEED", &[Need::Claims], |_| async { panic!("run in vain") }.boxed_local()),
            check("PASS", &[], |_| async { Ok(()) }.boxed_local()),
        ];
        let mut told = Vec::new();
        let findings = run(&mut context(), &checks, |finding| told.push(finding.id)).await;
        let verdicts: Vec<Verdict> = findings.into_iter().map(|finding| finding.verdict).collect();
        let expected = [
            Verdict::Fail("the check itself failed: made up".to_owned()),
            Verdict::Fail("made up".to_owned()),
            Verdict::NotApplicable("made up".to_owned()),
            Verdict::NotApplicable("the profile has no `claims`".to_owned()),
            Verdict::Pass,
        ];
        assert_eq!(verdicts, expected);
        assert_eq!(told, ["PANIC", "ERROR", "NOT", "NEED", "PASS"]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_check_that_hangs_fails_and_the_next_is_run() {
        let checks = [
            check("HANG", &[], |_| std::future::pending().boxed_local()),
            check("PASS", &[], |_| async { Ok(()) }.boxed_local()),
        ];
        for (collect, limit) in [(None, 600), (Some(900.0), 1500)] {
            let mut context = context();
            context.profile.limits.collect = collect;
            let findings = run(&mut context, &checks, |_| {}).await;
            let verdicts: Vec<Verdict> = findings.into_iter().map(|finding| finding.verdict).collect();
            let hang = format!("the check has not ended in {limit} s");
            assert_eq!(verdicts, [Verdict::Fail(hang), Verdict::Pass]);
        }
    }
}
