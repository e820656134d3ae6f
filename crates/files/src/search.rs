//! Searching names and lines.

use std::ops::ControlFlow;

use carrel_proto::files::{Found, MAX_LINE, MAX_MATCHES, MAX_SEARCHED, MAX_TEXT_FILE, Match, Name, Search};

use crate::{
    FileError, Root,
    text::{MAX_BYTES, Needle, visit},
};

impl Root {
    /// Finds files by name, or lines by text in files by name. One match per line.
    pub fn search(&self, query: &Search) -> Result<Found, FileError> {
        let limit = query.limit.min(MAX_MATCHES) as usize;
        let most = query.max_file.unwrap_or(MAX_TEXT_FILE).min(MAX_TEXT_FILE);
        let needle = match &query.text {
            Some(text) => Some(Needle::new(text, query.regex, query.ignore_case)?),
            None if query.glob.is_some() => None,
            None => return Err(FileError::argument("a search needs a glob, a text or both")),
        };
        let mut found = Found::default();
        let mut bytes = 0;
        let (unreadable, complete) = visit(self, &query.path, query.glob.as_deref(), |candidate| {
            if found.matches.len() >= limit || found.files_searched >= MAX_SEARCHED || bytes > MAX_BYTES {
                return Ok(ControlFlow::Break(()));
            }
            let Some(needle) = &needle else {
                found.files_searched += 1;
                found.matches.push(Match { path: Name(candidate.path), line: None, text: None });
                return Ok(ControlFlow::Continue(()));
            };
            let Some(text) = candidate.text(most, &mut found.skipped)? else {
                return Ok(ControlFlow::Continue(()));
            };
            found.files_searched += 1;
            bytes += text.len();
            let (matches, path) = (&mut found.matches, &candidate.path);
            Ok(needle.lines(&text, |line, text| {
                if matches.len() >= limit {
                    return ControlFlow::Break(());
                }
                matches.push(Match { path: Name(path.clone()), line: Some(line), text: Some(text) });
                ControlFlow::Continue(())
            }))
        })?;
        found.skipped.unreadable += unreadable;
        found.complete = complete;
        Ok(found)
    }
}

impl Needle {
    fn lines(&self, text: &[u8], mut hit: impl FnMut(u64, String) -> ControlFlow<()>) -> ControlFlow<()> {
        match self {
            // Over the whole text at once, since most of it does not match.
            Self::Literal(finder) => {
                let (mut line, mut counted, mut from) = (1, 0, 0);
                while let Some(at) = finder.find(&text[from..]).map(|at| from + at) {
                    let start = memchr::memrchr(b'\n', &text[..at]).map_or(0, |newline| newline + 1);
                    let end = memchr::memchr(b'\n', &text[at..]).map_or(text.len(), |newline| at + newline);
                    line += memchr::memchr_iter(b'\n', &text[counted..start]).count() as u64;
                    counted = start;
                    hit(line, excerpt(&text[start..end], at - start))?;
                    from = end.max(at + 1);
                }
            }
            Self::Regex(regex) => {
                let text = text.strip_suffix(b"\n").unwrap_or(text);
                for (number, line) in (1..).zip(text.split(|b| *b == b'\n')) {
                    let line = String::from_utf8_lossy(line.strip_suffix(b"\r").unwrap_or(line));
                    if let Some(found) = regex.find(&line) {
                        hit(number, excerpt(line.as_bytes(), found.start()))?;
                    }
                }
            }
        }
        ControlFlow::Continue(())
    }
}

/// The line, or of a long one the part around `at`.
fn excerpt(line: &[u8], at: usize) -> String {
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    let start = if line.len() <= MAX_LINE { 0 } else { at.saturating_sub(MAX_LINE / 4).min(line.len()) };
    String::from_utf8_lossy(&line[start..line.len().min(start + MAX_LINE)]).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str, find: &str, regex: bool) -> Vec<(u64, String)> {
        let mut all = Vec::new();
        let _ = Needle::new(find, regex, false).unwrap().lines(text.as_bytes(), |line, text| {
            all.push((line, text));
            ControlFlow::Continue(())
        });
        all
    }

    #[test]
    fn literal_and_regex_agree_on_lines() {
        let text = "one\r\ntwo one one\n\nthree\none";
        let expected = vec![(1, "one".into()), (2, "two one one".into()), (5, "one".into())];
        assert_eq!(lines(text, "one", false), expected);
        assert_eq!(lines(text, "o[n]e$|one t", true), expected);
    }

    #[test]
    fn long_lines_are_cut_around_the_match() {
        let text = format!("{}needle{}", "x".repeat(100_000), "y".repeat(100_000));
        let found = lines(&text, "needle", false);
        assert!(found[0].1.len() <= MAX_LINE && found[0].1.contains("needle"));
        assert_eq!(lines(&"\n".repeat(9), "\n", false).len(), 9);
    }
}
