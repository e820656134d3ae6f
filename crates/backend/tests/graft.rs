//! Images and grafts by themselves: the agent's own program becomes what an image says, or ends without having become anything.

#![cfg(target_arch = "x86_64")]
#![expect(clippy::unwrap_used, reason = "clippy's leave for tests ends at their helpers")]

use std::{
    fs::File,
    io::{Read, Seek, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::process::CommandExt,
    },
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

use carrel_backend::guest_programs;
use carrel_jail::image::{self, Image};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_get_seals, memfd_create};

/// What a graft ends with that has found something else than the image says.
const FAILED: i32 = 96;
const DEADLINE: Duration = Duration::from_secs(60);

struct Parent(Child);

impl Drop for Parent {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A python that has come to its sleep.
fn parent(code: &str) -> Parent {
    let mut command = Command::new("python3");
    command.args(["-I", "-S", "-c", code]).stdin(Stdio::null());
    let parent = Parent(command.spawn().unwrap());
    let pid = i32::try_from(parent.0.id()).unwrap();
    let begun = Instant::now();
    while !image::sleeps(pid) {
        assert!(begun.elapsed() < DEADLINE, "it does not sleep");
        std::thread::yield_now();
    }
    parent
}

fn take(code: &str) -> std::io::Result<Image> {
    let parent = parent(code);
    image::take(i32::try_from(parent.0.id()).unwrap())
}

/// Makes a copy of what is in `image`, as a runner does.
fn graft(image: &OwnedFd) -> Output {
    let state = tempfile::tempdir().unwrap();
    let program = guest_programs::agent(state.path()).unwrap();
    // By way of a shell, which puts the descriptor where a graft looks for it.
    let path = format!("/proc/{}/fd/{}", std::process::id(), std::os::fd::AsRawFd::as_raw_fd(image));
    let script = r#"exec 6<"$1"; exec -a carrel "$2" graft"#;
    let mut command = Command::new("bash");
    command.arg0("bash").args(["-c", script, "bash", &path]).arg(&program).stdin(Stdio::null());
    command.output().unwrap()
}

fn bytes(image: &Image) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut file = File::from(image.file().try_clone().unwrap());
    file.rewind().unwrap();
    file.read_to_end(&mut bytes).unwrap();
    bytes
}

fn as_file(bytes: &[u8]) -> OwnedFd {
    let mut file = File::from(memfd_create("damaged", MemfdFlags::CLOEXEC).unwrap());
    file.write_all(bytes).unwrap();
    file.into()
}

#[test]
fn a_copy_goes_on_where_its_parent_slept() {
    let image = take("import time, os; x = [1, 2, 3]\ntime.sleep(600)\nprint(sum(x), os.getpid() == int(os.readlink('/proc/self')))").unwrap();
    assert!(image.bytes > 1 << 20 && image.files.iter().any(|file| file.contains("libc")), "{image:?}");
    for _ in 0..3 {
        let copy = graft(image.file());
        assert_eq!(
            (copy.status.code(), copy.stdout.as_slice()),
            (Some(0), b"6 True\n".as_slice()),
            "{copy:?}"
        );
    }
}

#[test]
fn an_image_cannot_be_changed() {
    let image = take("import time; time.sleep(600)").unwrap();
    let seals = fcntl_get_seals(image.file()).unwrap();
    assert!(seals.contains(SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL));
    let mut file = File::from(image.file().as_fd().try_clone_to_owned().unwrap());
    assert!(file.write_all(b"x").is_err());
    let again = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(image.file()));
    assert!(File::options().write(true).open(&again).and_then(|mut file| file.write_all(b"x")).is_err());
}

#[test]
fn what_is_for_one_process_alone_is_not_copied() {
    // As the C library keeps random numbers that it has not given out yet.
    let code = "import mmap, time\nm = mmap.mmap(-1, 8192, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\n\
        m.madvise(18)\nm[:6] = b'secret'\nn = mmap.mmap(-1, 8192, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\nn[:6] = b'common'\n\
        time.sleep(600)\nprint(m[:6], n[:6]); m[:3] = b'own'; print(m[:3])";
    let copy = graft(take(code).unwrap().file());
    let said = String::from_utf8(copy.stdout).unwrap();
    assert_eq!(said, "b'\\x00\\x00\\x00\\x00\\x00\\x00' b'common'\nb'own'\n");
}

#[test]
fn what_an_image_could_not_say_is_refused() {
    let refusals = [
        (
            "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\ntime.sleep(600)",
            "threads",
        ),
        ("import signal, time\nsignal.signal(signal.SIGUSR1, print)\ntime.sleep(600)", "signals"),
        (
            "import signal, time\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\ntime.sleep(600)",
            "blocks signals",
        ),
        ("import mmap, time\nm = mmap.mmap(-1, 8192)\nm[0] = 1\ntime.sleep(600)", "shares memory"),
    ];
    for (code, why) in refusals {
        let error = take(code).unwrap_err().to_string();
        assert!(error.contains(why), "{why}: {error}");
    }
    // A process that does something else at the moment.
    let busy = Parent(Command::new("cat").stdin(Stdio::piped()).spawn().unwrap());
    let error = image::take(i32::try_from(busy.0.id()).unwrap()).unwrap_err().to_string();
    assert!(error.contains("sleep"), "{error}");
}

/// Whatever is in an image, a graft either becomes the copy or ends; nothing is said by anything half made.
#[test]
fn a_damaged_image_becomes_nothing() {
    let image = take("import time\ntime.sleep(600)\nprint('alive')").unwrap();
    let whole = bytes(&image);
    assert_eq!(graft(&as_file(&whole)).stdout, b"alive\n");
    let word = |at: usize, value: u64| {
        let mut bytes = whole.clone();
        bytes[8 * at..8 * at + 8].copy_from_slice(&value.to_ne_bytes());
        bytes
    };
    // The beginning, the length of the tables, the numbers of segments and files.
    let known =
        [(0, 0), (1, 0), (1, 4097), (1, u64::MAX), (2, u64::MAX), (2, 1 << 40), (3, u64::MAX), (3, 0)];
    for (at, value) in known {
        let copy = graft(&as_file(&word(at, value)));
        assert_eq!((copy.status.code(), copy.stdout.len()), (Some(FAILED), 0), "{at} {value}: {copy:?}");
    }
    for length in [0, 7, 4096, whole.len() / 2] {
        let copy = graft(&as_file(&whole[..length]));
        assert!(!copy.status.success() && copy.stdout.is_empty(), "{length}: {copy:?}");
    }
    // The first segment: where it begins, of what kind it is, which file.
    let header = usize::try_from(carrel_graft::format::HEADER_BYTES).unwrap() / 8;
    for (at, value) in [(0, 1), (1, 0), (2, 99), (5, 1 << 20)] {
        let copy = graft(&as_file(&word(header + at, value)));
        assert_eq!((copy.status.code(), copy.stdout.len()), (Some(FAILED), 0), "{at} {value}: {copy:?}");
    }
}
