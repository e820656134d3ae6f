//! Globs over names and paths: `*`, `?`, `[a-z]`, `[!a-z]`, `{a,b}`, `**` and `\` before a plain character.
//!
//! Matched by following all possible positions at once, so no pattern takes more than its length times the
//! name's. A name's bytes that are not UTF-8 count as one character each.

use carrel_proto::files::MAX_PATTERN;

use crate::FileError;

/// Patterns that braces may multiply into.
const MAX_ALTERNATIVES: usize = 64;

pub(crate) struct Glob {
    alternatives: Vec<Vec<Token>>,
    whole_path: bool,
}

enum Token {
    Char(char),
    /// `?`
    One,
    /// `*`: anything within a name.
    Star,
    /// `**` at the end: anything at all.
    Rest,
    /// `**/`: any number of directories, also none.
    Dirs,
    /// `[…]`
    Set {
        not: bool,
        ranges: Vec<(char, char)>,
    },
}

impl Glob {
    pub(crate) fn new(pattern: &str) -> Result<Self, FileError> {
        if pattern.is_empty() || pattern.len() > MAX_PATTERN {
            return Err(FileError::argument(format!("a glob has 1 to {MAX_PATTERN} bytes")));
        }
        let mut spelled = Vec::new();
        expand(pattern.trim_start_matches("./").chars().collect(), &mut spelled)?;
        let alternatives = spelled.iter().map(|chars| tokens(chars)).collect::<Result<_, _>>()?;
        Ok(Self { alternatives, whole_path: pattern.contains('/') })
    }

    /// `path` is relative to where the search began.
    pub(crate) fn matches(&self, path: &[u8]) -> bool {
        let name = path.rsplit(|b| *b == b'/').next().unwrap_or(path);
        let text = chars(if self.whole_path { path } else { name });
        self.alternatives.iter().any(|tokens| matches(tokens, &text))
    }
}

fn chars(bytes: &[u8]) -> Vec<char> {
    let mut all = Vec::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        all.extend(chunk.valid().chars());
        all.extend(chunk.invalid().iter().map(|_| char::REPLACEMENT_CHARACTER));
    }
    all
}

/// Spells out the first pair of braces, and so on with the results.
fn expand(pattern: Vec<char>, out: &mut Vec<Vec<char>>) -> Result<(), FileError> {
    let mut open = None;
    let mut commas = Vec::new();
    let mut depth = 0;
    let mut at = 0;
    while at < pattern.len() {
        match pattern[at] {
            '\\' => at += 1,
            '{' => {
                depth += 1;
                open = open.or(Some(at));
            }
            ',' if depth == 1 => commas.push(at),
            '}' if depth > 0 => {
                depth -= 1;
                if let (0, Some(open)) = (depth, open) {
                    let ends = commas.iter().copied().chain([at]);
                    let starts = [open].into_iter().chain(commas.iter().copied());
                    for (start, end) in starts.zip(ends) {
                        let one = [&pattern[..open], &pattern[start + 1..end], &pattern[at + 1..]].concat();
                        expand(one, out)?;
                    }
                    return Ok(());
                }
            }
            _ => {}
        }
        at += 1;
    }
    if depth > 0 {
        return Err(FileError::argument("a brace of the glob is not closed"));
    }
    if out.len() == MAX_ALTERNATIVES {
        return Err(FileError::argument(format!(
            "the glob's braces make more than {MAX_ALTERNATIVES} patterns"
        )));
    }
    out.push(pattern);
    Ok(())
}

fn tokens(pattern: &[char]) -> Result<Vec<Token>, FileError> {
    let mut tokens = Vec::new();
    let mut rest = pattern;
    loop {
        rest = match rest {
            [] => return Ok(tokens),
            ['\\', c, rest @ ..] => {
                tokens.push(Token::Char(*c));
                rest
            }
            ['*', '*', '/', rest @ ..]
                if matches!(tokens.last(), None | Some(Token::Char('/') | Token::Dirs)) =>
            {
                tokens.push(Token::Dirs);
                rest
            }
            ['*', '*', rest @ ..] => {
                tokens.push(Token::Rest);
                rest
            }
            ['*', rest @ ..] => {
                tokens.push(Token::Star);
                rest
            }
            ['?', rest @ ..] => {
                tokens.push(Token::One);
                rest
            }
            ['[', rest @ ..] => set(rest, &mut tokens)?,
            [c, rest @ ..] => {
                tokens.push(Token::Char(*c));
                rest
            }
        };
    }
}

fn set<'a>(mut rest: &'a [char], tokens: &mut Vec<Token>) -> Result<&'a [char], FileError> {
    let not = matches!(rest, ['!' | '^', ..]);
    if not {
        rest = &rest[1..];
    }
    let mut ranges = Vec::new();
    loop {
        rest = match rest {
            [] => return Err(FileError::argument("a bracket of the glob is not closed")),
            // First, a bracket stands for itself.
            [']', rest @ ..] if !ranges.is_empty() => {
                tokens.push(Token::Set { not, ranges });
                return Ok(rest);
            }
            [from, '-', to, rest @ ..] if *to != ']' => {
                ranges.push((*from, *to));
                rest
            }
            [c, rest @ ..] => {
                ranges.push((*c, *c));
                rest
            }
        };
    }
}

fn matches(tokens: &[Token], text: &[char]) -> bool {
    let mut here = vec![false; tokens.len() + 1];
    reach(tokens, &mut here, 0);
    for c in text {
        let mut next = vec![false; tokens.len() + 1];
        for (at, token) in tokens.iter().enumerate().filter(|(at, _)| here[*at]) {
            match token {
                Token::Char(wanted) if c == wanted => reach(tokens, &mut next, at + 1),
                Token::One if *c != '/' => reach(tokens, &mut next, at + 1),
                Token::Set { not, ranges }
                    if *c != '/' && ranges.iter().any(|(a, b)| (a..=b).contains(&c)) != *not =>
                {
                    reach(tokens, &mut next, at + 1);
                }
                Token::Star if *c != '/' => reach(tokens, &mut next, at),
                Token::Rest => reach(tokens, &mut next, at),
                Token::Dirs => {
                    // In the midst of a directory's name: the pattern goes on only behind the next slash.
                    next[at] = true;
                    if *c == '/' {
                        reach(tokens, &mut next, at + 1);
                    }
                }
                _ => {}
            }
        }
        here = next;
    }
    here[tokens.len()]
}

/// Marks `at` and what is reached from it without a character.
fn reach(tokens: &[Token], set: &mut [bool], mut at: usize) {
    set[at] = true;
    while let Some(Token::Star | Token::Rest | Token::Dirs) = tokens.get(at) {
        at += 1;
        set[at] = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hit(glob: &str, path: &str) -> bool {
        Glob::new(glob).unwrap().matches(path.as_bytes())
    }

    #[test]
    fn globs_match_as_people_expect() {
        for (glob, path) in [
            ("*.py", "src/a.py"),
            ("*.{ts,tsx}", "web/a.tsx"),
            ("src/**/*.rs", "src/a.rs"),
            ("src/**/*.rs", "src/x/y/a.rs"),
            ("**/test", "a/b/test"),
            ("**/test", "test"),
            ("src/**", "src/a/b"),
            ("?.txt", "ä.txt"),
            ("[a-c]x", "bx"),
            ("[!a-c]x", "dx"),
            ("[]]", "]"),
            ("a\\*", "a*"),
            ("{a,{b,c}}", "c"),
            ("*a*b*", "xxaxxbxx"),
        ] {
            assert!(hit(glob, path), "{glob} {path}");
        }
        for (glob, path) in [
            ("*.py", "a.pyc"),
            ("src/*.rs", "src/x/a.rs"),
            ("**/test", "a/mytest"),
            ("?", ""),
            ("[a-c]x", "dx"),
            ("a\\*", "ab"),
            ("src/*", "src"),
        ] {
            assert!(!hit(glob, path), "{glob} {path}");
        }
        assert!(Glob::new("*").unwrap().matches(b"\xff\n"));
        assert!(Glob::new("?").unwrap().matches(b"\xff"));
    }

    #[test]
    fn bad_and_costly_globs_are_refused_or_cheap() {
        for bad in ["", "[a", "{a", &"{a,b}".repeat(7)] {
            assert!(Glob::new(bad).is_err(), "{bad}");
        }
        assert!(!hit(&"*a".repeat(500), &"a".repeat(255)));
    }
}
