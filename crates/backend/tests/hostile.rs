//! An agent is untrusted: whatever comes out of its socket costs that one sandbox and nothing else.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails here")]

use std::{
    fs::File,
    io::{IoSlice, Read, Write},
    mem::MaybeUninit,
    net::{TcpListener, TcpStream, UdpSocket},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::{UnixListener, UnixStream},
    },
    path::PathBuf,
    thread::{self, JoinHandle},
};

use carrel_backend::link::{AgentLink, Piece};
use carrel_proto::{
    frame,
    message::{Event, PROTOCOL, Request},
    problem::Code,
};
use rustix::{
    fs::{OFlags, fcntl_getfl, fcntl_setfl},
    net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg},
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// A socket on which `behave` plays the agent for one caller.
fn agent(behave: impl FnOnce(UnixStream) + Send + 'static) -> (tempfile::TempDir, PathBuf, JoinHandle<()>) {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("agent.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let thread = thread::spawn(move || behave(listener.accept().unwrap().0));
    (directory, socket, thread)
}

fn welcome(stream: &mut UnixStream) {
    let mut greeting = [0; 256];
    assert!(stream.read(&mut greeting).unwrap() > 0);
    let mut out = Vec::new();
    frame::put_message(&mut out, 1, &Event::Welcome { protocol: PROTOCOL }).unwrap();
    stream.write_all(&out).unwrap();
}

fn memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").trim().parse::<u64>().unwrap() * 1024
}

#[tokio::test]
async fn garbage_instead_of_a_greeting() {
    for garbage in [
        &b"HTTP/1.1 200 OK\r\n\r\n"[..],
        &[0; 64],
        &[255; 64],
        b"\x05\x00\x00\x00\x09aaaa",
        b"\x06\x00\x00\x00\x00\x01\x00\x00\x00{",
    ] {
        let (_directory, socket, thread) = agent(move |mut stream| {
            let _ = stream.write_all(garbage);
        });
        let problem = AgentLink::connect(&socket).await.unwrap_err();
        assert_eq!(problem.code, Code::AgentLost, "{garbage:?}");
        thread.join().unwrap();
    }
}

#[tokio::test]
async fn a_huge_length_allocates_nothing() {
    let before = memory();
    let (_directory, socket, thread) = agent(|mut stream| {
        welcome(&mut stream);
        let _ = stream.write_all(&u32::MAX.to_le_bytes());
        let _ = stream.write_all(&[7; 1024]);
    });
    let mut link = AgentLink::connect(&socket).await.unwrap();
    assert_eq!(link.ask(&Request::Status).await.unwrap_err().code, Code::AgentLost);
    thread.join().unwrap();
    assert!(memory() - before < 16 << 20);
}

#[tokio::test]
async fn an_agent_that_hangs_up_in_the_middle_of_a_frame() {
    let (_directory, socket, thread) = agent(|mut stream| {
        welcome(&mut stream);
        let _ = stream.write_all(&[200, 0, 0, 0, 1, 2]);
    });
    let mut link = AgentLink::connect(&socket).await.unwrap();
    assert_eq!(link.ask(&Request::Status).await.unwrap_err().code, Code::AgentLost);
    thread.join().unwrap();
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_never_answers() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("agent.sock");
    let _listener = UnixListener::bind(&socket).unwrap();
    let problem = AgentLink::connect(&socket).await.unwrap_err();
    assert_eq!(problem.code, Code::AgentLost);
    assert!(problem.message.contains("does not answer"), "{}", problem.message);
}

#[tokio::test]
async fn answers_to_questions_nobody_asked_are_passed_over() {
    let (_directory, socket, thread) = agent(|mut stream| {
        welcome(&mut stream);
        let mut request = [0; 256];
        let _ = stream.read(&mut request);
        let mut out = Vec::new();
        for tag in [0, 99, u32::MAX] {
            frame::put_message(&mut out, tag, &Event::Done).unwrap();
            frame::put_data(&mut out, tag, frame::Stream::Stdout, 0, 0, &[1; 1000]).unwrap();
        }
        frame::put_message(&mut out, 2, &Event::Done).unwrap();
        let _ = stream.write_all(&out);
    });
    let mut link = AgentLink::connect(&socket).await.unwrap();
    assert_eq!(link.ask(&Request::Shutdown).await.unwrap(), Event::Done);
    thread.join().unwrap();
}

#[tokio::test]
async fn an_endless_answer_is_read_in_constant_memory() {
    const CHUNKS: u64 = 2000;
    let (_directory, socket, thread) = agent(|mut stream| {
        welcome(&mut stream);
        let mut request = [0; 256];
        let _ = stream.read(&mut request);
        let mut out = Vec::new();
        for number in 0..CHUNKS {
            out.clear();
            frame::put_data(&mut out, 2, frame::Stream::Stdout, number, number * 100_000, &[b'x'; 100_000])
                .unwrap();
            stream.write_all(&out).unwrap();
        }
    });
    let mut link = AgentLink::connect(&socket).await.unwrap();
    let before = memory();
    let tag = link.send(&Request::Status).await.unwrap();
    let mut seen = 0;
    while let Ok(Piece::Chunk { bytes, .. }) = link.reader.next(tag).await {
        seen += bytes.len() as u64;
    }
    assert_eq!(seen, CHUNKS * 100_000);
    assert!(memory() - before < 16 << 20);
    thread.join().unwrap();
}

/// Sends bytes with descriptors beside them.
fn send_with(stream: &UnixStream, bytes: &[u8], files: &[OwnedFd]) {
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(files.len()))];
    let mut beside = SendAncillaryBuffer::new(&mut space);
    let files: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
    beside.push(SendAncillaryMessage::ScmRights(&files));
    sendmsg(stream, &[IoSlice::new(bytes)], &mut beside, SendFlags::empty()).unwrap();
}

fn dialed() -> Vec<u8> {
    let mut out = Vec::new();
    frame::put_message(&mut out, 2, &Event::Dialed).unwrap();
    out
}

/// An agent that answers a dial with these descriptors.
fn handing_over(
    files: impl FnOnce() -> Vec<OwnedFd> + Send + 'static,
) -> (tempfile::TempDir, PathBuf, JoinHandle<()>) {
    agent(move |mut stream| {
        welcome(&mut stream);
        assert!(stream.read(&mut [0; 256]).unwrap() > 0);
        match files() {
            files if files.is_empty() => stream.write_all(&dialed()).unwrap(),
            files => send_with(&stream, &dialed(), &files),
        }
    })
}

/// A connection to a server of this process, and the server's end of it.
fn connection() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (near, listener.accept().unwrap().0)
}

#[tokio::test]
async fn a_socket_that_is_handed_over_carries_both_ways() {
    let (near, mut far) = connection();
    let (_directory, socket, thread) = handing_over(|| vec![near.into()]);
    let mut stream = AgentLink::connect(&socket).await.unwrap().dial(80).await.unwrap();
    let echo = thread::spawn(move || {
        let mut all = Vec::new();
        far.read_to_end(&mut all).unwrap();
        far.write_all(&all).unwrap();
    });
    let sent = vec![7; 1 << 20];
    stream.write_all(&sent).await.unwrap();
    stream.shutdown().await.unwrap();
    let mut received = Vec::new();
    stream.read_to_end(&mut received).await.unwrap();
    assert!(received == sent);
    echo.join().unwrap();
    thread.join().unwrap();
}

#[tokio::test]
async fn an_agent_that_makes_the_socket_block_blocks_nobody() {
    let (near, mut far) = connection();
    let copy = near.try_clone().unwrap();
    let (_directory, socket, thread) = handing_over(|| vec![near.into()]);
    let mut stream = AgentLink::connect(&socket).await.unwrap().dial(80).await.unwrap();
    fcntl_setfl(&copy, fcntl_getfl(&copy).unwrap() - OFlags::NONBLOCK).unwrap();
    // With a full buffer nothing says that there is no more to read.
    far.write_all(b"1234").unwrap();
    let mut four = [0; 4];
    stream.read_exact(&mut four).await.unwrap();
    let more = tokio::time::timeout(std::time::Duration::from_millis(50), stream.read(&mut four)).await;
    assert!(more.is_err(), "the runtime's one thread is free to notice the time");
    thread.join().unwrap();
}

#[tokio::test]
async fn what_is_no_connection_is_refused() {
    let tcp = || OwnedFd::from(connection().0);
    let cases: Vec<(&str, Vec<OwnedFd>)> = vec![
        ("nothing", vec![]),
        ("two of them", vec![tcp(), tcp()]),
        ("very many", (0..100).map(|_| tcp()).collect()),
        ("a file", vec![File::open("/proc/self/status").unwrap().into()]),
        ("a unix socket", vec![UnixStream::pair().unwrap().0.into()]),
        ("a datagram socket", vec![UdpSocket::bind("127.0.0.1:0").unwrap().into()]),
        ("a listener", vec![TcpListener::bind("127.0.0.1:0").unwrap().into()]),
        ("a pipe", vec![std::io::pipe().unwrap().0.into()]),
    ];
    for (what, files) in cases {
        let (_directory, socket, thread) = handing_over(|| files);
        let problem = AgentLink::connect(&socket).await.unwrap().dial(80).await.unwrap_err();
        assert_eq!(problem.code, Code::AgentLost, "{what}: {problem:?}");
        thread.join().unwrap();
    }
}

#[tokio::test]
async fn a_socket_that_leads_nowhere_is_a_closed_port() {
    let unconnected = || {
        use rustix::net::{AddressFamily, SocketType, socket};
        vec![socket(AddressFamily::INET, SocketType::STREAM, None).unwrap()]
    };
    let (_directory, socket, thread) = handing_over(unconnected);
    let problem = AgentLink::connect(&socket).await.unwrap().dial(80).await.unwrap_err();
    assert_eq!(problem.code, Code::PortClosed, "{problem:?}");
    thread.join().unwrap();
}

#[tokio::test]
async fn descriptors_that_nobody_asked_for_are_closed() {
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let (_directory, socket, thread) = agent(|mut stream| {
        welcome(&mut stream);
        let _ = stream.read(&mut [0; 256]);
        let mut out = Vec::new();
        frame::put_message(&mut out, 2, &Event::Done).unwrap();
        let pipes: Vec<OwnedFd> = (0..50).map(|_| std::io::pipe().unwrap().0.into()).collect();
        send_with(&stream, &out, &pipes);
    });
    let mut link = AgentLink::connect(&socket).await.unwrap();
    let before = open();
    assert_eq!(link.ask(&Request::Shutdown).await.unwrap(), Event::Done);
    thread.join().unwrap();
    assert!(open() <= before, "{} descriptors are left", open() - before);
}
