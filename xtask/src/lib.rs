//! Everything repeatable of this repository, as functions: the `xtask` command
//! calls them by name, the end-to-end tests call the cluster's.

#![forbid(unsafe_code)]

pub mod bench;
pub mod chaos;
pub mod classes;
pub mod cluster;
pub mod codegen;
pub mod conformance;
mod debian;
pub mod demo;
pub mod driver;
pub mod emulator;
pub mod exec;
mod files;
pub mod image;
pub mod paths;
pub mod suite;
