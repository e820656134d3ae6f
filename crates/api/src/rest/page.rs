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
