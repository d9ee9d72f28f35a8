//! Where things are in a checkout. The only place that knows.

use std::path::PathBuf;

/// The repository's root.
pub fn root() -> PathBuf {
    let mut path = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    path.pop();
    path
}
