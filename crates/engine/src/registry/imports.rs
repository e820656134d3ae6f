//! Which modules sandboxes ask for.

use carrel_proto::problem::Problem;
use rusqlite::{TransactionBehavior, params};

use super::{Registry, failed};

/// After so many sandboxes all counts are halved: what they asked for long ago weighs less than what they ask for now.
const MANY: i64 = 256;
/// In place of a module: how many sandboxes have asked for any.
const ANY: &str = "";

/// How many sandboxes of an environment have asked for each module, the most wanted first; and for any.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Imports {
    pub(crate) sandboxes: i64,
    pub(crate) modules: Vec<(String, i64)>,
}

impl Registry {
    pub(crate) fn count_imports(&self, environment: &str, modules: &[String]) -> Result<(), Problem> {
        let mut connection = self.connection();
        let transaction =
            connection.transaction_with_behavior(TransactionBehavior::Immediate).map_err(failed)?;
        let count = "INSERT INTO imports VALUES (?1, ?2, 1)
            ON CONFLICT (environment, module) DO UPDATE SET sandboxes = sandboxes + 1";
        for module in modules.iter().map(String::as_str).chain([ANY]) {
            transaction.execute(count, params![environment, module]).map_err(failed)?;
        }
        let many = "SELECT sandboxes >= ?2 FROM imports WHERE environment = ?1 AND module = ''";
        if transaction.query_row(many, params![environment, MANY], |row| row.get(0)).map_err(failed)? {
            let halve = "UPDATE imports SET sandboxes = sandboxes / 2 WHERE environment = ?1";
            transaction.execute(halve, params![environment]).map_err(failed)?;
            let forget = "DELETE FROM imports WHERE environment = ?1 AND sandboxes = 0";
            transaction.execute(forget, params![environment]).map_err(failed)?;
        }
        transaction.commit().map_err(failed)
    }

    pub(crate) fn imports(&self, environment: &str) -> Result<Imports, Problem> {
        let connection = self.connection();
        let all =
            "SELECT module, sandboxes FROM imports WHERE environment = ?1 ORDER BY sandboxes DESC, module";
        let mut statement = connection.prepare_cached(all).map_err(failed)?;
        let rows = statement
            .query_map(params![environment], |row| Ok((row.get::<_, String>(0)?, row.get::<_, i64>(1)?)))
            .map_err(failed)?;
        let mut imports = Imports::default();
        for row in rows {
            match row.map_err(failed)? {
                (module, count) if module == ANY => imports.sandboxes = count,
                row => imports.modules.push(row),
            }
        }
        Ok(imports)
    }
}
