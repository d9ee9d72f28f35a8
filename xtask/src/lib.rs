//! Everything repeatable of this repository, as functions: the `xtask` command
//! calls them by name, the end-to-end tests call the cluster's.

#![forbid(unsafe_code)]

pub mod codegen;
pub mod paths;
