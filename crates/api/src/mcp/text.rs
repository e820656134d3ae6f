//! Text as a model should read it: without a terminal's control sequences, and within a budget of characters.

use carrel_proto::limits::ByteSize;

use crate::kept::Kept;

/// One part of a result. What lies between head and tail is missing already.
#[derive(Debug, Default)]
pub(super) struct Section {
    head: String,
    tail: String,
    omitted: u64,
}

impl Section {
    pub(super) fn new(kept: &Kept) -> Self {
        let (head, tail, omitted) = kept.parts();
        if omitted == 0 {
            let head = clean(&String::from_utf8_lossy(&[head, tail].concat()));
            return Self { head, tail: String::new(), omitted };
        }
        let text = |bytes| clean(&String::from_utf8_lossy(bytes));
        Self { head: text(head), tail: text(tail), omitted }
    }

    pub(super) fn whole(text: String) -> Self {
        Self { head: text, tail: String::new(), omitted: 0 }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.head.is_empty() && self.tail.is_empty()
    }

    fn chars(&self) -> usize {
        let marker = if self.omitted > 0 { MARKER } else { 0 };
        self.head.chars().count() + self.tail.chars().count() + marker
    }

    /// Within `budget` characters; `true` if something is missing.
    pub(super) fn fit(&self, budget: usize) -> (String, bool) {
        let all = self.chars();
        if self.omitted == 0 && all <= budget {
            return (format!("{}{}", self.head, self.tail), false);
        }
        // The end says how it went, the beginning what it was.
        let room = budget.saturating_sub(MARKER);
        let (first, last) = if self.tail.is_empty() {
            (start(&self.head, room / 2), end(&self.head, room - room / 2))
        } else {
            (start(&self.head, room / 2), end(&self.tail, room - room / 2))
        };
        let between = (self.head.len() + self.tail.len()).saturating_sub(first.len() + last.len()) as u64;
        let missing = ByteSize(self.omitted + between);
        (format!("{first}\n[… {missing} left out …]\n{last}"), true)
    }
}

/// Room for the words that stand for what is left out.
const MARKER: usize = 40;

/// Every section within one budget. A short section leaves its share to the longer ones.
pub(super) fn fit(sections: &[&Section], budget: usize) -> Vec<(String, bool)> {
    let mut order: Vec<usize> = (0..sections.len()).collect();
    order.sort_by_key(|at| sections[*at].chars());
    let mut left = budget;
    let mut fitted = vec![(String::new(), false); sections.len()];
    for (done, at) in order.iter().enumerate() {
        let share = left / (sections.len() - done);
        fitted[*at] = sections[*at].fit(share);
        left -= fitted[*at].0.chars().count().min(left);
    }
    fitted
}

/// The first characters, up to a line's end if one is near.
fn start(text: &str, chars: usize) -> &str {
    let Some((cut, _)) = text.char_indices().nth(chars) else { return text };
    match text[..cut].rfind('\n') {
        Some(line) if line > cut / 5 * 4 => &text[..line],
        _ => &text[..cut],
    }
}

fn end(text: &str, chars: usize) -> &str {
    let count = text.chars().count();
    if count <= chars {
        return text;
    }
    let Some((cut, _)) = text.char_indices().nth(count - chars) else { return "" };
    match text[cut..].find('\n') {
        Some(line) if line < (text.len() - cut) / 5 => &text[cut + line + 1..],
        _ => &text[cut..],
    }
}

/// Without escape sequences and without what a carriage return has painted over.
pub(super) fn clean(text: &str) -> String {
    if !text.bytes().any(|byte| byte < b' ' && !matches!(byte, b'\n' | b'\t')) {
        return text.to_owned();
    }
    let plain = without_escapes(text);
    let mut out = String::with_capacity(plain.len());
    for line in plain.split_inclusive('\n') {
        let (line, newline) = line.strip_suffix('\n').map_or((line, ""), |line| (line, "\n"));
        let line = line.trim_end_matches('\r');
        out.push_str(line.rsplit('\r').next().unwrap_or(line));
        out.push_str(newline);
    }
    out
}

fn without_escapes(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '\x1b' => match chars.next() {
                // Parameters, then one letter.
                Some('[') => while chars.next().is_some_and(|c| !('@'..='~').contains(&c)) {},
                // Until a bell, or an escape whose backslash the next round takes for a sequence of its own.
                Some(']') => while chars.next_if(|c| *c != '\x07' && *c != '\x1b').is_some() {},
                _ => {}
            },
            '\n' | '\t' | '\r' => out.push(c),
            c if c < ' ' || c == '\x7f' => {}
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(most: u64, text: &str) -> Section {
        let mut kept = Kept::new(most);
        kept.add(0, text.as_bytes());
        Section::new(&kept)
    }

    #[test]
    fn a_terminals_paint_is_taken_off() {
        assert_eq!(clean("\x1b[1;31mred\x1b[0m \x1b]0;title\x07plain\x1b]8;;u\x1b\\link"), "red plainlink");
        assert_eq!(clean(" 10%\r 50%\r100%\ndone\r\n"), "100%\ndone\n");
        assert_eq!(clean("a\tb\0c\x08d"), "a\tbcd");
        assert_eq!(clean("ends in \x1b["), "ends in ");
    }

    #[test]
    fn what_fits_is_whole_and_what_does_not_says_so() {
        assert_eq!(fit(&[&kept(1000, "short")], 100), [("short".to_owned(), false)]);
        let long = "0123456789".repeat(1000);
        for section in [kept(100_000, &long), kept(1000, &long)] {
            let fitted = fit(&[&section], 500);
            let (text, cut) = &fitted[0];
            assert!(*cut && text.chars().count() <= 500, "{}", text.chars().count());
            assert!(
                text.starts_with("0123") && text.ends_with("6789") && text.contains("left out"),
                "{text}"
            );
        }
    }

    #[test]
    fn the_short_leave_room_to_the_long() {
        let (long, short) = (kept(100_000, &"é".repeat(20_000)), kept(100, "tiny"));
        let fitted = fit(&[&long, &short, &Section::default()], 1000);
        assert_eq!(fitted[1], ("tiny".to_owned(), false));
        let chars = fitted[0].0.chars().count();
        assert!((900..=996).contains(&chars), "{chars}");
    }
}
