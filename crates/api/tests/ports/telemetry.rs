use std::{collections::HashMap, convert::Infallible};

use axum::{
    body::{Body, Bytes},
    http::{Method, Request, Response},
};
use carrel_api::telemetry::Telemetry;
use carrel_proto::problem::Code;
use http_body_util::{BodyExt, Full};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::rt::TokioIo;
use opentelemetry_proto::tonic::{
    collector::{metrics::v1::ExportMetricsServiceRequest, trace::v1::ExportTraceServiceRequest},
    common::v1::{KeyValue, any_value::Value},
    trace::v1::Span,
};
use prost::Message;
use serde_json::json;
use tokio::{net::TcpListener, sync::mpsc};

use crate::world::{Reply, World, until};

/// Takes whatever comes: the path, and the body.
async fn collector() -> (String, mpsc::UnboundedReceiver<(String, Bytes)>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let (sender, receiver) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let sender = sender.clone();
            let service = service_fn(move |request: Request<Incoming>| {
                let sender = sender.clone();
                async move {
                    let path = request.uri().path().to_owned();
                    let body = request.into_body().collect().await.unwrap().to_bytes();
                    sender.send((path, body)).unwrap();
                    Ok::<_, Infallible>(Response::new(Full::new(Bytes::new())))
                }
            });
            tokio::spawn(
                hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service),
            );
        }
    });
    (endpoint, receiver)
}

fn text(attributes: &[KeyValue]) -> HashMap<&str, String> {
    let show = |value: &Value| match value {
        Value::StringValue(text) => text.clone(),
        Value::IntValue(number) => number.to_string(),
        other => format!("{other:?}"),
    };
    let value = |attribute: &KeyValue| show(attribute.value.as_ref().unwrap().value.as_ref().unwrap());
    attributes.iter().map(|attribute| (attribute.key.as_str(), value(attribute))).collect()
}

/// Spans, and names of metrics, that a collector was given.
fn sent(received: &mut mpsc::UnboundedReceiver<(String, Bytes)>) -> (Vec<Span>, Vec<String>) {
    let (mut spans, mut metrics): (Vec<Span>, Vec<String>) = Default::default();
    while let Ok((path, body)) = received.try_recv() {
        assert!(!body.windows(13).any(|window| window == b"a secret word"), "contents are sent");
        if path == "/v1/traces" {
            let request = ExportTraceServiceRequest::decode(body).unwrap();
            let resources = request.resource_spans.into_iter();
            spans.extend(resources.flat_map(|resource| resource.scope_spans).flat_map(|scope| scope.spans));
        } else {
            assert_eq!(path, "/v1/metrics");
            let request = ExportMetricsServiceRequest::decode(body).unwrap();
            let scopes = request.resource_metrics.into_iter().flat_map(|resource| resource.scope_metrics);
            metrics.extend(scopes.flat_map(|scope| scope.metrics).map(|metric| metric.name));
        }
    }
    (spans, metrics)
}

#[tokio::test]
async fn a_call_that_goes_down_with_its_sandbox_is_a_span_too() {
    let (endpoint, mut received) = collector().await;
    let mut world = World::with(Some(Telemetry::start(&endpoint).unwrap())).await;
    let sandbox = world.sandbox(None).await;
    let mut events = world.send(Request::get("/v1/events").body(Body::empty()).unwrap()).await.into_body();
    let (base, run) =
        (format!("/v1/sandboxes/{sandbox}"), json!({ "code": "import time; time.sleep(1000)" }));
    let path = format!("{base}/run");
    let (answer, ()) = tokio::join!(world.post(&path, None, run), async {
        until(&mut events, "run.started").await;
        world.ask(Method::DELETE, &base, None, Body::empty()).await;
    });
    assert!(!answer.status.is_success(), "{answer:?}");
    drop(events);
    world.stop().await;
    let (spans, _) = sent(&mut received);
    let lost = spans.iter().find(|span| span.name == "run").unwrap_or_else(|| panic!("{spans:?}"));
    assert_eq!(text(&lost.attributes)["carrel.cause"], "lost");
    assert_eq!(text(&lost.attributes)["carrel.sandbox"], sandbox);
    assert!(!lost.parent_span_id.is_empty() && lost.status.as_ref().unwrap().code == 2);
}

#[tokio::test]
async fn a_call_is_a_span_of_its_callers_trace() {
    let (endpoint, mut received) = collector().await;
    let mut world = World::with(Some(Telemetry::start(&endpoint).unwrap())).await;
    let made = world.post("/v1/sandboxes", None, json!({ "name": "traced" })).await.json();
    let sandbox = made["id"].as_str().unwrap();
    let request = Request::post(format!("/v1/sandboxes/{sandbox}/run"))
        .header("host", "localhost")
        .header("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01");
    let body = json!({ "code": "print('a secret word')", "session": "default" }).to_string();
    let reply = Reply::of(world.send(request.body(Body::from(body)).unwrap()).await).await.json();
    assert_eq!(reply["exit_code"], 0);
    world
        .post(
            &format!("/v1/sandboxes/{sandbox}/run"),
            None,
            json!({ "code": "while True: pass", "timeout_seconds": 0.2 }),
        )
        .await;
    let request = Request::post(format!("/v1/sandboxes/{sandbox}/execs"))
        .header("host", "localhost")
        .header("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01");
    let body = json!({ "argv": ["true"] }).to_string();
    let ended = Reply::of(world.send(request.body(Body::from(body)).unwrap()).await).await.json();
    assert_eq!(ended["exit_code"], 0, "{ended}");
    // What is left is sent at the end.
    world.stop().await;

    let (spans, metrics) = sent(&mut received);
    for name in ["http.server.request.duration", "carrel.call.duration"] {
        assert!(metrics.iter().any(|metric| metric == name), "{name}: {metrics:?}");
    }
    let trace =
        [0x0a, 0xf7, 0x65, 0x19, 0x16, 0xcd, 0x43, 0xdd, 0x84, 0x48, 0xeb, 0x21, 0x1c, 0x80, 0x31, 0x9c];
    let of_trace: Vec<&Span> = spans.iter().filter(|span| span.trace_id == trace).collect();
    let named = |name: &str| {
        *of_trace.iter().find(|span| span.name == name).unwrap_or_else(|| panic!("{of_trace:?}"))
    };
    let request = named("POST /v1/sandboxes/{sandbox}/run");
    assert_eq!(request.parent_span_id, [0xb7, 0xad, 0x6b, 0x71, 0x69, 0x20, 0x33, 0x31]);
    assert_eq!(text(&request.attributes)["http.response.status_code"], "200");
    let call = named("run");
    assert_eq!(call.parent_span_id, request.span_id);
    let exec = named("exec");
    assert_eq!(exec.parent_span_id, named("POST /v1/sandboxes/{sandbox}/execs").span_id);
    assert_eq!(text(&exec.attributes)["carrel.exec"], ended["exec"].as_str().unwrap());
    let said = text(&call.attributes);
    let wanted = [
        ("carrel.sandbox", sandbox),
        ("carrel.key", "user:local:traced"),
        ("carrel.environment", "python"),
        ("carrel.session", "default"),
        ("carrel.exec", reply["exec"].as_str().unwrap()),
        ("carrel.kind", "python"),
        ("carrel.cause", "exit"),
        ("carrel.exit_code", "0"),
        ("carrel.stdout_bytes", "14"),
        ("carrel.caller", "local"),
    ];
    for (name, value) in wanted {
        assert_eq!(said[name], value, "{name}");
    }
    assert_eq!(said["carrel.duration_us"], reply["receipt"]["duration_us"].to_string());
    for name in ["carrel.queue_us", "carrel.cpu_us", "carrel.peak_memory"] {
        assert!(said[name].parse::<u64>().is_ok(), "{name}");
    }
    let timed_out = spans.iter().find(|span| span.name == "run" && span.trace_id != trace).unwrap();
    assert_eq!(text(&timed_out.attributes)["carrel.cause"], "timeout");
    assert_eq!(timed_out.status.as_ref().unwrap().message, "timeout");
}

#[tokio::test]
async fn a_collector_that_is_not_there_holds_nobody_up() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}/", listener.local_addr().unwrap());
    drop(listener);
    let mut world = World::with(Some(Telemetry::start(&endpoint).unwrap())).await;
    assert_eq!(world.get("/health").await.json()["status"], "ok");
    world.stop().await;
}

#[tokio::test]
async fn addresses_that_cannot_be_sent_to_are_refused() {
    for (wrong, hint) in [
        ("https://127.0.0.1:4318", "a collector on this host"),
        ("ftp://x", "such as http"),
        ("x", ""),
        ("http://a:b@c", ""),
    ] {
        let problem = Telemetry::start(wrong).unwrap_err();
        assert_eq!(problem.code, Code::Config, "{wrong}");
        assert!(problem.hint.contains(hint), "{wrong}: {problem:?}");
    }
}
