//! Pages of sandboxes: filtered, in the order they were made, by indexes.

use std::{fmt, str::FromStr};

use carrel_proto::{
    id::Key,
    problem::{Code, Problem},
};
use rusqlite::{ToSql, params_from_iter};

use super::{COLUMNS, Record, Registry, State, record};
use crate::tenant::{Labels, Tenant};

/// Most sandboxes of one page. A row is a few kilobytes at most.
pub const MAX_PAGE: u32 = 1000;
/// Rows that are read at once where all are wanted: so long nobody else reads on the same connection.
const CHUNK: u32 = 100;

/// Which sandboxes are wanted. What is not said does not matter; those that have ended are never listed.
#[derive(Debug, Clone, Default)]
pub struct ListFilter {
    /// `None`: everybody's, which is for the local user alone.
    pub tenant: Option<Tenant>,
    pub key: Option<Key>,
    pub key_prefix: Option<String>,
    pub state: Option<State>,
    /// All of these.
    pub labels: Vec<(String, String)>,
}

/// Where a page ended. Its text is not for reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cursor(u32);

impl Cursor {
    pub(super) fn at(number: u32) -> Self {
        Self(number)
    }

    pub(super) fn number(self) -> u32 {
        self.0
    }
}

impl fmt::Display for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "c1{:08x}", self.0)
    }
}

impl FromStr for Cursor {
    type Err = Problem;
    fn from_str(text: &str) -> Result<Self, Problem> {
        let digits = text.strip_prefix("c1").filter(|digits| {
            digits.len() == 8
                && digits.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
        });
        digits.and_then(|digits| u32::from_str_radix(digits, 16).ok()).map(Self).ok_or_else(|| {
            Problem::new(Code::InvalidArgument, "this is not a cursor of a list")
                .hint("pass on what the page before said, unchanged")
        })
    }
}

#[derive(Debug, Clone)]
pub struct Page {
    pub records: Vec<Record>,
    /// For the next page; `None` on the last one.
    pub next: Option<Cursor>,
}

impl Registry {
    /// The sandboxes of a filter after `after`, at most `limit` of them.
    pub fn page(&self, filter: &ListFilter, after: Option<Cursor>, limit: u32) -> Result<Page, Problem> {
        let limit = limit.clamp(1, MAX_PAGE);
        let mut parts = Parts::default();
        parts.also("number > ?", i64::from(after.map_or(0, |cursor| cursor.0)));
        parts.filter(filter)?;
        // One more says whether there is a next page.
        parts.values.push(Box::new(i64::from(limit) + 1));
        let sql = format!("SELECT {COLUMNS} FROM sandboxes WHERE {} ORDER BY number LIMIT ?", parts.sql());
        let mut records = self.read(|connection| {
            let mut statement = connection.prepare_cached(&sql)?;
            let rows = statement.query_map(params_from_iter(&parts.values), record)?;
            rows.collect::<Result<Vec<_>, _>>()
        })?;
        let more = records.len() > limit as usize;
        records.truncate(limit as usize);
        let next = records.last().filter(|_| more).map(|last| Cursor(last.number));
        Ok(Page { records, next })
    }

    /// Some rows after the one of this number, ended ones too. `None`: there are no more.
    pub(crate) fn after(&self, number: u32) -> Result<Option<Vec<Record>>, Problem> {
        let sql = format!("SELECT {COLUMNS} FROM sandboxes WHERE number > ?1 ORDER BY number LIMIT {CHUNK}");
        let rows: Vec<Record> = self.read(|connection| {
            let mut statement = connection.prepare_cached(&sql)?;
            statement.query_map([number], record)?.collect()
        })?;
        Ok((!rows.is_empty()).then_some(rows))
    }
}

/// The conditions of a query and their values.
#[derive(Default)]
struct Parts {
    conditions: Vec<&'static str>,
    values: Vec<Box<dyn ToSql>>,
}

impl Parts {
    fn also(&mut self, condition: &'static str, value: impl ToSql + 'static) {
        self.conditions.push(condition);
        self.values.push(Box::new(value));
    }

    fn filter(&mut self, filter: &ListFilter) -> Result<(), Problem> {
        if let Some(tenant) = &filter.tenant {
            self.also("tenant = ?", tenant.as_str().to_owned());
        }
        match filter.state {
            Some(state) => self.also("state = ?", state.as_str()),
            None => self.conditions.push("state != 'ended'"),
        }
        if filter.state == Some(State::Ended) {
            self.conditions.push("0");
        }
        if let Some(key) = &filter.key {
            self.also("key = ?", key.as_str().to_owned());
        }
        if let Some(prefix) = &filter.key_prefix {
            // As a range, which an index serves. Keys are ASCII, so `~` with more is after all that begin so.
            self.also("key >= ?", prefix.clone());
            self.also("key < ?", format!("{prefix}\u{7f}"));
        }
        for (name, value) in &filter.labels {
            Labels::check_name(name)?;
            self.conditions.push("labels ->> ? = ?");
            self.values.push(Box::new(format!("$.\"{name}\"")));
            self.values.push(Box::new(value.clone()));
        }
        Ok(())
    }

    fn sql(&self) -> String {
        self.conditions.join(" AND ")
    }
}
