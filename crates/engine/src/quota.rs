//! What one tenant may hold at once, summed over the limits of its sandboxes; on disk its snapshots count too.
//!
//! Checked in the transaction that adds or changes a row, so that callers at the same time never exceed it together. What
//! counts is what was promised to a sandbox, not what it uses at the moment: else a promise could not be kept.

use std::{fmt, str::FromStr};

use carrel_proto::{
    id::SandboxId,
    limits::{ByteSize, Limits},
    problem::{Code, Problem},
};
use rusqlite::{Connection, Transaction, params};
use serde::{Deserialize, Serialize};

use crate::{Engine, nearest::nearest, registry::failed, tenant::Tenant};

/// Sandboxes that a refusal names: the largest ones.
const NAMED: usize = 5;
/// Snapshots of one token: each is a directory and a row, however small it is.
const MAX_SNAPSHOTS: u64 = 1000;

/// Most of everything; `None` is no limit. Written `sandboxes=20,cpu=8,memory=16GB,disk=50GB,rate=50`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Quota {
    pub sandboxes: Option<u32>,
    pub cpu_millis: Option<u64>,
    pub memory: Option<ByteSize>,
    pub disk: Option<ByteSize>,
    /// Calls per second; kept by [`crate::rate`].
    pub rate: Option<u32>,
}

const NAMES: [&str; 5] = ["sandboxes", "cpu", "memory", "disk", "rate"];

impl FromStr for Quota {
    type Err = Problem;

    fn from_str(text: &str) -> Result<Self, Problem> {
        let bad = |why: String| {
            Problem::new(Code::InvalidArgument, why)
                .hint("written like `sandboxes=20,cpu=8,memory=16GB,disk=50GB,rate=50`")
        };
        let mut quota = Self::default();
        let mut seen = Vec::new();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let (name, value) = part
                .split_once('=')
                .map(|(name, value)| (name.trim(), value.trim()))
                .ok_or_else(|| bad(format!("`{part}` of the quota has no `=`")))?;
            if seen.contains(&name) {
                return Err(bad(format!("the quota says `{name}` twice")));
            }
            let count = || value.parse().ok().filter(|count| *count > 0);
            let size = || value.parse::<ByteSize>().ok().filter(|size| size.0 > 0);
            let understood = match name {
                "sandboxes" => count().map(|count| quota.sandboxes = Some(count)),
                "rate" => count().map(|count| quota.rate = Some(count)),
                "cpu" => millis(value).map(|millis| quota.cpu_millis = Some(millis)),
                "memory" => size().map(|size| quota.memory = Some(size)),
                "disk" => size().map(|size| quota.disk = Some(size)),
                _ => {
                    let near = nearest(name, NAMES).map(|near| format!("; did you mean `{near}`?"));
                    return Err(bad(format!("a quota has no `{name}`{}", near.unwrap_or_default())));
                }
            };
            understood.ok_or_else(|| bad(format!("`{value}` is not a quota of {name}")))?;
            seen.push(name);
        }
        Ok(quota)
    }
}

/// CPUs to the thousandth.
fn millis(text: &str) -> Option<u64> {
    let (whole, part) = text.split_once('.').unwrap_or((text, "0"));
    let digits = |text: &str| (1..=9).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit());
    if !digits(whole) || !digits(part) || part.len() > 3 {
        return None;
    }
    let millis = whole.parse::<u64>().ok()? * 1000 + format!("{part:0<3}").parse::<u64>().ok()?;
    (millis > 0).then_some(millis)
}

fn cpus(millis: u64) -> String {
    let text = format!("{}.{:03}", millis / 1000, millis % 1000);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// As [`Quota`] reads it: exact, so in the largest unit that divides it.
fn exact(size: ByteSize) -> String {
    for (shift, unit) in [(40, "TB"), (30, "GB"), (20, "MB"), (10, "KB")] {
        if size.0 > 0 && size.0.trailing_zeros() >= shift {
            return format!("{}{unit}", size.0 >> shift);
        }
    }
    size.0.to_string()
}

impl fmt::Display for Quota {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = [
            self.sandboxes.map(|count| count.to_string()),
            self.cpu_millis.map(cpus),
            self.memory.map(exact),
            self.disk.map(exact),
            self.rate.map(|rate| rate.to_string()),
        ];
        let said = NAMES.iter().zip(parts).filter_map(|(name, part)| Some(format!("{name}={}", part?)));
        f.write_str(&said.collect::<Vec<_>>().join(","))
    }
}

/// One thing that a quota counts.
struct Thing {
    name: &'static str,
    /// Of one row.
    sql: &'static str,
    show: fn(u64) -> String,
}

const SANDBOXES: Thing = Thing { name: "sandboxes", sql: "1", show: |count| count.to_string() };
const CPU: Thing = Thing {
    name: "cpu",
    sql: "json_extract(spec, '$.limits.cpu_millis')",
    show: |millis| format!("{} CPUs", cpus(millis)),
};
const MEMORY: Thing = Thing {
    name: "memory",
    sql: "json_extract(spec, '$.limits.memory')",
    show: |bytes| ByteSize(bytes).to_string(),
};
const DISK: Thing = Thing {
    name: "disk",
    sql: "json_extract(spec, '$.limits.disk')",
    show: |bytes| ByteSize(bytes).to_string(),
};

/// Whether a sandbox with these limits still fits. `instead_of` is the one whose limits change.
pub(crate) fn check(
    transaction: &Transaction<'_>,
    tenant: &Tenant,
    quota: &Quota,
    asked: &Limits,
    instead_of: Option<&SandboxId>,
) -> Result<(), Problem> {
    let things = [
        (SANDBOXES, quota.sandboxes.map(u64::from), 1),
        (CPU, quota.cpu_millis, u64::from(asked.cpu_millis)),
        (MEMORY, quota.memory.map(|size| size.0), asked.memory.0),
        (DISK, quota.disk.map(|size| size.0), asked.disk.0),
    ];
    let except = instead_of.map_or("", SandboxId::as_str);
    for (thing, most, wanted) in things {
        let Some(most) = most else { continue };
        let used = used(transaction, tenant, &thing, except)?;
        if used.saturating_add(wanted) > most {
            return Err(refusal(transaction, tenant, &thing, (most, used, wanted), except)?);
        }
    }
    Ok(())
}

/// Whether a snapshot of so many bytes still fits. Before it is taken nobody knows how many, and none is asked for.
pub(crate) fn check_snapshot(
    transaction: &Transaction<'_>,
    tenant: &Tenant,
    quota: &Quota,
    bytes: u64,
) -> Result<(), Problem> {
    let (count, _) = saved(transaction, tenant).map_err(failed)?;
    if count >= MAX_SNAPSHOTS {
        return Err(Problem::new(Code::Quota, format!("{count} snapshots are kept, and no more may be"))
            .hint("remove some: GET /v1/snapshots lists them"));
    }
    let Some(most) = quota.disk.map(|size| size.0) else { return Ok(()) };
    let used = used(transaction, tenant, &DISK, "")?;
    if used.saturating_add(bytes.max(1)) > most {
        return Err(refusal(transaction, tenant, &DISK, (most, used, bytes), "")?);
    }
    Ok(())
}

/// How many snapshots a tenant has, and what they take on disk: unlike a sandbox, one never grows.
fn saved(connection: &Connection, tenant: &Tenant) -> rusqlite::Result<(u64, u64)> {
    connection
        .prepare_cached("SELECT COUNT(*), COALESCE(SUM(bytes), 0) FROM snapshots WHERE tenant = ?1")?
        .query_row([tenant.as_str()], |row| {
            Ok((row.get::<_, i64>(0)?.unsigned_abs(), row.get::<_, i64>(1)?.unsigned_abs()))
        })
}

/// By all sandboxes but one, and on disk by snapshots.
fn used(transaction: &Transaction<'_>, tenant: &Tenant, thing: &Thing, except: &str) -> Result<u64, Problem> {
    let sql = format!(
        "SELECT COALESCE(SUM({}), 0) FROM sandboxes WHERE tenant = ?1 AND state != 'ended' AND id != ?2",
        thing.sql
    );
    // A sum beyond what SQLite can count is an error there, and so more than any quota.
    let promised: u64 = transaction
        .prepare_cached(&sql)
        .and_then(|mut statement| {
            statement.query_row(params![tenant.as_str(), except], |row| row.get::<_, i64>(0))
        })
        .map_or(u64::MAX, i64::unsigned_abs);
    let kept = if thing.name == DISK.name { saved(transaction, tenant).map_err(failed)?.1 } else { 0 };
    Ok(promised.saturating_add(kept))
}

fn refusal(
    transaction: &Transaction<'_>,
    tenant: &Tenant,
    thing: &Thing,
    (most, used, wanted): (u64, u64, u64),
    except: &str,
) -> Result<Problem, Problem> {
    let sql = format!(
        "SELECT id, {} AS part FROM sandboxes WHERE tenant = ?1 AND state != 'ended' AND id != ?2
         ORDER BY part DESC, number LIMIT {}",
        thing.sql,
        NAMED + 1
    );
    let mut by = transaction
        .prepare_cached(&sql)
        .and_then(|mut statement| {
            let rows =
                statement.query_map(params![tenant.as_str(), except], |row| row.get::<_, String>(0))?;
            rows.collect::<Result<Vec<_>, _>>()
        })
        .map_err(failed)?;
    let more = if by.len() > NAMED { ", …" } else { "" };
    by.truncate(NAMED);
    let mut by = if by.is_empty() { String::new() } else { format!(" by {}{more}", by.join(", ")) };
    let mut hint = "close sandboxes that are not needed, or ask for less";
    if let (true, (count @ 1.., bytes)) =
        (thing.name == DISK.name, saved(transaction, tenant).map_err(failed)?)
    {
        let and = if by.is_empty() { "by" } else { "and" };
        by = format!("{by} {and} {count} snapshots ({})", (thing.show)(bytes));
        hint = "remove snapshots or close sandboxes that are not needed, or ask for less";
    }
    let show = thing.show;
    let word = format!(
        "the quota of {} is {}: {} used{by}; {} asked for",
        thing.name,
        show(most),
        show(used),
        show(wanted)
    );
    Ok(Problem::new(Code::Quota, word).hint(hint))
}

/// What a tenant holds at the moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    pub sandboxes: u64,
    pub cpu_millis: u64,
    pub memory: u64,
    pub disk: u64,
}

impl Engine {
    /// What a tenant's sandboxes and snapshots hold of its quota.
    pub fn held(&self, tenant: &Tenant) -> Result<Usage, Problem> {
        // Whole sums, also where they are larger than any quota.
        let sums = [SANDBOXES, CPU, MEMORY, DISK].map(|thing| format!("TOTAL({})", thing.sql)).join(", ");
        let sql = format!("SELECT {sums} FROM sandboxes WHERE tenant = ?1 AND state != 'ended'");
        self.registry.read(|connection| {
            let (_, kept) = saved(connection, tenant)?;
            connection.prepare_cached(&sql)?.query_row([tenant.as_str()], |row| {
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "a sum of what is not negative; it saturates"
                )]
                let sum = |at| row.get::<_, f64>(at).map(|sum| sum as u64);
                let disk = sum(3)?.saturating_add(kept);
                Ok(Usage { sandboxes: sum(0)?, cpu_millis: sum(1)?, memory: sum(2)?, disk })
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotas_are_printed_as_they_are_read() {
        for text in
            ["", "sandboxes=20,cpu=8,memory=16GB,disk=50GB,rate=50", "cpu=0.5", "memory=1536MB,rate=1"]
        {
            assert_eq!(text.parse::<Quota>().unwrap().to_string(), text);
        }
        let spaced: Quota = " memory = 1024MB , sandboxes=1,".parse().unwrap();
        assert_eq!(spaced.to_string(), "sandboxes=1,memory=1GB");
    }

    #[test]
    fn what_is_not_understood_is_named() {
        let said = |text: &str| text.parse::<Quota>().unwrap_err().message;
        assert!(said("memroy=1GB").contains("did you mean `memory`?"));
        for bad in [
            "cpu",
            "cpu=",
            "cpu=0",
            "cpu=-1",
            "cpu=1.2345",
            "sandboxes=0",
            "rate=1.5",
            "disk=x",
            "cpu=1,cpu=2",
        ] {
            assert!(!said(bad).is_empty(), "{bad}");
        }
    }
}
