//! A server with the tools, resources and prompts that the protocol's conformance suite asks for, on the transports of the
//! product. What passes here and fails on the product is missing there on purpose (it has no such tools); what fails here
//! is wrong with our transports. For tests only: `scripts/mcp-clients` runs it.
//!
//! Prints its address on standard output and serves until standard input ends.

// Sampling, logging and legacy subscriptions are deprecated by the newest protocol and part of the older suite.
#![expect(deprecated, reason = "the older requirement set tests them")]
#![expect(clippy::print_stdout, reason = "the address is for the script that started us")]

mod asking;
mod prompts;
mod resources;
mod tools;

use std::sync::Arc;

use carrel_api::mcp::http;
use rmcp::{ErrorData, RoleServer, ServerHandler, model::*, service::RequestContext};
use tokio::io::AsyncReadExt;
use tokio_util::sync::CancellationToken;

use self::asking::States;

#[derive(Clone, Default)]
struct Fixture {
    states: Arc<States>,
}

/// A value of the protocol written as JSON, which is how the suite describes it.
fn written<T: serde::de::DeserializeOwned>(value: serde_json::Value) -> Result<T, ErrorData> {
    serde_json::from_value(value).map_err(|error| ErrorData::internal_error(error.to_string(), None))
}

/// A result, said to be complete as the newest protocol wants it; the SDK leaves that out for older clients.
fn complete<T: serde::de::DeserializeOwned>(mut result: serde_json::Value) -> Result<T, ErrorData> {
    result["resultType"] = "complete".into();
    written(result)
}

impl ServerHandler for Fixture {
    fn get_info(&self) -> ServerConfig {
        let capabilities = ServerCapabilities::builder()
            .enable_tools()
            .enable_prompts()
            .enable_resources()
            .enable_resources_subscribe()
            .enable_completions()
            .enable_logging()
            .build();
        ServerConfig::new(capabilities).with_server_info(Implementation::new("carrel-conformance", "0"))
    }

    async fn list_tools(
        &self,
        _request: Option<PaginatedRequestParams>,
        _context: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        tools::list()
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        match asking::call(&self.states, &request, &context)? {
            Some(response) => Ok(response),
            None => tools::call(&request, &context).await,
        }
    }

    async fn list_prompts(
        &self,
        _request: Option<PaginatedRequestParams>,
        _context: RequestContext<RoleServer>,
    ) -> Result<ListPromptsResult, ErrorData> {
        prompts::list()
    }

    async fn get_prompt(
        &self,
        request: GetPromptRequestParams,
        _context: RequestContext<RoleServer>,
    ) -> Result<GetPromptResponse, ErrorData> {
        prompts::get(&request)
    }

    async fn list_resources(
        &self,
        _request: Option<PaginatedRequestParams>,
        _context: RequestContext<RoleServer>,
    ) -> Result<ListResourcesResult, ErrorData> {
        resources::list()
    }

    async fn list_resource_templates(
        &self,
        _request: Option<PaginatedRequestParams>,
        _context: RequestContext<RoleServer>,
    ) -> Result<ListResourceTemplatesResult, ErrorData> {
        resources::templates()
    }

    async fn read_resource(
        &self,
        request: ReadResourceRequestParams,
        _context: RequestContext<RoleServer>,
    ) -> Result<ReadResourceResponse, ErrorData> {
        resources::read(&request.uri)
    }

    async fn subscribe(
        &self,
        _request: SubscribeRequestParams,
        _context: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        Ok(())
    }

    async fn unsubscribe(
        &self,
        _request: UnsubscribeRequestParams,
        _context: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        Ok(())
    }

    fn accepted_subscription_filter(&self, requested: &SubscriptionFilter) -> Option<SubscriptionFilter> {
        Some(requested.clone())
    }

    async fn complete(
        &self,
        _request: CompleteRequestParams,
        _context: RequestContext<RoleServer>,
    ) -> Result<CompleteResult, ErrorData> {
        complete(serde_json::json!({"completion": {"values": ["paris", "park"], "hasMore": false}}))
    }

    async fn set_level(
        &self,
        _request: SetLevelRequestParams,
        _context: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        Ok(())
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    println!("http://{}{}", listener.local_addr()?, http::PATH);
    let stop = CancellationToken::new();
    let fixture = Fixture::default();
    let serving = http::serve(listener, http::Guards::default(), stop.clone(), move || fixture.clone());
    let mut until = Vec::new();
    tokio::select! {
        served = serving => served.map_err(|problem| problem.to_string())?,
        _ = async { tokio::io::stdin().read_to_end(&mut until).await } => stop.cancel(),
    }
    Ok(())
}
