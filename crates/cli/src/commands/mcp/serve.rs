//! The MCP door on stdio or HTTP. Nothing but the protocol goes to stdout.

use std::{io::Write, os::unix::fs::OpenOptionsExt, path::Path, process::ExitCode, sync::Arc};

use carrel_api::mcp::{Options, Server, http, stdio};
use carrel_proto::problem::{Code, Problem};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::{
    args::Mcp,
    commands::{log, pool::Pool},
    config::Settings,
    daemon::Client,
    output::Output,
    signals::Interrupts,
};

/// Bytes of randomness in a token.
const TOKEN_BYTES: usize = 32;
/// Shorter ones can be guessed.
const SHORTEST_TOKEN: usize = 16;

pub(crate) async fn run(
    args: &Mcp,
    settings: Settings,
    alone: bool,
    output: &Output,
) -> Result<ExitCode, Problem> {
    log(output.verbose);
    let directory = std::env::current_dir().unwrap_or_default();
    let options = options(args, &settings, &directory);
    if !alone
        && args.http.is_none()
        && let Some(client) = Client::find(&settings, output).await
    {
        return super::relay::run(&client, options, output).await;
    }
    let server = Server::new(options);
    // Over HTTP there are clients who come and go.
    let pool = match args.http {
        Some(_) => Some(Pool::keep(server.engine().await?, &settings)),
        None => None,
    };
    let stop = CancellationToken::new();
    let served = async {
        match args.http {
            Some(address) => serve_http(args, &settings, address, &server, stop.clone(), output).await,
            None => {
                // Ahead of the first call, beside the greeting.
                let warming = tokio::spawn({
                    let server = Arc::clone(&server);
                    async move { server.warm().await }
                });
                let connection = server.connection();
                let gone = connection.gone();
                let served = stdio::serve(connection, gone, stop.clone()).await;
                warming.abort();
                served
            }
        }
    };
    let mut interrupts = Interrupts::listen()?;
    let mut served = std::pin::pin!(served);
    let ended = tokio::select! {
        ended = &mut served => ended,
        _ = interrupts.next() => {
            server.leave();
            stop.cancel();
            tokio::select! {
                ended = &mut served => ended,
                _ = interrupts.next() => Ok(()),
            }
        }
    };
    server.finish().await;
    if let Some(pool) = pool {
        pool.end().await;
    }
    ended.map(|()| ExitCode::SUCCESS)
}

fn options(args: &Mcp, settings: &Settings, directory: &Path) -> Options {
    let environment = args.making.environment.as_deref().unwrap_or("python");
    Options {
        tools: args.tools.or_else(|| settings.tools.get(environment).copied()).unwrap_or_default(),
        structured: args.structured,
        scope: args.scope.clone(),
        end_on_disconnect: args.end_on_disconnect,
        place: if args.http.is_some() { "http".to_owned() } else { directory.display().to_string() },
        max_chars: args.max_chars,
        timeout: settings.timeout,
        wish: settings.wish(args.making.environment.as_deref()),
        engine: carrel_engine::Settings {
            state: settings.state.clone(),
            environments: settings.environments.clone(),
        },
    }
}

async fn serve_http(
    args: &Mcp,
    settings: &Settings,
    address: std::net::SocketAddr,
    server: &Arc<Server>,
    stop: CancellationToken,
    output: &Output,
) -> Result<(), Problem> {
    let token = token(args, settings, address, output)?;
    let listener = TcpListener::bind(address)
        .await
        .map_err(|error| Problem::new(Code::InvalidArgument, format!("{address}: {error}")))?;
    let address = listener.local_addr().map_err(Problem::internal)?;
    output.note(format_args!("serving MCP at http://{address}{}", http::PATH));
    let mut hosts = args.door.allow_host.clone();
    if !address.ip().is_unspecified() {
        hosts.push(address.ip().to_string());
    }
    let guards = http::Guards { token, hosts, origins: args.door.allow_origin.clone() };
    let server = Arc::clone(server);
    http::serve(listener, guards, stop, move || server.connection()).await
}

/// The token that clients must show: given, or made once and kept.
fn token(
    args: &Mcp,
    settings: &Settings,
    address: std::net::SocketAddr,
    output: &Output,
) -> Result<Option<String>, Problem> {
    let bad = |what: String| Problem::new(Code::InvalidArgument, what);
    if args.door.insecure_no_auth {
        if !address.ip().is_loopback() {
            return Err(bad(format!("--insecure-no-auth is for the loopback, and {address} is not"))
                .hint("use a token, or listen on 127.0.0.1"));
        }
        output.warning("everybody on this machine can run code here: no token is asked for");
        return Ok(None);
    }
    let read = |path: &Path| {
        std::fs::read_to_string(path).map_err(|error| bad(format!("{}: {error}", path.display())))
    };
    let token = match (&args.door.token_file, std::env::var("CARREL_TOKEN")) {
        (Some(path), _) => read(path)?,
        (None, Ok(token)) => token,
        (None, Err(_)) => {
            let path = settings.state.join("mcp-token");
            if !path.exists() {
                make_token(&path)?;
            }
            output.note(format_args!("the bearer token is in {}", path.display()));
            read(&path)?
        }
    };
    let token = token.trim().to_owned();
    if token.len() < SHORTEST_TOKEN {
        return Err(bad(format!("the token has fewer than {SHORTEST_TOKEN} characters")));
    }
    Ok(Some(token))
}

fn make_token(path: &Path) -> Result<(), Problem> {
    let failed = |error: std::io::Error| Problem::internal(format!("{}: {error}", path.display()));
    let mut random = [0; TOKEN_BYTES];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty()).map_err(Problem::internal)?;
    let text: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
    if let Some(above) = path.parent() {
        std::fs::create_dir_all(above).map_err(failed)?;
    }
    // Under its own name only once it is whole: another server may look for it now.
    let unfinished = path.with_extension(format!("{}", std::process::id()));
    let mut file = std::fs::File::options()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&unfinished)
        .map_err(failed)?;
    file.write_all(text.as_bytes()).map_err(failed)?;
    match std::fs::hard_link(&unfinished, path) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => Err(failed(error)),
        _ => std::fs::remove_file(&unfinished).map_err(failed),
    }
}
