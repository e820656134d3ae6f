//! Snapshots as files: out of one state directory, into another, and through hostile hands.

use std::{fs, io::Read, path::Path};

use carrel_engine::{
    Engine, Note, Quota, Record, State,
    snapshots::{ImportWish, RestoreWish, Snapshot, SnapshotFilter, SnapshotWish},
};
use carrel_proto::problem::{Code, Problem};

use crate::world::{bash, close_all, in_time, key, open, pack, wish};

/// A state directory with a snapshot of a sandbox that knows something.
async fn saved(files_only: bool) -> (tempfile::TempDir, Engine, Record, Snapshot) {
    let state = tempfile::tempdir().unwrap();
    let engine = open(state.path());
    let record = engine.sandbox(&key(), &wish()).await.unwrap().record;
    let setup =
        "A=5; mkdir -p sub; echo kept > sub/file; chmod 750 sub; ln -s /etc/hostname out; ln -s sub/file in";
    bash(&engine, &record, setup).await;
    let wish = SnapshotWish { tags: vec!["good".into()], files_only, ..SnapshotWish::default() };
    let snapshot = in_time("a snapshot", engine.snapshot(&record, &wish)).await.unwrap();
    (state, engine, record, snapshot)
}

fn exported(engine: &Engine, snapshot: &Snapshot) -> Vec<u8> {
    let mut file = Vec::new();
    engine.export_snapshot(snapshot, &mut file).unwrap();
    file
}

fn import(engine: &Engine, file: &[u8]) -> Result<Snapshot, Problem> {
    engine.import_snapshot(file, &ImportWish::default())
}

async fn restored(engine: &Engine, snapshot: &Snapshot) -> carrel_engine::Found {
    in_time("restoring", engine.restore_as(snapshot, &RestoreWish::default())).await.unwrap()
}

const FILES: &str = "echo $(cat sub/file) $(cat in) $(readlink out) $(stat -c %a%U sub) $(stat -c %U .)";

fn nothing_half(state: &Path, whole: usize) {
    let left: Vec<_> =
        fs::read_dir(state.join("snapshots")).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(left.len(), whole, "{left:?}");
}

fn unpacked(file: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    zstd::stream::read::Decoder::new(file).unwrap().read_to_end(&mut bytes).unwrap();
    bytes
}

fn packed(bytes: &[u8]) -> Vec<u8> {
    zstd::stream::encode_all(bytes, 1).unwrap()
}

#[tokio::test]
async fn files_go_to_another_state_directory() {
    let (state, engine, record, snapshot) = saved(true).await;
    let file = exported(&engine, &snapshot);
    let looked = bash(&engine, &record, FILES).await;
    let elsewhere = tempfile::tempdir().unwrap();
    let other = open(elsewhere.path());
    let imported = import(&other, &file).unwrap();
    assert_ne!(imported.id, snapshot.id);
    assert_eq!(
        (&imported.tags, &imported.key, &imported.sandbox),
        (&snapshot.tags, &snapshot.key, &record.id)
    );
    assert_eq!((imported.content.memory, imported.made_unix_ms), (false, snapshot.made_unix_ms));
    assert_eq!(imported.content.reason, snapshot.content.reason);
    let back = restored(&other, &imported).await;
    assert_eq!(back.note, Some(Note::FilesOnly));
    let seen = bash(&other, &back.record, FILES).await;
    assert_eq!(seen, looked);
    // They are the box's own, below its own limit.
    assert_eq!(bash(&other, &back.record, "echo more >> sub/file && tail -1 sub/file").await, "more\n");
    assert_eq!(back.record.spec.limits, record.spec.limits);
    // A link out leads nowhere for who reads from outside.
    let outside = other.files(&back.record).unwrap();
    let path = carrel_proto::files::GuestPath::parse(b"out").unwrap();
    assert!(outside.reader(&path).is_err());
    // The sandbox that it is of is not here, and where it is it becomes what it was.
    let gone = other.restore_in_place(&imported, &RestoreWish::default()).await.unwrap_err();
    assert_eq!(gone.code, Code::SandboxNotFound);
    let again = import(&engine, &file).unwrap();
    bash(&engine, &record, "rm -r sub").await;
    in_time("in place", engine.restore_in_place(&again, &RestoreWish::default())).await.unwrap();
    assert_eq!(bash(&engine, &record, FILES).await, looked);
    close_all(elsewhere.path(), &other).await;
    close_all(state.path(), &engine).await;
}

#[tokio::test]
async fn memory_is_taken_where_it_is_sealed_by_the_same_key() {
    let (state, engine, _, snapshot) = saved(false).await;
    if !snapshot.content.memory {
        println!("skipped: {:?}", snapshot.content.reason);
        return close_all(state.path(), &engine).await;
    }
    pack(&engine).unwrap();
    let file = exported(&engine, &snapshot);
    let again = import(&engine, &file).unwrap();
    assert!(again.content.memory, "{again:?}");
    assert_eq!(
        bash(&engine, &restored(&engine, &again).await.record, "echo $A $(cat sub/file)").await,
        "5 kept\n"
    );

    // Another host, which has a key of its own.
    let elsewhere = tempfile::tempdir().unwrap();
    let other = open(elsewhere.path());
    let foreign = import(&other, &file).unwrap();
    assert!(!foreign.content.memory);
    assert!(foreign.content.reason.as_ref().unwrap().contains("snapshot.key"), "{foreign:?}");
    let store = elsewhere.path().join("snapshots").join(foreign.id.as_str());
    assert!(!store.join("image").exists() && !store.join("spool").exists());
    let back = restored(&other, &foreign).await;
    assert_eq!(back.note, Some(Note::FilesOnly));
    assert_eq!(bash(&other, &back.record, "echo -$A- $(cat sub/file)").await, "-- kept\n");
    // Its operator may trust it all the same, or give both hosts one key.
    let trusting = ImportWish { trust_memory: true, ..ImportWish::default() };
    let trusted = other.import_snapshot(&file[..], &trusting).unwrap();
    assert!(trusted.content.memory);
    assert_eq!(bash(&other, &restored(&other, &trusted).await.record, "echo $A").await, "5\n");
    fs::copy(state.path().join("snapshot.key"), elsewhere.path().join("snapshot.key")).unwrap();
    let sealed = import(&other, &file).unwrap();
    assert!(sealed.content.memory);
    assert_eq!(bash(&other, &restored(&other, &sealed).await.record, "echo $A").await, "5\n");

    // One that says it is sealed, and is not.
    let mut forged = unpacked(&file);
    let at = forged.windows(8).rposition(|bytes| bytes == b"\"seal\":\"").unwrap() + 8;
    forged[at] = if forged[at] == b'0' { b'1' } else { b'0' };
    let refused = import(&other, &packed(&forged)).unwrap();
    assert!(!refused.content.memory);
    let store = elsewhere.path().join("snapshots").join(refused.id.as_str());
    assert!(!store.join("image").exists());
    close_all(elsewhere.path(), &other).await;
    close_all(state.path(), &engine).await;
}

#[tokio::test]
async fn what_is_not_whole_is_refused_and_leaves_nothing() {
    let (state, engine, _, snapshot) = saved(true).await;
    let file = exported(&engine, &snapshot);
    let elsewhere = tempfile::tempdir().unwrap();
    let other = open(elsewhere.path());
    let refused = |file: &[u8], what: &str| {
        let problem = import(&other, file).expect_err(what);
        assert_eq!(problem.code, Code::InvalidArgument, "{what}: {problem:?}");
        assert!(problem.message.contains("snapshot file") && !problem.hint.is_empty(), "{problem:?}");
        nothing_half(elsewhere.path(), 0);
    };
    refused(b"", "nothing");
    refused(b"PK\x03\x04 some other file", "another file");
    refused(&packed(b"something else altogether"), "another stream");
    for part in 1..16 {
        refused(&file[..file.len() * part / 16], &format!("{part}/16 of it"));
    }
    refused(&file[..file.len() - 1], "all but its last byte");
    refused(&[&file[..], b"more"].concat(), "something behind it");
    refused(&[&file[..], &packed(b"more")].concat(), "another stream behind it");
    let whole = unpacked(&file);
    for part in 1..16 {
        let mut changed = whole.clone();
        let at = changed.len() * part / 16;
        changed[at] ^= 0x20;
        let problem = import(&other, &packed(&changed)).unwrap_err();
        assert_ne!(problem.code, Code::Internal, "{problem:?}");
        nothing_half(elsewhere.path(), 0);
    }
    let mut newer = whole.clone();
    newer[16] = 9;
    let problem = import(&other, &packed(&newer)).unwrap_err();
    assert!(problem.message.contains("version 9"), "{problem:?}");
    // A reader that fails half-way.
    let broken = file[..file.len() / 2].chain(Failing);
    assert!(other.import_snapshot(broken, &ImportWish::default()).is_err());
    nothing_half(elsewhere.path(), 0);
    assert!(other.all_snapshots(&SnapshotFilter::default()).unwrap().is_empty());
    close_all(elsewhere.path(), &other).await;
    close_all(state.path(), &engine).await;
}

struct Failing;

impl Read for Failing {
    fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
        Err(std::io::ErrorKind::ConnectionAborted.into())
    }
}

/// A file as anybody could write one: a changed header, and any tar as the workspace.
fn forge(file: &[u8], change: impl FnOnce(&mut serde_json::Value), tar: Option<&[u8]>) -> Vec<u8> {
    use sha2::Digest;
    let whole = unpacked(file);
    let length = usize::try_from(u32::from_le_bytes(whole[21..25].try_into().unwrap())).unwrap();
    let mut header: serde_json::Value = serde_json::from_slice(&whole[25..25 + length]).unwrap();
    change(&mut header);
    let end = whole.windows(5).rposition(|bytes| bytes[0] == b'E' && bytes[3..5] == [0, 0]).unwrap();
    let mut forged = whole[..20].to_vec();
    let mut record = |kind: u8, bytes: &[u8]| {
        forged.push(kind);
        forged.extend_from_slice(&u32::try_from(bytes.len()).unwrap().to_le_bytes());
        forged.extend_from_slice(bytes);
    };
    record(b'H', &serde_json::to_vec(&header).unwrap());
    match tar {
        Some(tar) => {
            tar.chunks(1 << 16).for_each(|piece| record(b'W', piece));
            record(b'W', b"");
        }
        None => forged.extend_from_slice(&whole[25 + length..end]),
    }
    let digest: String = sha2::Sha256::digest(&forged).iter().map(|byte| format!("{byte:02x}")).collect();
    let end = format!("{{\"sha256\":\"{digest}\",\"seal\":\"00\"}}");
    forged.push(b'E');
    forged.extend_from_slice(&u32::try_from(end.len()).unwrap().to_le_bytes());
    forged.extend_from_slice(end.as_bytes());
    packed(&forged)
}

/// A tar of one entry.
fn entry(kind: u8, name: &str, link: &str, size: &str) -> Vec<u8> {
    let mut block = [0; 512];
    block[..name.len()].copy_from_slice(name.as_bytes());
    block[100..107].copy_from_slice(b"0000644");
    block[124..124 + size.len()].copy_from_slice(size.as_bytes());
    block[136..147].copy_from_slice(b"00000000000");
    block[156] = kind;
    block[157..157 + link.len()].copy_from_slice(link.as_bytes());
    block[257..265].copy_from_slice(b"ustar  \0");
    block[148..156].fill(b' ');
    let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    let mut tar = block.to_vec();
    tar.extend_from_slice(&[0; 1024]);
    tar
}

#[tokio::test]
async fn a_hostile_file_gets_nothing_that_its_sender_could_not_have() {
    let (state, engine, record, snapshot) = saved(true).await;
    let file = exported(&engine, &snapshot);
    let elsewhere = tempfile::tempdir().unwrap();
    let other = open(elsewhere.path());
    let refused = |file: &[u8], codes: &[Code], what: &str| {
        let problem = import(&other, file).expect_err(what);
        assert!(codes.contains(&problem.code), "{what}: {problem:?}");
        nothing_half(elsewhere.path(), 0);
    };
    for (kind, name, link) in [
        (b'0', "/etc/carrel-was-here", ""),
        (b'0', "../../escape", ""),
        (b'3', "disk", ""),
        (b'4', "block", ""),
        (b'6', "fifo", ""),
        (b'1', "hard", "../../../../etc/passwd"),
        (b'1', "hard", "/etc/passwd"),
    ] {
        let tar = entry(kind, name, link, "00000000000");
        let codes = [Code::PathOutside, Code::NotARegularFile, Code::InvalidArgument, Code::NotFound];
        refused(&forge(&file, |_| {}, Some(&tar)), &codes, name);
    }
    assert!(!Path::new("/etc/carrel-was-here").exists());
    // Through a link that the file itself brings.
    let mut tar = entry(b'2', "way", "/etc", "00000000000");
    tar.truncate(512);
    tar.extend_from_slice(&entry(b'0', "way/carrel-was-here", "", "00000000000"));
    refused(&forge(&file, |_| {}, Some(&tar)), &[Code::NotADirectory, Code::PathOutside], "a way out");
    assert!(!Path::new("/etc/carrel-was-here").exists());
    // More than its disk holds, promised and not sent.
    let tar = entry(b'0', "big", "", "77777777777");
    refused(&forge(&file, |_| {}, Some(&tar)), &[Code::TooLarge, Code::InvalidArgument], "too large");
    let limit = |header: &mut serde_json::Value| header["spec"]["limits"]["disk"] = (1_u64 << 60).into();
    refused(&forge(&file, limit, None), &[Code::InvalidArgument], "limits without end");
    // What it asks for beyond files is not given.
    let greedy = forge(
        &file,
        |header| {
            header["spec"]["isolation"] = "weak".into();
            header["spec"]["project"] = serde_json::json!({"directory": "/etc", "writable": true});
            header["spec"]["ephemeral"] = serde_json::json!({"pid": 1, "start_time": 1});
            header["key"] = "user:tok_other:work".into();
            header["made_unix_ms"] = u64::MAX.into();
        },
        None,
    );
    let token = carrel_engine::Tenant::token(&format!("tok_{}", "m".repeat(16)).parse().unwrap());
    let wish = ImportWish { tenant: token, ..ImportWish::default() };
    let imported = other.import_snapshot(&greedy[..], &wish).unwrap();
    let spec = &imported.content.spec;
    assert_eq!((spec.isolation, spec.project.as_ref(), spec.ephemeral), (Default::default(), None, None));
    assert_eq!(imported.key, None);
    assert!(imported.made_unix_ms < u64::MAX);
    // Another's sandbox is not touched by an import that names it.
    let named = engine.import_snapshot(&file[..], &wish).unwrap();
    assert_eq!(named.sandbox, record.id);
    let untouched = engine.record(&record.id).unwrap().unwrap();
    assert_eq!((untouched.origin, untouched.state), (Some(snapshot.id.clone()), State::Running));
    let refused = engine.restore_in_place(&named, &RestoreWish::default()).await.unwrap_err();
    assert_eq!(refused.code, Code::SandboxNotFound);
    // Nor is anything taken that the caller's quota could never hold.
    let quota: Quota = "memory=16MB".parse().unwrap();
    let small = ImportWish { quota: Some(quota), ..ImportWish::default() };
    assert_eq!(other.import_snapshot(&file[..], &small).unwrap_err().code, Code::Quota);
    close_all(elsewhere.path(), &other).await;
    close_all(state.path(), &engine).await;
}

/// Imports what comes on its standard input, if it is told where to.
#[tokio::test]
async fn helper_that_imports() {
    let Ok(state) = std::env::var("CARREL_TEST_IMPORT_TO") else { return };
    let engine = open(Path::new(&state));
    let _ = engine.import_snapshot(std::io::stdin().lock(), &ImportWish::default());
}

#[tokio::test]
async fn whoever_is_killed_while_importing_leaves_nothing() {
    use std::io::Write;
    let (state, engine, record, _) = saved(true).await;
    // More than decompression keeps to itself.
    bash(&engine, &record, "head -c 4000000 /dev/urandom > big").await;
    let files = SnapshotWish { files_only: true, ..SnapshotWish::default() };
    let snapshot = in_time("a snapshot", engine.snapshot(&record, &files)).await.unwrap();
    let file = exported(&engine, &snapshot);
    let elsewhere = tempfile::tempdir().unwrap();
    let other = open(elsewhere.path());
    let mut child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "exports::helper_that_imports", "--nocapture"])
        .env("CARREL_TEST_IMPORT_TO", elsewhere.path())
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    // The pipe holds less than this: what is written has been read, but for its last part.
    child.stdin.as_mut().unwrap().write_all(&file[..file.len() / 2]).unwrap();
    other.sweep().unwrap();
    nothing_half(elsewhere.path(), 1);
    child.kill().unwrap();
    child.wait().unwrap();
    other.sweep().unwrap();
    nothing_half(elsewhere.path(), 0);
    assert!(import(&other, &file).is_ok());
    close_all(elsewhere.path(), &other).await;
    close_all(state.path(), &engine).await;
}
