//! Slices that are kept. Those of a GPU are some 300 KB as the API's types and
//! 30 KB as text, and they are kept for as long as the process idles.

use std::sync::Arc;

use k8s_openapi::api::resource::v1::ResourceSliceSpec;

/// A slice as text. Equal slices are equal as text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackedSlice {
    pool: Arc<str>,
    text: Arc<str>,
}

impl PackedSlice {
    /// Writes a slice down.
    ///
    /// # Errors
    /// None that is known: the API's types can all be written.
    pub fn pack(slice: &ResourceSliceSpec) -> Result<Self, serde_json::Error> {
        Ok(Self { pool: slice.pool.name.as_str().into(), text: serde_json::to_string(slice)?.into() })
    }

    /// One that cannot be read again.
    #[cfg(any(test, feature = "fixtures"))]
    pub fn torn(pool: &str) -> Self {
        Self { pool: pool.into(), text: "{".into() }
    }

    /// The name of the pool it is of.
    pub fn pool(&self) -> &str {
        &self.pool
    }

    /// Reads it again.
    ///
    /// # Errors
    /// None that is known: it was written from the same type.
    pub fn unpack(&self) -> Result<ResourceSliceSpec, serde_json::Error> {
        serde_json::from_str(&self.text)
    }
}
