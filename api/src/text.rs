//! Text of others, for those who read it in a terminal or an event.

/// A character as it may be shown: one that would end the line or move the
/// cursor is escaped.
pub fn printable(character: char) -> impl Iterator<Item = char> {
    let escaped = character.is_control().then(|| character.escape_default());
    let plain = (!character.is_control()).then_some(character);
    escaped.into_iter().flatten().chain(plain)
}
