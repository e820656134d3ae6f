//! What an agent reads from a caller: one frame after the other, each a request or nothing.
#![no_main]

use carrel_proto::{frame::{self, Body, Decoder}, message::Request};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(request) = serde_json::from_slice::<Request>(bytes) {
        // What parses must survive the way back.
        let mut wire = Vec::new();
        frame::put_message(&mut wire, 1, &request).unwrap();
        let mut decoder = Decoder::default();
        let mut left = wire.as_slice();
        while !left.is_empty() {
            let space = decoder.space();
            let count = left.len().min(space.len());
            space[..count].copy_from_slice(&left[..count]);
            decoder.filled(count);
            left = &left[count..];
        }
        let frame = decoder.take().unwrap().unwrap();
        assert!(matches!(frame.body, Body::Message(_)));
        assert_eq!(frame.body.parse::<Request>().unwrap(), request);
    }
});
