//! Opens what the daemon listens on: sockets that systemd hands over, or its own.

use std::net::SocketAddr;

use carrel_api::rest::Listeners;
use carrel_proto::problem::{Code, Problem};
use listenfd::ListenFd;
use tokio::net::{TcpListener, UnixListener};
use tokio_rustls::TlsAcceptor;

use super::socket::{self, Socket};
use crate::{config::Settings, output::Output};

#[derive(Debug)]
pub(super) struct Doors {
    pub(super) listeners: Listeners,
    /// Removed at the end, unless it is systemd's.
    pub(super) socket: Option<Socket>,
}

impl Doors {
    /// Of all TCP doors.
    pub(super) fn addresses(&self) -> Result<Vec<SocketAddr>, Problem> {
        self.listeners.tcp.iter().map(|listener| listener.local_addr().map_err(Problem::internal)).collect()
    }
}

/// Opens all doors and says where they are.
pub(super) async fn open(
    settings: &Settings,
    tls: Option<TlsAcceptor>,
    output: &Output,
) -> Result<Doors, Problem> {
    let mut listeners = handed_over()?;
    let mut socket = None;
    if listeners.unix.is_empty() {
        let (listener, own) = socket::bind(&settings.socket)?;
        listeners.unix.push(adopt(listener)?);
        socket = Some(own);
    }
    for address in &settings.serve.listen {
        let listener = TcpListener::bind(address).await.map_err(|error| {
            Problem::new(Code::InvalidArgument, format!("{address}: {error}"))
                .hint("choose another port, or 0 for one that is free")
        })?;
        listeners.tcp.push(listener);
    }
    listeners.tls = tls;
    tell(&listeners, output)?;
    Ok(Doors { listeners, socket })
}

fn tell(listeners: &Listeners, output: &Output) -> Result<(), Problem> {
    for listener in &listeners.unix {
        let address = listener.local_addr().map_err(Problem::internal)?;
        let path =
            address.as_pathname().map_or_else(|| "(unnamed)".into(), |path| path.display().to_string());
        output.say_line(format_args!("listening on unix:{path}"));
    }
    let scheme = if listeners.tls.is_some() { "https" } else { "http" };
    for listener in &listeners.tcp {
        let address = listener.local_addr().map_err(Problem::internal)?;
        output.say_line(format_args!("listening on {scheme}://{address}"));
        if listeners.tls.is_none() && !address.ip().is_loopback() {
            output.warning(format_args!(
                "tokens travel in the clear to {address}: use --tls-cert and --tls-key"
            ));
        }
    }
    Ok(())
}

/// Sockets of a systemd unit (`LISTEN_FDS`).
fn handed_over() -> Result<Listeners, Problem> {
    let mut given = ListenFd::from_env();
    let mut listeners = Listeners::default();
    for at in 0..given.len() {
        if let Ok(Some(listener)) = given.take_unix_listener(at) {
            listeners.unix.push(adopt(listener)?);
        } else if let Ok(Some(listener)) = given.take_tcp_listener(at) {
            listener.set_nonblocking(true).map_err(Problem::internal)?;
            listeners.tcp.push(TcpListener::from_std(listener).map_err(Problem::internal)?);
        } else {
            return Err(Problem::new(
                Code::InvalidArgument,
                format!("descriptor {} is no listening socket", at + 3),
            )
            .hint("ListenStream= of the .socket unit names unix sockets or TCP ports"));
        }
    }
    Ok(listeners)
}

fn adopt(listener: std::os::unix::net::UnixListener) -> Result<UnixListener, Problem> {
    listener.set_nonblocking(true).map_err(Problem::internal)?;
    UnixListener::from_std(listener).map_err(Problem::internal)
}
