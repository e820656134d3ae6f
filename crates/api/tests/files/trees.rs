//! Trees, there and back, with a second opinion on what is in between.

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    io::{Cursor, Read},
    os::unix::{
        ffi::OsStrExt,
        fs::{MetadataExt, PermissionsExt, symlink},
    },
    path::Path,
};

use crate::world::World;

type Tree = BTreeMap<Vec<u8>, (u32, i64, Vec<u8>)>;

/// Modes, times of files, and contents or targets by path.
fn tree(below: &Path) -> Tree {
    let mut all = Tree::new();
    let mut open = vec![below.to_owned()];
    while let Some(directory) = open.pop() {
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            let meta = path.symlink_metadata().unwrap();
            let (time, contents) = if meta.is_dir() {
                open.push(path.clone());
                (0, Vec::new())
            } else if meta.is_symlink() {
                (0, std::fs::read_link(&path).unwrap().as_os_str().as_bytes().to_vec())
            } else {
                (meta.mtime(), std::fs::read(&path).unwrap())
            };
            let name = path.strip_prefix(below).unwrap().as_os_str().as_bytes().to_vec();
            all.insert(name, (meta.permissions().mode(), time, contents));
        }
    }
    all
}

fn plant(from: &Path) {
    let mode = |path: &Path, mode| std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    std::fs::create_dir_all(from.join("deep/er/empty")).unwrap();
    std::fs::write(from.join("run"), "#!/bin/sh\n").unwrap();
    mode(&from.join("run"), 0o750);
    std::fs::write(from.join("deep/er/big"), vec![b'x'; 300_000]).unwrap();
    std::fs::write(from.join("none"), "").unwrap();
    std::fs::write(from.join("grüße 🦀"), "text").unwrap();
    std::fs::write(from.join(OsStr::from_bytes(b"odd\xff\n")), "odd").unwrap();
    symlink("deep/er", from.join("link")).unwrap();
    symlink("/workspace/from/run", from.join("absolute")).unwrap();
    std::fs::create_dir(from.join("locked")).unwrap();
    std::fs::write(from.join("locked/inner"), "l").unwrap();
    mode(&from.join("locked"), 0o555);
}

#[tokio::test]
async fn trees_survive_the_round_trip() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let from = sandbox.workspace().join("from");
    std::fs::create_dir(&from).unwrap();
    plant(&from);
    let planted = tree(&from);
    for (format, kind) in [("tar", "application/x-tar"), ("zip", "application/zip")] {
        let archive = sandbox.get(&format!("/tree?path=from&format={format}")).await.is(200);
        assert_eq!(archive.header("content-type"), kind);
        let report = sandbox
            .send("PUT", &format!("/tree?path=to/{format}&format={format}"), &[], archive.body.clone())
            .await
            .is(200)
            .json();
        let count = |field: &str| report[field].as_u64().unwrap();
        assert_eq!(
            (count("files"), count("directories"), count("links"), count("left_out_count")),
            (6, 4, 2, 0)
        );
        assert_eq!(tree(&sandbox.workspace().join("to").join(format)), planted, "{format}");
        if format == "zip" {
            let mut read = zip::ZipArchive::new(Cursor::new(archive.body)).unwrap();
            assert_eq!(read.len(), planted.len());
            for at in 0..read.len() {
                let mut entry = read.by_index(at).unwrap();
                let name = entry.name_raw().strip_suffix(b"/").unwrap_or(entry.name_raw()).to_vec();
                let (mode, _, contents) = &planted[&name];
                assert_eq!(entry.unix_mode(), Some(*mode));
                let mut found = Vec::new();
                entry.read_to_end(&mut found).unwrap();
                assert_eq!(found, *contents);
            }
        }
    }
    let one = sandbox.get("/tree?path=from/run").await.is(200);
    let mut archive = tar::Archive::new(Cursor::new(one.body));
    let names: Vec<_> =
        archive.entries().unwrap().map(|entry| entry.unwrap().path().unwrap().into_owned()).collect();
    assert_eq!(names, [Path::new("run")]);
    sandbox.get("/tree?path=nowhere").await.refused(404, "not_found");
}

#[tokio::test]
async fn archives_of_others_are_understood() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let mut writer = zip::ZipWriter::new(Cursor::new(Vec::new()));
    let deflated =
        zip::write::SimpleFileOptions::default().compression_method(zip::CompressionMethod::Deflated);
    let stored = deflated.compression_method(zip::CompressionMethod::Stored).unix_permissions(0o755);
    writer.add_directory("dir", deflated).unwrap();
    writer.start_file("dir/deflated", deflated.large_file(true)).unwrap();
    std::io::Write::write_all(&mut writer, &vec![b'y'; 100_000]).unwrap();
    writer.start_file("stored", stored).unwrap();
    std::io::Write::write_all(&mut writer, b"as it is").unwrap();
    writer.add_symlink("link", "stored", deflated).unwrap();
    writer.set_comment("a word behind it all").unwrap();
    let archive = writer.finish().unwrap().into_inner();
    let report = sandbox.send("PUT", "/tree?format=zip", &[], archive).await.is(200).json();
    assert_eq!(report["bytes"], 100_008);
    assert_eq!(sandbox.get("/content?path=link").await.is(200).body, "as it is");
    assert_eq!(sandbox.get("/content?path=dir/deflated").await.is(200).body, vec![b'y'; 100_000]);
    assert_eq!(sandbox.get("/stat?path=stored").await.json()["mode"], 0o755);
    // Nothing but what was in it: the archive itself was never seen here.
    assert_eq!(sandbox.get("").await.json()["items"].as_array().unwrap().len(), 3);
}

#[tokio::test]
async fn a_tar_that_breaks_off_is_no_tree() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    std::fs::create_dir(sandbox.workspace().join("from")).unwrap();
    plant(&sandbox.workspace().join("from"));
    let archive = sandbox.get("/tree?path=from").await.is(200).body;
    let cut = archive.slice(..archive.len() / 2);
    sandbox.send("PUT", "/tree?path=to", &[], cut).await.refused(400, "invalid_argument");
}
