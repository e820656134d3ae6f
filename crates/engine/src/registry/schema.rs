//! The registry's tables, version by version. A newer carrel brings an older registry up to date when it opens it.

use carrel_proto::problem::Problem;
use rusqlite::{Connection, TransactionBehavior};

use super::failed;

/// Raised with every change of the tables.
const SCHEMA: i64 = 5;

/// From nothing to 1.
const FIRST: &str = "
    CREATE TABLE sandboxes (
        number     INTEGER PRIMARY KEY AUTOINCREMENT,
        id         TEXT NOT NULL UNIQUE,
        key        TEXT UNIQUE,
        state      TEXT NOT NULL,
        spec       TEXT NOT NULL,
        placed     TEXT,
        boot       TEXT NOT NULL,
        reason     TEXT,
        created_ms INTEGER NOT NULL,
        used_ms    INTEGER NOT NULL
    ) STRICT;
    CREATE INDEX sandboxes_by_state ON sandboxes (state);
    PRAGMA user_version = 1;";

/// From 1 to 2: tenants. A key was unique by itself, which SQLite can only undo with a new table. Numbers go on where they
/// were, also those of sandboxes that are gone: user ids derive from them.
const TENANTS: &str = "
    ALTER TABLE sandboxes RENAME TO sandboxes_1;
    DROP INDEX sandboxes_by_state;
    CREATE TABLE sandboxes (
        number      INTEGER PRIMARY KEY AUTOINCREMENT,
        id          TEXT NOT NULL UNIQUE,
        tenant      TEXT NOT NULL DEFAULT '',
        key         TEXT,
        state       TEXT NOT NULL,
        spec        TEXT NOT NULL,
        labels      TEXT NOT NULL DEFAULT '{}',
        placed      TEXT,
        boot        TEXT NOT NULL,
        reason      TEXT,
        created_ms  INTEGER NOT NULL,
        used_ms     INTEGER NOT NULL,
        close_at_ms INTEGER,
        UNIQUE (tenant, key)
    ) STRICT;
    INSERT INTO sandboxes (number, id, key, state, spec, placed, boot, reason, created_ms, used_ms)
        SELECT number, id, key, state, spec, placed, boot, reason, created_ms, used_ms FROM sandboxes_1;
    DELETE FROM sqlite_sequence WHERE name = 'sandboxes';
    INSERT INTO sqlite_sequence (name, seq)
        SELECT 'sandboxes', seq FROM sqlite_sequence WHERE name = 'sandboxes_1';
    DROP TABLE sandboxes_1;
    CREATE INDEX sandboxes_by_state ON sandboxes (state, number);
    CREATE INDEX sandboxes_by_tenant ON sandboxes (tenant, number);
    CREATE INDEX sandboxes_to_close ON sandboxes (close_at_ms) WHERE close_at_ms IS NOT NULL;

    CREATE TABLE closed_scopes (
        tenant    TEXT NOT NULL,
        scope     TEXT NOT NULL,
        owner     TEXT NOT NULL,
        closed_ms INTEGER NOT NULL,
        PRIMARY KEY (tenant, scope, owner)
    ) STRICT, WITHOUT ROWID;

    CREATE TABLE tokens (
        id         TEXT PRIMARY KEY NOT NULL,
        name       TEXT NOT NULL,
        digest     BLOB NOT NULL,
        scopes     TEXT NOT NULL,
        quota      TEXT NOT NULL,
        created_ms INTEGER NOT NULL,
        expires_ms INTEGER,
        revoked_ms INTEGER,
        used_ms    INTEGER
    ) STRICT;

    CREATE TABLE answers (
        tenant     TEXT NOT NULL,
        key        TEXT NOT NULL,
        request    BLOB NOT NULL,
        begun_ms   INTEGER NOT NULL,
        boot       TEXT NOT NULL,
        pid        INTEGER NOT NULL,
        start_time INTEGER NOT NULL,
        serial     INTEGER NOT NULL,
        status     INTEGER,
        body       BLOB,
        PRIMARY KEY (tenant, key)
    ) STRICT;
    CREATE INDEX answers_by_age ON answers (begun_ms);
    PRAGMA user_version = 2;";

/// From 2 to 3: sandboxes that sleep.
const SLEEP: &str = "
    ALTER TABLE sandboxes ADD COLUMN image TEXT;
    ALTER TABLE sandboxes ADD COLUMN image_made_ms INTEGER;
    ALTER TABLE sandboxes ADD COLUMN image_bytes INTEGER;
    ALTER TABLE sandboxes ADD COLUMN standby_reason TEXT;
    ALTER TABLE sandboxes ADD COLUMN usage TEXT;
    PRAGMA user_version = 3;";

/// From 3 to 4: snapshots. Numbers are never used again, so that pages stay in order.
const SNAPSHOTS: &str = "
    ALTER TABLE sandboxes ADD COLUMN origin TEXT;
    ALTER TABLE sandboxes ADD COLUMN forked_from TEXT;
    CREATE TABLE snapshots (
        number  INTEGER PRIMARY KEY AUTOINCREMENT,
        id      TEXT NOT NULL UNIQUE,
        tenant  TEXT NOT NULL,
        sandbox TEXT NOT NULL,
        key     TEXT,
        parent  TEXT,
        tags    TEXT NOT NULL,
        made_ms INTEGER NOT NULL,
        bytes   INTEGER NOT NULL,
        content TEXT NOT NULL
    ) STRICT;
    CREATE INDEX snapshots_by_tenant ON snapshots (tenant, number);
    CREATE INDEX snapshots_by_sandbox ON snapshots (sandbox, number);
    PRAGMA user_version = 4;";

/// From 4 to 5: how many sandboxes of an environment have asked for a module; without a name, how many have asked for any.
const IMPORTS: &str = "
    CREATE TABLE imports (
        environment TEXT NOT NULL,
        module      TEXT NOT NULL,
        sandboxes   INTEGER NOT NULL,
        PRIMARY KEY (environment, module)
    ) STRICT, WITHOUT ROWID;
    PRAGMA user_version = 5;";

pub(super) fn migrate(connection: &mut Connection) -> Result<(), Problem> {
    let version =
        |connection: &Connection| connection.query_row("PRAGMA user_version", [], |row| row.get::<_, i64>(0));
    let found = version(connection).map_err(failed)?;
    if found == SCHEMA {
        return Ok(());
    }
    if found > SCHEMA {
        return Err(Problem::internal(format!(
            "the registry was written by a newer carrel (schema {found})"
        ))
        .hint("use that version, or another CARREL_STATE"));
    }
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate).map_err(failed)?;
    // Another process may have been first.
    let found = version(&transaction).map_err(failed)?;
    for (from, step) in [FIRST, TENANTS, SLEEP, SNAPSHOTS, IMPORTS].into_iter().enumerate() {
        if usize::try_from(found).is_ok_and(|found| found <= from) {
            transaction.execute_batch(step).map_err(failed)?;
        }
    }
    transaction.commit().map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        registry::{Claim, Registry, tests::claim},
        tenant::Tenant,
    };

    /// As the first release wrote it.
    fn old(path: &std::path::Path) {
        let connection = Connection::open(path).unwrap();
        connection.execute_batch(FIRST).unwrap();
        let spec = r#"{"environment":"node","limits":{"cpu_millis":1000,"memory":5,"pids":6,"disk":7,"output":8,"execs":9},"isolation":"jail","project":null,"idle_timeout_s":60,"max_lifetime_s":600,"ephemeral":null}"#;
        let mut insert = connection
            .prepare("INSERT INTO sandboxes (id, key, state, spec, boot, created_ms, used_ms) VALUES (?1, ?2, ?3, ?4, 'b', 10, 20)")
            .unwrap();
        insert.execute(("sbx_one", Some("user:local:one"), "lost", spec)).unwrap();
        insert.execute(("sbx_two", None::<&str>, "running", spec)).unwrap();
        insert.execute(("sbx_gone", Some("user:local:gone"), "ended", spec)).unwrap();
        insert.execute(("sbx_last", None::<&str>, "running", spec)).unwrap();
        connection.execute("DELETE FROM sandboxes WHERE id = 'sbx_last'", []).unwrap();
    }

    #[test]
    fn a_registry_of_the_first_release_is_taken_over_whole() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("registry.db");
        old(&path);
        for _ in 0..2 {
            let registry = Registry::open(&path).unwrap();
            let all = registry.all().unwrap();
            assert_eq!(all.iter().map(|record| record.number).collect::<Vec<_>>(), [1, 2, 3]);
            let one = registry.by_key(&Tenant::local(), &"user:local:one".parse().unwrap()).unwrap().unwrap();
            assert_eq!((one.id.as_str(), one.spec.limits.pids, one.used_unix_ms), ("sbx_one", 6, 20));
            assert!(one.tenant.is_local() && one.labels.is_empty() && one.close_at_unix_ms.is_none());
            assert_eq!((one.spec.standby_after_s, one.spec.hibernate_after_s), (300, 1800));
            assert_eq!(one.sleep, crate::registry::Sleep::default());
        }
        let registry = Registry::open(&path).unwrap();
        let taken = Claim { key: Some("user:local:one".parse().unwrap()), ..claim("sbx_new") };
        assert!(registry.claim(&taken).unwrap().is_none());
        // A number that a sandbox had which is gone is not given out again.
        assert_eq!(registry.claim(&claim("sbx_new")).unwrap().unwrap().number, 5);
    }

    #[test]
    fn an_empty_old_registry_keeps_its_numbers_too() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("registry.db");
        old(&path);
        Connection::open(&path).unwrap().execute("DELETE FROM sandboxes", []).unwrap();
        let registry = Registry::open(&path).unwrap();
        assert_eq!(registry.claim(&claim("sbx_new")).unwrap().unwrap().number, 5);
    }

    #[test]
    fn many_openers_of_an_old_registry_migrate_it_once() {
        for _ in 0..10 {
            let place = tempfile::tempdir().unwrap();
            let path = place.path().join("registry.db");
            old(&path);
            let together = std::sync::Barrier::new(8);
            std::thread::scope(|scope| {
                for _ in 0..8 {
                    scope.spawn(|| {
                        together.wait();
                        assert_eq!(Registry::open(&path).unwrap().all().unwrap().len(), 3);
                    });
                }
            });
        }
    }

    #[test]
    fn who_opens_it_while_another_writes_the_first_tables_waits() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("registry.db");
        // Not yet in WAL mode: there SQLite refuses to switch at once, whatever the patience of the connection.
        let mut first = Connection::open(&path).unwrap();
        let writing = first.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
        std::thread::scope(|scope| {
            let opener = scope.spawn(|| Registry::open(&path).map(drop));
            // Time for the refusal to show; one that waits is not done before the other is, however long this takes.
            for _ in 0..50 {
                std::thread::sleep(std::time::Duration::from_millis(2));
                assert!(!opener.is_finished(), "it was refused");
            }
            writing.commit().unwrap();
            opener.join().unwrap().unwrap();
        });
    }

    #[test]
    fn a_newer_registry_is_left_alone() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("registry.db");
        Connection::open(&path).unwrap().execute_batch("PRAGMA user_version = 99;").unwrap();
        assert!(Registry::open(&path).unwrap_err().hint.contains("that version"));
    }
}
