//! What an engine reads from an agent: any bytes, in any pieces.
#![no_main]

use carrel_proto::{frame::{Body, Decoder, Stream}, message::{Display, Event}};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (u8, &[u8])| {
    let (step, mut bytes) = input;
    let mut decoder = Decoder::default();
    while !bytes.is_empty() {
        let space = decoder.space();
        let count = usize::from(step).max(1).min(bytes.len()).min(space.len());
        space[..count].copy_from_slice(&bytes[..count]);
        decoder.filled(count);
        bytes = &bytes[count..];
        loop {
            match decoder.take() {
                Ok(Some(frame)) => match frame.body {
                    Body::Data { stream: Stream::Display, bytes, .. } => {
                        let _ = serde_json::from_slice::<Display>(bytes);
                    }
                    body => {
                        let _ = body.parse::<Event>();
                    }
                },
                Ok(None) => break,
                Err(_) => return,
            }
        }
    }
});
