//! A hostile archive writes below its root or nowhere.
#![no_main]

use carrel_files::{OutsideLinks, Root, TreeLimits, read_tar};
use carrel_proto::files::GuestPath;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let outer = tempfile::tempdir().unwrap();
    let inner = outer.path().join("root");
    std::fs::create_dir(&inner).unwrap();
    let root = Root::open(&inner).unwrap();
    let limits = TreeLimits { bytes: 1 << 20, entries: 100 };
    let _ = read_tar(&root, &GuestPath::root(), bytes, &limits, OutsideLinks::Refuse);
    assert_eq!(std::fs::read_dir(outer.path()).unwrap().count(), 1);
});
