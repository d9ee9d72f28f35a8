//! Errors as people read them.

use std::error::Error;

/// An error and its causes in one sentence, of what each `said` for itself.
pub fn in_one_sentence(
    error: &(dyn Error + 'static),
    said: impl Fn(&(dyn Error + 'static)) -> String,
) -> String {
    let mut text = said(error);
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = said(cause);
        // Some errors repeat their cause in their own text.
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    text
}
