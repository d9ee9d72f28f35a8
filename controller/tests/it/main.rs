//! The publisher and the claim reader against a stateful API server: one in
//! this process, and a real one where `KERF_TEST_KUBECONFIG` names it.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests stop where something is wrong")]

mod claims;
mod fake_api;
mod publishing;
mod real_server;
