//! `carrel mcp` through the daemon: an upgraded connection that carries the stdio transport, served with the daemon's own engine.
//!
//! The first line is what the client's `carrel mcp` was told ([`Wanted`]); everything after it is MCP.

use std::{sync::Arc, time::Duration};

use axum::{
    extract::{Request, State},
    response::Response,
};
use carrel_engine::{Environments, Settings, Wish};
use carrel_proto::problem::{Code, Problem};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};

use crate::mcp::{self, Server, ToolSet};

use super::{Daemon, desk::MCP_UPGRADE, guard::Caller, problem::Refusal, server::OwnUser, upgrade};

/// The first line is short; its client is at hand.
const LONGEST_FIRST: u64 = 1 << 20;
const FIRST_TIME: Duration = Duration::from_secs(10);

/// How `carrel mcp` was started.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Wanted {
    pub tools: ToolSet,
    pub structured: bool,
    pub scope: Option<String>,
    pub end_on_disconnect: bool,
    pub place: String,
    pub max_chars: usize,
    pub timeout: Duration,
    pub wish: Wish,
    pub environments: Environments,
}

impl From<mcp::Options> for Wanted {
    fn from(options: mcp::Options) -> Self {
        Self {
            tools: options.tools,
            structured: options.structured,
            scope: options.scope,
            end_on_disconnect: options.end_on_disconnect,
            place: options.place,
            max_chars: options.max_chars,
            timeout: options.timeout,
            wish: options.wish,
            environments: options.engine.environments,
        }
    }
}

pub(super) async fn stdio(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    mut request: Request,
) -> Result<Response, Refusal> {
    upgrade::local_operator(&caller)?;
    let own = request.extensions().get::<OwnUser>().is_some();
    let (upgrade, response) = upgrade::agree(&mut request, MCP_UPGRADE)?;
    let serving = Arc::clone(&daemon);
    daemon.tasks.spawn(async move {
        let served = async { serve(&serving, upgrade::stream(upgrade).await?, own).await };
        if let Err(problem) = served.await {
            tracing::warn!("an MCP client: {problem}");
        }
    });
    Ok(response)
}

async fn serve(daemon: &Arc<Daemon>, stream: upgrade::Stream, own: bool) -> Result<(), Problem> {
    let (reader, writer) = tokio::io::split(stream);
    let mut reader = BufReader::new(reader);
    let first = async {
        let mut line = Vec::new();
        (&mut reader).take(LONGEST_FIRST).read_until(b'\n', &mut line).await.map_err(Problem::internal)?;
        Ok::<_, Problem>(line)
    };
    let line = tokio::time::timeout(FIRST_TIME, first)
        .await
        .map_err(|_| Problem::new(Code::Timeout, "its first line did not come"))??;
    let wanted: Wanted =
        serde_json::from_slice(&line).map_err(|error| Problem::new(Code::Protocol, error.to_string()))?;
    let state = daemon.engine.state_directory().to_path_buf();
    let environments = upgrade::environments(daemon, own, wanted.environments);
    let engine = daemon.engine.with_environments(environments.clone());
    let options = mcp::Options {
        tools: wanted.tools,
        structured: wanted.structured,
        scope: wanted.scope,
        end_on_disconnect: wanted.end_on_disconnect,
        place: wanted.place,
        max_chars: wanted.max_chars,
        timeout: wanted.timeout,
        wish: Wish { caller: Some(Arc::from("local")), ..wanted.wish },
        engine: Settings { state, environments },
    };
    let server = Server::over(engine, options);
    let connection = server.connection();
    let gone = connection.gone();
    let stop = daemon.stop.child_token();
    let leaving = {
        let (server, stop) = (Arc::clone(&server), stop.clone());
        async move {
            stop.cancelled().await;
            server.leave();
            std::future::pending::<()>().await;
        }
    };
    let ended = tokio::select! {
        biased;
        () = leaving => Ok(()),
        ended = mcp::stdio::serve_on(reader, writer, connection, gone, stop) => ended,
    };
    server.finish().await;
    ended
}
