//! TCP ports of the box: what listens, and a way in for the host.
//!
//! The host cannot reach the box's network namespace. The agent is in it: it opens a connection and hands the socket over,
//! and what flows then does not pass through it.

use std::{fs, net::IpAddr, os::fd::OwnedFd};

use carrel_proto::{
    message::{Event, PortInfo},
    problem::{Code, Problem},
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::{
        AddressFamily, SocketAddrV4, SocketAddrV6, SocketFlags, SocketType, connect, socket_with,
        sockopt::socket_error,
    },
};

use crate::{listeners, serve::Agent};

/// A box has 256 processes by default; whoever listens on more than this has other plans.
const MOST: usize = 4096;
/// `TCP_LISTEN` in the kernel's table.
const LISTEN: &str = "0A";

impl Agent {
    fn own_network(&self) -> Result<(), Problem> {
        if self.config.namespaces {
            return Ok(());
        }
        Err(Problem::new(Code::Unsupported, "weak isolation has no network of its own, so it has no ports")
            .hint("the server listens on the host itself: connect to it there"))
    }

    pub(crate) fn ports(&self) -> Result<Vec<PortInfo>, Problem> {
        self.own_network()?;
        let mut ports = listeners::listening(MOST).unwrap_or_else(|_| tables());
        ports.sort_by(|one: &PortInfo, other| (one.port, &one.address).cmp(&(other.port, &other.address)));
        ports.dedup();
        ports.truncate(MOST);
        Ok(ports)
    }

    pub(crate) fn dial(&mut self, caller: u32, tag: u32, port: u16) -> Result<(), Problem> {
        self.own_network()?;
        let closed = |error: Errno| {
            Problem::new(Code::PortClosed, format!("nothing answers on port {port} of this sandbox: {error}"))
                .hint("start a server first: `carrel exec -d` starts one and leaves it running")
        };
        let socket = match connect_v4(port) {
            Ok(socket) => socket,
            // The reason of the first is the one that people know.
            Err(error) => connect_v6(port).map_err(|_| closed(error))?,
        };
        if let Some(connection) = self.connections.get_mut(&caller) {
            connection.send_with(tag, &Event::Dialed, socket);
        }
        Ok(())
    }
}

/// What a kernel says that has no better way.
fn tables() -> Vec<PortInfo> {
    // A box without IPv6 has one table only.
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"].map(|path| fs::read_to_string(path).unwrap_or_default());
    tables.iter().flat_map(|table| table.lines()).filter_map(listener).collect()
}

fn connect_v4(port: u16) -> Result<OwnedFd, Errno> {
    let socket = open(AddressFamily::INET)?;
    let asked = connect(&socket, &SocketAddrV4::new(std::net::Ipv4Addr::LOCALHOST, port));
    begun(socket, asked)
}

fn connect_v6(port: u16) -> Result<OwnedFd, Errno> {
    let socket = open(AddressFamily::INET6)?;
    let asked = connect(&socket, &SocketAddrV6::new(std::net::Ipv6Addr::LOCALHOST, port, 0, 0));
    begun(socket, asked)
}

fn open(family: AddressFamily) -> Result<OwnedFd, Errno> {
    socket_with(family, SocketType::STREAM, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC, None)
}

/// On loopback a refusal is there at once; anything slower is for the host to wait for.
fn begun(socket: OwnedFd, asked: Result<(), Errno>) -> Result<OwnedFd, Errno> {
    match asked {
        Ok(()) => return Ok(socket),
        Err(Errno::INPROGRESS) => {}
        Err(error) => return Err(error),
    }
    poll(&mut [PollFd::new(&socket, PollFlags::OUT)], Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))?;
    socket_error(&socket)??;
    Ok(socket)
}

/// A line of the kernel's table, if it is of something that listens: `sl local remote state …`.
fn listener(line: &str) -> Option<PortInfo> {
    let mut fields = line.split_ascii_whitespace().skip(1);
    let (local, _remote, state) = (fields.next()?, fields.next()?, fields.next()?);
    let (address, port) = local.split_once(':')?;
    if state != LISTEN {
        return None;
    }
    Some(PortInfo { port: u16::from_str_radix(port, 16).ok()?, address: self::address(address)?.to_string() })
}

/// The kernel prints an address as 32-bit words in the machine's own order.
fn address(text: &str) -> Option<IpAddr> {
    let word = |at: usize| u32::from_str_radix(text.get(at..at + 8)?, 16).ok().map(u32::to_ne_bytes);
    match text.len() {
        8 => Some(IpAddr::from(word(0)?)),
        32 => {
            let mut all = [0; 16];
            for part in 0..4 {
                all[part * 4..part * 4 + 4].copy_from_slice(&word(part * 8)?);
            }
            Some(IpAddr::from(all))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_endian = "little")]
    fn listeners_are_read_from_the_kernels_table() {
        let read = |line: &str| listener(line).map(|found| format!("{} {}", found.address, found.port));
        let tail = "00000000:00000000 00:00000000 00000000 0 0 1 1 0 100 0 0 10 0";
        let v4 = format!("   0: 0100007F:1F90 00000000:0000 0A {tail}");
        assert_eq!(read(&v4).as_deref(), Some("127.0.0.1 8080"));
        let connected = v4.replace(" 0A ", " 01 ");
        assert_eq!(read(&connected), None, "a connection is no listener");
        let any = format!("   1: {}:0050 {}:0000 0A {tail}", "0".repeat(32), "0".repeat(32));
        assert_eq!(read(&any).as_deref(), Some(":: 80"));
        let one = format!("   1: {}01000000:0050 {}:0000 0A {tail}", "0".repeat(24), "0".repeat(32));
        assert_eq!(read(&one).as_deref(), Some("::1 80"));
        for odd in ["", "  sl  local_address rem_address   st", "0: 0100007F 0 0A", "0: 01:1F90 0:0 0A"] {
            assert_eq!(read(odd), None, "{odd}");
        }
    }

    #[test]
    fn a_refusal_is_told_at_once() {
        let server = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = server.local_addr().unwrap().port();
        assert!(connect_v4(port).is_ok());
        drop(server);
        assert_eq!(connect_v4(port).unwrap_err(), Errno::CONNREFUSED);
    }
}
