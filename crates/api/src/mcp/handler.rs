//! One connection: each request of the protocol to the file that answers it.
//!
//! A tool that fails says so in its result, where the model reads it; a protocol error is for requests that make no sense.

// Logging and legacy subscriptions are deprecated by the newest protocol and used by every older client.
#![expect(deprecated, reason = "clients of both eras are served")]

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicI64, Ordering},
    },
    time::{Duration, Instant},
};

use axum::http::request::Parts;
use carrel_proto::problem::{Code, Problem};
use rmcp::{
    ErrorData, RoleServer, ServerHandler,
    model::*,
    service::{RequestContext, SubscriptionContext},
};
use tokio::{sync::OnceCell, task::AbortHandle};
use tokio_util::sync::CancellationToken;

use super::{
    MAX_DEPTH, Server, TOO_LARGE_METHOD, code, complete,
    files::mark,
    follow::Client,
    log::Log,
    presence::{Presence, SESSION_HEADER},
    report::failure,
    resources, run,
    scope::Scope,
    tasks,
    watch::Watch,
};

/// A call that a polling client would rather not wait for.
const TASK_AFTER: Duration = Duration::from_secs(5);
/// Resources that one connection may watch.
const MOST_WATCHED: usize = 100;

#[derive(Debug)]
pub struct Connection {
    server: Arc<Server>,
    scope: OnceCell<Arc<Scope>>,
    watched: Mutex<HashMap<String, AbortHandle>>,
    log: Log,
    gone: CancellationToken,
    /// When the newest subscription was accepted, as [`mark`] has it.
    subscribed: AtomicI64,
}

impl Connection {
    pub(super) fn new(server: Arc<Server>) -> Self {
        let gone = server.leaving.child_token();
        Self {
            server,
            scope: OnceCell::new(),
            watched: Mutex::default(),
            log: Log::default(),
            gone,
            subscribed: AtomicI64::new(0),
        }
    }

    /// To be cancelled when the client has gone away, before the SDK cancels its requests.
    pub fn gone(&self) -> CancellationToken {
        self.gone.clone()
    }

    /// Whose names this client means; decided by its first request that needs to know.
    async fn scope(&self, context: &RequestContext<RoleServer>) -> Result<Arc<Scope>, Problem> {
        let make = || async {
            let options = &self.server.options;
            if let Some(name) = &options.scope {
                return Scope::shared(name).map(Arc::new);
            }
            let client = context.client_info().map_or_else(|| "unknown".to_owned(), |info| info.name);
            let parts = context.extensions.get::<Parts>();
            if let Some(parts) = parts {
                if let Some(name) = asked_scope(parts) {
                    return Scope::shared(&name).map(Arc::new);
                }
                if !parts.headers.contains_key(SESSION_HEADER) {
                    return Ok(Arc::new(Scope::unleased(&client, &options.place)));
                }
            }
            let (state, place) = (&options.engine.state, &options.place);
            let scope = match parts.and_then(|parts| parts.extensions.get::<Arc<Presence>>()) {
                Some(presence) => {
                    let abandoned = |prefix: &str| self.server.abandoned(prefix);
                    Scope::leased_while(state, &client, place, Some(Arc::clone(presence)), abandoned)
                }
                None => Scope::leased(state, &client, place),
            };
            let scope = scope.map(Arc::new)?;
            self.server.remember(&scope);
            Ok(scope)
        };
        self.scope.get_or_try_init(make).await.cloned()
    }

    fn watched(&self) -> std::sync::MutexGuard<'_, HashMap<String, AbortHandle>> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn call(
        &self,
        request: CallToolRequestParams,
        context: &RequestContext<RoleServer>,
    ) -> Option<Result<CallToolResponse, Problem>> {
        if !self.server.options.tools.has(&request.name) {
            return None;
        }
        let scope = match self.scope(context).await {
            Ok(scope) => scope,
            Err(problem) => return Some(Err(problem)),
        };
        if request.name == "run" {
            let polls = context.client_capabilities().is_some_and(|it| it.supports_tasks());
            let client = Client::new(context, &self.gone, polls.then_some(TASK_AFTER));
            return Some(run::run(&self.server, &scope, request.arguments, &client).await);
        }
        // The shapes of these have a word of their own for what goes on.
        let client = Client::new(context, &self.gone, None);
        let answer = code::call(&self.server, &scope, &request.name, request.arguments, &client).await?;
        Some(answer.map(|answer| answer.result().into()))
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        for (_, watching) in self.watched().drain() {
            watching.abort();
        }
        if let Some(scope) = self.scope.get() {
            self.server.left(scope);
        }
    }
}

/// `/mcp?scope=NAME`.
fn asked_scope(parts: &Parts) -> Option<String> {
    let query = parts.uri.query()?;
    query.split('&').find_map(|pair| pair.strip_prefix("scope=")).map(str::to_owned)
}

/// A problem as a protocol error, for requests other than tool calls.
fn error(problem: Problem) -> ErrorData {
    let data = serde_json::to_value(&problem).ok();
    let text = if problem.hint.is_empty() {
        problem.message
    } else {
        format!("{}; {}", problem.message, problem.hint)
    };
    match problem.code {
        Code::NotFound | Code::SandboxNotFound | Code::SnapshotNotFound | Code::ExecNotFound => {
            ErrorData::resource_not_found(text, data)
        }
        Code::Internal | Code::AgentLost | Code::Protocol => ErrorData::internal_error(text, data),
        _ => ErrorData::invalid_params(text, data),
    }
}

impl ServerHandler for Connection {
    fn get_info(&self) -> ServerConfig {
        let capabilities = ServerCapabilities::builder()
            .enable_tools()
            .enable_resources()
            .enable_resources_subscribe()
            .enable_completions()
            .enable_logging()
            .enable_tasks()
            .build();
        // The SDK's own helper would say the SDK's name.
        let about = Implementation::new("carrel", env!("CARGO_PKG_VERSION"));
        ServerConfig::new(capabilities)
            .with_server_info(about)
            .with_instructions(self.server.options.tools.instructions())
    }

    async fn list_tools(
        &self,
        _request: Option<PaginatedRequestParams>,
        _context: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        let options = &self.server.options;
        Ok(ListToolsResult::with_all_items(options.tools.tools(options.structured)))
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let name = request.name.clone();
        let begun = Instant::now();
        match Box::pin(self.call(request, &context)).await {
            Some(Ok(response)) => {
                self.log.info(&context, format!("{name} took {} ms", begun.elapsed().as_millis())).await;
                Ok(response)
            }
            Some(Err(problem)) => {
                let code = problem.code.as_str();
                self.log.warn(&context, format!("{name} failed: {code}: {}", problem.message)).await;
                Ok(failure(&problem).into())
            }
            None => Err(ErrorData::invalid_params(format!("there is no tool `{name}`"), None)),
        }
    }

    async fn list_prompts(
        &self,
        _request: Option<PaginatedRequestParams>,
        _context: RequestContext<RoleServer>,
    ) -> Result<ListPromptsResult, ErrorData> {
        Err(ErrorData::method_not_found::<ListPromptsRequestMethod>())
    }

    async fn list_resources(
        &self,
        request: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListResourcesResult, ErrorData> {
        let scope = self.scope(&context).await.map_err(error)?;
        let cursor = request.and_then(|request| request.cursor);
        resources::list(&self.server, &scope, cursor.as_deref()).await.map_err(error)
    }

    async fn list_resource_templates(
        &self,
        _request: Option<PaginatedRequestParams>,
        _context: RequestContext<RoleServer>,
    ) -> Result<ListResourceTemplatesResult, ErrorData> {
        Ok(ListResourceTemplatesResult::with_all_items(resources::templates()))
    }

    async fn read_resource(
        &self,
        request: ReadResourceRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<ReadResourceResponse, ErrorData> {
        let scope = self.scope(&context).await.map_err(error)?;
        let read = resources::read(&self.server, &scope, &request.uri).await;
        read.map(Into::into).map_err(|problem| {
            let mut error = error(problem);
            // The protocol wants to hear which one was meant.
            if let Some(data) = error.data.as_mut().and_then(|data| data.as_object_mut()) {
                data.insert("uri".to_owned(), request.uri.into());
            }
            error
        })
    }

    async fn subscribe(
        &self,
        request: SubscribeRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        let scope = self.scope(&context).await.map_err(error)?;
        let mut watch = Watch::begin(&self.server, &scope, &request.uri, None).await.map_err(error)?;
        let mut watched = self.watched();
        watched.retain(|_, watching| !watching.is_finished());
        if watched.len() >= MOST_WATCHED {
            let word = format!("a connection watches at most {MOST_WATCHED} resources");
            return Err(error(Problem::new(Code::TooMany, word)));
        }
        let (peer, uri) = (context.peer.clone(), request.uri.clone());
        let watching = tokio::spawn(async move {
            while watch.changed().await {
                let changed = ResourceUpdatedNotificationParam::new(uri.clone());
                if peer.notify_resource_updated(changed).await.is_err() {
                    break;
                }
            }
        });
        if let Some(before) = watched.insert(request.uri, watching.abort_handle()) {
            before.abort();
        }
        Ok(())
    }

    async fn unsubscribe(
        &self,
        request: UnsubscribeRequestParams,
        _context: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        if let Some(watching) = self.watched().remove(&request.uri) {
            watching.abort();
        }
        Ok(())
    }

    fn accepted_subscription_filter(&self, requested: &SubscriptionFilter) -> Option<SubscriptionFilter> {
        self.subscribed.store(mark(), Ordering::Relaxed);
        let mut accepted = SubscriptionFilter::new();
        accepted.resource_subscriptions = requested.resource_subscriptions.clone();
        Some(accepted)
    }

    async fn listen(&self, context: SubscriptionContext) -> Result<(), ErrorData> {
        let scope = self.scope(context.request_context()).await.map_err(error)?;
        // The SDK has told the client already that it is subscribed: what changed since then is news.
        let since = self.subscribed.load(Ordering::Relaxed);
        let uris = context.accepted().resource_subscriptions.clone().unwrap_or_default();
        let mut watching = tokio::task::JoinSet::new();
        for uri in uris.into_iter().take(MOST_WATCHED) {
            let mut watch = Watch::begin(&self.server, &scope, &uri, Some(since)).await.map_err(error)?;
            let sink = context.sink().clone();
            watching.spawn(async move {
                while watch.changed().await && sink.notify_resource_updated(uri.clone()).await.is_ok() {}
            });
        }
        context.cancelled().await;
        Ok(())
    }

    async fn complete(
        &self,
        request: CompleteRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CompleteResult, ErrorData> {
        let scope = self.scope(&context).await.map_err(error)?;
        let values = complete::complete(&self.server, &scope, &request).await.map_err(error)?;
        let info =
            CompletionInfo::with_all_values(values).map_err(|text| ErrorData::internal_error(text, None))?;
        Ok(CompleteResult::new(info))
    }

    async fn set_level(
        &self,
        request: SetLevelRequestParams,
        _context: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        self.log.set(request.level);
        Ok(())
    }

    async fn get_task(
        &self,
        request: GetTaskParams,
        context: RequestContext<RoleServer>,
    ) -> Result<GetTaskResult, ErrorData> {
        let scope = self.scope(&context).await.map_err(error)?;
        tasks::get(&self.server, &scope, &request.task_id).await.map_err(error)
    }

    async fn update_task(
        &self,
        _request: UpdateTaskParams,
        _context: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        // Our tasks never ask for anything.
        Ok(())
    }

    async fn cancel_task(
        &self,
        request: CancelTaskParams,
        context: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        let scope = self.scope(&context).await.map_err(error)?;
        tasks::cancel(&self.server, &scope, &request.task_id).await.map_err(error)
    }

    async fn on_custom_request(
        &self,
        request: CustomRequest,
        _context: RequestContext<RoleServer>,
    ) -> Result<CustomResult, ErrorData> {
        if request.method == TOO_LARGE_METHOD {
            let limit = super::MAX_MESSAGE >> 20;
            let text = format!(
                "the message is larger than {limit} MiB or nested deeper than {MAX_DEPTH} levels; send files in parts"
            );
            return Err(ErrorData::invalid_request(text, None));
        }
        Err(ErrorData::new(ErrorCode::METHOD_NOT_FOUND, request.method, None))
    }
}
