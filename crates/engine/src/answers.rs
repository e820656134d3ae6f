//! Answers that are given again: a caller who repeats a request under the same idempotency key gets what the first one
//! got, and nothing is done twice.
//!
//! ```text
//! (nothing) ── begin ──> under way ── finish ──> answered ── 24 h ──> (nothing)
//!                            │ abandon, or its process died
//!                            └──> (nothing): the next one begins anew
//! ```

use std::sync::atomic::{AtomicU64, Ordering};

use carrel_proto::problem::{Code, Problem};
use rusqlite::{OptionalExtension, params};

use crate::{
    Engine,
    registry::{Owner, Registry, boot_id, failed, now_ms, signed},
    tenant::Tenant,
    tokens::digest,
};

/// So long an answer is given again.
const KEPT_MS: u64 = 24 * 3600 * 1000;
/// Longest key: a UUID with a prefix fits many times.
pub const MAX_KEY: usize = 255;
/// Largest answer that is kept. Those of creates are a few kilobytes.
pub const MAX_ANSWER: usize = 256 << 10;
/// Answers of one tenant at a time; the oldest give way.
const MAX_ANSWERS: i64 = 10_000;
/// Answers larger than this, of which a tenant keeps fewer: so that all of one tenant's together stay in the low hundreds of megabytes.
const LARGE: i64 = 16 << 10;
const MAX_LARGE: i64 = 256;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    pub status: u16,
    pub body: Vec<u8>,
}

/// What becomes of a request with a key.
#[derive(Debug)]
pub enum Begun {
    /// It is to be done; the ticket takes its answer.
    New(Ticket),
    /// It was done before.
    Known(Answer),
}

/// A request under way. Dropped without an answer, it is as if it had never begun.
#[derive(Debug)]
pub struct Ticket {
    engine: Engine,
    tenant: Tenant,
    key: String,
    serial: u64,
    answered: bool,
}

impl Ticket {
    /// Keeps the answer for whoever asks again.
    pub async fn finish(mut self, answer: Answer) -> Result<(), Problem> {
        if answer.body.len() > MAX_ANSWER {
            return Err(Problem::new(Code::TooLarge, "the answer is too large to be given again"));
        }
        self.answered = true;
        let (tenant, key, serial) = (self.tenant.clone(), self.key.clone(), self.serial);
        self.engine
            .blocking(move |engine| engine.registry.finish_answer(&tenant, &key, serial, &answer))
            .await
    }

    /// It came to nothing: whoever asks again begins anew.
    pub fn abandon(self) {}
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if self.answered {
            return;
        }
        let (engine, tenant, key, serial) =
            (self.engine.clone(), self.tenant.clone(), std::mem::take(&mut self.key), self.serial);
        // What fails here is found when its process is gone.
        let forget = move || drop(engine.registry.abandon_answer(&tenant, &key, serial));
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn_blocking(forget)),
            Err(_) => forget(),
        }
    }
}

/// A number for every beginning in this process, so that one that is late does not answer for another.
fn next_serial() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

enum Entry {
    New(u64),
    Known(Answer),
}

impl Registry {
    fn begin_answer(&self, tenant: &Tenant, key: &str, request: &[u8; 32]) -> Result<Entry, Problem> {
        if key.is_empty() || key.len() > MAX_KEY || key.chars().any(char::is_control) {
            return Err(Problem::new(
                Code::InvalidArgument,
                format!("an idempotency key has 1 to {MAX_KEY} bytes and no control characters"),
            ));
        }
        let (now, me, serial) = (now_ms(), Owner::me(), next_serial());
        self.write(|transaction| {
            let found = transaction
                .prepare_cached(
                    "SELECT request, status, body, boot, pid, start_time FROM answers
                     WHERE tenant = ?1 AND key = ?2 AND begun_ms > ?3",
                )
                .and_then(|mut statement| {
                    let old = signed(now.saturating_sub(KEPT_MS));
                    statement
                        .query_row(params![tenant.as_str(), key, old], |row| {
                            let owner =
                                Owner { pid: row.get(4)?, start_time: row.get::<_, i64>(5)?.unsigned_abs() };
                            Ok((
                                row.get::<_, Vec<u8>>(0)?,
                                row.get::<_, Option<u16>>(1)?,
                                row.get::<_, Option<Vec<u8>>>(2)?,
                                row.get::<_, String>(3)?,
                                owner,
                            ))
                        })
                        .optional()
                })
                .map_err(failed)?;
            if let Some((first, status, body, boot, owner)) = found {
                let dead = status.is_none() && (boot != boot_id() || !owner.is_alive());
                if !dead && first != request {
                    return Err(Problem::new(
                        Code::Conflict,
                        "this idempotency key was used for another request",
                    )
                    .hint("a new request needs a new key"));
                }
                match (status, body) {
                    (Some(status), body) => {
                        return Ok(Entry::Known(Answer { status, body: body.unwrap_or_default() }));
                    }
                    _ if dead => {}
                    _ => {
                        return Err(Problem::new(Code::InProgress, "this very request is still under way")
                            .hint("try again in a moment with the same key: the answer will be there"));
                    }
                }
            } else {
                make_room(transaction, tenant)?;
            }
            transaction
                .prepare_cached(
                    "INSERT OR REPLACE INTO answers (tenant, key, request, begun_ms, boot, pid, start_time, serial)
                     VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
                )
                .and_then(|mut statement| {
                    statement.execute(params![
                        tenant.as_str(),
                        key,
                        request,
                        signed(now),
                        boot_id(),
                        me.pid,
                        signed(me.start_time),
                        signed(serial)
                    ])
                })
                .map_err(failed)?;
            Ok(Entry::New(serial))
        })
    }

    fn finish_answer(&self, tenant: &Tenant, key: &str, serial: u64, answer: &Answer) -> Result<(), Problem> {
        self.write(|transaction| {
            transaction
                .prepare_cached(
                    "UPDATE answers SET status = ?4, body = ?5
                     WHERE tenant = ?1 AND key = ?2 AND serial = ?3 AND pid = ?6 AND status IS NULL",
                )
                .and_then(|mut statement| {
                    statement.execute(params![
                        tenant.as_str(),
                        key,
                        signed(serial),
                        answer.status,
                        answer.body,
                        std::process::id()
                    ])
                })
                .map_err(failed)?;
            if i64::try_from(answer.body.len()).is_ok_and(|size| size > LARGE) {
                let old = "DELETE FROM answers WHERE rowid IN (SELECT rowid FROM answers
                           WHERE tenant = ?1 AND LENGTH(body) > ?2 ORDER BY begun_ms DESC, rowid DESC
                           LIMIT -1 OFFSET ?3)";
                transaction.execute(old, params![tenant.as_str(), LARGE, MAX_LARGE]).map_err(failed)?;
            }
            Ok(())
        })
    }

    fn abandon_answer(&self, tenant: &Tenant, key: &str, serial: u64) -> Result<(), Problem> {
        self.write(|transaction| {
            transaction
                .execute(
                    "DELETE FROM answers
                     WHERE tenant = ?1 AND key = ?2 AND serial = ?3 AND pid = ?4 AND status IS NULL",
                    params![tenant.as_str(), key, signed(serial), std::process::id()],
                )
                .map_err(failed)?;
            Ok(())
        })
    }

    /// Forgets answers whose time is over.
    pub(crate) fn sweep_answers(&self) -> Result<(), Problem> {
        let old = signed(now_ms().saturating_sub(KEPT_MS));
        let any: bool = self.read(|connection| {
            connection
                .prepare_cached("SELECT EXISTS (SELECT 1 FROM answers WHERE begun_ms <= ?1)")?
                .query_row([old], |row| row.get(0))
        })?;
        if any {
            self.write(|transaction| {
                transaction.execute("DELETE FROM answers WHERE begun_ms <= ?1", [old]).map_err(failed)
            })?;
        }
        Ok(())
    }
}

/// Forgets the oldest answers of a tenant that has very many: who repeats a request does so within seconds, not after ten
/// thousand others.
fn make_room(transaction: &rusqlite::Transaction<'_>, tenant: &Tenant) -> Result<(), Problem> {
    let count: i64 = transaction
        .prepare_cached("SELECT COUNT(*) FROM (SELECT 1 FROM answers WHERE tenant = ?1 LIMIT ?2)")
        .and_then(|mut statement| {
            statement.query_row(params![tenant.as_str(), MAX_ANSWERS], |row| row.get(0))
        })
        .map_err(failed)?;
    if count >= MAX_ANSWERS {
        transaction
            .execute(
                "DELETE FROM answers WHERE rowid IN (SELECT rowid FROM answers
                 WHERE tenant = ?1 AND status IS NOT NULL ORDER BY begun_ms LIMIT ?2)",
                params![tenant.as_str(), MAX_ANSWERS / 10],
            )
            .map_err(failed)?;
    }
    Ok(())
}

impl Engine {
    /// Begins a request under a tenant's idempotency key, or says what it came to before. `request` is all that makes
    /// it this request and no other: method, path, body.
    pub async fn begin_once(&self, tenant: &Tenant, key: &str, request: &[u8]) -> Result<Begun, Problem> {
        let request = digest(request);
        let (tenant, key) = (tenant.clone(), key.to_owned());
        self.blocking(move |engine| {
            Ok(match engine.registry.begin_answer(&tenant, &key, &request)? {
                Entry::Known(answer) => Begun::Known(answer),
                Entry::New(serial) => {
                    Begun::New(Ticket { engine: engine.clone(), tenant, key, serial, answered: false })
                }
            })
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Environments, Settings};

    fn engine() -> (tempfile::TempDir, Engine) {
        let place = tempfile::tempdir().unwrap();
        let settings = Settings { state: place.path().to_path_buf(), environments: Environments::default() };
        let engine = Engine::open(settings).unwrap();
        (place, engine)
    }

    async fn begin(engine: &Engine, tenant: &str, key: &str, request: &str) -> Result<Begun, Problem> {
        engine.begin_once(&Tenant::stored(tenant.to_owned()), key, request.as_bytes()).await
    }

    fn ticket(begun: Result<Begun, Problem>) -> Ticket {
        match begun.unwrap() {
            Begun::New(ticket) => ticket,
            Begun::Known(answer) => panic!("known: {answer:?}"),
        }
    }

    #[tokio::test]
    async fn very_many_answers_make_room_for_new_ones() {
        let (_place, engine) = engine();
        let old = "WITH RECURSIVE n(i) AS (VALUES (1) UNION ALL SELECT i + 1 FROM n WHERE i < ?1)
            INSERT INTO answers (tenant, key, request, begun_ms, boot, pid, start_time, serial, status, body)
            SELECT 'tok_a', 'old-' || i, x'00', ?2 + i, '', 1, 1, i, 201, x'' FROM n";
        let since = signed(now_ms() - 60_000);
        engine
            .registry
            .write(|transaction| transaction.execute(old, params![MAX_ANSWERS, since]).map_err(failed))
            .unwrap();
        let answer = Answer { status: 201, body: b"made".to_vec() };
        ticket(begin(&engine, "tok_a", "k", "create x").await).finish(answer.clone()).await.unwrap();
        match begin(&engine, "tok_a", "k", "create x").await.unwrap() {
            Begun::Known(known) => assert_eq!(known, answer),
            Begun::New(_) => panic!("done twice"),
        }
        // The youngest of the old ones are still known: by their key alone, since nobody knows what they asked for.
        let newest = format!("old-{MAX_ANSWERS}");
        assert_eq!(begin(&engine, "tok_a", &newest, "x").await.unwrap_err().code, Code::Conflict);
        ticket(begin(&engine, "tok_a", "old-1", "x").await).abandon();
    }

    #[tokio::test]
    async fn of_large_answers_fewer_are_kept() {
        let (_place, engine) = engine();
        let old = "WITH RECURSIVE n(i) AS (VALUES (1) UNION ALL SELECT i + 1 FROM n WHERE i < ?1)
            INSERT INTO answers (tenant, key, request, begun_ms, boot, pid, start_time, serial, status, body)
            SELECT 'tok_a', 'old-' || i, x'00', ?2 + i, '', 1, 1, i, 201, zeroblob(?3) FROM n";
        let since = signed(now_ms() - 60_000);
        engine
            .registry
            .write(|transaction| {
                transaction.execute(old, params![MAX_LARGE, since, LARGE + 1]).map_err(failed)
            })
            .unwrap();
        let large = Answer { status: 201, body: vec![b'x'; usize::try_from(LARGE).unwrap() + 1] };
        ticket(begin(&engine, "tok_a", "k", "create x").await).finish(large.clone()).await.unwrap();
        match begin(&engine, "tok_a", "k", "create x").await.unwrap() {
            Begun::Known(known) => assert_eq!(known, large),
            Begun::New(_) => panic!("done twice"),
        }
        // The oldest one has given way, and no other.
        assert_eq!(begin(&engine, "tok_a", "old-2", "x").await.unwrap_err().code, Code::Conflict);
        ticket(begin(&engine, "tok_a", "old-1", "x").await).abandon();
    }

    #[tokio::test]
    async fn the_same_request_gets_the_same_answer() {
        let (_place, engine) = engine();
        let first = ticket(begin(&engine, "tok_a", "k", "create x").await);
        let problem = begin(&engine, "tok_a", "k", "create x").await.unwrap_err();
        assert_eq!(problem.code, Code::InProgress);
        assert!(problem.hint.contains("try again"));
        // Another tenant's key is another key.
        let theirs = ticket(begin(&engine, "tok_b", "k", "create y").await);
        let answer = Answer { status: 201, body: b"made".to_vec() };
        first.finish(answer.clone()).await.unwrap();
        match begin(&engine, "tok_a", "k", "create x").await.unwrap() {
            Begun::Known(known) => assert_eq!(known, answer),
            Begun::New(_) => panic!("done twice"),
        }
        let problem = begin(&engine, "tok_a", "k", "create z").await.unwrap_err();
        assert_eq!(problem.code, Code::Conflict);
        theirs.finish(answer).await.unwrap();
        for bad in ["", "a\nb", &"x".repeat(256)] {
            assert_eq!(begin(&engine, "", bad, "x").await.unwrap_err().code, Code::InvalidArgument);
        }
    }

    #[tokio::test]
    async fn what_came_to_nothing_can_be_begun_anew_and_a_late_answer_does_no_harm() {
        let (_place, engine) = engine();
        let first = ticket(begin(&engine, "", "k", "x").await);
        let (tenant, serial) = (first.tenant.clone(), first.serial);
        // As the drop does, but waited for.
        engine.registry.abandon_answer(&tenant, "k", serial).unwrap();
        let second = ticket(begin(&engine, "", "k", "other").await);
        first.finish(Answer { status: 500, body: Vec::new() }).await.unwrap();
        assert_eq!(begin(&engine, "", "k", "other").await.unwrap_err().code, Code::InProgress);
        second.finish(Answer { status: 201, body: Vec::new() }).await.unwrap();
        assert!(matches!(
            begin(&engine, "", "k", "other").await,
            Ok(Begun::Known(Answer { status: 201, .. }))
        ));
    }

    #[test]
    fn a_dropped_ticket_frees_its_key() {
        let (_place, engine) = engine();
        // One thread, so that what is left to it is done in order.
        let runtime = tokio::runtime::Builder::new_current_thread()
            .max_blocking_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let first = ticket(runtime.block_on(begin(&engine, "", "k", "x")));
        // Where there is no runtime.
        drop(first);
        let again = runtime.block_on(async {
            ticket(begin(&engine, "", "k", "x").await).abandon();
            begin(&engine, "", "k", "y").await
        });
        runtime.block_on(ticket(again).finish(Answer { status: 200, body: Vec::new() })).unwrap();
    }

    #[tokio::test]
    async fn a_dead_process_leaves_no_request_under_way() {
        let (_place, engine) = engine();
        for change in ["start_time = 7", "boot = 'before'"] {
            let lost = ticket(begin(&engine, "", "k", "x").await);
            let sql = format!("UPDATE answers SET {change}, serial = 0");
            engine.registry.write(|transaction| transaction.execute(&sql, []).map_err(failed)).unwrap();
            let again = ticket(begin(&engine, "", "k", "x").await);
            drop(lost);
            again.finish(Answer { status: 200, body: Vec::new() }).await.unwrap();
            assert!(matches!(begin(&engine, "", "k", "x").await, Ok(Begun::Known(_))));
            engine
                .registry
                .write(|transaction| {
                    transaction.execute("UPDATE answers SET begun_ms = 5", []).map_err(failed)
                })
                .unwrap();
            engine.tidy().await.unwrap();
        }
        let left: i64 = engine
            .registry
            .read(|connection| connection.query_row("SELECT COUNT(*) FROM answers", [], |row| row.get(0)))
            .unwrap();
        assert_eq!(left, 0, "old answers are swept");
    }

    #[tokio::test]
    async fn of_many_at_once_one_begins() {
        let (_place, engine) = engine();
        let mut all = tokio::task::JoinSet::new();
        for _ in 0..50 {
            let engine = engine.clone();
            all.spawn(async move { begin(&engine, "", "k", "x").await });
        }
        let begun = all.join_all().await;
        assert_eq!(begun.iter().filter(|begun| matches!(begun, Ok(Begun::New(_)))).count(), 1);
    }
}
