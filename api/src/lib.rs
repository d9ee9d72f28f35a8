//! Wire types of kerf: what users write and what kerf publishes.
//!
//! Everything here is text to value and back, without any I/O. Input is
//! hostile: it can be refused, never make the process fail.

#![forbid(unsafe_code)]

pub mod attributes;
pub mod config;
pub mod quantity;
pub mod text;
