//! Signals by number or name.

use std::fmt;

use serde::{Deserialize, Deserializer, de};
use utoipa::openapi::{ObjectBuilder, OneOfBuilder, RefOr, Schema, schema::Type};

/// By number, from 1 on: Linux on every machine that carrel runs on.
const NAMES: [&str; 31] = [
    "HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2", "PIPE",
    "ALRM", "TERM", "STKFLT", "CHLD", "CONT", "STOP", "TSTP", "TTIN", "TTOU", "URG", "XCPU", "XFSZ",
    "VTALRM", "PROF", "WINCH", "IO", "PWR", "SYS",
];

/// `15`, `"TERM"` or `"SIGTERM"`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Signal(i32);

impl Signal {
    pub(super) fn number(self) -> i32 {
        self.0
    }

    fn named(name: &str) -> Option<Self> {
        let name = name.strip_prefix("SIG").unwrap_or(name);
        let at = NAMES.iter().position(|known| *known == name)?;
        i32::try_from(at + 1).ok().map(Self)
    }
}

impl<'de> Deserialize<'de> for Signal {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl de::Visitor<'_> for Visitor {
            type Value = Signal;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a signal: 1 to 31, or a name as TERM")
            }
            fn visit_u64<E: de::Error>(self, number: u64) -> Result<Signal, E> {
                let known = i32::try_from(number).ok().filter(|number| (1..=31).contains(number));
                known.map(Signal).ok_or_else(|| E::invalid_value(de::Unexpected::Unsigned(number), &self))
            }
            fn visit_str<E: de::Error>(self, name: &str) -> Result<Signal, E> {
                Signal::named(name).ok_or_else(|| E::invalid_value(de::Unexpected::Str(name), &self))
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

impl utoipa::PartialSchema for Signal {
    fn schema() -> RefOr<Schema> {
        let names = NAMES.iter().flat_map(|name| [(*name).to_owned(), format!("SIG{name}")]);
        OneOfBuilder::new()
            .description(Some("A signal by number or name."))
            .item(ObjectBuilder::new().schema_type(Type::Integer).minimum(Some(1)).maximum(Some(31)))
            .item(ObjectBuilder::new().schema_type(Type::String).enum_values(Some(names)))
            .into()
    }
}

impl utoipa::ToSchema for Signal {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_have_numbers_and_names() {
        let read = |text: &str| serde_json::from_str::<Signal>(text).map(Signal::number);
        for (text, number) in
            [("15", 15), ("\"TERM\"", 15), ("\"SIGKILL\"", 9), ("\"WINCH\"", 28), ("31", 31)]
        {
            assert_eq!(read(text).unwrap(), number, "{text}");
        }
        for text in ["0", "32", "-1", "\"term\"", "\"SIGSIGTERM\"", "\"\"", "1.5", "true", "null"] {
            assert!(read(text).is_err(), "{text}");
        }
    }
}
