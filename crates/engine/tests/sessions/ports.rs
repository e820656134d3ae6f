//! Ports: what listens in a sandbox, and connections into it.

use carrel_backend::{IsolationLevel, port::PortStream};
use carrel_engine::Wish;
use carrel_proto::{message::PortInfo, problem::Code};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::world::{Live, Sandbox, World, an_exec, in_time};

/// Listens where it is told, says on which port, and sends back what it gets, line by line.
const ECHO: &str = "
import socket, sys, threading
family = socket.AF_INET6 if ':' in sys.argv[1] else socket.AF_INET
server = socket.socket(family)
server.bind((sys.argv[1], 0))
server.listen(64)
print(f'port={server.getsockname()[1]};', flush=True)
def serve(one):
    with one, one.makefile('rb') as lines:
        for line in lines:
            one.sendall(line)
while True:
    threading.Thread(target=serve, args=[server.accept()[0]], daemon=True).start()";

async fn echo(sandbox: &Sandbox, address: &str) -> (Live, u16) {
    let mut live = sandbox.launch(an_exec(&["python3", "-c", ECHO, address])).await;
    live.until(";").await;
    let said = String::from_utf8_lossy(&live.stdout).into_owned();
    let port = said.trim().trim_start_matches("port=").trim_end_matches(';').parse().unwrap();
    (live, port)
}

async fn line(stream: &mut PortStream, text: &str) -> String {
    stream.write_all(text.as_bytes()).await.unwrap();
    let mut all = vec![0; text.len()];
    in_time("an echo", stream.read_exact(&mut all)).await.unwrap();
    String::from_utf8(all).unwrap()
}

#[tokio::test]
async fn a_server_is_listed_and_reached() {
    let world = World::new();
    let (sandbox, other) = (world.sandbox().await, world.sandbox().await);
    assert_eq!(sandbox.engine.ports(&sandbox.record).await.unwrap(), []);
    let (_live, port) = echo(&sandbox, "127.0.0.1").await;
    let expected = PortInfo { port, address: "127.0.0.1".into() };
    assert_eq!(sandbox.engine.ports(&sandbox.record).await.unwrap(), [expected]);
    let mut one = sandbox.engine.dial(&sandbox.record, port).await.unwrap();
    let mut two = sandbox.engine.dial(&sandbox.record, port).await.unwrap();
    assert_eq!(line(&mut one, "first\n").await, "first\n");
    assert_eq!(line(&mut two, "second\n").await, "second\n");
    assert_eq!(line(&mut one, "again\n").await, "again\n");
    one.shutdown().await.unwrap();
    assert_eq!(one.read(&mut [0; 1]).await.unwrap(), 0, "the server's end");

    // Neighbours have ports of their own.
    assert_eq!(other.engine.ports(&other.record).await.unwrap(), []);
    let closed = other.engine.dial(&other.record, port).await.unwrap_err();
    assert_eq!(closed.code, Code::PortClosed, "{closed:?}");
    assert!(closed.hint.contains("exec -d"));
}

#[tokio::test]
async fn much_data_passes_unchanged_both_ways() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let (_live, port) = echo(&sandbox, "0.0.0.0").await;
    assert_eq!(sandbox.engine.ports(&sandbox.record).await.unwrap()[0].address, "0.0.0.0");
    let stream = sandbox.engine.dial(&sandbox.record, port).await.unwrap();
    let (mut from, mut to) = tokio::io::split(stream);
    let sent: Vec<u8> =
        (0..4_000_000_u32).map(|n| if n % 977 == 0 { b'\n' } else { b'a' + (n % 23) as u8 }).collect();
    let mut sent_line = sent.clone();
    sent_line.push(b'\n');
    let mut received = vec![0; sent_line.len()];
    let (wrote, read) = in_time("an echo of megabytes", async {
        tokio::join!(to.write_all(&sent_line), from.read_exact(&mut received))
    })
    .await;
    wrote.unwrap();
    read.unwrap();
    assert!(received == sent_line);
}

#[tokio::test]
async fn a_server_of_the_newer_protocol_is_reached_too() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    if sandbox.exec(&["test", "-e", "/proc/net/if_inet6"]).await.outcome.exit_code != 0 {
        println!("skipped: this kernel has no IPv6");
        return;
    }
    let (_live, port) = echo(&sandbox, "::1").await;
    let ports = sandbox.engine.ports(&sandbox.record).await.unwrap();
    assert_eq!(ports, [PortInfo { port, address: "::1".into() }]);
    let mut stream = sandbox.engine.dial(&sandbox.record, port).await.unwrap();
    assert_eq!(line(&mut stream, "six\n").await, "six\n");
}

#[tokio::test]
async fn a_port_that_is_none_or_not_the_sandboxs_own_is_refused() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let zero = sandbox.engine.dial(&sandbox.record, 0).await.unwrap_err();
    assert_eq!(zero.code, Code::InvalidArgument);
    // A server of the host, on its loopback, is not there for a box.
    let host = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = host.local_addr().unwrap().port();
    assert_eq!(sandbox.engine.dial(&sandbox.record, port).await.unwrap_err().code, Code::PortClosed);
    let weak = world.sandbox_with(Wish { isolation: IsolationLevel::Weak, ..Wish::default() }).await;
    assert_eq!(weak.engine.dial(&weak.record, port).await.unwrap_err().code, Code::Unsupported);
    assert_eq!(weak.engine.ports(&weak.record).await.unwrap_err().code, Code::Unsupported);
}
