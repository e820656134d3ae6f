//! What happens, as it happens: the engine's events, as server-sent ones.
//!
//! A token hears what is its own, numbered by itself; the operator hears all. Whoever is too slow loses the stream and takes it up with
//! `Last-Event-ID`; what the engine no longer has by then is said as a `gap`.

use std::sync::Arc;

use axum::{extract::State, http::HeaderMap, response::Response};
use carrel_engine::{
    events::{Event, Heard},
    tokens::Scope,
};
use serde::{Deserialize, Serialize};
use utoipa::IntoParams;
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{
    Daemon,
    extract::Query,
    guard::Caller,
    problem::{Problems, Refusal, bad},
    sse::{self, Events, Gone, ServerSentEvent},
};

pub(crate) fn routes() -> OpenApiRouter<Arc<Daemon>> {
    OpenApiRouter::new().routes(routes!(events))
}

/// Longest filter: the longest key.
const LONGEST: usize = 512;

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct EventsQuery {
    /// Of this sandbox alone.
    sandbox: Option<String>,
    /// Of the sandbox with this key alone.
    key: Option<String>,
    /// Kinds that begin so: `run.`, `session.file.`, `limit.hit`.
    kind: Option<String>,
    /// After the event of this number. Without it, and without `Last-Event-ID`: from now on.
    since: Option<u64>,
}

impl EventsQuery {
    fn wants(&self, event: &Event) -> bool {
        let is = |wanted: &Option<String>, given: Option<&str>| {
            wanted.as_deref().is_none_or(|wanted| given == Some(wanted))
        };
        is(&self.sandbox, event.sandbox.as_ref().map(|id| id.as_str()))
            && is(&self.key, event.key.as_ref().map(|key| key.as_str()))
            && self.kind.as_deref().is_none_or(|prefix| event.kind.as_str().starts_with(prefix))
    }
}

#[derive(Debug, Serialize)]
struct Gap {
    /// Null where nobody knows how many.
    missed: Option<u64>,
}

/// Events as they happen.
#[utoipa::path(get, path = "/v1/events", tag = "events", params(EventsQuery, ("Last-Event-ID" = Option<u64>, Header)),
    responses((status = 200, description = "events named by their kind, and `gap`", headers(("last-event-id" = u64, description = "where the stream begins")), body = ServerSentEvent, content_type = "text/event-stream"), Problems))]
async fn events(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    headers: HeaderMap,
    Query(query): Query<EventsQuery>,
) -> Result<Response, Refusal> {
    caller.may(Scope::Read)?;
    if [&query.sandbox, &query.key, &query.kind].into_iter().flatten().any(|text| text.len() > LONGEST) {
        return Err(bad(format!("a filter has at most {LONGEST} bytes")).into());
    }
    // A client that comes back says where it was; its query still says where it began.
    let since = match headers.get("last-event-id") {
        None => query.since,
        Some(value) => {
            let number = value.to_str().ok().and_then(|text| text.parse().ok());
            Some(number.ok_or_else(|| bad("Last-Event-ID is the number of an event"))?)
        }
    };
    let mut heard = daemon.engine.events().subscribe(&caller.tenant, since);
    let begin = heard.since();
    let mut response = sse::stream(daemon.stop.clone(), move |events| async move {
        if events.mark(&begin.to_string()).await.is_err() {
            return;
        }
        loop {
            let next = tokio::select! {
                () = events.closed() => return,
                next = heard.next() => next,
            };
            if tell(&events, &query, next).await.is_err() {
                return;
            }
        }
    });
    // Before any of the stream, for clients that read headers.
    response.headers_mut().insert("last-event-id", begin.into());
    Ok(response)
}

async fn tell(events: &Events, query: &EventsQuery, heard: Heard) -> Result<(), Gone> {
    match heard {
        Heard::Event(numbered) if query.wants(&numbered.event) => {
            let id = numbered.seq.to_string();
            events.send(numbered.event.kind.as_str(), Some(&id), &numbered).await
        }
        Heard::Event(_) => Ok(()),
        Heard::Gap { missed, seq } => events.send("gap", Some(&seq.to_string()), &Gap { missed }).await,
    }
}
