//! Who did what to which sandbox: one JSON line per request, never contents, never secrets.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use carrel_engine::tokens::TokenId;
use carrel_proto::id::{SandboxId, SnapshotId};
use serde::Serialize;

/// Sandboxes that one line names: a scope may have had any number.
const MOST_NAMED: usize = 100;

/// What a request was about, beside what its path says.
#[derive(Debug, Default)]
pub(crate) struct ActedOn {
    sandboxes: Vec<SandboxId>,
    /// Those beyond [`MOST_NAMED`].
    more: u64,
    /// Where the path stands for several.
    pub(crate) action: Option<&'static str>,
    pub(crate) snapshot: Option<SnapshotId>,
    pub(crate) token: Option<TokenId>,
}

impl ActedOn {
    pub(crate) fn sandbox(&mut self, id: &SandboxId) {
        if self.sandboxes.contains(id) {
            return;
        }
        if self.sandboxes.len() < MOST_NAMED {
            self.sandboxes.push(id.clone());
        } else {
            self.more += 1;
        }
    }
}

/// One request, once it is answered.
#[derive(Debug)]
pub(crate) struct Entry<'a> {
    pub(crate) request: &'a str,
    /// `None`: nobody, because the request was refused or needed no token.
    pub(crate) caller: Option<&'a str>,
    pub(crate) method: &'a str,
    pub(crate) route: Option<&'a str>,
    pub(crate) path: &'a str,
    pub(crate) acted_on: &'a ActedOn,
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
    action: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sandbox: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    exec: Option<&'a str>,
    /// Several, or others than the one in the path: those that were made of it.
    #[serde(skip_serializing_if = "<[SandboxId]>::is_empty")]
    sandboxes: &'a [SandboxId],
    #[serde(skip_serializing_if = "is_none_more")]
    sandboxes_left_out: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    snapshot: Option<&'a SnapshotId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token: Option<&'a TokenId>,
    status: u16,
    duration_us: u64,
}

fn is_none_more(count: &u64) -> bool {
    *count == 0
}

impl Entry<'_> {
    pub(crate) fn names_a_sandbox(&self) -> bool {
        let line = self.line();
        line.sandbox.is_some() || !line.sandboxes.is_empty()
    }

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
        let mut sandboxes = self.acted_on.sandboxes.as_slice();
        if let (None, [only]) = (sandbox, sandboxes) {
            (sandbox, sandboxes) = (Some(only.as_str()), &[]);
        } else if sandboxes.iter().all(|id| Some(id.as_str()) == sandbox) {
            sandboxes = &[];
        }
        Line {
            unix_ms: u64::try_from(now.as_millis()).unwrap_or(u64::MAX),
            request: self.request,
            caller: self.caller,
            method: self.method,
            route: self.route.unwrap_or("(none)"),
            action: self.acted_on.action,
            sandbox,
            exec,
            sandboxes,
            sandboxes_left_out: self.acted_on.more,
            snapshot: self.acted_on.snapshot.as_ref(),
            token: self.acted_on.token.as_ref(),
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
        let nothing = ActedOn::default();
        let entry = Entry {
            request: "r1",
            caller: Some("tok_a"),
            method: "POST",
            route: Some("/v1/sandboxes/{sandbox}/execs/{exec}/stdin"),
            path: "/v1/sandboxes/sbx_abc/execs/ex_4/stdin",
            acted_on: &nothing,
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

    #[test]
    fn lines_name_sandboxes_that_the_path_does_not() {
        let ids: Vec<SandboxId> = (0..=u8::try_from(MOST_NAMED).unwrap())
            .map(|number| SandboxId::from_random([number; 10]))
            .collect();
        let line = |path: &str, about: &[SandboxId]| {
            let mut acted_on = ActedOn::default();
            // Told twice is named once.
            about.iter().chain(about.first()).for_each(|id| acted_on.sandbox(id));
            let entry = Entry {
                request: "r1",
                caller: None,
                method: "POST",
                route: None,
                path,
                acted_on: &acted_on,
                status: 499,
                duration: Duration::ZERO,
            };
            assert_eq!(entry.names_a_sandbox(), !about.is_empty() || path != "/v1/run");
            serde_json::to_value(entry.line()).unwrap()
        };
        let one = line("/v1/run", &ids[..1]);
        assert!(one["sandbox"] == ids[0].as_str() && one["sandboxes"].is_null(), "{one}");
        let fork = line("/v1/sandboxes/sbx_abc/fork", &ids[..2]);
        assert_eq!((&fork["sandbox"], fork["sandboxes"].as_array().unwrap().len()), (&"sbx_abc".into(), 2));
        let many = line("/v1/scopes/workflow/run_1", &ids);
        assert_eq!(many["sandboxes"].as_array().unwrap().len(), MOST_NAMED);
        assert_eq!(many["sandboxes_left_out"], 1);
        assert!(line("/v1/run", &[])["sandbox"].is_null());
    }
}
