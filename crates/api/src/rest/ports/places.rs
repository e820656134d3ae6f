//! How many exchanges with servers in sandboxes are under way. Each costs two descriptors and a buffer or two, also after its request has
//! become a WebSocket, and share links bring them in from people without a token: so they are counted here, not at the turnstile.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use carrel_engine::Tenant;
use carrel_proto::{
    id::SandboxId,
    problem::{Code, Problem},
};

use crate::rest::shares::{Share, Shares};

/// In all.
const MOST: usize = 1024;
/// Of one sandbox: so that one link that got around takes nobody else's places.
const MOST_OF_ONE: usize = 128;
/// Of one token's sandboxes together: so that many sandboxes take nobody else's places, either.
const MOST_OF_TENANT: usize = 384;

#[derive(Debug)]
pub(super) struct Places {
    by_tenant: Arc<Shares>,
    taken: Mutex<HashMap<SandboxId, usize>>,
}

impl Default for Places {
    fn default() -> Self {
        Self { by_tenant: Shares::new("requests to ports", MOST, MOST_OF_TENANT), taken: Mutex::default() }
    }
}

/// One of them, until it is dropped.
#[derive(Debug)]
pub(super) struct Place {
    places: Arc<Places>,
    sandbox: SandboxId,
    _share: Share,
}

impl Places {
    pub(super) fn take(self: &Arc<Self>, tenant: &Tenant, sandbox: &SandboxId) -> Result<Place, Problem> {
        let share = self.by_tenant.take(tenant)?;
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let own = taken.entry(sandbox.clone()).or_default();
        if *own >= MOST_OF_ONE {
            let word = format!("{MOST_OF_ONE} requests to ports of this sandbox are under way");
            return Err(Problem::new(Code::RateLimited, word).hint("end some of them, or wait"));
        }
        *own += 1;
        Ok(Place { places: Arc::clone(self), sandbox: sandbox.clone(), _share: share })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.places.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(own) = taken.get_mut(&self.sandbox) {
            *own -= 1;
            if *own == 0 {
                taken.remove(&self.sandbox);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_sandbox_cannot_take_all_places_and_gives_back_what_it_took() {
        let places = Arc::new(Places::default());
        let tenant = Tenant::token(&"tok_aaaaaaaaaaaaaaaa".parse().unwrap());
        let ids: Vec<SandboxId> = (0..5).map(|number| SandboxId::from_random([number; 10])).collect();
        let take = |id: &SandboxId| places.take(&tenant, id);
        let mut taken: Vec<Place> = (0..MOST_OF_ONE).map(|_| take(&ids[0]).unwrap()).collect();
        assert_eq!(take(&ids[0]).unwrap_err().code, Code::RateLimited);
        // Nor can one token with many of them.
        taken.extend(
            (1..3).flat_map(|at| (0..MOST_OF_ONE).map(move |_| at)).map(|at| take(&ids[at]).unwrap()),
        );
        assert_eq!(take(&ids[3]).unwrap_err().code, Code::TooMany);
        let other = Tenant::token(&"tok_bbbbbbbbbbbbbbbb".parse().unwrap());
        assert!(places.take(&other, &ids[4]).is_ok());
        drop(taken);
        assert!(take(&ids[0]).is_ok());
        assert!(places.taken.lock().unwrap().is_empty());
    }
}
