//! Who did what to which sandbox: one JSON line per request, never contents, never secrets.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::Serialize;

/// One request, once it is answered.
#[derive(Debug)]
pub(crate) struct Entry<'a> {
    pub(crate) request: &'a str,
    /// `None`: nobody, because the request was refused or needed no token.
    pub(crate) caller: Option<&'a str>,
    pub(crate) method: &'a str,
    pub(crate) route: Option<&'a str>,
    pub(crate) path: &'a str,
    pub(crate) status: u16,
    pub(crate) duration: Duration,
}

#[derive(Debug, Serialize)]
pub(crate) struct Line<'a> {
    unix_ms: u64,
    request: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    caller: Option<&'a str>,
    method: &'a str,
    route: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    sandbox: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    exec: Option<&'a str>,
    status: u16,
    duration_us: u64,
}

impl Entry<'_> {
    /// Paths go in by their pattern, with the ids of what was acted upon: a share link's own path is a secret, and the path behind a
    /// port is the sandbox's business.
    pub(crate) fn line(&self) -> Line<'_> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut parts = self.path.split('/').skip(1);
        let (mut sandbox, mut exec) = (None, None);
        if parts.next() == Some("v1") && parts.next() == Some("sandboxes") {
            sandbox = parts.next().filter(|part| part.starts_with("sbx_") && part.len() <= 64);
            if parts.next() == Some("execs") {
                exec = parts.next().filter(|part| part.starts_with("ex_") && part.len() <= 64);
            }
        }
        Line {
            unix_ms: u64::try_from(now.as_millis()).unwrap_or(u64::MAX),
            request: self.request,
            caller: self.caller,
            method: self.method,
            route: self.route.unwrap_or("(none)"),
            sandbox,
            exec,
            status: self.status,
            duration_us: u64::try_from(self.duration.as_micros()).unwrap_or(u64::MAX),
        }
    }

    /// Probes of the daemon itself are not worth one.
    pub(crate) fn is_worth_a_line(&self) -> bool {
        let looks = matches!(self.method, "GET" | "HEAD");
        !(looks && matches!(self.path, "/health" | "/ready" | "/metrics" | "/openapi.json"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_name_what_was_acted_upon_and_no_secrets() {
        let entry = Entry {
            request: "r1",
            caller: Some("tok_a"),
            method: "POST",
            route: Some("/v1/sandboxes/{sandbox}/execs/{exec}/stdin"),
            path: "/v1/sandboxes/sbx_abc/execs/ex_4/stdin",
            status: 204,
            duration: Duration::from_micros(7),
        };
        let line: serde_json::Value = serde_json::to_value(entry.line()).unwrap();
        assert_eq!(line["sandbox"], "sbx_abc");
        assert_eq!(line["exec"], "ex_4");
        let entry =
            Entry { path: "/shared/c2VjcmV0/index.html", route: Some("/shared/{link}/{*path}"), ..entry };
        assert!(!serde_json::to_string(&entry.line()).unwrap().contains("c2VjcmV0"));
        assert!(entry.is_worth_a_line());
        let entry = Entry { path: "/metrics", method: "GET", ..entry };
        assert!(!entry.is_worth_a_line());
        assert!(Entry { method: "POST", ..entry }.is_worth_a_line());
    }
}
