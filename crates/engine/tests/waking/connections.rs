//! TCP connections that are open when a sandbox is written to disk: whoever comes back is told that they are gone, and so is
//! whoever was at the other end. What listened still listens.

use carrel_proto::guest::Language::{Node, Python};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::{
    run, with_memory,
    world::{close_all, in_time, key, wish},
};

/// An echo on port 8000, each connection with a thread that writes down how it ended.
const SERVER: &str = "\
import socket, threading
server = socket.create_server(('127.0.0.1', 8000))
ends = []
def end(name, connection):
    try:
        while data := connection.recv(100):
            connection.sendall(data.upper())
        ends.append(name + ' end')
    except OSError:
        ends.append(name + ' error')
threads = []
def follow(name, connection):
    threads.append(threading.Thread(target=end, args=(name, connection), daemon=True))
    threads[-1].start()
def serve():
    while True:
        follow('server', server.accept()[0])
threading.Thread(target=serve, daemon=True).start()";
/// A client in the same process that reads, and one that is idle.
const CLIENTS: &str = "\
reading, idle = (socket.create_connection(('127.0.0.1', 8000)) for _ in range(2))
idle.sendall(b'before'); print(idle.recv(100))
follow('client', reading)";
const NODE_CLIENT: &str = "\
var end = new Promise((told) => {
  var client = require('net').connect(8000, '127.0.0.1');
  client.on('error', () => {}).on('close', () => told('closed'));
  client.once('data', (data) => console.log(String(data)));
  client.write('hello');
});
await new Promise((told) => setTimeout(told, 200))";

#[tokio::test]
async fn those_that_were_open_end_on_both_sides_and_listeners_listen() {
    let Some((state, engine)) = with_memory() else { return };
    let record = engine.sandbox(&key("connected"), &wish()).await.unwrap().record;
    run(&engine, &record, Python, SERVER).await;
    assert_eq!(run(&engine, &record, Python, CLIENTS).await, "b'BEFORE'");
    assert_eq!(run(&engine, &record, Node, NODE_CLIENT).await, "HELLO");
    let mut outside = in_time("dialling", engine.dial(&record, 8000)).await.unwrap();
    outside.write_all(b"hello").await.unwrap();
    let mut answer = [0; 5];
    in_time("the server", outside.read_exact(&mut answer)).await.unwrap();
    assert_eq!(&answer, b"HELLO");

    in_time("hibernate", engine.hibernate(&record)).await.unwrap();
    // Whoever came from outside is told before anybody wakes it: an end or an error, but no silence.
    let told = in_time("the other end", outside.read(&mut answer)).await;
    assert!(matches!(told, Ok(0) | Err(_)), "{told:?}");

    // Five connections were there with a thread each: of the server's four, and of the one client that reads.
    let ends = "for thread in list(threads): thread.join(60)\nprint(len(threads), len(ends))";
    assert_eq!(run(&engine, &record, Python, ends).await, "5 5");
    let idle = "\
try:
    idle.sendall(b'after'); print('an answer', idle.recv(100))
except OSError as error:
    print(type(error).__name__)";
    let told = run(&engine, &record, Python, idle).await;
    assert!(told.ends_with("Error"), "{told}");
    assert_eq!(run(&engine, &record, Node, "console.log(await end)").await, "closed");

    // The same listener, from within and from outside.
    let again =
        "with socket.create_connection(('127.0.0.1', 8000)) as c: c.sendall(b'again'); print(c.recv(100))";
    assert_eq!(run(&engine, &record, Python, again).await, "b'AGAIN'");
    let mut outside = in_time("dialling", engine.dial(&record, 8000)).await.unwrap();
    outside.write_all(b"again").await.unwrap();
    in_time("the server", outside.read_exact(&mut answer)).await.unwrap();
    assert_eq!(&answer, b"AGAIN");
    close_all(state.path()).await;
}
