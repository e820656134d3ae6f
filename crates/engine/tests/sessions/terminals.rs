//! Commands on a terminal: size, keys, and the end of the line.

use carrel_proto::{
    message::{Exec, PtySize},
    outcome::{Cause, SessionState::Preserved},
    problem::Code,
};

use crate::world::{World, an_exec};

fn on_a_terminal(argv: &[&str]) -> Exec {
    Exec { pty: Some(PtySize { rows: 24, cols: 80 }), ..an_exec(argv) }
}

#[tokio::test]
async fn a_terminal_is_one_and_has_a_size() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let script =
        "tty && test -t 0 -a -t 1 -a -t 2 && stty size && echo err >&2 && : > /dev/tty && echo $TERM";
    let ran = sandbox.launch(on_a_terminal(&["bash", "-c", script])).await.end().await.ok();
    let screen = ran.screen();
    assert!(screen.starts_with("/dev/pts/") && screen.contains("24 80\r\nerr\r\n"), "{screen:?}");
    assert!(ran.stdout.is_empty() && ran.stderr.is_empty());
    assert_eq!(ran.outcome.receipt.stdout_bytes, ran.screen.len() as u64);
    assert_eq!(sandbox.exec(&["tty"]).await.kept(1).out(), "not a tty\n");

    // A new size arrives with its signal, before the input that follows it.
    let watch = "
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGWINCH])
print('ready', flush=True)
signal.sigwait([signal.SIGWINCH])
print(os.get_terminal_size(), flush=True)
print(input())
print(os.get_terminal_size())";
    let mut live = sandbox.launch(on_a_terminal(&["python3", "-c", watch])).await;
    live.until("ready").await;
    live.control().resize(40, 100).await.unwrap();
    live.until("columns=100, lines=40").await;
    live.control().input(b"typed\r").await.unwrap();
    let screen = live.end().await.ok().screen();
    assert_eq!(screen.matches("columns=100, lines=40").count(), 2, "{screen:?}");
    assert_eq!(screen.matches("typed").count(), 2, "echoed and printed: {screen:?}");
}

/// Dies of the first interrupt after its word, which a shell that is about to start something may swallow.
const PATIENT: &str =
    "import signal\nsignal.signal(2, signal.SIG_DFL)\nprint(f'ready{1 + 1}', flush=True)\nsignal.pause()";

#[tokio::test]
async fn keys_mean_what_they_mean_on_a_terminal() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let mut live = sandbox.launch(on_a_terminal(&["python3", "-c", PATIENT])).await;
    live.until("ready2").await;
    live.control().input(b"\x03").await.unwrap();
    let ran = live.end().await.died(Cause::Signal, Code::Crashed, Preserved);
    assert_eq!((ran.outcome.signal, ran.outcome.exit_code), (Some(2), 130));

    // An interactive shell (the command says itself that it is there): control-C ends the command in it, control-D the shell.
    let mut live = sandbox.launch(on_a_terminal(&["bash", "--norc", "-i"])).await;
    let line = format!("PS1='p$((2+2))> '; python3 -c \"{}\"\r", PATIENT.replace('\n', ";"));
    live.control().input(line.as_bytes()).await.unwrap();
    live.until("ready2").await;
    live.control().input(b"\x03").await.unwrap();
    live.until("p4> ").await;
    live.control().input(b"echo out$((1+2))\r").await.unwrap();
    live.until("out3").await;
    assert!(!String::from_utf8_lossy(&live.screen).contains("no job control"));
    live.control().input(b"exit 4\r").await.unwrap();
    live.end().await.kept(4);
    let mut live = sandbox.launch(on_a_terminal(&["cat"])).await;
    live.control().input(b"line\r").await.unwrap();
    live.until("line\r\nline\r\n").await;
    live.control().input(b"\x04").await.unwrap();
    live.end().await.ok();
}

#[tokio::test]
async fn what_has_no_terminal_cannot_be_resized() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let mut live = sandbox.launch(Exec { stdin: true, ..an_exec(&["cat"]) }).await;
    live.control().resize(1, 1).await.unwrap();
    live.control().input(b"still here\n").await.unwrap();
    live.until("still here").await;
    live.control().close_input().await.unwrap();
    live.end().await.ok();
}
