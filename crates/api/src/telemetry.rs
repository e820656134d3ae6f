//! Traces and metrics over OTLP, for who asks for them: a span per request, one per call with what it was and what it used, and how long
//! both took.
//!
//! Nothing here holds anything up: spans go into a bounded queue, a thread of its own sends them, and what a collector does not take in
//! time is dropped. Never contents: no code, no output, no arguments.

mod collector;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant, SystemTime},
};

use axum::http::{HeaderMap, Method, StatusCode};
use carrel_engine::Record;
use carrel_proto::{
    guest::Language,
    id::{ExecId, SandboxId, SessionName},
    outcome::{Cause, Outcome},
    problem::{Code, Problem},
};
use opentelemetry::{
    Context, KeyValue,
    metrics::{Histogram, MeterProvider},
    propagation::TextMapPropagator,
    trace::{Span as _, SpanBuilder, SpanContext, SpanKind, Status, TraceContextExt, Tracer, TracerProvider},
};
use opentelemetry_http::HeaderExtractor;
use opentelemetry_otlp::{MetricExporter, SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::{
    Resource,
    metrics::{PeriodicReader, SdkMeterProvider},
    propagation::TraceContextPropagator,
    trace::{SdkTracer, SdkTracerProvider, Span},
};

use self::collector::Collector;

/// Calls whose beginning is remembered until they end. More than that run on no host; those beyond have spans without a parent.
const MOST_CALLS: usize = 16 << 10;
/// For what is still to be sent when the daemon stops.
const LAST: Duration = Duration::from_secs(5);

/// Sends what happens to a collector. Dropping it sends nothing more; [`Telemetry::shutdown`] sends the rest.
pub struct Telemetry {
    spans: SdkTracerProvider,
    meters: SdkMeterProvider,
    tracer: SdkTracer,
    request_time: Histogram<f64>,
    call_time: Histogram<f64>,
    calls: Mutex<HashMap<(SandboxId, ExecId), Begun>>,
}

impl std::fmt::Debug for Telemetry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Telemetry")
    }
}

/// A call that has not ended.
#[derive(Debug)]
struct Begun {
    when: SystemTime,
    clock: Instant,
    request: Option<SpanContext>,
}

tokio::task_local! {
    /// The span of the request that a task works for.
    static REQUEST: SpanContext;
}

/// Work that goes on in a task of its own stays part of its request.
pub(crate) fn carried<F: Future>(work: F) -> impl Future<Output = F::Output> {
    let request = REQUEST.try_with(Clone::clone).ok();
    async move {
        match request {
            Some(request) => REQUEST.scope(request, work).await,
            None => work.await,
        }
    }
}

impl Telemetry {
    /// Begins to send to the collector at `endpoint`, `http://HOST:PORT`. Has to be called within a tokio runtime, through which it sends.
    pub fn start(endpoint: &str) -> Result<Self, Problem> {
        let endpoint = endpoint.trim_end_matches('/');
        let collector = Arc::new(Collector::new(endpoint)?);
        let failed = |error: opentelemetry_otlp::ExporterBuildError| {
            Problem::new(Code::Config, format!("telemetry to {endpoint}: {error}"))
        };
        let resource = Resource::builder()
            .with_service_name("carrel")
            .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")))
            .build();
        let exporter = SpanExporter::builder()
            .with_http()
            .with_shared_http_client(collector.clone())
            .with_endpoint(format!("{endpoint}/v1/traces"))
            .build()
            .map_err(failed)?;
        let spans = SdkTracerProvider::builder()
            .with_batch_exporter(exporter)
            .with_resource(resource.clone())
            .build();
        let exporter = MetricExporter::builder()
            .with_http()
            .with_shared_http_client(collector)
            .with_endpoint(format!("{endpoint}/v1/metrics"))
            .build()
            .map_err(failed)?;
        let reader = PeriodicReader::builder(exporter).build();
        let meters = SdkMeterProvider::builder().with_reader(reader).with_resource(resource).build();
        let meter = meters.meter("carrel");
        let time = |name: &'static str, what: &'static str| {
            meter.f64_histogram(name).with_unit("s").with_description(what).build()
        };
        Ok(Self {
            tracer: spans.tracer("carrel"),
            request_time: time("http.server.request.duration", "Time to the head of an answer"),
            call_time: time("carrel.call.duration", "How long runs and execs took"),
            spans,
            meters,
            calls: Mutex::default(),
        })
    }

    /// Sends what is left, within a few seconds.
    pub async fn shutdown(&self) {
        let (spans, meters) = (self.spans.clone(), self.meters.clone());
        // It waits for its own threads, which send through this runtime.
        let sent = tokio::task::spawn_blocking(move || {
            let sent = spans.shutdown_with_timeout(LAST);
            sent.and(meters.shutdown_with_timeout(LAST))
        });
        if let Ok(Err(error)) = sent.await {
            tracing::warn!("telemetry that was not sent: {error}");
        }
    }

    /// A request that came in. The caller's own trace, if it has one, goes on in it.
    pub(crate) fn request(&self, method: &Method, headers: &HeaderMap) -> RequestSpan<'_> {
        let parent =
            TraceContextPropagator::new().extract_with_context(&Context::new(), &HeaderExtractor(headers));
        let builder = SpanBuilder::from_name(method.to_string()).with_kind(SpanKind::Server);
        RequestSpan {
            telemetry: self,
            span: self.tracer.build_with_context(builder, &parent),
            method: method.clone(),
        }
    }

    /// A call was taken on.
    pub(crate) fn call_started(&self, record: &Record, exec: &ExecId) {
        let begun = Begun {
            when: SystemTime::now(),
            clock: Instant::now(),
            request: REQUEST.try_with(Clone::clone).ok(),
        };
        let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        if calls.len() < MOST_CALLS {
            calls.insert((record.id.clone(), exec.clone()), begun);
        }
    }

    /// A call that is followed no further.
    pub(crate) fn forget(&self, record: &Record, exec: &ExecId) {
        self.begun(record, exec);
    }

    fn begun(&self, record: &Record, exec: &ExecId) -> Option<Begun> {
        let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        calls.remove(&(record.id.clone(), exec.clone()))
    }

    /// A call went down with its sandbox.
    pub(crate) fn call_lost(
        &self,
        record: &Record,
        language: Option<Language>,
        exec: &ExecId,
        caller: &str,
        why: Code,
    ) {
        let Some(begun) = self.begun(record, exec) else { return };
        let said = vec![
            KeyValue::new("carrel.kind", language.map_or("exec", Language::as_str)),
            KeyValue::new("carrel.cause", "lost"),
            KeyValue::new("carrel.sandbox", record.id.to_string()),
            KeyValue::new("carrel.exec", exec.to_string()),
            KeyValue::new("carrel.caller", caller.to_owned()),
        ];
        let parent =
            begun.request.map_or_else(Context::new, |it| Context::new().with_remote_span_context(it));
        let name = if language.is_some() { "run" } else { "exec" };
        let builder = SpanBuilder::from_name(name).with_start_time(begun.when).with_attributes(said);
        let mut span = self.tracer.build_with_context(builder, &parent);
        span.set_status(Status::error(why.as_str()));
        span.end();
    }

    /// A call ended.
    pub(crate) fn call_finished(
        &self,
        record: &Record,
        session: &SessionName,
        language: Option<Language>,
        outcome: &Outcome,
        caller: &str,
    ) {
        let begun = self.begun(record, &outcome.exec);
        let receipt = &outcome.receipt;
        let ran = Duration::from_micros(receipt.duration_us);
        let kind = language.map_or("exec", Language::as_str);
        let about =
            [KeyValue::new("carrel.kind", kind), KeyValue::new("carrel.cause", outcome.cause.as_str())];
        self.call_time.record(ran.as_secs_f64(), &about);
        let number = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
        let mut said = Vec::from(about);
        said.extend([
            KeyValue::new("carrel.sandbox", record.id.to_string()),
            KeyValue::new("carrel.environment", record.spec.environment.clone()),
            KeyValue::new("carrel.session", session.to_string()),
            KeyValue::new("carrel.exec", outcome.exec.to_string()),
            KeyValue::new("carrel.caller", caller.to_owned()),
            KeyValue::new("carrel.exit_code", i64::from(outcome.exit_code)),
            KeyValue::new("carrel.duration_us", number(receipt.duration_us)),
            KeyValue::new("carrel.cpu_us", number(receipt.cpu_us)),
            KeyValue::new("carrel.peak_memory", number(receipt.peak_memory)),
            KeyValue::new("carrel.processes", i64::from(receipt.processes)),
            KeyValue::new("carrel.stdout_bytes", number(receipt.stdout_bytes)),
            KeyValue::new("carrel.stderr_bytes", number(receipt.stderr_bytes)),
            KeyValue::new("carrel.output_dropped", number(receipt.output_dropped)),
        ]);
        if let Some(key) = &record.key {
            said.push(KeyValue::new("carrel.key", key.to_string()));
        }
        if let Some(begun) = &begun {
            // From its acceptance on, less the time it ran: waiting for its turn, and for a client that reads a stream slowly.
            let queued = begun.clock.elapsed().saturating_sub(ran);
            said.push(KeyValue::new(
                "carrel.queue_us",
                number(queued.as_micros().try_into().unwrap_or(u64::MAX)),
            ));
        }
        let now = SystemTime::now();
        let start = begun.as_ref().map_or(now.checked_sub(ran).unwrap_or(now), |begun| begun.when);
        let parent = begun
            .and_then(|begun| begun.request)
            .map_or_else(Context::new, |request| Context::new().with_remote_span_context(request));
        let name = if language.is_some() { "run" } else { "exec" };
        let builder = SpanBuilder::from_name(name).with_start_time(start).with_attributes(said);
        let mut span = self.tracer.build_with_context(builder, &parent);
        if outcome.cause != Cause::Exit {
            span.set_status(Status::error(outcome.cause.as_str()));
        }
        span.end_with_timestamp(now);
    }
}

/// A request under way.
#[derive(Debug)]
pub(crate) struct RequestSpan<'a> {
    telemetry: &'a Telemetry,
    span: Span,
    method: Method,
}

impl RequestSpan<'_> {
    /// Does the request's work as a part of it.
    pub(crate) async fn scope<F: Future>(&self, work: F) -> F::Output {
        REQUEST.scope(self.span.span_context().clone(), work).await
    }

    /// It was answered.
    pub(crate) fn end(mut self, route: Option<&str>, status: StatusCode, number: &str, time: Duration) {
        let route = route.unwrap_or("(none)").to_owned();
        self.span.update_name(format!("{} {route}", self.method));
        let mut about = vec![
            KeyValue::new("http.request.method", self.method.to_string()),
            KeyValue::new("http.route", route),
            KeyValue::new("http.response.status_code", i64::from(status.as_u16())),
        ];
        self.telemetry.request_time.record(time.as_secs_f64(), &about);
        about.push(KeyValue::new("carrel.request", number.to_owned()));
        self.span.set_attributes(about);
        if status.is_server_error() {
            self.span.set_status(Status::error(status.as_str().to_owned()));
        }
        self.span.end();
    }
}
