//! What an attack came to, and how results of calls are judged.
//!
//! `held` is said only when the attack was tried and failed; what could not be tried is `skipped`.

use rustix::io::Errno;
use serde::Serialize;

/// Details are cut to this many bytes: they travel through a pipe whose buffer must hold them.
pub(crate) const DETAIL_MAX: usize = 2000;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Verdict {
    Held,
    Breach,
    Skipped,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub(crate) verdict: Verdict,
    pub(crate) detail: String,
}

pub(crate) fn held(detail: impl Into<String>) -> Outcome {
    Outcome { verdict: Verdict::Held, detail: detail.into() }
}

pub(crate) fn breach(detail: impl Into<String>) -> Outcome {
    Outcome { verdict: Verdict::Breach, detail: detail.into() }
}

pub(crate) fn skipped(detail: impl Into<String>) -> Outcome {
    Outcome { verdict: Verdict::Skipped, detail: detail.into() }
}

/// How a filter or the kernel says no before doing anything.
pub(crate) const REFUSED: &[Errno] = &[Errno::PERM, Errno::ACCESS, Errno::NOSYS];

/// How a file system says that there is nothing for you here.
pub(crate) const NO_FILE: &[Errno] = &[
    Errno::NOENT,
    Errno::NOTDIR,
    Errno::ACCESS,
    Errno::PERM,
    Errno::NOSYS,
    Errno::LOOP,
    Errno::NXIO,
    Errno::NODEV,
    Errno::XDEV,
    Errno::SRCH,
    Errno::IO,
];

/// How a file system says that you may not write.
pub(crate) const NO_WRITE: &[Errno] =
    &[Errno::ROFS, Errno::ACCESS, Errno::PERM, Errno::NOENT, Errno::NOTDIR, Errno::ISDIR, Errno::NOSYS];

/// Judges one call: success is a breach, an allowed errno is held, and any other errno means that the call
/// passed the fence and failed for a reason of its own, which an attacker could mend.
pub(crate) fn expect_errno<T>(what: &str, result: Result<T, Errno>, allowed: &[Errno]) -> Outcome {
    match result {
        Ok(_) => breach(format!("{what}: succeeded")),
        Err(errno) if allowed.contains(&errno) => held(format!("{what}: {}", name(errno))),
        Err(errno) => breach(format!("{what}: not refused, failed only with {}", name(errno))),
    }
}

/// The errno of a `std` error; those without one become `EIO`.
pub(crate) fn errno_of(error: &std::io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error)
}

/// Many results as one: a breach anywhere is a breach; held if anything was tried and nothing broke.
pub(crate) fn merge(outcomes: impl IntoIterator<Item = Outcome>) -> Outcome {
    let outcomes: Vec<Outcome> = outcomes.into_iter().collect();
    let joined = |verdict: Verdict| {
        let details: Vec<&str> =
            outcomes.iter().filter(|o| o.verdict == verdict).map(|o| o.detail.as_str()).collect();
        details.join("; ")
    };
    let (breaches, helds, skips) = (joined(Verdict::Breach), joined(Verdict::Held), joined(Verdict::Skipped));
    if outcomes.iter().any(|o| o.verdict == Verdict::Breach) {
        breach(breaches)
    } else if outcomes.iter().any(|o| o.verdict == Verdict::Held) {
        held(if skips.is_empty() { helds } else { format!("{helds} (not tried: {skips})") })
    } else {
        skipped(if skips.is_empty() { "nothing to try".to_owned() } else { skips })
    }
}

/// Found things as a verdict: none is held, any is a breach that names (a bounded number of) them.
pub(crate) fn none_found(what: &str, found: &[String]) -> Outcome {
    if found.is_empty() {
        return held(format!("no {what}"));
    }
    let shown: Vec<&str> = found.iter().take(12).map(String::as_str).collect();
    breach(format!("{} {what}: {}", found.len(), shown.join(", ")))
}

/// Cuts at a character boundary to at most [`DETAIL_MAX`] bytes.
pub(crate) fn clip(mut detail: String) -> String {
    if detail.len() > DETAIL_MAX {
        let end = (0..=DETAIL_MAX - 4).rev().find(|at| detail.is_char_boundary(*at)).unwrap_or_default();
        detail.truncate(end);
        detail.push('…');
    }
    detail
}

/// The symbolic name of the errnos that turn up here, or the number.
pub(crate) fn name(errno: Errno) -> String {
    let known = match errno {
        Errno::PERM => "EPERM",
        Errno::NOENT => "ENOENT",
        Errno::SRCH => "ESRCH",
        Errno::IO => "EIO",
        Errno::NXIO => "ENXIO",
        Errno::BADF => "EBADF",
        Errno::CHILD => "ECHILD",
        Errno::AGAIN => "EAGAIN",
        Errno::NOMEM => "ENOMEM",
        Errno::ACCESS => "EACCES",
        Errno::FAULT => "EFAULT",
        Errno::NOTBLK => "ENOTBLK",
        Errno::BUSY => "EBUSY",
        Errno::EXIST => "EEXIST",
        Errno::XDEV => "EXDEV",
        Errno::NODEV => "ENODEV",
        Errno::NOTDIR => "ENOTDIR",
        Errno::ISDIR => "EISDIR",
        Errno::INVAL => "EINVAL",
        Errno::NFILE => "ENFILE",
        Errno::MFILE => "EMFILE",
        Errno::NOTTY => "ENOTTY",
        Errno::TXTBSY => "ETXTBSY",
        Errno::FBIG => "EFBIG",
        Errno::NOSPC => "ENOSPC",
        Errno::ROFS => "EROFS",
        Errno::PIPE => "EPIPE",
        Errno::NOLCK => "ENOLCK",
        Errno::NOSYS => "ENOSYS",
        Errno::LOOP => "ELOOP",
        Errno::NOEXEC => "ENOEXEC",
        Errno::OPNOTSUPP => "EOPNOTSUPP",
        Errno::AFNOSUPPORT => "EAFNOSUPPORT",
        Errno::PROTONOSUPPORT => "EPROTONOSUPPORT",
        Errno::SOCKTNOSUPPORT => "ESOCKTNOSUPPORT",
        Errno::PROTOTYPE => "EPROTOTYPE",
        Errno::ADDRNOTAVAIL => "EADDRNOTAVAIL",
        Errno::NETUNREACH => "ENETUNREACH",
        Errno::NETDOWN => "ENETDOWN",
        Errno::HOSTUNREACH => "EHOSTUNREACH",
        Errno::CONNREFUSED => "ECONNREFUSED",
        Errno::TIMEDOUT => "ETIMEDOUT",
        Errno::INPROGRESS => "EINPROGRESS",
        Errno::DQUOT => "EDQUOT",
        other => return format!("errno {}", other.raw_os_error()),
    };
    known.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_breach_outweighs_and_a_skip_never_counts_as_held() {
        assert_eq!(merge([held("a"), breach("b"), skipped("c")]).verdict, Verdict::Breach);
        assert_eq!(merge([held("a"), skipped("c")]), held("a (not tried: c)"));
        assert_eq!(merge([skipped("c")]).verdict, Verdict::Skipped);
        assert_eq!(merge([]).verdict, Verdict::Skipped);
    }

    #[test]
    fn only_listed_errnos_count_as_refused() {
        assert_eq!(expect_errno::<()>("x", Err(Errno::PERM), REFUSED), held("x: EPERM"));
        assert_eq!(expect_errno::<()>("x", Err(Errno::INVAL), REFUSED).verdict, Verdict::Breach);
        assert_eq!(expect_errno("x", Ok(()), REFUSED).verdict, Verdict::Breach);
    }

    #[test]
    fn long_details_are_cut_at_a_character() {
        let cut = clip("é".repeat(DETAIL_MAX));
        assert!(cut.len() <= DETAIL_MAX && cut.ends_with('…'));
    }
}
