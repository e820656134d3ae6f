//! What was found, as a table for people and as JSON for programs.

use std::{
    collections::BTreeMap,
    io::{self, IsTerminal, Write},
};

use serde::Serialize;

pub(super) const GROUPS: [&str; 8] =
    ["host-files", "processes", "kernel", "network", "devices", "descriptors", "sessions", "exhaustion"];

/// Longest detail in the table; the JSON has all of it.
const SHOWN: usize = 240;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Verdict {
    Held,
    Breach,
    /// A limit that this host cannot enforce, and that says so in the sandbox's metadata.
    NotEnforced,
    /// Could not be tried.
    Skipped,
}

#[derive(Debug, Clone, Serialize)]
pub(super) struct Finding {
    pub(super) name: String,
    pub(super) group: String,
    pub(super) verdict: Verdict,
    pub(super) detail: String,
    /// How the attack was started: `exec`, `terminal`, an interpreter's name, or `host` for what was seen from outside.
    pub(super) via: String,
}

impl Finding {
    /// Seen from outside.
    pub(super) fn host(group: &str, name: &str, verdict: Verdict, detail: impl Into<String>) -> Self {
        Self {
            name: name.to_owned(),
            group: group.to_owned(),
            verdict,
            detail: detail.into(),
            via: "host".to_owned(),
        }
    }

    /// Held if nothing is wrong, otherwise a breach that names (a bounded number of) what is.
    pub(super) fn host_judged(group: &str, name: &str, fine: impl Into<String>, wrong: &[String]) -> Self {
        if wrong.is_empty() {
            return Self::host(group, name, Verdict::Held, fine);
        }
        let shown: Vec<&str> = wrong.iter().take(12).map(String::as_str).collect();
        let more = if wrong.len() > shown.len() {
            format!("; and {} more", wrong.len() - shown.len())
        } else {
            String::new()
        };
        Self::host(group, name, Verdict::Breach, format!("{}{more}", shown.join("; ")))
    }
}

#[derive(Serialize)]
struct Json<'a> {
    held: usize,
    breaches: Vec<&'a Finding>,
    not_enforced: Vec<&'a Finding>,
    skipped: Vec<&'a Finding>,
    probes: &'a [Finding],
}

fn of(findings: &[Finding], verdict: Verdict) -> Vec<&Finding> {
    findings.iter().filter(|finding| finding.verdict == verdict).collect()
}

pub(super) fn json(out: &mut impl Write, findings: &[Finding]) -> io::Result<()> {
    let all = Json {
        held: of(findings, Verdict::Held).len(),
        breaches: of(findings, Verdict::Breach),
        not_enforced: of(findings, Verdict::NotEnforced),
        skipped: of(findings, Verdict::Skipped),
        probes: findings,
    };
    serde_json::to_writer(&mut *out, &all)?;
    writeln!(out)
}

pub(super) fn table(out: &mut impl Write, findings: &[Finding]) -> io::Result<()> {
    let colour = io::stdout().is_terminal();
    let paint =
        |code: &str, text: &str| if colour { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() };
    writeln!(
        out,
        "{}",
        paint("1", &row("group", ["held", "breach", "not enforced", "skipped"].map(str::to_owned)))
    )?;
    let counts = |chosen: &[&Finding]| {
        [Verdict::Held, Verdict::Breach, Verdict::NotEnforced, Verdict::Skipped]
            .map(|verdict| chosen.iter().filter(|finding| finding.verdict == verdict).count())
    };
    for group in GROUPS {
        let chosen: Vec<&Finding> = findings.iter().filter(|finding| finding.group == group).collect();
        if !chosen.is_empty() {
            writeln!(out, "{}", row(group, counts(&chosen).map(|count| count.to_string())))?;
        }
    }
    let all: Vec<&Finding> = findings.iter().collect();
    let [held, breaches, not_enforced, skipped] = counts(&all);
    let total = row("total", [held, breaches, not_enforced, skipped].map(|count| count.to_string()));
    writeln!(out, "{}", paint("1", &total))?;
    let lists = [
        (Verdict::Breach, "breach", "31"),
        (Verdict::NotEnforced, "not enforced", "33"),
        (Verdict::Skipped, "skipped", "2"),
    ];
    for (verdict, word, code) in lists {
        let lines = together(&of(findings, verdict));
        if !lines.is_empty() {
            writeln!(out)?;
        }
        for (name, detail, ways) in lines {
            writeln!(out, "{}  {name} ({ways}): {}", paint(code, word), clip(&detail))?;
        }
    }
    writeln!(out)?;
    match breaches {
        0 if held == 0 => writeln!(out, "{}: no attack could be tried", paint("31", "nothing is proved")),
        0 => writeln!(out, "{}: {held} attacks were stopped", paint("32", "no breach")),
        count => writeln!(
            out,
            "{}: see above, and SECURITY.md for how to report it",
            paint("31", &format!("{count} breached"))
        ),
    }
}

fn row(name: &str, cells: [String; 4]) -> String {
    let [held, breach, not_enforced, skipped] = cells;
    format!("{name:<12}{held:>6}{breach:>8}{not_enforced:>14}{skipped:>9}")
}

/// The same result by several ways is one line.
fn together(findings: &[&Finding]) -> Vec<(String, String, String)> {
    let mut order = Vec::new();
    let mut ways: BTreeMap<(&str, &str), Vec<&str>> = BTreeMap::new();
    for finding in findings {
        let key = (finding.name.as_str(), finding.detail.as_str());
        let known = ways.entry(key).or_default();
        if known.is_empty() {
            order.push(key);
        }
        known.push(&finding.via);
    }
    let line = |key: (&str, &str)| (key.0.to_owned(), key.1.to_owned(), ways[&key].join(", "));
    order.into_iter().map(line).collect()
}

fn clip(detail: &str) -> String {
    // Details come from inside a box: nothing in them may steer the terminal.
    let clean: String = detail.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    match clean.char_indices().nth(SHOWN) {
        Some((at, _)) => format!("{}…", &clean[..at]),
        None => clean,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finding(name: &str, verdict: Verdict, via: &str) -> Finding {
        let (name, via) = (name.to_owned(), via.to_owned());
        Finding { name, group: "kernel".into(), verdict, detail: "why\x1b[2J".into(), via }
    }

    #[test]
    fn the_table_counts_and_names_what_did_not_hold() {
        let findings = [
            finding("a", Verdict::Held, "exec"),
            finding("b", Verdict::Breach, "exec"),
            finding("b", Verdict::Breach, "python"),
            finding("c", Verdict::Skipped, "exec"),
        ];
        let mut out = Vec::new();
        table(&mut out, &findings).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(text.contains("kernel           1       2             0        1\n"), "{text}");
        assert!(text.contains("breach  b (exec, python): why [2J\n"), "{text}");
        assert!(!text.contains('\x1b'), "{text}");
    }

    #[test]
    fn a_table_of_nothing_that_held_says_so() {
        let mut out = Vec::new();
        table(&mut out, &[finding("a", Verdict::Skipped, "exec")]).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(text.ends_with("nothing is proved: no attack could be tried\n"), "{text}");
    }

    #[test]
    fn the_json_has_the_documented_shape() {
        let mut out = Vec::new();
        json(&mut out, &[finding("a", Verdict::Held, "exec"), finding("b", Verdict::NotEnforced, "exec")])
            .unwrap();
        let value: serde_json::Value = serde_json::from_slice(&out).unwrap();
        assert_eq!(value["held"], 1);
        assert_eq!(value["not_enforced"][0]["name"], "b");
        assert_eq!(value["probes"][1]["verdict"], "not_enforced");
        assert_eq!(value["breaches"].as_array().map(Vec::len), Some(0));
    }
}
