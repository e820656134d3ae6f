//! How many exchanges with servers in sandboxes are under way. Each costs two descriptors and a buffer or two, also after its request has
//! become a WebSocket, and share links bring them in from people without a token: so they are counted here, not at the turnstile.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use carrel_proto::{
    id::SandboxId,
    problem::{Code, Problem},
};

/// In all.
const MOST: usize = 1024;
/// Of one sandbox: so that one link that got around takes nobody else's places.
const MOST_OF_ONE: usize = 128;

#[derive(Debug, Default)]
pub(super) struct Places(Mutex<Taken>);

#[derive(Debug, Default)]
struct Taken {
    all: usize,
    by_sandbox: HashMap<SandboxId, usize>,
}

/// One of them, until it is dropped.
#[derive(Debug)]
pub(super) struct Place {
    places: Arc<Places>,
    sandbox: SandboxId,
}

impl Places {
    pub(super) fn take(self: &Arc<Self>, sandbox: &SandboxId) -> Result<Place, Problem> {
        let mut taken = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if taken.all >= MOST {
            return Err(Problem::new(Code::Unavailable, "too many requests to sandboxes are under way"));
        }
        let own = taken.by_sandbox.entry(sandbox.clone()).or_default();
        if *own >= MOST_OF_ONE {
            let word = format!("{MOST_OF_ONE} requests to ports of this sandbox are under way");
            return Err(Problem::new(Code::RateLimited, word).hint("end some of them, or wait"));
        }
        *own += 1;
        taken.all += 1;
        Ok(Place { places: Arc::clone(self), sandbox: sandbox.clone() })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.places.0.lock().unwrap_or_else(PoisonError::into_inner);
        taken.all -= 1;
        if let Some(own) = taken.by_sandbox.get_mut(&self.sandbox) {
            *own -= 1;
            if *own == 0 {
                taken.by_sandbox.remove(&self.sandbox);
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
        let (one, other) = (SandboxId::from_random([1; 10]), SandboxId::from_random([2; 10]));
        let taken: Vec<Place> = (0..MOST_OF_ONE).map(|_| places.take(&one).unwrap()).collect();
        assert_eq!(places.take(&one).unwrap_err().code, Code::RateLimited);
        assert!(places.take(&other).is_ok());
        drop(taken);
        assert!(places.take(&one).is_ok());
        let taken = places.0.lock().unwrap();
        assert!(taken.all == 0 && taken.by_sandbox.is_empty());
    }
}
