//! The checks, tried on a driver that is right and on one that is wrong in one
//! way at a time.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests stop where something is wrong")]

mod api;
mod claims;
mod driver;
mod in_vain;
mod process;
mod publisher;
mod selftest;
mod services;

#[test]
fn the_readme_has_the_table_of_all_checks() {
    let table = dra_conformance::table(dra_conformance::all());
    let readme = include_str!("../../README.md");
    assert!(readme.ends_with(&table), "put what `dra-conformance list` prints at the end of the README");
}

#[test]
fn the_readmes_profile_is_one() {
    let readme = include_str!("../../README.md");
    let example = readme.split("```yaml\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    let profile = dra_conformance::Profile::parse(example).unwrap();
    assert_eq!(profile.claims.len(), 1);
}
