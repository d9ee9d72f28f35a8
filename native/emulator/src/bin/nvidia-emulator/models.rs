//! `nvidia-emulator models`.

use kerf_emulator::model;

use crate::{Failure, say};

/// Lists the models, or prints one with where its numbers come from.
pub(crate) fn run(key: Option<&str>) -> Result<(), Failure> {
    let models = model::built_in().map_err(|error| format!("the models do not parse: {error}"))?;
    if let Some(key) = key {
        let model = model::find(&models, key)?;
        say(&serde_json::to_string_pretty(model).map_err(|error| error.to_string())?);
        return Ok(());
    }
    for (key, model) in &models {
        let profiles = model.mig.as_ref().map_or(0, |mig| mig.profiles.len());
        say(&format!("{key:<14} {:<44} {profiles:>2} MIG profiles", model.name));
    }
    Ok(())
}
