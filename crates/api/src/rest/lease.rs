//! How long what a token was let in for may go on: a token that is revoked or over ends its streams and answers under way too.
//!
//! Who revokes through this daemon ends them at once; what another process revokes, and what expires, is found in rounds.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use carrel_engine::{Engine, tokens::TokenId};
use carrel_proto::problem::Problem;
use tokio_util::sync::CancellationToken;

/// Between two looks at the tokens that have something open.
const ROUND: Duration = Duration::from_secs(2);

/// Of one token, shared by everything that it has open.
#[derive(Debug)]
pub(crate) struct Lease(CancellationToken);

impl Lease {
    /// When the token is good no longer.
    pub(crate) async fn over(&self) {
        self.0.cancelled().await;
    }

    pub(crate) fn token(&self) -> CancellationToken {
        self.0.clone()
    }
}

#[derive(Debug, Default)]
pub(crate) struct Leases(Mutex<HashMap<TokenId, Arc<Lease>>>);

impl Leases {
    fn all(&self) -> MutexGuard<'_, HashMap<TokenId, Arc<Lease>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn take(&self, token: &TokenId) -> Arc<Lease> {
        let mut all = self.all();
        let lease = all.entry(token.clone()).or_insert_with(|| Arc::new(Lease(CancellationToken::new())));
        Arc::clone(lease)
    }

    /// Everything of this token ends now.
    pub(crate) fn end(&self, token: &TokenId) {
        if let Some(lease) = self.all().remove(token) {
            lease.0.cancel();
        }
    }

    /// Tokens that have something open.
    fn open(&self) -> Vec<TokenId> {
        let mut all = self.all();
        // Who has something open holds its lease, too. New holders come through the lock that is held here.
        all.retain(|_, lease| Arc::strong_count(lease) > 1);
        all.keys().cloned().collect()
    }

    /// Ends what is open of tokens that are good no longer.
    fn look(&self, engine: &Engine) -> Result<(), Problem> {
        for token in self.open() {
            if !engine.is_good_token(&token)? {
                self.end(&token);
            }
        }
        Ok(())
    }

    /// Looks again and again, until `stop`.
    pub(crate) async fn keep(self: Arc<Self>, engine: Engine, stop: CancellationToken) {
        let rounds = async {
            loop {
                tokio::time::sleep(ROUND).await;
                let (leases, engine) = (Arc::clone(&self), engine.clone());
                let looked = tokio::task::spawn_blocking(move || leases.look(&engine)).await;
                // A registry that cannot be read at the moment refuses every new request by itself.
                if let Err(problem) = looked.map_err(Problem::internal).flatten() {
                    tracing::warn!("looking at tokens: {problem}");
                }
            }
        };
        stop.run_until_cancelled(rounds).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(letter: char) -> TokenId {
        format!("tok_{}", letter.to_string().repeat(16)).parse().unwrap()
    }

    #[test]
    fn a_lease_ends_with_its_token_and_no_other_does() {
        let leases = Leases::default();
        let (one, same, other) = (leases.take(&id('a')), leases.take(&id('a')), leases.take(&id('b')));
        leases.end(&id('a'));
        assert!(one.0.is_cancelled() && same.0.is_cancelled() && !other.0.is_cancelled());
        // Whoever comes later is asked again.
        assert!(!leases.take(&id('a')).0.is_cancelled());
        assert_eq!(leases.open(), [id('b')], "what nobody holds is forgotten");
    }
}
