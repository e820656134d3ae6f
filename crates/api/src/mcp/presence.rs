//! Which legacy HTTP sessions have somebody at their other end.
//!
//! Such a session has no connection: it is a name in a header, and most clients leave without a word. What it has while its
//! client is there is an open answer: the stream that clients listen on, or that of a call. A client that is not there gives
//! its slot up to the next one of the same name (see [`super::scope`]), which is most often itself.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicUsize, Ordering},
    },
};

use axum::{
    body::Body,
    extract::{Request, State},
    http::header,
    middleware::Next,
    response::Response,
};
use tokio_stream::StreamExt;

pub(super) const SESSION_HEADER: &str = "mcp-session-id";

/// One session's open answers.
#[derive(Debug, Default)]
pub(super) struct Presence {
    open: AtomicUsize,
}

impl Presence {
    pub(super) fn is_there(&self) -> bool {
        self.open.load(Ordering::Acquire) > 0
    }
}

/// Counts as an open answer until it is dropped.
struct Open(Arc<Presence>);

impl Open {
    fn new(presence: &Arc<Presence>) -> Self {
        presence.open.fetch_add(1, Ordering::AcqRel);
        Self(Arc::clone(presence))
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Sessions by name, for as long as somebody is interested in them.
#[derive(Debug, Default)]
pub(super) struct Sessions {
    known: Mutex<HashMap<String, Weak<Presence>>>,
}

impl Sessions {
    fn of(&self, id: &str) -> Arc<Presence> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(presence) = known.get(id).and_then(Weak::upgrade) {
            return presence;
        }
        known.retain(|_, presence| presence.strong_count() > 0);
        let presence = Arc::new(Presence::default());
        known.insert(id.to_owned(), Arc::downgrade(&presence));
        presence
    }
}

/// Notes the answers of each session, and tells the handler whose request it is by an extension.
pub(super) async fn attend(
    State(sessions): State<Arc<Sessions>>,
    mut request: Request,
    next: Next,
) -> Response {
    let id = request.headers().get(SESSION_HEADER).and_then(|id| id.to_str().ok());
    let Some(presence) = id.map(|id| sessions.of(id)) else { return next.run(request).await };
    let open = Open::new(&presence);
    request.extensions_mut().insert(presence);
    let response = next.run(request).await;
    let streams = response
        .headers()
        .get(header::CONTENT_TYPE)
        .is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"));
    if !streams {
        return response;
    }
    response.map(|body| {
        Body::from_stream(body.into_data_stream().map(move |part| {
            // Dropped with the stream: when it ends, or when its client hangs up.
            let _ = &open;
            part
        }))
    })
}
