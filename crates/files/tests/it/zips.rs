//! Trees as zip archives, and archives that are not what they say. The `zip` crate gives the second opinion.

use std::{
    fs,
    io::{Cursor, Write},
    os::unix::fs::symlink,
};

use carrel_files::{FileError, OutsideLinks, TreeLimits, TreeReport, read_zip, write_zip};
use proptest::prelude::*;

use crate::{Desk, code, path};

fn pack(desk: &Desk, from: &str) -> Vec<u8> {
    let mut archive = Vec::new();
    write_zip(&desk.root, &path(from), &mut archive, &TreeLimits::default()).unwrap();
    archive
}

fn unpack(desk: &Desk, to: &str, archive: &[u8], limits: TreeLimits) -> Result<TreeReport, FileError> {
    let mut scratch = desk.root.scratch().unwrap();
    scratch.write_all(archive).unwrap();
    read_zip(&desk.root, &path(to), scratch.file(), &limits, OutsideLinks::Refuse)
}

fn small(desk: &Desk) -> Vec<u8> {
    fs::create_dir_all(desk.workspace.join("from/dir")).unwrap();
    fs::write(desk.workspace.join("from/dir/a"), "some text that is long enough to be deflated, text, text")
        .unwrap();
    symlink("dir/a", desk.workspace.join("from/link")).unwrap();
    pack(desk, "from")
}

#[test]
fn more_entries_than_the_old_format_counts() {
    const FILES: usize = 65_600;
    let desk = Desk::new();
    fs::create_dir(desk.workspace.join("from")).unwrap();
    for number in 0..FILES {
        fs::File::create(desk.workspace.join(format!("from/{number:05}"))).unwrap();
    }
    let archive = pack(&desk, "from");
    assert_eq!(zip::ZipArchive::new(Cursor::new(&archive)).unwrap().len(), FILES);
    // Its list is found; that it is read to its end needs no tree of this size.
    let limits = TreeLimits { entries: 10, ..TreeLimits::default() };
    assert_eq!(code(unpack(&desk, "to", &archive, limits)), "too_large");
    assert_eq!(fs::read_dir(desk.workspace.join("to")).unwrap().count(), 10);
}

#[test]
fn limits_hold_before_anything_beyond_them_is_written() {
    let desk = Desk::new();
    let archive = small(&desk);
    for limits in [
        TreeLimits { bytes: 10, ..TreeLimits::default() },
        TreeLimits { entries: 2, ..TreeLimits::default() },
    ] {
        assert_eq!(code(unpack(&desk, "to", &archive, limits)), "too_large");
    }
    assert!(!desk.workspace.join("to/dir/a").exists() || !desk.workspace.join("to/link").exists());
    let mut out = Vec::new();
    let packed = write_zip(&desk.root, &path("from"), &mut out, &TreeLimits { entries: 2, bytes: 1 });
    assert_eq!(code(packed), "too_large");
}

proptest! {
    /// Whatever is broken in an archive, it is an error or a tree inside; nothing outside changes and nothing panics.
    #[test]
    fn broken_archives_do_no_harm(changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6)) {
        let desk = Desk::new();
        let mut archive = small(&desk);
        for (at, byte) in changes {
            let at = at.index(archive.len());
            archive[at] = byte;
        }
        let limits = TreeLimits { bytes: 1 << 20, entries: 100 };
        if let Err(error) = unpack(&desk, "to", &archive, limits) {
            prop_assert_ne!(error.code(), "io");
        }
        desk.assert_outside_untouched();
    }
}
