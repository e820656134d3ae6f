//! Standard input and output: one message per line.
//!
//! The SDK drops a line above its limit without a word, as it does one that is nested too deeply, and the client waits for
//! ever. [`Lines`] stands before it and puts a tiny request with the same id in such a line's place, which the handler then
//! answers with an error.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use carrel_proto::problem::Problem;
use rmcp::{
    RoleServer, ServerHandler, ServiceExt,
    model::RequestId,
    service::ServerInitializeError,
    transport::{async_rw::AsyncRwTransport, io::stdio_pipes},
};
use tokio::io::{AsyncBufRead, AsyncRead, AsyncWrite, BufReader, ReadBuf};
use tokio_util::sync::CancellationToken;

use super::{MAX_DEPTH, MAX_MESSAGE, TOO_LARGE_METHOD, json_id::TopLevelId};

/// Serves one client until it goes away or `stop`.
///
/// `gone` is cancelled when the client hangs up, before the SDK cancels what the client had asked for.
pub async fn serve<H: ServerHandler>(
    handler: H,
    gone: CancellationToken,
    stop: CancellationToken,
) -> Result<(), Problem> {
    let (reader, writer) = stdio_pipes();
    serve_on(reader, writer, handler, gone, stop).await
}

/// Standard input and output, for who passes them on.
pub fn pipes() -> (impl AsyncRead + Send + Unpin + 'static, impl AsyncWrite + Send + Unpin + 'static) {
    stdio_pipes()
}

/// As [`serve`], over any pair of streams.
pub async fn serve_on<H, R, W>(
    reader: R,
    writer: W,
    handler: H,
    gone: CancellationToken,
    stop: CancellationToken,
) -> Result<(), Problem>
where
    H: ServerHandler,
    R: AsyncRead + Send + Unpin + 'static,
    W: AsyncWrite + Send + Unpin + 'static,
{
    let lines = Lines::new(reader, MAX_MESSAGE, gone);
    let transport = AsyncRwTransport::<RoleServer, _, _>::new(lines, writer).with_max_line_length(usize::MAX);
    match handler.serve_with_ct(transport, stop).await {
        Ok(running) => running.waiting().await.map(drop).map_err(Problem::internal),
        // A client that leaves before it has said anything has a right to.
        Err(ServerInitializeError::ConnectionClosed(_) | ServerInitializeError::Cancelled) => Ok(()),
        Err(error) => Err(Problem::internal(error)),
    }
}

/// Passes lines through, too long ones as a small request in their place.
struct Lines<R> {
    inner: BufReader<R>,
    line: Line,
    gone: CancellationToken,
}

struct Line {
    limit: usize,
    state: State,
    /// What is still to be handed out.
    ready: Vec<u8>,
    given: usize,
}

enum State {
    /// The line so far.
    Collecting(Vec<u8>),
    /// Too long: only its id is still of interest.
    Skipping(TopLevelId),
}

impl<R: AsyncRead + Unpin> Lines<R> {
    fn new(inner: R, limit: usize, gone: CancellationToken) -> Self {
        let inner = BufReader::with_capacity(64 << 10, inner);
        let line = Line { limit, state: State::Collecting(Vec::new()), ready: Vec::new(), given: 0 };
        Self { inner, line, gone }
    }
}

impl Line {
    /// Takes up to one line's end. The line, or what stands for it, is then in `ready`.
    fn take(&mut self, available: &[u8]) -> usize {
        let (count, ended) = match available.iter().position(|byte| *byte == b'\n') {
            Some(at) => (at + 1, true),
            None => (available.len(), false),
        };
        let piece = &available[..count];
        match &mut self.state {
            State::Collecting(line) if line.len() + count <= self.limit => line.extend_from_slice(piece),
            State::Collecting(line) => {
                let mut id = TopLevelId::default();
                id.read(line);
                id.read(piece);
                self.state = State::Skipping(id);
            }
            State::Skipping(id) => id.read(piece),
        }
        if ended {
            let line = match std::mem::replace(&mut self.state, State::Collecting(Vec::new())) {
                State::Collecting(line) => match too_deep(&line) {
                    Some(id) => stand_in(id.found()),
                    None => line,
                },
                State::Skipping(id) => stand_in(id.found()),
            };
            self.ready = line;
            self.given = 0;
        }
        count
    }
}

/// Reads a line's id if the SDK's parser would give up on its depth. Most lines have too few brackets for that.
fn too_deep(line: &[u8]) -> Option<TopLevelId> {
    let brackets = line.iter().filter(|byte| matches!(byte, b'{' | b'[')).count();
    if brackets <= MAX_DEPTH {
        return None;
    }
    let mut id = TopLevelId::default();
    id.read(line);
    (id.deepest() > MAX_DEPTH).then_some(id)
}

/// The request in a too long one's place. Without an id it is no message at all, which the SDK answers for us.
fn stand_in(id: Option<RequestId>) -> Vec<u8> {
    let message = match id {
        Some(id) => serde_json::json!({"jsonrpc": "2.0", "id": id, "method": TOO_LARGE_METHOD}),
        None => serde_json::json!({"jsonrpc": "2.0"}),
    };
    format!("{message}\n").into_bytes()
}

impl<R: AsyncRead + Unpin> AsyncRead for Lines<R> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let line = &mut this.line;
        while line.given == line.ready.len() {
            let available = ready!(Pin::new(&mut this.inner).poll_fill_buf(cx))?;
            if available.is_empty() {
                this.gone.cancel();
                return Poll::Ready(Ok(()));
            }
            let count = line.take(available);
            Pin::new(&mut this.inner).consume(count);
        }
        let count = buf.remaining().min(line.ready.len() - line.given);
        buf.put_slice(&line.ready[line.given..line.given + count]);
        line.given += count;
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt;

    use super::*;

    async fn through(limit: usize, input: &[u8]) -> String {
        let mut lines = Lines::new(input, limit, CancellationToken::new());
        let mut text = String::new();
        lines.read_to_string(&mut text).await.unwrap();
        text
    }

    #[tokio::test]
    async fn short_lines_pass_as_they_are() {
        assert_eq!(through(100, b"one\ntwo\n\nthree\n").await, "one\ntwo\n\nthree\n");
        assert_eq!(through(100, b"no end").await, "");
    }

    #[tokio::test]
    async fn a_long_line_keeps_its_id_wherever_it_stands() {
        let filling = "x".repeat(200_000);
        for (line, id) in [
            (format!(r#"{{"id":7,"method":"a","params":{{"id":9,"x":"{filling}"}}}}"#), "7"),
            (format!(r#"{{"params":{{"id":9,"x":"{filling}"}},"id":"se\"ven"}}"#), r#""se\"ven""#),
        ] {
            let text = through(1000, format!("{line}\nnext\n").as_bytes()).await;
            let (stand_in, rest) = text.split_once('\n').unwrap();
            let message: serde_json::Value = serde_json::from_str(stand_in).unwrap();
            assert_eq!(message["id"].to_string(), id);
            assert_eq!(message["method"], TOO_LARGE_METHOD);
            assert_eq!(rest, "next\n");
        }
        let text = through(1000, format!("{filling}\n").as_bytes()).await;
        assert_eq!(text, "{\"jsonrpc\":\"2.0\"}\n");
    }

    #[tokio::test]
    async fn a_deep_line_is_stood_in_for_and_a_wide_one_passes() {
        let nested = |depth: usize| {
            format!("{{\"params\":{}{},\"id\":7}}\n", "[".repeat(depth - 1), "]".repeat(depth - 1))
        };
        let text = through(100_000, nested(MAX_DEPTH + 1).as_bytes()).await;
        let message: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!((&message["id"], &message["method"]), (&7.into(), &TOO_LARGE_METHOD.into()));
        let deepest = nested(MAX_DEPTH);
        assert!(serde_json::from_str::<serde_json::Value>(&deepest).is_ok(), "the parser gives up earlier");
        let wide = format!("{{\"id\":7,\"params\":[\"{}\",{}]}}\n", "[".repeat(500), "[],".repeat(500));
        for line in [deepest, wide] {
            assert_eq!(through(100_000, line.as_bytes()).await, line);
        }
    }
}
