//! How much callers may have under way at once: requests, and bytes of requests and replies that are held in memory.

use std::{
    collections::HashMap,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
};

use axum::body::{Body, Bytes};
use carrel_engine::{Tenant, rate::Rates, tokens::Token};
use carrel_proto::problem::{Code, Problem};
use hyper::body::{Frame, SizeHint};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::WaitForCancellationFutureOwned;

use super::{lease::Lease, problem::Refusal};

/// Requests under way in all; streams count for as long as they last.
const MAX_REQUESTS: usize = 4096;
/// Of one token: so that no single one can take all places.
const MAX_REQUESTS_OF_ONE: usize = 1024;
/// Bytes held for one token: several of the largest requests and replies at once, and far below what a host has.
const MAX_BYTES_OF_ONE: usize = 512 << 20;
/// Tokens that are kept count of before those without a request are forgotten.
const MOST_TOKENS: usize = 1024;

/// Places and paces of callers.
#[derive(Debug)]
pub(crate) struct Turnstile {
    all: Arc<Semaphore>,
    tokens: Mutex<HashMap<Tenant, OfOne>>,
    rates: Rates,
}

#[derive(Debug, Clone)]
struct OfOne {
    places: Arc<Semaphore>,
    room: Room,
}

impl Default for OfOne {
    fn default() -> Self {
        Self {
            places: Arc::new(Semaphore::new(MAX_REQUESTS_OF_ONE)),
            room: Room(Some(Arc::new(Semaphore::new(MAX_BYTES_OF_ONE)))),
        }
    }
}

impl Default for Turnstile {
    fn default() -> Self {
        Self {
            all: Arc::new(Semaphore::new(MAX_REQUESTS)),
            tokens: Mutex::default(),
            rates: Rates::default(),
        }
    }
}

impl Turnstile {
    /// A place for one request. It is free again when the answer, stream included, has been sent.
    pub(crate) fn enter(&self, token: Option<&Token>, lease: Option<Arc<Lease>>) -> Result<Places, Refusal> {
        let full = || Refusal::from(Problem::new(Code::Unavailable, "too many requests are under way"));
        let mut places = Vec::with_capacity(2);
        let mut room = Room::default();
        if let Some(token) = token {
            let tenant = token.tenant();
            if let Some(rate) = token.quota.rate
                && let Err(refusal) = self.rates.take(&tenant, rate)
            {
                let wait = refusal.retry_after.as_secs() + 1;
                return Err(Refusal::from(Problem::from(refusal)).retry_after(wait));
            }
            let mut tokens = self.tokens.lock().unwrap_or_else(PoisonError::into_inner);
            if tokens.len() >= MOST_TOKENS {
                // Who holds a place or room holds its semaphore too.
                tokens.retain(|_, one| Arc::strong_count(&one.places) > 1 || one.room.is_held());
            }
            let one = tokens.entry(tenant).or_default();
            let place = Arc::clone(&one.places).try_acquire_owned().map_err(|_| {
                let word = format!("{MAX_REQUESTS_OF_ONE} requests of this token are under way");
                Problem::new(Code::RateLimited, word).hint("end some streams, or wait")
            })?;
            places.push(place);
            room = one.room.clone();
        }
        places.push(Arc::clone(&self.all).try_acquire_owned().map_err(|_| full())?);
        Ok(Places { _places: Arc::new(places), lease, room, held: Arc::default() })
    }
}

/// Where the bytes that are held for a caller are counted. The operator's are not.
#[derive(Debug, Clone, Default)]
pub(crate) struct Room(Option<Arc<Semaphore>>);

/// Bytes that are held, until it is dropped.
#[derive(Debug, Default)]
pub(crate) struct Taken(Option<OwnedSemaphorePermit>);

impl Room {
    fn is_held(&self) -> bool {
        self.0.as_ref().is_some_and(|room| Arc::strong_count(room) > 1)
    }

    /// Room for so many bytes more.
    pub(crate) fn take(&self, bytes: usize, taken: &mut Taken) -> Result<(), Problem> {
        let Some(room) = &self.0 else { return Ok(()) };
        let count = u32::try_from(bytes).unwrap_or(u32::MAX);
        let more = Arc::clone(room).try_acquire_many_owned(count).map_err(|_| {
            let word =
                format!("requests and replies of this token hold {} MB already", MAX_BYTES_OF_ONE >> 20);
            Problem::new(Code::RateLimited, word)
                .hint("wait for some of them, ask for less output, or send files as uploads")
        })?;
        match &mut taken.0 {
            Some(held) => held.merge(more),
            none => *none = Some(more),
        }
        Ok(())
    }
}

/// The places of a request. What goes on behind its answer, as a WebSocket does, holds them too.
#[derive(Debug, Clone, Default)]
pub(crate) struct Places {
    _places: Arc<Vec<OwnedSemaphorePermit>>,
    lease: Option<Arc<Lease>>,
    room: Room,
    held: Arc<Mutex<Taken>>,
}

impl Places {
    /// For what is held for its caller after it, too.
    pub(crate) fn room(&self) -> Room {
        self.room.clone()
    }

    /// When the caller's token is good no longer.
    pub(crate) async fn over(&self) {
        match &self.lease {
            Some(lease) => lease.over().await,
            None => std::future::pending().await,
        }
    }

    /// Room for so many bytes of this request, for as long as it has its places.
    pub(crate) fn hold(&self, bytes: usize) -> Result<(), Problem> {
        self.room.take(bytes, &mut self.held.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// An answer that is over when its body is, or when its caller's token is.
    pub(crate) fn answer(self, body: Body, taken: Option<Arc<Taken>>) -> Body {
        let over = self.lease.as_ref().map(|lease| Box::pin(lease.token().cancelled_owned()));
        Body::new(Held { body, over, _places: self, _taken: taken })
    }
}

/// A body that keeps its request's places until it is sent or dropped.
struct Held {
    body: Body,
    over: Option<Pin<Box<WaitForCancellationFutureOwned>>>,
    _places: Places,
    _taken: Option<Arc<Taken>>,
}

impl hyper::body::Body for Held {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        if let Some(over) = &mut self.over
            && over.as_mut().poll(context).is_ready()
        {
            // Broken off, not ended: what is there is not the whole.
            return Poll::Ready(Some(Err(axum::Error::new("the token is good no longer"))));
        }
        Pin::new(&mut self.body).poll_frame(context)
    }
    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }
    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use carrel_engine::{Quota, tokens::Scopes};

    use super::*;

    fn token(letter: char) -> Token {
        Token {
            id: format!("tok_{}", letter.to_string().repeat(16)).parse().unwrap(),
            name: String::new(),
            scopes: Scopes::all(),
            quota: Quota::default(),
            created_unix_ms: 0,
            expires_unix_ms: None,
            revoked_unix_ms: None,
            used_unix_ms: None,
        }
    }

    #[test]
    fn one_token_has_so_many_requests_and_all_have_so_many() {
        let turnstile = Turnstile::default();
        let code = |one: Result<Places, Refusal>| one.unwrap_err().problem().code;
        let enter = |letter| turnstile.enter(Some(&token(letter)), None);
        let mut under_way: Vec<Places> = (0..MAX_REQUESTS_OF_ONE).map(|_| enter('a').unwrap()).collect();
        assert_eq!(code(enter('a')), Code::RateLimited);
        for letter in ['b', 'c', 'd'] {
            under_way.extend((0..MAX_REQUESTS_OF_ONE).map(|_| enter(letter).unwrap()));
        }
        assert_eq!(code(enter('e')), Code::Unavailable);
        assert_eq!(code(turnstile.enter(None, None)), Code::Unavailable);
        // A stream that holds its places holds them for its answer's body, too.
        let body = under_way.remove(0).answer(Body::empty(), None);
        assert_eq!(code(enter('a')), Code::RateLimited);
        drop(body);
        assert!(enter('a').is_ok());
    }

    #[tokio::test]
    async fn bodies_of_one_token_are_held_within_its_room() {
        let turnstile = Turnstile::default();
        let enter = || turnstile.enter(Some(&token('a')), None).unwrap();
        let first = enter();
        first.hold(MAX_BYTES_OF_ONE - 4).unwrap();
        let read = |places: Places| async move {
            let mut request = axum::extract::Request::new(Body::from("12345"));
            request.extensions_mut().insert(places);
            crate::rest::extract::body(request, 100).await
        };
        assert_eq!(read(enter()).await.unwrap_err().problem().code, Code::RateLimited);
        assert!(read(turnstile.enter(Some(&token('b')), None).unwrap()).await.is_ok());
        drop(first);
        assert!(read(enter()).await.is_ok());
    }

    #[test]
    fn what_is_held_is_counted_together_and_given_back() {
        let room = OfOne::default().room;
        let (mut one, mut other) = (Taken::default(), Taken::default());
        room.take(MAX_BYTES_OF_ONE - 10, &mut one).unwrap();
        room.take(6, &mut one).unwrap();
        assert_eq!(room.take(5, &mut other).unwrap_err().code, Code::RateLimited);
        room.take(4, &mut other).unwrap();
        drop(one);
        room.take(MAX_BYTES_OF_ONE - 4, &mut other).unwrap();
        // The operator's room has no walls.
        Room::default().take(usize::MAX, &mut Taken::default()).unwrap();
    }
}
