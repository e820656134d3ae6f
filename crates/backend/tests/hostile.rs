//! An agent is untrusted: whatever comes out of its socket costs that one sandbox and nothing else.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails here")]

use std::{
    io::{Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::PathBuf,
    thread::{self, JoinHandle},
};

use carrel_backend::link::{AgentLink, Piece};
use carrel_proto::{
    frame,
    message::{Event, PROTOCOL, Request},
    problem::Code,
};

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
