//! What a sandbox may use, and what a host can enforce of it.

use std::{fmt, str::FromStr, time::Duration};

use serde::{Deserialize, Serialize};

/// Default and largest wall time of one call.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);
pub const MAX_TIMEOUT: Duration = Duration::from_secs(60 * 60);
/// Between the interrupt and the kill.
pub const INTERRUPT_GRACE: Duration = Duration::from_secs(2);

/// Bytes, written `64MB`, `1GB`, `512KiB` or as a plain number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "schema", schema(description = "Bytes.", maximum = 9223372036854775807usize))]
#[serde(transparent)]
pub struct ByteSize(pub u64);

impl ByteSize {
    pub const fn mb(n: u64) -> Self {
        Self(n << 20)
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a size (try 512MB, 1GB or a number of bytes)")]
pub struct BadSize(String);

impl FromStr for ByteSize {
    type Err = BadSize;
    fn from_str(text: &str) -> Result<Self, BadSize> {
        let bad = || BadSize(text.to_owned());
        let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let number: u64 = text[..digits].parse().map_err(|_| bad())?;
        let shift = match text[digits..].trim().to_ascii_lowercase().as_str() {
            "" | "b" => 0,
            "k" | "kb" | "kib" => 10,
            "m" | "mb" | "mib" => 20,
            "g" | "gb" | "gib" => 30,
            "t" | "tb" | "tib" => 40,
            _ => return Err(bad()),
        };
        number.checked_mul(1 << shift).map(Self).ok_or_else(bad)
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (shift, unit) in [(40, "TB"), (30, "GB"), (20, "MB"), (10, "KB")] {
            if self.0 >> shift > 0 {
                let whole = self.0 >> shift;
                let tenth = ((self.0 & ((1 << shift) - 1)) * 10) >> shift;
                return if tenth == 0 {
                    write!(f, "{whole} {unit}")
                } else {
                    write!(f, "{whole}.{tenth} {unit}")
                };
            }
        }
        write!(f, "{} B", self.0)
    }
}

/// Limits of one sandbox.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// CPUs, in thousandths: 2000 is two.
    #[cfg_attr(feature = "schema", schema(maximum = 4294967295u32))]
    pub cpu_millis: u32,
    pub memory: ByteSize,
    #[cfg_attr(feature = "schema", schema(maximum = 4294967295u32))]
    pub pids: u32,
    /// Of the workspace.
    pub disk: ByteSize,
    /// Output kept per run or exec; what is beyond is counted, not kept.
    pub output: ByteSize,
    /// Runs and execs under way at once.
    #[cfg_attr(feature = "schema", schema(maximum = 4294967295u32))]
    pub execs: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            cpu_millis: 2000,
            memory: ByteSize::mb(512),
            pids: 256,
            disk: ByteSize::mb(1024),
            output: ByteSize::mb(64),
            execs: 64,
        }
    }
}

/// How a limit is enforced on this host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case", tag = "by", content = "detail")]
pub enum Enforcement {
    CgroupV2,
    CgroupV1,
    /// A process limit: coarser than asked for; the word says how.
    Rlimit(String),
    /// The workspace is a file system of exactly this size.
    SizedFilesystem,
    /// Usage is watched and the offender stopped; it can be passed for a moment.
    Watched(String),
    /// Not enforced; the word says what is missing.
    Nothing(String),
}

/// Every limit with the way it is enforced.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Enforced {
    pub memory: Enforcement,
    pub pids: Enforcement,
    pub cpu: Enforcement,
    pub disk: Enforcement,
    pub freezer: Enforcement,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_parse_and_print() {
        assert_eq!("512MB".parse(), Ok(ByteSize::mb(512)));
        assert_eq!("1GiB".parse(), Ok(ByteSize::mb(1024)));
        assert_eq!("7".parse(), Ok(ByteSize(7)));
        assert_eq!(ByteSize::mb(1536).to_string(), "1.5 GB");
        for bad in ["", "MB", "-1", "1.5GB", "99999999999999999999", "18446744073709551615k"] {
            assert!(bad.parse::<ByteSize>().is_err(), "{bad}");
        }
    }
}
