//! Bytes that are mostly text: on the wire a JSON string where that is exact, else `{"base64": "…"}`.
//!
//! Names on Linux are bytes, and so are contents. A lossy string would name another file, so what is not
//! UTF-8 travels as base64. Readers take both forms for any value; nothing is guessed.

use std::fmt;

use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{self, MapAccess, Visitor},
    ser::SerializeMap,
};

macro_rules! wire_bytes {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        pub struct $name(pub Vec<u8>);

        impl $name {
            pub fn as_bytes(&self) -> &[u8] {
                &self.0
            }
        }
        impl From<&[u8]> for $name {
            fn from(bytes: &[u8]) -> Self {
                Self(bytes.to_vec())
            }
        }
        impl From<Vec<u8>> for $name {
            fn from(bytes: Vec<u8>) -> Self {
                Self(bytes)
            }
        }
        impl From<&str> for $name {
            fn from(text: &str) -> Self {
                Self(text.as_bytes().to_vec())
            }
        }
        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serialize(&self.0, serializer)
            }
        }
        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                deserialize(deserializer).map(Self)
            }
        }
    };
}

wire_bytes! {
    /// A file's name, a path below a listed directory, or a symlink's target, exactly as the kernel gave it.
    Name
}
wire_bytes! {
    /// What is in a file.
    Content
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        show(&self.0, f)
    }
}
impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Name({self})")
    }
}
impl fmt::Debug for Content {
    /// Contents do not belong into logs.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Content({} bytes)", self.0.len())
    }
}

/// For people: one line, no terminal tricks, every byte still told apart.
pub(super) fn show(bytes: &[u8], f: &mut fmt::Formatter<'_>) -> fmt::Result {
    for chunk in bytes.utf8_chunks() {
        for c in chunk.valid().chars() {
            // Direction overrides (U+202A.., U+2066..) could make one name look like another.
            let deceptive =
                matches!(c, '\u{200e}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
            match c {
                '\\' => f.write_str("\\\\")?,
                c if c.is_control() || deceptive => write!(f, "{}", c.escape_default())?,
                c => fmt::Write::write_char(f, c)?,
            }
        }
        for byte in chunk.invalid() {
            write!(f, "\\x{byte:02x}")?;
        }
    }
    Ok(())
}

/// Text goes as a string unless JSON would blow it up: a control character takes six bytes, so a binary that
/// happens to be UTF-8 would pass the largest frame. Base64 never grows beyond 4/3.
fn as_text(bytes: &[u8]) -> Option<&str> {
    let dense = |b: &u8| *b >= b' ' || matches!(b, b'\n' | b'\r' | b'\t');
    std::str::from_utf8(bytes).ok().filter(|text| text.as_bytes().iter().all(dense))
}

pub(super) fn serialize<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
    match as_text(bytes) {
        Some(text) => serializer.serialize_str(text),
        None => {
            let mut map = serializer.serialize_map(Some(1))?;
            map.serialize_entry("base64", &STANDARD.encode(bytes))?;
            map.end()
        }
    }
}

pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
    struct Either;
    impl<'de> Visitor<'de> for Either {
        type Value = Vec<u8>;
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a string or {\"base64\": \"...\"}")
        }
        fn visit_str<E: de::Error>(self, text: &str) -> Result<Vec<u8>, E> {
            Ok(text.as_bytes().to_vec())
        }
        fn visit_string<E: de::Error>(self, text: String) -> Result<Vec<u8>, E> {
            Ok(text.into_bytes())
        }
        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Vec<u8>, A::Error> {
            let mut bytes = None;
            while let Some(key) = map.next_key::<String>()? {
                if key != "base64" {
                    return Err(de::Error::unknown_field(&key, &["base64"]));
                }
                if bytes.is_some() {
                    return Err(de::Error::duplicate_field("base64"));
                }
                let text: String = map.next_value()?;
                bytes = Some(STANDARD.decode(text).map_err(|_| de::Error::custom("not valid base64"))?);
            }
            bytes.ok_or_else(|| de::Error::missing_field("base64"))
        }
    }
    deserializer.deserialize_any(Either)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn text_stays_text_and_the_rest_is_base64() {
        assert_eq!(serde_json::to_string(&Name::from("a\nb")).unwrap(), r#""a\nb""#);
        assert_eq!(serde_json::to_string(&Name(vec![0xff])).unwrap(), r#"{"base64":"/w=="}"#);
        assert_eq!(serde_json::to_string(&Content(vec![1])).unwrap(), r#"{"base64":"AQ=="}"#);
        assert_eq!(Name(b"a\x1b[0m\xff\n".to_vec()).to_string(), "a\\u{1b}[0m\\xff\\n");
        for bad in [r#"{}"#, r#"{"base64":"!"}"#, r#"{"b":"AQ=="}"#, "3", r#"{"base64":"","base64":""}"#] {
            assert!(serde_json::from_str::<Name>(bad).is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_survive(bytes: Vec<u8>) {
            let json = serde_json::to_string(&Content(bytes.clone())).unwrap();
            prop_assert!(json.len() <= bytes.len() * 2 + 20);
            prop_assert_eq!(serde_json::from_str::<Content>(&json).unwrap().0, bytes);
        }
    }
}
