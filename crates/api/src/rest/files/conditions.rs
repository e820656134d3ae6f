//! The conditions of RFC 9110: which content of a file is meant, and which part of it.

use axum::http::{HeaderMap, HeaderName, header};
use carrel_files::Stamp;

/// What a client says it knows a content by. Strong: it names exactly these bytes.
pub(super) fn etag(stamp: &Stamp) -> String {
    format!("\"{:x}-{:x}-{:x}\"", stamp.inode, stamp.mtime_ns, stamp.size)
}

/// What `If-Match` and `If-None-Match` ask for.
#[derive(Debug, Default)]
pub(super) struct Conditions {
    matches: Option<Tags>,
    differs: Option<Tags>,
}

#[derive(Debug)]
enum Tags {
    Any,
    Of(Vec<String>),
}

impl Conditions {
    pub(super) fn of(headers: &HeaderMap) -> Self {
        Self { matches: tags(headers, &header::IF_MATCH), differs: tags(headers, &header::IF_NONE_MATCH) }
    }

    /// `If-Match` holds for this content, or for there being none.
    pub(super) fn matches(&self, stamp: Option<&Stamp>) -> bool {
        match (&self.matches, stamp) {
            (None, _) => true,
            (Some(_), None) => false,
            (Some(tags), Some(stamp)) => tags.include(stamp, false),
        }
    }

    /// So does `If-None-Match`.
    pub(super) fn differs(&self, stamp: Option<&Stamp>) -> bool {
        match (&self.differs, stamp) {
            (None, _) | (_, None) => true,
            (Some(tags), Some(stamp)) => !tags.include(stamp, true),
        }
    }

    /// `If-None-Match: *`: nothing may be there.
    pub(super) fn wants_new(&self) -> bool {
        matches!(self.differs, Some(Tags::Any))
    }

    /// The content as it is decides what happens.
    pub(super) fn given(&self) -> bool {
        self.matches.is_some() || self.differs.is_some()
    }
}

impl Tags {
    /// A weak tag is as good as a strong one only for telling that nothing changed.
    fn include(&self, stamp: &Stamp, weakly: bool) -> bool {
        match self {
            Self::Any => true,
            Self::Of(tags) => {
                let own = etag(stamp);
                tags.iter().any(|tag| match tag.strip_prefix("W/") {
                    Some(weak) => weakly && weak == own,
                    None => *tag == own,
                })
            }
        }
    }
}

fn tags(headers: &HeaderMap, name: &HeaderName) -> Option<Tags> {
    let mut all = Vec::new();
    for value in headers.get_all(name) {
        // Our tags hold no commas, and what is no tag at all matches nothing.
        let parts = value.to_str().unwrap_or_default().split(',').map(str::trim);
        all.extend(parts.filter(|part| !part.is_empty()).map(str::to_owned));
    }
    match headers.contains_key(name) {
        false => None,
        true if all.iter().any(|tag| tag == "*") => Some(Tags::Any),
        true => Some(Tags::Of(all)),
    }
}

/// Which bytes are wanted.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Part {
    Whole,
    /// From and up to, both included.
    Range(u64, u64),
    Nowhere,
}

/// `Range`, unless `If-Range` names another content. Several ranges at once are answered with the whole, as any server may.
pub(super) fn part(headers: &HeaderMap, stamp: &Stamp) -> Part {
    let text = |name| headers.get(name).and_then(|value: &axum::http::HeaderValue| value.to_str().ok());
    if headers.contains_key(header::IF_RANGE) && text(header::IF_RANGE) != Some(etag(stamp).as_str()) {
        return Part::Whole;
    }
    let range = text(header::RANGE).and_then(|range| range.split_once('='));
    let Some((_, range)) = range.filter(|(unit, _)| unit.trim().eq_ignore_ascii_case("bytes")) else {
        return Part::Whole;
    };
    let Some((first, last)) = range.trim().split_once('-') else { return Part::Whole };
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    // More digits than a number has are a number beyond every file.
    let number = |text: &str| text.parse().unwrap_or(u64::MAX);
    let size = stamp.size;
    let (first, last) = match (first.trim(), last.trim()) {
        ("", last) if digits(last) => match number(last) {
            0 => return Part::Nowhere,
            length => (size.saturating_sub(length), size.saturating_sub(1)),
        },
        (first, "") if digits(first) => (number(first), size.saturating_sub(1)),
        (first, last) if digits(first) && digits(last) => {
            if number(last) < number(first) {
                return Part::Whole;
            }
            (number(first), number(last).min(size.saturating_sub(1)))
        }
        _ => return Part::Whole,
    };
    if first >= size { Part::Nowhere } else { Part::Range(first, last) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAMP: Stamp = Stamp { inode: 12, mtime_ns: 34, size: 100 };

    fn headers(all: &[(HeaderName, &str)]) -> HeaderMap {
        all.iter().map(|(name, value)| (name.clone(), value.parse().unwrap())).collect()
    }

    #[test]
    fn ranges_are_cut_to_the_file_and_nonsense_is_no_range() {
        for (range, meant) in [
            ("bytes=0-9", Part::Range(0, 9)),
            ("Bytes = 5-", Part::Range(5, 99)),
            ("bytes=-10", Part::Range(90, 99)),
            ("bytes=-1000", Part::Range(0, 99)),
            ("bytes=99-2000", Part::Range(99, 99)),
            ("bytes=0-99999999999999999999999", Part::Range(0, 99)),
            ("bytes=100-", Part::Nowhere),
            ("bytes=99999999999999999999999-", Part::Nowhere),
            ("bytes=-0", Part::Nowhere),
            ("bytes=9-5", Part::Whole),
            ("bytes=0-1,5-6", Part::Whole),
            ("bytes=-", Part::Whole),
            ("bytes=+1-2", Part::Whole),
            ("lines=1-2", Part::Whole),
            ("bytes", Part::Whole),
        ] {
            assert_eq!(part(&headers(&[(header::RANGE, range)]), &STAMP), meant, "{range}");
        }
        let empty = Stamp { size: 0, ..STAMP };
        assert_eq!(part(&headers(&[(header::RANGE, "bytes=0-")]), &empty), Part::Nowhere);
        assert_eq!(part(&headers(&[(header::RANGE, "bytes=-5")]), &empty), Part::Nowhere);
        let of = |tag: &str| part(&headers(&[(header::RANGE, "bytes=0-9"), (header::IF_RANGE, tag)]), &STAMP);
        assert_eq!(of(&etag(&STAMP)), Part::Range(0, 9));
        assert_eq!(of("\"other\""), Part::Whole);
        assert_eq!(of("Tue, 15 Nov 1994 12:45:26 GMT"), Part::Whole);
    }

    #[test]
    fn tags_are_compared_as_the_header_says() {
        let own = etag(&STAMP);
        let of = |name: HeaderName, value: &str| Conditions::of(&headers(&[(name, value)]));
        assert!(of(header::IF_MATCH, &own).matches(Some(&STAMP)));
        assert!(of(header::IF_MATCH, &format!("\"a\" , {own}")).matches(Some(&STAMP)));
        assert!(!of(header::IF_MATCH, &format!("W/{own}")).matches(Some(&STAMP)));
        assert!(of(header::IF_MATCH, "*").matches(Some(&STAMP)));
        assert!(!of(header::IF_MATCH, "*").matches(None));
        assert!(!of(header::IF_MATCH, "").matches(Some(&STAMP)));
        assert!(!of(header::IF_NONE_MATCH, &format!("W/{own}")).differs(Some(&STAMP)));
        assert!(of(header::IF_NONE_MATCH, "*").differs(None));
        assert!(of(header::IF_NONE_MATCH, "*").wants_new());
        assert!(!Conditions::default().given());
    }
}
