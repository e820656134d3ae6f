//! A path that was accepted is relative and never leads above its root by itself.
#![no_main]

use carrel_proto::files::GuestPath;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(path) = GuestPath::parse(bytes) {
        assert!(!path.as_bytes().starts_with(b"/"));
        assert!(!path.as_bytes().contains(&0));
        let json = serde_json::to_string(&path).unwrap();
        assert_eq!(serde_json::from_str::<GuestPath>(&json).unwrap(), path);
    }
});
