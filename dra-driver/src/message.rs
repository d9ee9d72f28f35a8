//! What users read when something does not work, as `docs/troubleshooting.md`
//! lists it. Each crate says it of its own errors, for tests alone: with the
//! feature `fixtures`.

/// A message that users may meet.
#[derive(Debug, Clone)]
pub struct Message {
    /// The whole message, with an example's values.
    pub text: String,
    /// Why it is said.
    pub why: &'static str,
    /// What its reader can do.
    pub remedy: &'static str,
}

/// The messages of a type: `messages!(said, Type, [variants that others say],
/// pattern => example, why, remedy; …)`. Each example must be of its pattern,
/// and a variant that no pattern takes does not compile.
#[macro_export]
macro_rules! messages {
    ($said:expr, $type:ty, [$($passed:pat),*],
     $($pattern:pat => $example:expr, $why:literal, $remedy:literal;)*) => {{
        let exhaustive = |value: &$type| match value {
            $($pattern => (),)*
            $($passed => (),)*
        };
        let said = $said;
        vec![$({
            let example: $type = $example;
            exhaustive(&example);
            assert!(matches!(&example, $pattern), "{example:?} is no {}", stringify!($pattern));
            $crate::message::Message { text: said(&example), why: $why, remedy: $remedy }
        }),*]
    }};
}
