//! The MIG profiles that the chart has a `DeviceClass` for: those of every
//! model whose numbers are known (`models.json` of the emulator), so that a new
//! model brings its classes along.
//!
//! What is generated is the list; the chart's template makes a class of each.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::paths;

/// Where the models are.
const MODELS: &str = "native/emulator/models.json";
/// What is generated.
const LIST: &str = "charts/kerf/files/mig-profiles.yaml";

/// Writes the chart's list, or with `check` fails if the committed one is not
/// what would be written.
pub fn run(check: bool) -> Result<()> {
    let read = |file: &str| {
        let path = paths::root().join(file);
        std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
    };
    let wanted = render(&profiles(&read(MODELS)?)?);
    if check {
        ensure!(read(LIST)? == wanted, "{LIST} is not what {MODELS} says: run `cargo xtask codegen`");
        return Ok(());
    }
    let path = paths::root().join(LIST);
    std::fs::write(&path, wanted).with_context(|| format!("cannot write {}", path.display()))
}

/// The profiles of all models: what a resource is called after, to the
/// profile's own name.
fn profiles(models: &str) -> Result<BTreeMap<String, String>> {
    let models: BTreeMap<String, Value> = serde_json::from_str(models).context("the models are not JSON")?;
    let mut profiles = BTreeMap::new();
    for (key, model) in &models {
        for profile in model["mig"]["profiles"].as_array().into_iter().flatten() {
            let name = profile["name"].as_str().with_context(|| format!("{key}: a profile has no name"))?;
            let former = profiles.insert(resource(name), name.to_owned());
            ensure!(
                former.as_ref().is_none_or(|former| former == name),
                "{name} and {former:?} would be one resource"
            );
        }
    }
    Ok(profiles)
}

/// A profile as part of an extended resource's name, where no `+` may be:
/// `1g.10gb+me` is `1g.10gb.me` and `1g.24gb-me` stays, as NVIDIA's device
/// plugin names them.
fn resource(profile: &str) -> String {
    profile.replace('+', ".")
}

fn render(profiles: &BTreeMap<String, String>) -> String {
    let mut list = format!(
        "# Generated from {MODELS} by `cargo xtask codegen`. Do not edit.\n\
         # What follows `nvidia.com/mig-` in the extended resource's name, and the profile.\n"
    );
    for (resource, profile) in profiles {
        // Writing to a String cannot fail.
        let _ = writeln!(list, "\"{resource}\": \"{profile}\"");
    }
    list
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn file(path: &str) -> String {
        std::fs::read_to_string(paths::root().join(path)).expect("a file of the repository")
    }

    /// The committed list, as Helm reads it.
    fn list() -> BTreeMap<String, String> {
        serde_saphyr::from_str(&file(LIST)).expect("the list is YAML, no name twice")
    }

    #[test]
    fn each_profile_of_each_model_has_one_class_and_no_class_is_without_a_model() {
        run(true).expect("the list is current");
        let models: BTreeMap<String, Value> = serde_json::from_str(&file(MODELS)).expect("JSON");
        let named: BTreeSet<String> = models
            .values()
            .flat_map(|model| model["mig"]["profiles"].as_array().into_iter().flatten())
            .map(|profile| profile["name"].as_str().expect("a name").to_owned())
            .collect();
        let list = list();
        let classes: BTreeSet<String> = list.values().cloned().collect();
        assert_eq!(classes.len(), list.len(), "a profile has two classes");
        assert_eq!(classes, named);
        for spelled in ["1g.5gb", "1g.10gb+me", "1g.24gb+gfx", "1g.24gb+me.all", "1g.24gb-me"] {
            assert!(classes.contains(spelled), "{spelled}");
        }
    }

    #[test]
    fn every_name_that_the_template_makes_is_one_that_kubernetes_takes() {
        // An extended resource is a qualified name, a class a DNS subdomain.
        // Of the latter each part between dots begins and ends with a letter
        // or digit, and that is stricter.
        let alphanumeric = |letter: &u8| letter.is_ascii_lowercase() || letter.is_ascii_digit();
        for resource in list().keys() {
            let name = format!("mig-{resource}");
            assert!(name.len() <= 63, "{name}");
            for label in name.split('.') {
                let bytes = label.as_bytes();
                assert!(bytes.first().is_some_and(alphanumeric), "{name}");
                assert!(bytes.last().is_some_and(alphanumeric), "{name}");
                assert!(bytes.iter().all(|byte| alphanumeric(byte) || *byte == b'-'), "{name}");
            }
        }
    }

    /// The words of a text that begin with something, as names go.
    fn words<'a>(text: &'a str, start: &str) -> Vec<&'a str> {
        let is_name = |letter: char| letter.is_ascii_alphanumeric() || matches!(letter, '.' | '-' | '/');
        text.match_indices(start)
            .map(|(at, _)| &text[at + start.len()..])
            .map(|rest| rest.split(|letter| !is_name(letter)).next().unwrap_or_default())
            .collect()
    }

    #[test]
    fn the_examples_of_the_page_of_claims_are_yaml_and_name_classes_that_there_are() {
        let list = list();
        let is_class = |name: &str| {
            let stem = name.strip_suffix(".nvidia.com").unwrap_or_default();
            matches!(stem, "gpu" | "mig")
                || stem.strip_prefix("mig-").is_some_and(|resource| list.contains_key(resource))
        };
        let page = file("docs/claims.md");
        let examples: Vec<&str> =
            page.split("```yaml\n").skip(1).filter_map(|rest| rest.split("```").next()).collect();
        assert_eq!(examples.len(), 10);
        for example in examples {
            for document in example.split("\n---\n") {
                let object: Value = serde_saphyr::from_str(document).expect(document);
                assert!(object["kind"].is_string(), "{document}");
            }
            let classes = words(example, "deviceClassName: ");
            let resources = words(example, "nvidia.com/mig-");
            assert!(!classes.is_empty() || !resources.is_empty(), "{example}");
            assert!(classes.iter().all(|class| is_class(class)), "{classes:?}");
            assert!(resources.iter().all(|resource| list.contains_key(*resource)), "{resources:?}");
        }
    }

    #[test]
    fn a_plus_is_a_dot_in_a_resource_and_a_minus_stays() {
        assert_eq!(resource("1g.10gb+me"), "1g.10gb.me");
        assert_eq!(resource("1g.24gb+me.all"), "1g.24gb.me.all");
        assert_eq!(resource("2g.48gb+gfx"), "2g.48gb.gfx");
        assert_eq!(resource("1g.24gb-me"), "1g.24gb-me");
    }

    #[test]
    fn two_profiles_that_would_be_one_resource_are_refused() {
        let models =
            r#"{"a": {"mig": {"profiles": [{"name": "1g.5gb+me"}, {"name": "1g.5gb.me"}]}}, "b": {}}"#;
        let error = profiles(models).expect_err("one resource for both").to_string();
        assert!(error.contains("1g.5gb.me"), "{error}");
        assert!(profiles(r#"{"a": {"mig": {"profiles": [{}]}}}"#).is_err());
    }
}
