//! `carrel mcp` while a daemon runs: the daemon serves the client, and this process passes its bytes on.

use std::process::ExitCode;

use carrel_api::{
    mcp::{Options, stdio},
    rest::mcp::Wanted,
};
use carrel_proto::problem::{Code, Problem};
use tokio::io::{AsyncWriteExt, copy};

use crate::{daemon::Client, output::Output, signals::Interrupts};

pub(crate) async fn run(client: &Client, options: Options, output: &Output) -> Result<ExitCode, Problem> {
    let mut interrupts = Interrupts::listen()?;
    let (mut from_daemon, mut to_daemon) = client.mcp().await?.into_split();
    let mut first = serde_json::to_vec(&Wanted::from(options)).map_err(Problem::internal)?;
    first.push(b'\n');
    to_daemon.write_all(&first).await.map_err(gone)?;
    output.detail(format_args!("served by the daemon, pid {}", client.about.pid));
    let (mut stdin, mut stdout) = stdio::pipes();
    let mut asking = std::pin::pin!(async move {
        // Which of the two has ended is found out by the other direction.
        let _ = copy(&mut stdin, &mut to_daemon).await;
        let _ = to_daemon.shutdown().await;
    });
    let mut answering = std::pin::pin!(copy(&mut from_daemon, &mut stdout));
    let mut left = false;
    loop {
        tokio::select! {
            biased;
            () = &mut asking, if !left => left = true,
            // Its client has hung up, so that the daemon may too.
            ended = &mut answering => return match ended {
                Ok(_) if left => Ok(ExitCode::SUCCESS),
                Ok(_) => Err(gone("it has hung up")),
                Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(ExitCode::SUCCESS),
                Err(error) => Err(gone(error)),
            },
            // The daemon sees that this end is closed, and the client's calls go on.
            _ = interrupts.next() => return Ok(ExitCode::SUCCESS),
        }
    }
}

fn gone(error: impl std::fmt::Display) -> Problem {
    Problem::new(Code::Unavailable, format!("the daemon has gone away: {error}"))
        .hint("start `carrel mcp` again: sessions are as they were")
}
