//! Replacing text in files. Each file changes atomically and keeps its mode; files without a match are untouched.

use std::{io::Write, ops::ControlFlow};

use carrel_proto::files::{MAX_MATCHES, MAX_SEARCHED, MAX_TEXT_FILE, Name, Replace, Replaced, ReplacedIn};
use rustix::fs::{self, OFlags};

use crate::{
    FileError, Root,
    root::{Owner, STRICT, open_at},
    stage::{Stage, dress},
    text::{Candidate, MAX_BYTES, Needle, visit},
};

/// Largest file that a replacement may make: a short pattern and a long text multiply.
const MAX_RESULT: usize = 64 << 20;

impl Root {
    /// Replaces in one file, or in all text files below a directory.
    pub fn replace(&self, query: &Replace) -> Result<Replaced, FileError> {
        let needle = Needle::new(&query.find, query.regex, false)?;
        let mut all = Replaced::default();
        let (mut looked_at, mut bytes) = (0, 0);
        let (unreadable, complete) = visit(self, &query.path, query.glob.as_deref(), |candidate| {
            if query.expect.is_some() && !candidate.single {
                return Err(FileError::argument("expect is for a single file"));
            }
            if all.files.len() >= MAX_MATCHES as usize || looked_at >= MAX_SEARCHED || bytes > MAX_BYTES {
                return Ok(ControlFlow::Break(()));
            }
            let Some(old) = candidate.text(MAX_TEXT_FILE, &mut all.skipped)? else {
                return Ok(ControlFlow::Continue(()));
            };
            looked_at += 1;
            bytes += old.len();
            let shown = Name(candidate.path.clone());
            let (count, new) = match needle.replace(&old, &query.with) {
                Ok(done) => done,
                Err(Unfit::NotText) if !candidate.single => {
                    all.skipped.binary += 1;
                    return Ok(ControlFlow::Continue(()));
                }
                Err(Unfit::NotText) => {
                    return Err(FileError::argument(format!("{shown} is not text, which a regex needs")));
                }
                Err(Unfit::TooLarge) => {
                    let what = format!("the result would be beyond {MAX_RESULT} bytes");
                    return Err(FileError::TooLarge { path: shown.to_string(), what });
                }
            };
            if let Some(expected) = query.expect.filter(|expected| *expected != count) {
                let what =
                    format!("expected {expected} occurrences in {shown}, found {count}; nothing was changed");
                return Err(FileError::argument(what));
            }
            if count > 0 {
                if new != old {
                    self.rewrite(&candidate, &new, &shown)?;
                }
                all.count += count;
                all.files.push(ReplacedIn { path: shown, count });
            }
            Ok(ControlFlow::Continue(()))
        })?;
        all.skipped.unreadable += unreadable;
        all.complete = complete;
        Ok(all)
    }

    fn rewrite(&self, candidate: &Candidate<'_>, data: &[u8], shown: &Name) -> Result<(), FileError> {
        let fail = |errno| FileError::at(shown, errno);
        let dir = open_at(candidate.dir, b".", OFlags::PATH | OFlags::DIRECTORY, STRICT).map_err(fail)?;
        let mut stage = Stage::create(dir).map_err(fail)?;
        if self.owner.is_none() {
            let fs::Stat { st_uid: uid, st_gid: gid, .. } = candidate.stat;
            // As in `write`: kept where we may.
            let _ = dress(&stage.file, 0o600, Some(Owner { uid, gid }));
        }
        stage.file.write_all(data).map_err(|e| FileError::io(shown, e))?;
        self.note_change();
        stage.publish(candidate.name, candidate.stat.st_mode, self.owner, true, false).map_err(fail)?;
        self.note_change();
        Ok(())
    }
}

/// Why a text cannot be replaced in.
#[derive(Debug)]
enum Unfit {
    NotText,
    TooLarge,
}

impl Needle {
    fn replace(&self, text: &[u8], with: &str) -> Result<(u64, Vec<u8>), Unfit> {
        let mut out = Vec::new();
        let mut kept = 0;
        let mut count = 0;
        match self {
            Self::Literal(finder) => {
                for at in finder.find_iter(text) {
                    out.extend_from_slice(&text[kept..at]);
                    out.extend_from_slice(with.as_bytes());
                    kept = at + finder.needle().len();
                    count += 1;
                    if out.len() > MAX_RESULT {
                        return Err(Unfit::TooLarge);
                    }
                }
            }
            Self::Regex(regex) => {
                let whole = std::str::from_utf8(text).map_err(|_| Unfit::NotText)?;
                let mut expanded = String::new();
                for captures in regex.captures_iter(whole) {
                    let Some(found) = captures.get(0) else { continue };
                    out.extend_from_slice(&text[kept..found.start()]);
                    expanded.clear();
                    captures.expand(with, &mut expanded);
                    out.extend_from_slice(expanded.as_bytes());
                    kept = found.end();
                    count += 1;
                    if out.len() > MAX_RESULT {
                        return Err(Unfit::TooLarge);
                    }
                }
            }
        }
        out.extend_from_slice(&text[kept..]);
        Ok((count, out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn replaced(text: &str, find: &str, with: &str, regex: bool) -> (u64, String) {
        let (count, out) = Needle::new(find, regex, false).unwrap().replace(text.as_bytes(), with).unwrap();
        (count, String::from_utf8(out).unwrap())
    }

    #[test]
    fn literals_stay_literal_and_groups_are_filled_in() {
        assert_eq!(replaced("a.b $1 a.b", "a.b", "$1", false), (2, "$1 $1 $1".into()));
        assert_eq!(replaced("k=v\nx=y\n", r"^(\w)=(\w)$", "$2=$1", true), (2, "v=k\ny=x\n".into()));
        assert_eq!(replaced("aaa", "aa", "b", false), (1, "ba".into()));
    }

    #[test]
    fn growth_is_bounded() {
        let text = "a".repeat(1 << 20);
        let needle = Needle::new("a", false, false).unwrap();
        assert!(matches!(needle.replace(text.as_bytes(), &"b".repeat(1000)), Err(Unfit::TooLarge)));
    }
}
