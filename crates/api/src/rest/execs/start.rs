//! Starting commands.

use std::{collections::BTreeMap, fmt, sync::Arc};

use axum::{
    extract::State,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use carrel_engine::{Record, tokens::Scope};
use carrel_proto::{
    files::Content,
    id::SessionName,
    limits::MAX_TIMEOUT,
    message::{Exec, ExecInfo, PtySize},
    problem::Problem,
};
use serde::{Deserialize, Deserializer, de};
use tokio_util::sync::CancellationToken;
use utoipa::{
    PartialSchema, ToSchema,
    openapi::{ObjectBuilder, OneOfBuilder, RefOr, Schema, schema::Type},
};

use crate::{
    reply::Reply,
    rest::{
        Daemon,
        extract::SandboxPath,
        guard::Caller,
        idempotency::Once,
        problem::{Problems, Refusal, bad},
        run::{Following, millis, output_within, presence},
    },
    telemetry::carried,
};

use super::{Size, input::feed, no_exec};

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ExecRequest {
    #[schema(min_items = 1, max_items = 16384)]
    argv: Vec<String>,
    session: Option<SessionName>,
    /// Absolute, or relative to the session's own directory.
    #[schema(max_length = 4096)]
    cwd: Option<String>,
    #[serde(default)]
    env: BTreeMap<String, String>,
    /// As long as it takes, if none is given; an hour if the answer waits for the end.
    #[schema(exclusive_minimum = 0.0, maximum = 3600.0)]
    timeout_seconds: Option<f64>,
    #[serde(default)]
    stdin: Stdin,
    pty: Option<Size>,
    /// Answer at once; the command goes on by itself.
    #[serde(default)]
    stream: bool,
    /// Interrupt the command if this client goes away before the end.
    #[serde(default)]
    cancel_on_disconnect: bool,
    /// Most bytes of each output stream in the reply.
    #[schema(maximum = 67_108_864)]
    max_output: Option<u64>,
}

/// `false`: none. `true`: it will come. Bytes: given at once, then closed.
#[derive(Debug, Default)]
pub(super) enum Stdin {
    #[default]
    None,
    Later,
    Given(Vec<u8>),
}

impl<'de> Deserialize<'de> for Stdin {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl<'de> de::Visitor<'de> for Visitor {
            type Value = Stdin;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("true, false, or the input: a string or {\"base64\": …}")
            }
            fn visit_bool<E: de::Error>(self, later: bool) -> Result<Stdin, E> {
                Ok(if later { Stdin::Later } else { Stdin::None })
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Stdin, E> {
                Ok(Stdin::Given(text.as_bytes().to_vec()))
            }
            fn visit_map<A: de::MapAccess<'de>>(self, map: A) -> Result<Stdin, A::Error> {
                Content::deserialize(de::value::MapAccessDeserializer::new(map)).map(|it| Stdin::Given(it.0))
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

impl PartialSchema for Stdin {
    fn schema() -> RefOr<Schema> {
        OneOfBuilder::new()
            .description(Some("Whether input will come, or the input itself: given at once, then closed."))
            .item(ObjectBuilder::new().schema_type(Type::Boolean))
            .item(Content::schema())
            .into()
    }
}

impl ToSchema for Stdin {}

/// Runs a command, or starts it and leaves it alone.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/execs", tag = "execs", operation_id = "exec",
    params(("sandbox" = String, Path), ("Idempotency-Key" = Option<String>, Header)), request_body = ExecRequest,
    responses((status = 200, description = "how it ended", body = Reply), (status = 201, description = "with `stream`: it has begun", body = ExecInfo), Problems))]
pub(super) async fn start(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    Once(request, ticket): Once<ExecRequest>,
) -> Result<Response, Refusal> {
    caller.may(Scope::Run)?;
    let max_output = output_within(request.max_output)?;
    let timeout_ms = request.timeout_seconds.map(millis).transpose()?;
    if request.stream && request.cancel_on_disconnect {
        return Err(
            bad("with `stream` the answer comes at once, so there is no disconnect to cancel on").into()
        );
    }
    if request.pty.is_some() && matches!(request.stdin, Stdin::Given(_)) {
        return Err(bad("a terminal's input has no end, so it cannot be given at once")
            .hint("send it to …/stdin, or attach")
            .into());
    }
    let (gone, _here) = presence(request.cancel_on_disconnect);
    let (running, who) = (Arc::clone(&daemon), caller.clone());
    ticket
        .once(&daemon, &caller, async move {
            let found = running.living(&who, &id).await?;
            let session = request.session.unwrap_or_else(SessionName::main);
            let command = Command {
                exec: Exec {
                    session: session.clone(),
                    argv: request.argv,
                    cwd: request.cwd,
                    env: request.env,
                    stdin: !matches!(request.stdin, Stdin::None),
                    pty: request.pty.map(|size| PtySize { rows: size.rows, cols: size.cols }),
                    timeout_ms,
                    detach: request.stream,
                    cancel_on_disconnect: request.cancel_on_disconnect,
                },
                input: match request.stdin {
                    Stdin::Given(bytes) => Some(bytes),
                    _ => None,
                },
                following: Following {
                    record: found.record,
                    session,
                    language: None,
                    note: found.note.map(|note| note.text(id.as_str())),
                    daemon: Arc::clone(&running),
                    caller: who.name().to_owned(),
                    room: who.room.clone(),
                },
            };
            // The command goes on when its client hangs up, and its end is still noted: so not in the request's own task.
            let working = running.tasks.spawn(carried(async move {
                if request.stream { command.start().await } else { command.run(max_output, gone).await }
            }));
            working.await.map_err(Problem::internal)?
        })
        .await
}

/// A command whose sandbox is known.
#[derive(Debug)]
struct Command {
    exec: Exec,
    input: Option<Vec<u8>>,
    following: Following,
}

impl Command {
    fn parts(&self) -> (Arc<Daemon>, Record) {
        (Arc::clone(&self.following.daemon), self.following.record.clone())
    }

    /// To its end.
    async fn run(mut self, max_output: u64, gone: Option<CancellationToken>) -> Result<Response, Refusal> {
        let (daemon, record) = self.parts();
        daemon.engine.ensure_session(&record, &self.exec.session).await?;
        let longest = u64::try_from(MAX_TIMEOUT.as_millis()).unwrap_or(u64::MAX);
        self.exec.timeout_ms.get_or_insert(longest);
        let call = daemon.engine.exec(&record, self.exec).await?;
        self.following.gather(call, self.input, max_output, gone).await
    }

    /// Only its beginning.
    async fn start(self) -> Result<Response, Refusal> {
        let (daemon, record) = self.parts();
        daemon.engine.ensure_session(&record, &self.exec.session).await?;
        let exec = daemon.engine.start(&record, self.exec).await?;
        self.following.started(&exec);
        if let Some(bytes) = self.input {
            feed(&daemon, &record, &exec, bytes).await;
        }
        let execs = daemon.engine.execs(&record).await?;
        let info = execs.into_iter().find(|info| info.exec == exec).ok_or_else(|| no_exec(&exec))?;
        let following = self.following;
        daemon.tasks.spawn(async move { following.watch(&exec).await });
        Ok((StatusCode::CREATED, axum::Json(info)).into_response())
    }
}
