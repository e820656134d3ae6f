//! What there is little of in all, and so less of for one: threads that pack archives, the kernel's eyes on directories, lines to servers.
//!
//! The operator's own are bounded by the whole alone: there is nobody else whose share they would take.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use carrel_engine::Tenant;
use carrel_proto::problem::{Code, Problem};

#[derive(Debug)]
pub(crate) struct Shares {
    /// As a refusal names them.
    what: &'static str,
    all: usize,
    of_one: usize,
    taken: Mutex<Taken>,
}

#[derive(Debug, Default)]
struct Taken {
    all: usize,
    by_tenant: HashMap<Tenant, usize>,
}

/// One of them, until it is dropped.
#[derive(Debug)]
pub(crate) struct Share {
    shares: Arc<Shares>,
    tenant: Tenant,
}

impl Shares {
    pub(crate) fn new(what: &'static str, all: usize, of_one: usize) -> Arc<Self> {
        Arc::new(Self { what, all, of_one, taken: Mutex::default() })
    }

    pub(crate) fn take(self: &Arc<Self>, tenant: &Tenant) -> Result<Share, Problem> {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if taken.all >= self.all {
            return Err(Problem::new(Code::TooMany, format!("{} {} are under way", self.all, self.what))
                .hint("try again in a moment"));
        }
        let own = taken.by_tenant.entry(tenant.clone()).or_default();
        if *own >= self.of_one && !tenant.is_local() {
            let word = format!("{} {} of this token are under way", self.of_one, self.what);
            return Err(Problem::new(Code::TooMany, word).hint("end some of them, or wait"));
        }
        *own += 1;
        taken.all += 1;
        Ok(Share { shares: Arc::clone(self), tenant: tenant.clone() })
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut taken = self.shares.taken.lock().unwrap_or_else(PoisonError::into_inner);
        taken.all -= 1;
        if let Some(own) = taken.by_tenant.get_mut(&self.tenant) {
            *own -= 1;
            if *own == 0 {
                taken.by_tenant.remove(&self.tenant);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_token_cannot_take_everything_and_gives_back_what_it_took() {
        let shares = Shares::new("archives", 4, 2);
        let token =
            |letter: char| Tenant::token(&format!("tok_{}", letter.to_string().repeat(16)).parse().unwrap());
        let own = [shares.take(&token('a')).unwrap(), shares.take(&token('a')).unwrap()];
        assert_eq!(shares.take(&token('a')).unwrap_err().code, Code::TooMany);
        let others = [shares.take(&token('b')).unwrap(), shares.take(&Tenant::local()).unwrap()];
        assert!(shares.take(&token('c')).unwrap_err().message.starts_with("4 archives are"));
        drop(own);
        // The operator may have what is left.
        let _rest = [shares.take(&Tenant::local()).unwrap(), shares.take(&Tenant::local()).unwrap()];
        drop(others);
        assert_eq!(shares.taken.lock().unwrap().by_tenant.len(), 1);
    }
}
