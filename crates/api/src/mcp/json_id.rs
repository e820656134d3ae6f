//! Finds the `id` of a JSON-RPC message that is too large to be kept, byte by byte and in constant memory.

use rmcp::model::RequestId;

/// No client's ids are longer.
const MAX_ID: usize = 256;
/// `"id"` with its quotes; longer keys are not it.
const KEY: &[u8] = br#""id""#;

/// Reads a message in pieces; afterwards it knows the id of its outermost object.
#[derive(Debug, Default)]
pub(super) struct TopLevelId {
    depth: usize,
    deepest: usize,
    in_string: bool,
    escaped: bool,
    /// In the outermost object, before the colon.
    at_key: bool,
    key: Vec<u8>,
    is_id: bool,
    value: Vec<u8>,
}

impl TopLevelId {
    pub(super) fn read(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.step(*byte);
        }
    }

    fn step(&mut self, byte: u8) {
        if self.in_string {
            self.keep(byte);
            match byte {
                _ if self.escaped => self.escaped = false,
                b'\\' => self.escaped = true,
                b'"' => self.in_string = false,
                _ => {}
            }
            return;
        }
        match byte {
            b'{' | b'[' => {
                self.depth += 1;
                self.deepest = self.deepest.max(self.depth);
                self.at_key = self.depth == 1 && byte == b'{';
            }
            b'}' | b']' => {
                self.is_id &= self.depth > 1;
                self.depth = self.depth.saturating_sub(1);
            }
            b',' if self.depth == 1 => {
                self.at_key = true;
                self.is_id = false;
                self.key.clear();
            }
            b':' if self.depth == 1 => {
                self.at_key = false;
                self.is_id = self.key == KEY && self.value.is_empty();
            }
            b'"' => {
                self.in_string = true;
                self.keep(byte);
            }
            byte if byte.is_ascii_whitespace() => {}
            _ => self.keep(byte),
        }
    }

    fn keep(&mut self, byte: u8) {
        if self.depth != 1 {
            return;
        }
        if self.at_key && self.key.len() <= KEY.len() {
            self.key.push(byte);
        } else if self.is_id && self.value.len() < MAX_ID {
            self.value.push(byte);
        }
    }

    /// Levels of arrays and objects so far.
    pub(super) fn deepest(&self) -> usize {
        self.deepest
    }

    pub(super) fn found(&self) -> Option<RequestId> {
        serde_json::from_slice(&self.value).ok()
    }
}
