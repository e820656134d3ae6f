//! Every setting that has a name: what it is called in files, in the environment and as a flag, and what it may be.

use std::{fmt, net::SocketAddr, path::PathBuf, time::Duration};

pub(crate) use carrel_engine::nearest::nearest;
use carrel_engine::{
    packing::PACK_AFTER,
    pool,
    registry::{HIBERNATE_AFTER_S, STANDBY_AFTER_S},
};
use carrel_proto::{
    limits::{ByteSize, DEFAULT_TIMEOUT, Limits, MAX_TIMEOUT},
    message::{DEFAULT_UNDO, MAX_UNDO},
};

/// Modules of a warm parent.
const MAX_MODULES: usize = 32;
/// A year: longer than any sandbox should wait, and far from overflow.
const LONGEST: Duration = Duration::from_secs(366 * 24 * 3600);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Key {
    State,
    Isolation,
    IdleTimeout,
    MaxLifetime,
    StandbyAfter,
    HibernateAfter,
    UndoCalls,
    WarmParents,
    WarmModules,
    WarmLearn,
    Cpus,
    Memory,
    Pids,
    Disk,
    Output,
    Execs,
    Timeout,
    ProjectDirectory,
    ProjectWritable,
    ServeSocket,
    ServeListen,
    ServeTlsCert,
    ServeTlsSecret,
    ServeAllowHosts,
    ServeAllowOrigins,
    ServePublicUrl,
    ServeAudit,
    ServePackAfter,
    OtlpEndpoint,
    PoolFloor,
    PoolCeiling,
}

/// A setting's value, checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Value {
    Time(Duration),
    Size(ByteSize),
    Count(u32),
    /// Thousandths of a CPU.
    Cpus(u32),
    Flag(bool),
    Word(&'static str),
    Path(PathBuf),
    Text(String),
    List(Vec<String>),
}

/// What kind of value a key takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Time {
        most: Duration,
    },
    /// 0 is never.
    TimeOrNever {
        most: Duration,
    },
    Size,
    Count,
    /// Also none.
    UpTo(u32),
    Cpus,
    Flag,
    Word(&'static [&'static str]),
    Path,
    Url,
    /// `127.0.0.1:8700`, any number of them.
    Addresses,
    /// Host names.
    Hosts,
    /// `https://app.example.com`.
    Origins,
    /// `numpy`, `os.path`.
    Modules,
}

const ISOLATION: &[&str] = &["jail", "weak"];

impl Key {
    pub(crate) const ALL: [Key; 31] = [
        Key::State,
        Key::Isolation,
        Key::IdleTimeout,
        Key::MaxLifetime,
        Key::StandbyAfter,
        Key::HibernateAfter,
        Key::UndoCalls,
        Key::WarmParents,
        Key::WarmModules,
        Key::WarmLearn,
        Key::Cpus,
        Key::Memory,
        Key::Pids,
        Key::Disk,
        Key::Output,
        Key::Execs,
        Key::Timeout,
        Key::ProjectDirectory,
        Key::ProjectWritable,
        Key::ServeSocket,
        Key::ServeListen,
        Key::ServeTlsCert,
        Key::ServeTlsSecret,
        Key::ServeAllowHosts,
        Key::ServeAllowOrigins,
        Key::ServePublicUrl,
        Key::ServeAudit,
        Key::ServePackAfter,
        Key::OtlpEndpoint,
        Key::PoolFloor,
        Key::PoolCeiling,
    ];
    /// Tables of a file that hold settings.
    pub(crate) const SECTIONS: [&str; 7] =
        ["session", "warm", "limits", "project", "serve", "telemetry", "pool"];

    /// In a file: `section.key`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Key::State => "state",
            Key::Isolation => "isolation",
            Key::IdleTimeout => "session.idle_timeout_seconds",
            Key::MaxLifetime => "session.max_lifetime_seconds",
            Key::StandbyAfter => "session.standby_after_seconds",
            Key::HibernateAfter => "session.hibernate_after_seconds",
            Key::UndoCalls => "session.undo_calls",
            Key::WarmParents => "warm.parents",
            Key::WarmModules => "warm.modules",
            Key::WarmLearn => "warm.learn",
            Key::Cpus => "limits.cpus",
            Key::Memory => "limits.memory",
            Key::Pids => "limits.pids",
            Key::Disk => "limits.disk",
            Key::Output => "limits.output",
            Key::Execs => "limits.execs",
            Key::Timeout => "limits.timeout_seconds",
            Key::ProjectDirectory => "project.directory",
            Key::ProjectWritable => "project.writable",
            Key::ServeSocket => "serve.socket",
            Key::ServeListen => "serve.listen",
            Key::ServeTlsCert => "serve.tls_cert",
            Key::ServeTlsSecret => "serve.tls_key",
            Key::ServeAllowHosts => "serve.allow_hosts",
            Key::ServeAllowOrigins => "serve.allow_origins",
            Key::ServePublicUrl => "serve.public_url",
            Key::ServeAudit => "serve.audit",
            Key::ServePackAfter => "serve.pack_after_seconds",
            Key::OtlpEndpoint => "telemetry.otlp_endpoint",
            Key::PoolFloor => "pool.floor",
            Key::PoolCeiling => "pool.ceiling",
        }
    }

    /// `CARREL_` and the name: `CARREL_LIMITS_MEMORY`.
    pub(crate) fn variable(self) -> String {
        // Every command looks for the socket, not `serve` alone.
        if self == Key::ServeSocket {
            return "CARREL_SOCKET".to_owned();
        }
        format!("CARREL_{}", self.name().replace('.', "_").to_ascii_uppercase())
    }

    pub(crate) fn kind(self) -> Kind {
        match self {
            Key::State
            | Key::ProjectDirectory
            | Key::ServeSocket
            | Key::ServeTlsCert
            | Key::ServeTlsSecret => Kind::Path,
            Key::ServeListen => Kind::Addresses,
            Key::ServeAllowHosts => Kind::Hosts,
            Key::ServeAllowOrigins => Kind::Origins,
            Key::ServePublicUrl | Key::OtlpEndpoint => Kind::Url,
            Key::Isolation => Kind::Word(ISOLATION),
            Key::IdleTimeout | Key::MaxLifetime => Kind::Time { most: LONGEST },
            Key::StandbyAfter | Key::HibernateAfter | Key::ServePackAfter => {
                Kind::TimeOrNever { most: LONGEST }
            }
            Key::Timeout => Kind::Time { most: MAX_TIMEOUT },
            Key::Cpus => Kind::Cpus,
            Key::Memory | Key::Disk | Key::Output => Kind::Size,
            Key::Pids | Key::Execs => Kind::Count,
            Key::UndoCalls => Kind::UpTo(MAX_UNDO),
            Key::PoolFloor | Key::PoolCeiling => Kind::UpTo(pool::MOST),
            Key::WarmModules => Kind::Modules,
            Key::ProjectWritable | Key::ServeAudit | Key::WarmParents | Key::WarmLearn => Kind::Flag,
        }
    }

    /// What holds when nobody says anything. The state directory's depends on the user and is not here.
    pub(crate) fn default(self) -> Option<Value> {
        let limits = Limits::default();
        Some(match self {
            Key::State
            | Key::ProjectDirectory
            | Key::ServeSocket
            | Key::ServeListen
            | Key::ServeTlsCert
            | Key::ServeTlsSecret
            | Key::ServeAllowHosts
            | Key::ServeAllowOrigins
            | Key::ServePublicUrl
            | Key::WarmModules
            | Key::OtlpEndpoint => return None,
            Key::ServeAudit | Key::WarmParents | Key::WarmLearn => Value::Flag(true),
            Key::ServePackAfter => Value::Time(PACK_AFTER),
            Key::Isolation => Value::Word(ISOLATION[0]),
            Key::IdleTimeout => Value::Time(Duration::from_secs(12 * 3600)),
            Key::MaxLifetime => Value::Time(Duration::from_secs(24 * 3600)),
            Key::StandbyAfter => Value::Time(Duration::from_secs(STANDBY_AFTER_S)),
            Key::HibernateAfter => Value::Time(Duration::from_secs(HIBERNATE_AFTER_S)),
            Key::UndoCalls => Value::Count(DEFAULT_UNDO),
            Key::PoolFloor => Value::Count(pool::DEFAULT_FLOOR),
            Key::PoolCeiling => Value::Count(pool::DEFAULT_CEILING),
            Key::Cpus => Value::Cpus(limits.cpu_millis),
            Key::Memory => Value::Size(limits.memory),
            Key::Pids => Value::Count(limits.pids),
            Key::Disk => Value::Size(limits.disk),
            Key::Output => Value::Size(limits.output),
            Key::Execs => Value::Count(limits.execs),
            Key::Timeout => Value::Time(DEFAULT_TIMEOUT),
            Key::ProjectWritable => Value::Flag(false),
        })
    }

    /// Whether a file that came with a project may say it. It may not loosen how the user is protected from that
    /// very project.
    pub(crate) fn in_project_file(self) -> bool {
        match self {
            // Modules are loaded once for the sandboxes of all projects.
            Key::State | Key::Isolation | Key::WarmParents | Key::WarmModules | Key::WarmLearn => false,
            _ => !["serve.", "telemetry.", "pool."].iter().any(|section| self.name().starts_with(section)),
        }
    }
}

impl Kind {
    /// Checks a value in its written form. The error says what would be right.
    pub(crate) fn parse(self, text: &str) -> Result<Value, String> {
        match self {
            Kind::Time { most } => time(text, most).map(Value::Time),
            Kind::TimeOrNever { .. } if matches!(text, "0" | "0s" | "0 s" | "never") => {
                Ok(Value::Time(Duration::ZERO))
            }
            Kind::TimeOrNever { most } => time(text, most).map(Value::Time),
            Kind::Size => match text.parse::<ByteSize>() {
                Ok(ByteSize(0)) => Err("must be more than 0".to_owned()),
                Ok(size) => Ok(Value::Size(size)),
                Err(error) => Err(error.to_string()),
            },
            Kind::Count => match text.parse::<u32>() {
                Ok(count) if count > 0 => Ok(Value::Count(count)),
                _ => Err(format!("`{text}` is not a whole number above 0")),
            },
            Kind::UpTo(most) => match text.parse::<u32>() {
                Ok(count) if count <= most => Ok(Value::Count(count)),
                _ => Err(format!("`{text}` is not a whole number from 0 to {most}")),
            },
            Kind::Cpus => cpus(text).map(Value::Cpus),
            Kind::Flag => match text {
                "true" | "1" | "yes" => Ok(Value::Flag(true)),
                "false" | "0" | "no" | "" => Ok(Value::Flag(false)),
                _ => Err(format!("`{text}` is neither true nor false")),
            },
            Kind::Word(words) => match words.iter().find(|word| **word == text) {
                Some(word) => Ok(Value::Word(word)),
                None => Err(format!("`{text}` is not one of: {}", words.join(", "))),
            },
            Kind::Path if text.is_empty() => Err("is empty".to_owned()),
            Kind::Path => Ok(Value::Path(PathBuf::from(text))),
            Kind::Url => url(text).map(|()| Value::Text(text.trim_end_matches('/').to_owned())),
            Kind::Addresses => list(text, |one| match one.parse::<SocketAddr>() {
                Ok(_) => Ok(()),
                Err(_) => Err(format!("`{one}` is not ADDRESS:PORT (try 127.0.0.1:8700)")),
            }),
            Kind::Hosts => list(text, |one| match one.contains(['/', '@', ' ']) {
                false => Ok(()),
                true => Err(format!("`{one}` is not the name of a host")),
            }),
            Kind::Origins => list(text, url),
            Kind::Modules => match list(text, module)? {
                Value::List(all) if all.len() > MAX_MODULES => {
                    Err(format!("more than {MAX_MODULES} modules"))
                }
                modules => Ok(modules),
            },
        }
    }

    /// Whether a file holds it as an array.
    pub(crate) fn is_list(self) -> bool {
        matches!(self, Kind::Addresses | Kind::Hosts | Kind::Origins | Kind::Modules)
    }

    /// What a file must hold, in words.
    pub(crate) fn wanted(self) -> &'static str {
        match self {
            Kind::Time { .. } => "a number of seconds",
            Kind::TimeOrNever { .. } => "a number of seconds, or 0 for never",
            Kind::Size => "a size such as \"512MB\", or a number of bytes",
            Kind::Count | Kind::UpTo(_) => "a whole number",
            Kind::Cpus => "a number",
            Kind::Flag => "true or false",
            Kind::Word(_) | Kind::Path | Kind::Url => "a string",
            Kind::Addresses | Kind::Hosts | Kind::Origins | Kind::Modules => "an array of strings",
        }
    }
}

/// Separated by commas, as in a variable; none of what is listed can hold one.
fn list(text: &str, check: impl Fn(&str) -> Result<(), String>) -> Result<Value, String> {
    let all: Vec<&str> = text.split(',').map(str::trim).filter(|one| !one.is_empty()).collect();
    all.iter().try_for_each(|one| check(one))?;
    Ok(Value::List(all.into_iter().map(str::to_owned).collect()))
}

fn module(text: &str) -> Result<(), String> {
    let is_word = |word: &str| !word.is_empty() && !word.starts_with(|c: char| c.is_numeric());
    let is_known = |c: char| c.is_alphanumeric() || c == '_' || c == '.';
    match text.chars().all(is_known) && text.split('.').all(is_word) {
        true => Ok(()),
        false => Err(format!("`{text}` is not the name of a module")),
    }
}

fn url(text: &str) -> Result<(), String> {
    let rest = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
    match rest.is_some_and(|rest| !rest.is_empty() && !rest.starts_with('/') && !rest.contains([' ', ','])) {
        true => Ok(()),
        false => Err(format!("`{text}` does not begin with https:// or http:// and a host")),
    }
}

/// `30`, `30s`, `500ms`, `5m`, `2h`, `1d`: above nothing and at most `most`.
pub(crate) fn time(text: &str, most: Duration) -> Result<Duration, String> {
    let bad = || format!("`{text}` is not a time (try 30s, 5m, 1h or a number of seconds)");
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let number: u64 = text[..digits].parse().map_err(|_| bad())?;
    let millis: u64 = match text[digits..].trim() {
        "ms" => 1,
        "" | "s" => 1000,
        "m" | "min" => 60_000,
        "h" => 3_600_000,
        "d" => 24 * 3_600_000,
        _ => return Err(bad()),
    };
    let time = Duration::from_millis(number.checked_mul(millis).ok_or_else(bad)?);
    if time.is_zero() {
        return Err("must be more than 0".to_owned());
    }
    if time > most {
        return Err(format!("`{text}` is more than the most, {} s", most.as_secs()));
    }
    Ok(time)
}

/// `2`, `1.5`, `0.25`: to the thousandth.
fn cpus(text: &str) -> Result<u32, String> {
    let bad = || format!("`{text}` is not a number of CPUs (try 2 or 0.5)");
    let (whole, part) = text.split_once('.').unwrap_or((text, "0"));
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if !digits(whole) || !digits(part) || part.len() > 3 {
        return Err(bad());
    }
    let whole: u32 = whole.parse().map_err(|_| bad())?;
    let part: u32 = format!("{part:0<3}").parse().map_err(|_| bad())?;
    match whole.checked_mul(1000).and_then(|whole| whole.checked_add(part)) {
        Some(millis) if millis > 0 => Ok(millis),
        _ => Err(bad()),
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Time(time) if time.subsec_millis() > 0 => write!(f, "{} ms", time.as_millis()),
            Value::Time(time) => write!(f, "{} s", time.as_secs()),
            Value::Size(size) => size.fmt(f),
            Value::Count(count) => count.fmt(f),
            Value::Cpus(millis) if millis % 1000 == 0 => (millis / 1000).fmt(f),
            Value::Cpus(millis) => {
                f.write_str(format!("{}.{:03}", millis / 1000, millis % 1000).trim_end_matches('0'))
            }
            Value::Flag(flag) => flag.fmt(f),
            Value::Word(word) => f.write_str(word),
            Value::Path(path) => path.display().fmt(f),
            Value::Text(text) => f.write_str(text),
            Value::List(list) => f.write_str(&list.join(", ")),
        }
    }
}

impl Value {
    /// As numbers in the units that the keys' names say.
    pub(crate) fn json(&self) -> serde_json::Value {
        match self {
            Value::Time(time) => time.as_secs_f64().into(),
            Value::Size(size) => size.0.into(),
            Value::Count(count) => (*count).into(),
            Value::Cpus(millis) => (f64::from(*millis) / 1000.0).into(),
            Value::Flag(flag) => (*flag).into(),
            Value::Word(word) => (*word).into(),
            Value::Path(path) => path.to_string_lossy().into(),
            Value::Text(text) => text.as_str().into(),
            Value::List(list) => list.as_slice().into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units_and_bounds() {
        let hour = Duration::from_secs(3600);
        assert_eq!(time("30", hour), Ok(Duration::from_secs(30)));
        assert_eq!(time("5m", hour), Ok(Duration::from_secs(300)));
        assert_eq!(time("250ms", hour), Ok(Duration::from_millis(250)));
        assert_eq!(time("1h", hour), Ok(hour));
        for bad in ["", "0", "0s", "-1", "1.5s", "5 weeks", "61m", "3601", "99999999999999999999"] {
            assert!(time(bad, hour).is_err(), "{bad}");
        }
    }

    #[test]
    fn cpus_are_exact_to_the_thousandth() {
        assert_eq!(cpus("2"), Ok(2000));
        assert_eq!(cpus("1.5"), Ok(1500));
        assert_eq!(cpus("0.25"), Ok(250));
        assert_eq!(Value::Cpus(1500).to_string(), "1.5");
        for bad in ["", "0", "0.0", ".5", "-1", "1e3", "0.0001", "x"] {
            assert!(cpus(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_slip_of_the_finger_is_understood() {
        let known = || Key::ALL.map(Key::name);
        assert_eq!(nearest("limits.memmory", known()), Some("limits.memory"));
        assert_eq!(nearest("limits.pdis", known()), Some("limits.pids"));
        assert_eq!(nearest("xyz", ["memory", "disk"]), None);
    }

    #[test]
    fn defaults_satisfy_their_own_rules() {
        for key in Key::ALL {
            let Some(value) = key.default() else { continue };
            let text = match &value {
                Value::Size(size) => size.0.to_string(),
                other => other.to_string(),
            };
            assert_eq!(key.kind().parse(&text), Ok(value), "{}", key.name());
        }
    }
}
