//! What the daemon counts. Counting is a look into a table and a few additions; everything that has to be looked up (sandboxes, memory,
//! descriptors) is looked up when somebody asks.

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use axum::http::{Method, StatusCode};
use carrel_engine::{Engine, State, journal::Journal, pool::PoolStatus};
use carrel_proto::{guest::Language, outcome::Outcome, problem::Problem};
use prometheus_client::{
    encoding::{EncodeLabelSet, text::encode},
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::{Registry, Unit},
};

/// Seconds: from a warm call to the longest one.
const BUCKETS: [f64; 14] =
    [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0, 300.0];
/// So long sandboxes are not counted again, however many ask.
const COUNTED: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RouteLabels {
    method: &'static str,
    route: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    method: &'static str,
    route: String,
    status: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CallLabels {
    /// `exec`, or what a run was written in.
    kind: &'static str,
    cause: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StateLabels {
    state: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReadyLabels {
    environment: String,
    language: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SourceLabels {
    /// `pool`, or `cold`: made while its caller waited.
    source: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct JournalLabels {
    journal: &'static str,
}

type Histograms<L> = Family<L, Histogram, fn() -> Histogram>;

#[derive(Debug)]
pub(crate) struct Counts {
    requests: Family<RequestLabels, Counter>,
    request_time: Histograms<RouteLabels>,
    calls: Family<CallLabels, Counter>,
    call_time: Histograms<CallLabels>,
    sandboxes: Family<StateLabels, Gauge>,
    ready: Family<ReadyLabels, Gauge>,
    /// The engine counts these; they only ever grow, and are copied when somebody asks.
    claims: Family<SourceLabels, Counter>,
    refills: Counter,
    dropped: Counter,
    lost_lines: Family<JournalLabels, Gauge<u64, AtomicU64>>,
    memory: Gauge<u64, AtomicU64>,
    files: Gauge<u64, AtomicU64>,
    registry: Registry,
    counted: Mutex<Option<Instant>>,
}

impl Default for Counts {
    fn default() -> Self {
        let histogram: fn() -> Histogram = || Histogram::new(BUCKETS);
        let mut counts = Self {
            requests: Family::default(),
            request_time: Family::new_with_constructor(histogram),
            calls: Family::default(),
            call_time: Family::new_with_constructor(histogram),
            sandboxes: Family::default(),
            ready: Family::default(),
            claims: Family::default(),
            refills: Counter::default(),
            dropped: Counter::default(),
            lost_lines: Family::default(),
            memory: Gauge::default(),
            files: Gauge::default(),
            registry: Registry::with_prefix("carrel"),
            counted: Mutex::new(None),
        };
        let registry = &mut counts.registry;
        registry.register("http_requests", "Requests answered", counts.requests.clone());
        registry.register_with_unit(
            "http_request_duration",
            "Time to the head of an answer",
            Unit::Seconds,
            counts.request_time.clone(),
        );
        registry.register("calls", "Runs and execs that ended", counts.calls.clone());
        registry.register_with_unit(
            "call_duration",
            "How long runs and execs took",
            Unit::Seconds,
            counts.call_time.clone(),
        );
        registry.register("sandboxes", "Sandboxes by state", counts.sandboxes.clone());
        registry.register("pool_ready", "Boxes that stand ready", counts.ready.clone());
        registry.register(
            "pool_claims",
            "New sandboxes, from the pool or made on demand",
            counts.claims.clone(),
        );
        registry.register("pool_refills", "Boxes that were made ready", counts.refills.clone());
        registry.register("pool_dropped", "Ready boxes that went unused", counts.dropped.clone());
        registry.register(
            "journal_lines_lost",
            "Lines that a journal had no room for",
            counts.lost_lines.clone(),
        );
        registry.register_with_unit(
            "resident_memory",
            "Memory of the daemon",
            Unit::Bytes,
            counts.memory.clone(),
        );
        registry.register("open_files", "Open descriptors of the daemon", counts.files.clone());
        counts
    }
}

/// Whatever a client makes up is one method: every label costs memory for good.
fn method_name(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::POST => "POST",
        Method::PUT => "PUT",
        Method::PATCH => "PATCH",
        Method::DELETE => "DELETE",
        Method::HEAD => "HEAD",
        Method::OPTIONS => "OPTIONS",
        _ => "other",
    }
}

pub(crate) fn call_kind(language: Option<Language>) -> &'static str {
    language.map_or("exec", Language::as_str)
}

impl Counts {
    pub(crate) fn request(&self, method: &Method, route: Option<&str>, status: StatusCode, time: Duration) {
        let status = match status.as_u16() / 100 {
            1 => "1xx",
            2 => "2xx",
            3 => "3xx",
            4 => "4xx",
            _ => "5xx",
        };
        let (method, route) = (method_name(method), route.unwrap_or("(none)").to_owned());
        let labels = RouteLabels { method, route };
        self.request_time.get_or_create(&labels).observe(time.as_secs_f64());
        let labels = RequestLabels { method, route: labels.route, status };
        self.requests.get_or_create(&labels).inc();
    }

    pub(crate) fn call(&self, language: Option<Language>, outcome: &Outcome) {
        let labels = CallLabels { kind: call_kind(language), cause: outcome.cause.as_str() };
        self.calls.get_or_create(&labels).inc();
        let time = Duration::from_micros(outcome.receipt.duration_us).as_secs_f64();
        self.call_time.get_or_create(&labels).observe(time);
    }

    /// All of it, as Prometheus reads it. Waits for the disk.
    pub(crate) fn text(&self, engine: &Engine, audit: Option<&Journal>) -> Result<String, Problem> {
        self.count_sandboxes(engine)?;
        self.count_pool(&engine.pool());
        let journals = [("events", engine.events().journal()), ("audit", audit)];
        for (journal, found) in journals {
            if let Some(found) = found {
                self.lost_lines.get_or_create(&JournalLabels { journal }).set(found.lost());
            }
        }
        self.memory.set(resident());
        let files = std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
        self.files.set(u64::try_from(files).unwrap_or_default());
        let mut text = String::with_capacity(16 << 10);
        encode(&mut text, &self.registry).map_err(Problem::internal)?;
        Ok(text)
    }

    fn count_pool(&self, pool: &PoolStatus) {
        // Kinds that are gone are not reported as ready for ever.
        self.ready.clear();
        for kind in &pool.ready {
            let language = kind.language.map_or("none", Language::as_str);
            let labels = ReadyLabels { environment: kind.environment.clone(), language };
            // Kinds may differ in their limits alone.
            self.ready.get_or_create(&labels).inc_by(i64::from(kind.count));
        }
        for (source, count) in [("pool", pool.claimed), ("cold", pool.cold)] {
            self.claims.get_or_create(&SourceLabels { source }).inner().store(count, Ordering::Relaxed);
        }
        self.refills.inner().store(pool.made, Ordering::Relaxed);
        self.dropped.inner().store(pool.dropped, Ordering::Relaxed);
    }

    fn count_sandboxes(&self, engine: &Engine) -> Result<(), Problem> {
        let mut counted = self.counted.lock().unwrap_or_else(PoisonError::into_inner);
        if counted.is_some_and(|when| when.elapsed() < COUNTED) {
            return Ok(());
        }
        let all = engine.list()?;
        for state in State::LISTED {
            let count = all.iter().filter(|record| record.state == state).count();
            let labels = StateLabels { state: state.as_str() };
            self.sandboxes.get_or_create(&labels).set(i64::try_from(count).unwrap_or(i64::MAX));
        }
        *counted = Some(Instant::now());
        Ok(())
    }
}

/// Bytes of this process that are in memory.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kilobytes = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kilobytes.unwrap_or_default() * 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn made_up_methods_and_paths_cost_one_line_each() {
        let counts = Counts::default();
        for number in 0..100 {
            let method = Method::from_bytes(format!("M{number}").as_bytes()).unwrap();
            counts.request(&method, None, StatusCode::NOT_FOUND, Duration::ZERO);
        }
        let mut text = String::new();
        encode(&mut text, &counts.registry).unwrap();
        let lines: Vec<&str> =
            text.lines().filter(|line| line.starts_with("carrel_http_requests_total")).collect();
        assert_eq!(lines, [r#"carrel_http_requests_total{method="other",route="(none)",status="4xx"} 100"#]);
        assert!(text.ends_with("# EOF\n"));
    }
}
