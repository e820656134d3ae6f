//! Trees as archives, there and back, and archives made to do harm. The `tar` crate gives the second opinion.

use std::{
    fs,
    io::Read,
    os::unix::fs::{MetadataExt, PermissionsExt, symlink},
    process::Command,
};

use carrel_files::{OutsideLinks, TreeLimits, TreeReport, read_tar, write_tar};
use proptest::prelude::*;

use crate::{Desk, SECRET, code, path};

fn pack(desk: &Desk, from: &str) -> (Vec<u8>, TreeReport) {
    let mut archive = Vec::new();
    let report = write_tar(&desk.root, &path(from), &mut archive, &TreeLimits::default()).unwrap();
    (archive, report)
}

fn unpack(desk: &Desk, to: &str, archive: &[u8]) -> Result<TreeReport, carrel_files::FileError> {
    read_tar(&desk.root, &path(to), archive, &TreeLimits::default(), OutsideLinks::Refuse)
}

/// One entry exactly as given, without the politeness of a library.
fn raw(kind: u8, name: &[u8], link: &[u8], data: &[u8]) -> Vec<u8> {
    let mut header = tar::Header::new_gnu();
    let fields = header.as_gnu_mut().unwrap();
    fields.name[..name.len()].copy_from_slice(name);
    fields.linkname[..link.len()].copy_from_slice(link);
    header.set_entry_type(tar::EntryType::new(kind));
    header.set_size(data.len() as u64);
    header.set_mode(0o6755);
    header.set_mtime(1_000_000_000);
    header.set_cksum();
    let mut bytes = [header.as_bytes().as_slice(), data].concat();
    bytes.resize(bytes.len().next_multiple_of(512), 0);
    bytes
}

fn archive(entries: &[Vec<u8>]) -> Vec<u8> {
    [entries.concat(), vec![0; 1024]].concat()
}

#[test]
fn a_tree_survives_the_round_trip() {
    let desk = Desk::new();
    let from = desk.workspace.join("from");
    let long = "n".repeat(200);
    fs::create_dir_all(from.join(&long).join(&long)).unwrap();
    fs::write(from.join(&long).join(&long).join("f"), "deep").unwrap();
    fs::write(from.join("run"), "#!").unwrap();
    fs::set_permissions(from.join("run"), PermissionsExt::from_mode(0o4750)).unwrap();
    fs::write(from.join(<std::ffi::OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(b"\xff\n")), "odd")
        .unwrap();
    symlink(format!("{long}/{long}"), from.join("link")).unwrap();
    symlink("/workspace/from/run", from.join("absolute")).unwrap();
    fs::create_dir(from.join("locked")).unwrap();
    fs::write(from.join("locked/f"), "l").unwrap();
    fs::set_permissions(from.join("locked"), PermissionsExt::from_mode(0o555)).unwrap();
    let (bytes, packed) = pack(&desk, "from");
    assert_eq!((packed.files, packed.dirs, packed.links, packed.left_out_count), (4, 3, 2, 0));
    let unpacked = unpack(&desk, "to", &bytes).unwrap();
    assert_eq!((unpacked.files, unpacked.dirs, unpacked.links), (4, 3, 2));
    let to = desk.workspace.join("to");
    assert_eq!(fs::read(to.join("link/f")).unwrap(), b"deep");
    let meta = fs::metadata(to.join("run")).unwrap();
    assert_eq!(meta.mode() & 0o7777, 0o750);
    assert_eq!(meta.mtime(), fs::metadata(from.join("run")).unwrap().mtime());
    assert_eq!(fs::metadata(to.join("locked")).unwrap().mode() & 0o7777, 0o555);
    // Packing the copy gives the same archive, whose times of directories alone may differ.
    let names = |bytes: &[u8]| {
        let mut archive = tar::Archive::new(bytes);
        let entries = archive.entries().unwrap();
        entries
            .map(|entry| {
                let mut entry = entry.unwrap();
                let mut data = Vec::new();
                entry.read_to_end(&mut data).unwrap();
                (entry.path_bytes().to_vec(), entry.link_name_bytes().map(|l| l.to_vec()), data)
            })
            .collect::<Vec<_>>()
    };
    assert_eq!(names(&bytes), names(&pack(&desk, "to").0));
    assert_eq!(names(&bytes).len(), 9);
    // Again over what is there, and a file alone.
    unpack(&desk, "to", &bytes).unwrap();
    let (bytes, _) = pack(&desk, "from/run");
    assert_eq!(names(&bytes), [(b"run".to_vec(), None, b"#!".to_vec())]);
}

#[test]
fn archives_of_other_tools_are_understood() {
    let desk = Desk::new();
    let source = desk.workspace.join("s");
    fs::create_dir_all(source.join("d")).unwrap();
    fs::write(source.join("d/f"), "data").unwrap();
    fs::hard_link(source.join("d/f"), source.join("d/again")).unwrap();
    let holes = fs::File::create(source.join("holes")).unwrap();
    holes.set_len(10 << 20).unwrap();
    for n in 0..9 {
        std::os::unix::fs::FileExt::write_at(&holes, b"island", n << 20).unwrap();
    }
    for options in
        [&["--format=gnu", "-S"][..], &["--format=pax", "-S"], &["--format=ustar"], &["--format=v7"]]
    {
        let output = Command::new("tar").args(options).args(["-c", "."]).current_dir(&source).output();
        let Ok(output) = output.map_err(|error| println!("skip: no tar here: {error}")) else { return };
        if !output.status.success() {
            println!("skip {options:?}: {}", String::from_utf8_lossy(&output.stderr));
            continue;
        }
        unpack(&desk, "to", &output.stdout).unwrap();
        let to = desk.workspace.join("to");
        assert_eq!(
            fs::read(to.join("holes")).unwrap(),
            fs::read(source.join("holes")).unwrap(),
            "{options:?}"
        );
        assert_eq!(fs::read(to.join("d/f")).unwrap(), b"data");
        let inode = |name: &str| fs::metadata(to.join(name)).unwrap().ino();
        assert_eq!(inode("d/f"), inode("d/again"));
        desk.root.delete(&path("to"), true).unwrap();
    }
}

#[test]
fn hostile_names_and_links_are_refused() {
    let desk = Desk::new();
    symlink("../outside", desk.workspace.join("out")).unwrap();
    let file = |name: &[u8]| raw(b'0', name, b"", b"evil");
    let link = |name: &[u8], target: &[u8]| raw(b'2', name, target, b"");
    for (entries, expected) in [
        (vec![file(b"../outside/canary")], "path_outside"),
        (vec![file(b"/etc/evil")], "path_outside"),
        (vec![file(b"a/../../outside/x")], "path_outside"),
        (vec![file(b"out/canary")], "not_a_directory"),
        (vec![raw(b'5', b"out/new/", b"", b"")], "invalid_path"),
        (vec![link(b"l", b"../outside")], "path_outside"),
        (vec![link(b"l", b"/etc")], "path_outside"),
        (vec![link(b"l", b"/workspace/../outside")], "path_outside"),
        (vec![link(b"a/b/up", b"../.."), link(b"l", b"a/b/up/..")], "path_outside"),
        // Through a link of its own.
        (vec![raw(b'5', b"real/", b"", b""), link(b"l", b"real"), file(b"l/f")], "not_a_directory"),
        (vec![raw(b'1', b"h", b"../outside/canary", b"")], "path_outside"),
        (vec![raw(b'1', b"h", b"out/canary", b"")], "not_a_directory"),
        (vec![raw(b'1', b"h", b"out", b"")], "not_a_regular_file"),
        (vec![raw(b'1', b"h", b"missing", b"")], "not_found"),
        (vec![raw(b'3', b"null", b"", b"")], "not_a_regular_file"),
        (vec![raw(b'4', b"disk", b"", b"")], "not_a_regular_file"),
        (vec![raw(b'6', b"fifo", b"", b"")], "not_a_regular_file"),
        (vec![file(b".")], "invalid_path"),
        (vec![raw(b'Z', b"odd", b"", b"")], "invalid_argument"),
    ] {
        assert_eq!(code(unpack(&desk, ".", &archive(&entries))), expected);
    }
    desk.assert_outside_untouched();
    let left = read_tar(
        &desk.root,
        &path("."),
        &*archive(&[link(b"l2", b"/usr/bin/python3"), file(b"good")]),
        &TreeLimits::default(),
        OutsideLinks::LeaveOut,
    );
    assert_eq!(left.unwrap().left_out_count, 1);
    // A file replaces a link instead of writing through it, and modes lose their upper bits.
    unpack(&desk, ".", &archive(&[file(b"out")])).unwrap();
    let meta = fs::symlink_metadata(desk.workspace.join("out")).unwrap();
    assert!(meta.is_file() && meta.mode() & 0o7777 == 0o755);
    desk.assert_outside_untouched();
    assert!(desk.names().iter().all(|name| !name.contains(".carrel-")));
}

#[test]
fn broken_archives_are_errors_and_cheap() {
    let desk = Desk::new();
    let good = archive(&[raw(b'0', b"f", b"", &[7; 1000])]);
    for cut in [0, 100, 512, 600, 1535, 1536] {
        assert_eq!(code(unpack(&desk, ".", &good[..cut])), "invalid_argument", "{cut}");
    }
    let mut flipped = good.clone();
    flipped[0] ^= 1;
    assert_eq!(code(unpack(&desk, ".", &flipped)), "invalid_argument");
    // Metadata that claims to be huge must not be read into memory.
    for kind in [b'L', b'K', b'x'] {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::new(kind));
        header.set_size(1 << 40);
        header.set_cksum();
        assert_eq!(code(unpack(&desk, ".", header.as_bytes())), "invalid_argument");
    }
    let many = vec![raw(b'L', b"././@LongLink", b"", b"name\0"); 100];
    assert_eq!(code(unpack(&desk, ".", &archive(&many))), "invalid_argument");
    let deep = "d/".repeat(2000);
    let long = [raw(b'L', b"././@LongLink", b"", deep.as_bytes()), raw(b'5', b"x", b"", b"")];
    assert_eq!(code(unpack(&desk, ".", &archive(&long))), "too_large");
    assert!(
        !desk.names().contains(&"f".to_owned()) || fs::read(desk.workspace.join("f")).unwrap() == [7; 1000]
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn damaged_archives_never_touch_the_outside(
        flips in proptest::collection::vec((0_usize..4096, any::<u8>()), 1..6), fix in any::<bool>(),
    ) {
        let desk = Desk::new();
        let mut bytes = archive(&[
            raw(b'5', b"d/", b"", b""),
            raw(b'0', b"d/f", b"", SECRET),
            raw(b'2', b"d/l", b"../d", b""),
            raw(b'1', b"h", b"d/f", b""),
        ]);
        for (at, value) in flips {
            let at = at % bytes.len();
            bytes[at] = value;
        }
        if fix {
            // Past the checksums, so that the fields themselves are met.
            for block in bytes.chunks_mut(512).filter(|block| block[257..262] == *b"ustar") {
                block[148..156].fill(b' ');
                let sum: u32 = block.iter().map(|b| u32::from(*b)).sum();
                block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
            }
        }
        let _ = unpack(&desk, ".", &bytes);
        desk.assert_outside_untouched();
    }
}
