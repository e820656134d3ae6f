//! What software a sandbox can have, and whether this host has it.

use std::sync::Arc;

use axum::extract::State;
use carrel_engine::{Source, tokens::Scope};
use carrel_proto::{guest::Language, problem::Problem};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{
    Daemon,
    extract::Query,
    guard::Caller,
    page::Page,
    problem::{Problems, Refusal},
};

pub(crate) fn routes() -> OpenApiRouter<Arc<Daemon>> {
    OpenApiRouter::new().routes(routes!(list))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ListQuery {
    after: Option<String>,
    #[param(minimum = 1, maximum = 500)]
    limit: Option<u32>,
}

#[derive(Debug, Serialize, ToSchema)]
struct Environment {
    name: String,
    /// `preset`: the host's own interpreters; `artifact`: a root filesystem of its own.
    #[schema(pattern = "^(preset|artifact)$")]
    source: &'static str,
    /// What its code is written in; null where that cannot be found out.
    language: Option<Language>,
    available: bool,
    /// Why it is not.
    why: Option<String>,
}

/// Lists environments.
#[utoipa::path(get, path = "/v1/environments", tag = "environments", params(ListQuery),
    responses((status = 200, body = Page<Environment>), Problems))]
async fn list(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    Query(query): Query<ListQuery>,
) -> Result<axum::Json<Page<Environment>>, Refusal> {
    caller.may(Scope::Read)?;
    let engine = daemon.engine.clone();
    // Looking takes a stat of every place where an interpreter could be, and a read of every manifest.
    let all = tokio::task::spawn_blocking(move || {
        let here = engine.host_interpreters();
        let environments = engine.environments();
        let describe = |(name, source): (&str, &Source)| {
            let (source, language, why) = match source {
                Source::Preset(language) => {
                    let missing = || format!("the host has no {}", language.as_str());
                    ("preset", Some(*language), (!here.contains_key(language)).then(missing))
                }
                Source::Artifact(_) => match environments.language(name, Some(name)) {
                    Ok(language) => ("artifact", Some(language), None),
                    Err(problem) => ("artifact", None, Some(problem.message)),
                },
            };
            Environment { name: name.to_owned(), source, language, available: why.is_none(), why }
        };
        environments.iter().map(describe).collect::<Vec<_>>()
    });
    let all = all.await.map_err(Problem::internal)?;
    Page::by_name(all, |environment| environment.name.clone(), query.after.as_deref(), query.limit)
        .map(axum::Json)
}
