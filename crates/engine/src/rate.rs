//! How often a tenant may call: a bucket that fills at the quota's rate and holds one second's worth.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use carrel_proto::problem::{Code, Problem};

use crate::tenant::Tenant;

/// Tenants that are remembered. Those whose bucket is full are as good as new and are forgotten first.
const MAX_BUCKETS: usize = 1024;

/// A refusal, and when there is room again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TooFast {
    pub retry_after: Duration,
    pub rate: u32,
}

impl From<TooFast> for Problem {
    fn from(refusal: TooFast) -> Self {
        let millis = refusal.retry_after.as_millis().max(1);
        Problem::new(Code::RateLimited, format!("more than {} calls per second", refusal.rate))
            .hint(format!("come back in {millis} ms"))
    }
}

#[derive(Debug)]
struct Bucket {
    rate: u32,
    /// Calls that are left.
    left: f64,
    at: Instant,
}

impl Bucket {
    fn fill(&mut self, rate: u32, now: Instant) {
        let passed = now.saturating_duration_since(self.at).as_secs_f64();
        self.rate = rate;
        self.left = (self.left + passed * f64::from(rate)).min(f64::from(rate));
        self.at = self.at.max(now);
    }
}

/// The buckets of all tenants of one process.
#[derive(Debug, Default)]
pub struct Rates(Mutex<HashMap<Tenant, Bucket>>);

impl Rates {
    /// Counts one call of a tenant that may make `rate` of them per second.
    pub fn take(&self, tenant: &Tenant, rate: u32) -> Result<(), TooFast> {
        self.take_at(tenant, rate, Instant::now())
    }

    fn take_at(&self, tenant: &Tenant, rate: u32, now: Instant) -> Result<(), TooFast> {
        let rate = rate.max(1);
        let mut buckets = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if buckets.len() >= MAX_BUCKETS && !buckets.contains_key(tenant) {
            buckets.retain(|_, bucket| {
                bucket.fill(bucket.rate, now);
                bucket.left < f64::from(bucket.rate)
            });
        }
        let full = || Bucket { rate, left: f64::from(rate), at: now };
        let bucket = buckets.entry(tenant.clone()).or_insert_with(full);
        bucket.fill(rate, now);
        if bucket.left >= 1.0 {
            bucket.left -= 1.0;
            return Ok(());
        }
        Err(TooFast { retry_after: Duration::from_secs_f64((1.0 - bucket.left) / f64::from(rate)), rate })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tenant(number: usize) -> Tenant {
        Tenant::stored(format!("tok_{number}"))
    }

    #[test]
    fn a_second_of_calls_at_once_and_then_at_the_rate() {
        let (rates, start) = (Rates::default(), Instant::now());
        for _ in 0..5 {
            rates.take_at(&tenant(1), 5, start).unwrap();
        }
        let refusal = rates.take_at(&tenant(1), 5, start).unwrap_err();
        assert_eq!(refusal.retry_after, Duration::from_millis(200));
        rates.take_at(&tenant(2), 5, start).unwrap();
        // Who comes back when told to is let in, and only once.
        let later = start + refusal.retry_after + Duration::from_micros(1);
        rates.take_at(&tenant(1), 5, later).unwrap();
        let refusal = rates.take_at(&tenant(1), 5, later).unwrap_err();
        assert_eq!(Problem::from(refusal).code, Code::RateLimited);
        // A long rest is worth one second, and a clock that goes back nothing.
        let rested = later + Duration::from_secs(1000);
        let through = (0..10).filter(|_| rates.take_at(&tenant(1), 5, rested).is_ok()).count();
        assert_eq!(through, 5);
        assert!(rates.take_at(&tenant(1), 5, start).is_err());
    }

    #[test]
    fn buckets_of_many_tenants_do_not_pile_up() {
        let (rates, mut now) = (Rates::default(), Instant::now());
        for number in 0..5 * MAX_BUCKETS {
            rates.take_at(&tenant(number), 10, now).unwrap();
            now += Duration::from_millis(10);
        }
        assert!(rates.0.lock().unwrap().len() <= MAX_BUCKETS);
    }
}
