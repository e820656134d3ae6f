//! What is kept of a stream for a caller: all of it, or its head and tail with an exact count of what is between.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde::{Serialize, Serializer, ser::SerializeMap};
use utoipa::openapi::{ObjectBuilder, OneOfBuilder, RefOr, Schema, schema::Type};

/// The beginning and the end of a stream.
///
/// `head` begins where the transcript began, `tail` ends at `end`, both without holes: after a hole (an offset that
/// jumps: the sandbox did not keep what is between) nothing is added to `head`, and `tail` begins anew.
#[derive(Debug)]
pub struct Kept {
    half: usize,
    head: Vec<u8>,
    tail: Vec<u8>,
    /// Offset of the first byte, once there is one.
    begin: Option<u64>,
    end: u64,
    whole: bool,
}

impl Kept {
    /// Of at most this many bytes, half of them from the beginning.
    pub fn new(most: u64) -> Self {
        let half = usize::try_from(most / 2).unwrap_or(usize::MAX);
        Self { half, head: Vec::new(), tail: Vec::new(), begin: None, end: 0, whole: true }
    }

    pub fn add(&mut self, offset: u64, mut bytes: &[u8]) {
        let begin = *self.begin.get_or_insert(offset);
        if offset != self.end && offset != begin {
            self.whole = false;
            self.tail.clear();
        }
        self.end = offset + bytes.len() as u64;
        if self.whole {
            let room = (self.half - self.head.len()).min(bytes.len());
            self.head.extend_from_slice(&bytes[..room]);
            bytes = &bytes[room..];
            self.whole = bytes.is_empty();
        }
        self.tail.extend_from_slice(bytes);
        // Cut rarely: moving the rest down costs as much as it saves.
        if self.tail.len() > self.half.saturating_mul(2).max(self.half + 4096) {
            self.tail.drain(..self.tail.len() - self.half);
        }
    }

    /// Bytes that came and are not kept, and so none of the end before them.
    pub fn skip(&mut self, offset: u64, count: usize) {
        self.begin.get_or_insert(offset);
        self.whole = false;
        self.tail = Vec::new();
        self.end = offset + count as u64;
    }

    /// In memory.
    pub fn held(&self) -> usize {
        self.head.len() + self.tail.len()
    }

    /// All bytes of the stream so far, also those not kept.
    pub fn total(&self) -> u64 {
        self.end - self.begin.unwrap_or(0)
    }

    fn tail(&self) -> &[u8] {
        &self.tail[self.tail.len().saturating_sub(self.half)..]
    }

    /// Beginning, end, and how many bytes are missing between them.
    pub fn parts(&self) -> (&[u8], &[u8], u64) {
        let tail = self.tail();
        let omitted = self.total() - (self.head.len() + tail.len()) as u64;
        if omitted == 0 {
            return (&self.head, tail, 0);
        }
        let (head, tail) = (whole_start(&self.head), whole_end(tail));
        (head, tail, self.total() - (head.len() + tail.len()) as u64)
    }
}

impl Serialize for Kept {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (head, tail, omitted) = self.parts();
        if omitted == 0 {
            return Bytes(&[head, tail].concat()).serialize(serializer);
        }
        let mut map = serializer.serialize_map(Some(3))?;
        map.serialize_entry("head", &Bytes(head))?;
        map.serialize_entry("tail", &Bytes(tail))?;
        map.serialize_entry("omitted_bytes", &omitted)?;
        map.end()
    }
}

impl utoipa::PartialSchema for Kept {
    fn schema() -> RefOr<Schema> {
        let part = || <carrel_proto::files::Content as utoipa::PartialSchema>::schema();
        let cut = ObjectBuilder::new()
            .property("head", part())
            .property("tail", part())
            .property("omitted_bytes", ObjectBuilder::new().schema_type(Type::Integer))
            .required("head")
            .required("tail")
            .required("omitted_bytes");
        OneOfBuilder::new().item(part()).item(cut).into()
    }
}

impl utoipa::ToSchema for Kept {}

/// Text as a string, anything else as `{"base64": …}`.
#[derive(Debug)]
pub struct Bytes<'a>(pub &'a [u8]);

impl Serialize for Bytes<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if let Ok(text) = std::str::from_utf8(self.0) {
            return serializer.serialize_str(text);
        }
        let mut map = serializer.serialize_map(Some(1))?;
        map.serialize_entry("base64", &STANDARD.encode(self.0))?;
        map.end()
    }
}

/// Without the character that the cut went through.
fn whole_start(bytes: &[u8]) -> &[u8] {
    match std::str::from_utf8(bytes) {
        Err(error) if error.error_len().is_none() => &bytes[..error.valid_up_to()],
        _ => bytes,
    }
}

fn whole_end(bytes: &[u8]) -> &[u8] {
    let rest = bytes.iter().take(3).take_while(|byte| **byte & 0xc0 == 0x80).count();
    if std::str::from_utf8(&bytes[rest..]).is_ok() { &bytes[rest..] } else { bytes }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn json(most: u64, chunks: &[(u64, &[u8])]) -> String {
        let mut kept = Kept::new(most);
        for (offset, bytes) in chunks {
            kept.add(*offset, bytes);
        }
        serde_json::to_string(&kept).unwrap()
    }

    #[test]
    fn what_fits_is_whole() {
        assert_eq!(json(10, &[]), r#""""#);
        assert_eq!(json(10, &[(0, b"hello"), (5, b"world")]), r#""helloworld""#);
        assert_eq!(json(10, &[(0, b"\xff")]), r#"{"base64":"/w=="}"#);
        // From the middle on, as `logs --since` gives it.
        assert_eq!(json(10, &[(70, b"hello"), (75, b"world")]), r#""helloworld""#);
    }

    #[test]
    fn the_gap_is_counted_exactly() {
        assert_eq!(json(4, &[(0, b"0123456789")]), r#"{"head":"01","tail":"89","omitted_bytes":6}"#);
        let mut kept = Kept::new(1000);
        for n in 0..10_000u64 {
            kept.add(n * 10, b"0123456789");
        }
        let value = serde_json::to_value(&kept).unwrap();
        assert_eq!(value["omitted_bytes"], 99_000);
        assert_eq!(value["tail"].as_str().unwrap().len(), 500);
        assert!(kept.tail.len() < 10_000);
    }

    #[test]
    fn holes_count_too_and_are_never_bridged() {
        assert_eq!(json(100, &[(0, b"ab"), (50, b"cd")]), r#"{"head":"ab","tail":"cd","omitted_bytes":48}"#);
        assert_eq!(
            json(100, &[(0, b"a"), (9, b"b"), (20, b"c")]),
            r#"{"head":"a","tail":"c","omitted_bytes":19}"#
        );
    }

    #[test]
    fn what_there_is_no_room_for_is_a_hole() {
        let mut kept = Kept::new(100);
        kept.add(0, b"ab");
        kept.skip(2, 5);
        kept.add(7, b"cd");
        assert_eq!(kept.held(), 4);
        assert_eq!(serde_json::to_string(&kept).unwrap(), r#"{"head":"ab","tail":"cd","omitted_bytes":5}"#);
        kept.skip(9, 1);
        assert_eq!(serde_json::to_string(&kept).unwrap(), r#"{"head":"ab","tail":"","omitted_bytes":8}"#);
        let mut none = Kept::new(100);
        none.skip(0, 3);
        assert_eq!(serde_json::to_string(&none).unwrap(), r#"{"head":"","tail":"","omitted_bytes":3}"#);
    }

    #[test]
    fn characters_are_not_cut_in_two() {
        // é is two bytes; the cut would go through it on both sides.
        let text = "aéééééa".as_bytes();
        assert_eq!(json(6, &[(0, text)]), r#"{"head":"aé","tail":"éa","omitted_bytes":6}"#);
        assert_eq!(json(4, &[(0, text)]), r#"{"head":"a","tail":"a","omitted_bytes":10}"#);
    }
}
