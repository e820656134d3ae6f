//! `carrel config show`: what holds, and who said so.

use std::process::ExitCode;

use carrel_engine::Source;
use carrel_proto::problem::Problem;
use serde_json::{Map, Value, json};

use crate::{args::ConfigCommand, config::Config, output::Output};

pub(crate) fn run(command: &ConfigCommand, config: &Config, output: &Output) -> Result<ExitCode, Problem> {
    let ConfigCommand::Show = command;
    if output.json {
        output.object(&object(config))?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut rows: Vec<Vec<String>> = config
        .values()
        .map(|(key, value, origin)| vec![key.name().to_owned(), value.to_string(), origin.to_string()])
        .collect();
    rows.extend(config.environments().map(|(name, source, origin)| {
        let (field, value) = said(source);
        vec![format!("environments.{name}.{field}"), value, origin.to_string()]
    }));
    output.table(&["SETTING", "VALUE", "FROM"], &rows)?;
    Ok(ExitCode::SUCCESS)
}

fn said(source: &Source) -> (&'static str, String) {
    match source {
        Source::Preset(language) => ("preset", language.as_str().to_owned()),
        Source::Artifact(path) => ("sandbox", path.display().to_string()),
    }
}

fn object(config: &Config) -> Value {
    let settings: Map<String, Value> = config
        .values()
        .map(|(key, value, origin)| {
            let entry = json!({ "value": value.json(), "from": origin.to_string() });
            (key.name().to_owned(), entry)
        })
        .collect();
    let environments: Map<String, Value> = config
        .environments()
        .map(|(name, source, origin)| {
            let (field, value) = said(source);
            (name.to_owned(), json!({ field: value, "from": origin.to_string() }))
        })
        .collect();
    json!({ "settings": settings, "environments": environments, "files": config.files })
}
