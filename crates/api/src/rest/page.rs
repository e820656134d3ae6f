//! Lists come in pages.

use serde::Serialize;

use super::problem::{Refusal, bad};

/// A page's own bounds: a screenful for a machine.
pub(crate) const MOST: u32 = 500;
pub(crate) const DEFAULT: u32 = 100;

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct Page<T> {
    pub(crate) items: Vec<T>,
    /// Pass as `after` for the next page; null at the end.
    pub(crate) next: Option<String>,
}

impl<T> Page<T> {
    /// A page of a list that is at hand as a whole, by position.
    pub(crate) fn cut(all: Vec<T>, after: Option<&str>, limit: Option<u32>) -> Result<Self, Refusal> {
        let limit = usize::try_from(check(limit)?).unwrap_or(usize::MAX);
        let start: usize = match after {
            None => 0,
            Some(text) => text.parse().map_err(|_| bad_cursor(text))?,
        };
        let total = all.len();
        let items: Vec<T> = all.into_iter().skip(start).take(limit).collect();
        let end = start.saturating_add(items.len());
        let next = (end < total && !items.is_empty()).then(|| end.to_string());
        Ok(Self { items, next })
    }
}

impl<T> Page<T> {
    /// A page of a list that is at hand as a whole, by name: what goes or comes while a client turns the pages moves nothing else.
    pub(crate) fn by_name(
        mut all: Vec<T>,
        name: impl Fn(&T) -> String,
        after: Option<&str>,
        limit: Option<u32>,
    ) -> Result<Self, Refusal> {
        let limit = usize::try_from(check(limit)?).unwrap_or(usize::MAX);
        all.retain(|item| after.is_none_or(|after| name(item).as_str() > after));
        all.sort_by_cached_key(&name);
        let more = all.len() > limit;
        all.truncate(limit);
        let next = all.last().filter(|_| more).map(name);
        Ok(Self { items: all, next })
    }
}

pub(crate) fn check(limit: Option<u32>) -> Result<u32, Refusal> {
    match limit.unwrap_or(DEFAULT) {
        limit @ 1..=MOST => Ok(limit),
        _ => Err(bad(format!("limit is between 1 and {MOST}")).into()),
    }
}

pub(crate) fn bad_cursor(text: &str) -> Refusal {
    let text: String = text.chars().take(40).collect();
    bad(format!("`{text}` is no cursor of this list"))
        .hint("pass `next` of the page before as `after`")
        .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_goes_between_two_pages_takes_nobody_else_along() {
        let page = |all: &[&'static str], after: Option<&str>| {
            Page::by_name(all.to_vec(), |name| (*name).to_owned(), after, Some(2)).unwrap()
        };
        let first = page(&["c", "a", "b", "d"], None);
        assert_eq!((first.items, first.next.as_deref()), (vec!["a", "b"], Some("b")));
        let second = page(&["c", "b", "d"], Some("b"));
        assert_eq!((second.items, second.next), (vec!["c", "d"], None));
        assert!(Page::by_name(vec!["a"], |name| (*name).to_owned(), None, Some(MOST + 1)).is_err());
    }
}
