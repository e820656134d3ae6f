//! Paths, links and archives made to lead out.

use std::os::unix::fs::symlink;

use carrel_proto::limits::ByteSize;
use serde_json::json;

use crate::world::{Sandbox, World};

const SECRET: &str = "the canary sings outside";

fn tar_of(entries: &[(u8, &str, &str, &[u8])]) -> Vec<u8> {
    let mut out = Vec::new();
    for (kind, name, link, data) in entries {
        let mut header = tar::Header::new_gnu();
        let fields = header.as_gnu_mut().unwrap();
        fields.name[..name.len()].copy_from_slice(name.as_bytes());
        fields.linkname[..link.len()].copy_from_slice(link.as_bytes());
        header.set_entry_type(tar::EntryType::new(*kind));
        header.set_size(data.len() as u64);
        header.set_mode(0o6755);
        header.set_mtime(1_000_000_000);
        header.set_cksum();
        out.extend_from_slice(header.as_bytes());
        out.extend_from_slice(data);
        out.resize(out.len().next_multiple_of(512), 0);
    }
    out.resize(out.len() + 1024, 0);
    out
}

/// A stored entry exactly as given: name, attributes, contents, and the size that is claimed.
fn zip_of(entries: &[(&str, u32, &[u8], u32)]) -> Vec<u8> {
    let (mut out, mut list) = (Vec::new(), Vec::new());
    for (name, mode, data, claimed) in entries {
        let mut crc = 0xffff_ffff_u32;
        for byte in *data {
            crc ^= u32::from(*byte);
            for _ in 0..8 {
                crc = crc >> 1 ^ if crc & 1 == 1 { 0xedb8_8320 } else { 0 };
            }
        }
        let mut common = Vec::new();
        for field in [20_u16, 0, 0, 0, 33] {
            common.extend_from_slice(&field.to_le_bytes());
        }
        for field in [!crc, u32::try_from(data.len()).unwrap(), *claimed] {
            common.extend_from_slice(&field.to_le_bytes());
        }
        common.extend_from_slice(&u16::try_from(name.len()).unwrap().to_le_bytes());
        common.extend_from_slice(&[0, 0]);
        let at = u32::try_from(out.len()).unwrap();
        out.extend_from_slice(b"PK\x03\x04");
        out.extend_from_slice(&common);
        out.extend_from_slice(name.as_bytes());
        out.extend_from_slice(data);
        list.extend_from_slice(b"PK\x01\x02\x14\x03");
        list.extend_from_slice(&common);
        list.extend_from_slice(&[0; 6]);
        list.extend_from_slice(&(mode << 16).to_le_bytes());
        list.extend_from_slice(&at.to_le_bytes());
        list.extend_from_slice(name.as_bytes());
    }
    let (at, size) = (u32::try_from(out.len()).unwrap(), u32::try_from(list.len()).unwrap());
    out.extend_from_slice(&list);
    out.extend_from_slice(b"PK\x05\x06\0\0\0\0");
    for _ in 0..2 {
        out.extend_from_slice(&u16::try_from(entries.len()).unwrap().to_le_bytes());
    }
    out.extend_from_slice(&size.to_le_bytes());
    out.extend_from_slice(&at.to_le_bytes());
    out.extend_from_slice(&[0, 0]);
    out
}

/// A sandbox with links to a directory beside its workspace that holds a secret.
async fn tempted(world: &World) -> (Sandbox<'_>, std::path::PathBuf) {
    let sandbox = world.sandbox().await;
    let outside = world.state.path().join("outside");
    std::fs::create_dir(&outside).unwrap();
    std::fs::write(outside.join("canary"), SECRET).unwrap();
    symlink(&outside, sandbox.workspace().join("out")).unwrap();
    symlink("../../../outside/canary", sandbox.workspace().join("up")).unwrap();
    symlink("/etc/passwd", sandbox.workspace().join("passwd")).unwrap();
    (sandbox, outside)
}

fn untouched(outside: &std::path::Path) {
    let names: Vec<_> = std::fs::read_dir(outside).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["canary"]);
    assert_eq!(std::fs::read_to_string(outside.join("canary")).unwrap(), SECRET);
}

#[tokio::test]
async fn no_path_and_no_link_leads_out() {
    let world = World::new();
    let (sandbox, outside) = tempted(&world).await;
    for path in [
        "../outside/canary",
        "/etc/passwd",
        "/workspace/../../etc/passwd",
        "out/canary",
        "up",
        "passwd",
        "%2e%2e/x",
    ] {
        for call in ["/content", "/tree"] {
            sandbox.get(&format!("{call}?path={path}")).await.refused(400, "path_outside");
        }
        sandbox.get(&format!("/stat?path={path}&follow=true")).await.refused(400, "path_outside");
        if !["up", "passwd"].contains(&path) {
            sandbox.send("DELETE", &format!("?path={path}"), &[], "").await.refused(400, "path_outside");
        }
        sandbox.put(path, "gone").await.refused(400, "path_outside");
        sandbox
            .send("PUT", &format!("/content?path={path}&append=true"), &[], "gone")
            .await
            .refused(400, "path_outside");
    }
    sandbox.get("?path=out").await.refused(400, "path_outside");
    sandbox.get("/watch?path=out").await.refused(400, "path_outside");
    sandbox.post("/move", json!({"from": "up", "to": "out/x"})).await.refused(400, "path_outside");
    sandbox.post("/mkdir", json!({"path": "out/x/y", "parents": true})).await.refused(400, "path_outside");
    // A link that is deleted is the link, never what it leads to.
    sandbox.send("DELETE", "?path=out&recursive=true", &[], "").await.is(200);
    untouched(&outside);
}

#[tokio::test]
async fn archives_that_reach_out_or_lie_are_refused() {
    let world = World::new();
    let (sandbox, outside) = tempted(&world).await;
    let put = async |format: &str, body: Vec<u8>| {
        sandbox.send("PUT", &format!("/tree?path=in&format={format}"), &[], body).await
    };
    for name in ["../x", "/abs", "a/../../x"] {
        put("tar", tar_of(&[(b'0', name, "", b"x")])).await.refused(400, "path_outside");
        put("zip", zip_of(&[(name, 0o100_644, b"x", 1)])).await.refused(400, "path_outside");
    }
    for (kind, mode) in [(b'3', 0o020_644), (b'4', 0o060_644), (b'6', 0o010_644)] {
        put("tar", tar_of(&[(kind, "dev", "", b"")])).await.refused(409, "not_a_regular_file");
        put("zip", zip_of(&[("dev", mode, b"", 0)])).await.refused(409, "not_a_regular_file");
    }
    // A link that leads out is left out, and said to be.
    let tar =
        put("tar", tar_of(&[(b'2', "l", "../../outside", b""), (b'0', "f", "", b"x")])).await.is(200).json();
    let zip = put("zip", zip_of(&[("l", 0o120_777, b"../../outside", 13), ("f", 0o100_644, b"x", 1)]))
        .await
        .is(200)
        .json();
    for report in [&tar, &zip] {
        assert_eq!(report["left_out"], json!([{"path": "l", "why": "a link that leads out"}]));
        assert_eq!(
            (&report["files"], &report["links"], &report["left_out_count"]),
            (&json!(1), &json!(0), &json!(1))
        );
    }
    // And one that is there already is not walked through.
    symlink(&outside, sandbox.workspace().join("in/there")).unwrap();
    put("tar", tar_of(&[(b'0', "there/x", "", b"x")])).await.refused(409, "not_a_directory");
    put("zip", zip_of(&[("there/x", 0o100_644, b"x", 1)])).await.refused(409, "not_a_directory");
    // Sizes that are not true, sums that are wrong, archives that are cut off or none.
    put("zip", zip_of(&[("f", 0o100_644, b"xyz", 2)])).await.refused(400, "invalid_argument");
    put("zip", zip_of(&[("f", 0o100_644, b"xyz", 4)])).await.refused(400, "invalid_argument");
    put("zip", zip_of(&[("f", 0o100_644, b"xyz", 4_000_000_000)])).await.refused(413, "too_large");
    let mut wrong = zip_of(&[("f", 0o100_644, b"xyz", 3)]);
    wrong[31] ^= 1;
    put("zip", wrong).await.refused(400, "invalid_argument");
    let whole = zip_of(&[("f", 0o100_644, b"xyz", 3)]);
    for cut in 0..whole.len() {
        put("zip", whole[..cut].to_vec()).await.refused(400, "invalid_argument");
    }
    put("tar", b"no archive".to_vec()).await.refused(400, "invalid_argument");
    put("rar", Vec::new()).await.refused(400, "invalid_argument");
    assert_eq!(sandbox.get("/content?path=in/f").await.is(200).body, "x");
    untouched(&outside);
    let names: Vec<_> = std::fs::read_dir(world.state.path().join("sandboxes")).unwrap().collect();
    assert_eq!(names.len(), 1, "something was made beside the sandbox");
}

#[tokio::test]
async fn a_bomb_is_stopped_by_what_it_would_be() {
    const DISK: u64 = 8 << 20;
    let world = World::new();
    let sandbox = world.sandbox_of(ByteSize(DISK)).await;
    // Entries that tell the truth, each as large as the disk: zeros take no room on it, and are counted all the same.
    let mut writer = zip::ZipWriter::new(std::io::Cursor::new(Vec::new()));
    let options =
        zip::write::SimpleFileOptions::default().compression_method(zip::CompressionMethod::Deflated);
    let zeros = vec![0; usize::try_from(DISK).unwrap()];
    for number in 0..6 {
        writer.start_file(format!("zeros{number}"), options).unwrap();
        std::io::Write::write_all(&mut writer, &zeros).unwrap();
    }
    let bomb = writer.finish().unwrap().into_inner();
    assert!(bomb.len() < 1 << 20);
    sandbox.send("PUT", "/tree?path=bomb&format=zip", &[], bomb).await.refused(413, "too_large");
    sandbox.get("/stat?path=bomb/zeros5").await.refused(404, "not_found");
}
