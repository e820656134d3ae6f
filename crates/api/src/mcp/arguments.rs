//! A tool's arguments, checked at the edge.

use std::time::Duration;

use carrel_proto::{
    limits::MAX_TIMEOUT,
    problem::{Code, Problem},
};
use rmcp::model::JsonObject;
use serde::{Deserialize, Deserializer, de::DeserializeOwned};
use serde_json::Value;

/// The arguments of a call, or an error that names the field.
pub(super) fn parse<T: DeserializeOwned>(arguments: Option<JsonObject>) -> Result<T, Problem> {
    let object = Value::Object(arguments.unwrap_or_default());
    serde_json::from_value(object)
        .map_err(|error| Problem::new(Code::InvalidArgument, format!("the arguments: {error}")))
}

/// A number of seconds, also written as text: models do that.
#[derive(Debug, Clone, Copy)]
pub(super) struct Seconds(pub(super) Duration);

impl<'de> Deserialize<'de> for Seconds {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = Value::deserialize(deserializer)?;
        let number = match &value {
            Value::Number(number) => number.as_f64(),
            Value::String(text) => text.trim().trim_end_matches('s').parse().ok(),
            _ => None,
        };
        let seconds = number.filter(|seconds| seconds.is_finite() && *seconds > 0.0);
        let seconds = seconds.ok_or_else(|| {
            serde::de::Error::custom(format!("a number of seconds above 0 was expected, not {value}"))
        })?;
        Ok(Self(Duration::from_secs_f64(seconds.min(MAX_TIMEOUT.as_secs_f64()))))
    }
}

/// As milliseconds for the agent.
pub(super) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_in_every_spelling() {
        let read = |text: &str| serde_json::from_str::<Seconds>(text).map(|seconds| millis(seconds.0));
        assert_eq!(read("1.5").unwrap(), 1500);
        assert_eq!(read("\"30\"").unwrap(), 30_000);
        assert_eq!(read("\"30s\"").unwrap(), 30_000);
        assert_eq!(read("1e300").unwrap(), millis(MAX_TIMEOUT));
        for bad in ["0", "-1", "\"soon\"", "[]", "true"] {
            assert!(read(bad).is_err(), "{bad}");
        }
    }
}
