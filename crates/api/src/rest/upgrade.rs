//! Connections of the unix socket that stop being HTTP.

use std::{io, pin::Pin};

use axum::{
    body::Body,
    extract::Request,
    http::{HeaderValue, StatusCode, header},
    response::Response,
};
use carrel_engine::Environments;
use carrel_proto::problem::{Code, Problem};
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::{io::AsyncReadExt, net::UnixStream};
use tokio_io_timeout::TimeoutStream;

use super::{
    Daemon,
    guard::Caller,
    problem::{Refusal, bad},
    server::Door,
};

/// What the unix door hands to hyper.
type Wire = TokioIo<Pin<Box<TimeoutStream<UnixStream>>>>;
/// A connection of the unix door, with what had been read of it ahead.
pub(super) type Stream = tokio::io::Join<
    tokio::io::Chain<
        io::Cursor<hyper::body::Bytes>,
        tokio::io::ReadHalf<Pin<Box<TimeoutStream<UnixStream>>>>,
    >,
    tokio::io::WriteHalf<Pin<Box<TimeoutStream<UnixStream>>>>,
>;

/// The user who runs the daemon, on its own socket and without a token.
pub(super) fn local_operator(caller: &Caller) -> Result<(), Refusal> {
    caller.operator_only()?;
    match caller.door {
        Door::Unix => Ok(()),
        Door::Tcp { .. } => {
            Err(Problem::new(Code::Forbidden, "this is for the daemon's unix socket alone").into())
        }
    }
}

/// The environments that a command brings along. Its interpreters are asked, which runs them outside of any box: so only for the
/// user who runs the daemon. Others who may open the socket get the daemon's own.
pub(super) fn environments(daemon: &Daemon, own: bool, brought: Environments) -> Environments {
    match own {
        true => brought,
        false => brought.at(daemon.engine.environments().whereabouts().clone()),
    }
}

/// Agrees to speak `protocol` from now on.
pub(super) fn agree(request: &mut Request, protocol: &'static str) -> Result<(OnUpgrade, Response), Refusal> {
    let wanted = request.headers().get(header::UPGRADE).and_then(|value| value.to_str().ok());
    if wanted != Some(protocol) {
        return Err(bad(format!("this path needs `Connection: upgrade` and `Upgrade: {protocol}`")).into());
    }
    let upgrade = hyper::upgrade::on(request);
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    let headers = response.headers_mut();
    headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(header::UPGRADE, HeaderValue::from_static(protocol));
    Ok((upgrade, response))
}

/// The connection itself, once the answer has gone out. It may be silent or stalled for as long as it likes: a pager at the
/// other end waits for its reader.
pub(super) async fn stream(upgrade: OnUpgrade) -> Result<Stream, Problem> {
    let upgraded = upgrade.await.map_err(Problem::internal)?;
    let parts = upgraded
        .downcast::<Wire>()
        .map_err(|_| Problem::internal("an upgraded connection of another kind"))?;
    let mut stream = parts.io.into_inner();
    stream.as_mut().set_write_timeout_pinned(None);
    let (reader, writer) = tokio::io::split(stream);
    Ok(tokio::io::join(io::Cursor::new(parts.read_buf).chain(reader), writer))
}
