//! One request as the audit log, the counts and the traces know it.
//!
//! It is noted when its answer begins. A client that hangs up before that takes nothing out of the log: the work it asked for goes on
//! without it, so the request is noted with the status 499. Which sandbox it was about may only be found by that work; then the line
//! waits for it.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use axum::{
    extract::{MatchedPath, Request},
    http::{Method, StatusCode},
};
use carrel_engine::tokens::TokenId;
use carrel_proto::id::{SandboxId, SnapshotId};

use super::{
    Daemon,
    audit::{ActedOn, Entry},
};
use crate::telemetry::RequestSpan;

/// The client hung up before it was answered. No standard names it; everybody's logs do so.
const GONE: u16 = 499;

/// What a handler says of its request while it works.
#[derive(Debug)]
pub(crate) struct Visit {
    daemon: Arc<Daemon>,
    began: Instant,
    number: String,
    method: Method,
    path: String,
    route: Option<String>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    caller: Option<String>,
    acted_on: ActedOn,
    ended: Option<(u16, Duration)>,
    noted: bool,
}

impl Visit {
    pub(crate) fn new(daemon: Arc<Daemon>, number: String, request: &Request) -> Arc<Self> {
        Arc::new(Self {
            daemon,
            began: Instant::now(),
            number,
            method: request.method().clone(),
            path: request.uri().path().to_owned(),
            route: request.extensions().get::<MatchedPath>().map(|path| path.as_str().to_owned()),
            state: Mutex::default(),
        })
    }

    pub(crate) fn number(&self) -> &str {
        &self.number
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn caller(&self, name: &str) {
        self.state().caller = Some(name.to_owned());
    }

    /// A sandbox that is not in the path.
    pub(crate) fn acts_on(&self, sandbox: &SandboxId) {
        let mut state = self.state();
        state.acted_on.sandbox(sandbox);
        if state.ended.is_some() {
            self.note(&mut state);
        }
    }

    /// Where a path stands for several things.
    pub(crate) fn does(&self, what: &'static str) {
        self.state().acted_on.action = Some(what);
    }

    pub(crate) fn acts_on_snapshot(&self, snapshot: &SnapshotId) {
        self.state().acted_on.snapshot = Some(snapshot.clone());
    }

    pub(crate) fn acts_on_token(&self, token: &TokenId) {
        self.state().acted_on.token = Some(token.clone());
    }

    fn end(&self, status: u16) {
        let mut state = self.state();
        state.ended = Some((status, self.began.elapsed()));
        let entry = self.entry(&state);
        // What goes on without its client may still find out whom it was about.
        if status != GONE || entry.is_some_and(|entry| entry.names_a_sandbox()) {
            self.note(&mut state);
        }
    }

    fn entry<'a>(&'a self, state: &'a State) -> Option<Entry<'a>> {
        let (status, duration) = state.ended?;
        Some(Entry {
            request: &self.number,
            caller: state.caller.as_deref(),
            method: self.method.as_str(),
            route: self.route.as_deref(),
            path: &self.path,
            acted_on: &state.acted_on,
            status,
            duration,
        })
    }

    /// Once.
    fn note(&self, state: &mut State) {
        if state.noted {
            return;
        }
        if let Some(entry) = self.entry(state) {
            self.daemon.audit(&entry);
            state.noted = true;
        }
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        let mut state = std::mem::take(&mut *self.state());
        self.note(&mut state);
    }
}

/// A request while its client is there.
#[derive(Debug)]
pub(crate) struct Attended<'a> {
    visit: Arc<Visit>,
    span: Option<RequestSpan<'a>>,
    ended: bool,
}

impl<'a> Attended<'a> {
    pub(crate) fn new(visit: Arc<Visit>, span: Option<RequestSpan<'a>>) -> Self {
        Self { visit, span, ended: false }
    }

    /// Does the request's work as a part of its trace.
    pub(crate) async fn scope<F: Future>(&self, work: F) -> F::Output {
        match &self.span {
            None => work.await,
            Some(span) => span.scope(work).await,
        }
    }

    pub(crate) fn answered(mut self, status: StatusCode) {
        self.end(status);
    }

    fn end(&mut self, status: StatusCode) {
        self.ended = true;
        let (visit, time) = (&self.visit, self.visit.began.elapsed());
        let route = visit.route.as_deref();
        if let Some(span) = self.span.take() {
            span.end(route, status, &visit.number, time);
        }
        visit.daemon.count(&visit.method, route, status, time);
        visit.end(status.as_u16());
    }
}

impl Drop for Attended<'_> {
    fn drop(&mut self) {
        if !self.ended {
            self.end(StatusCode::from_u16(GONE).unwrap_or(StatusCode::BAD_REQUEST));
        }
    }
}
