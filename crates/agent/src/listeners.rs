//! What listens on TCP in the box, asked of the kernel by netlink (`sock_diag`).
//!
//! `/proc/net/tcp` says the same and takes 4 ms: the kernel goes through its table of all connections of the host. Asked for
//! listeners alone it takes 40 µs. Most boxes have no TCP socket at all, and that is told in 3 µs by [`Counts`].

use std::{
    cell::OnceCell,
    fs::File,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    os::unix::fs::FileExt,
};

use carrel_proto::message::PortInfo;
use rustix::{
    io::Errno,
    net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send, socket_with},
};

/// `SOCK_DIAG_BY_FAMILY`.
const BY_FAMILY: u16 = 20;
/// `NLM_F_REQUEST | NLM_F_DUMP`.
const DUMP: u16 = 0x301;
const DONE: u16 = 3;
const ERROR: u16 = 2;
const TCP: u8 = 6;
/// One bit per state; `TCP_LISTEN` is 10.
const LISTEN: u32 = 1 << 10;
/// `struct nlmsghdr`, and that with a `struct inet_diag_req_v2`.
const HEADER: usize = 16;
const REQUEST: usize = HEADER + 56;
/// The kernel answers in pieces of a page, or of this where pages are larger. On the stack: fresh memory is dear.
const ANSWER: usize = 8 << 10;
const FAMILIES: [AddressFamily; 2] = [AddressFamily::INET, AddressFamily::INET6];

/// How many sockets the box's network has, in files of the kernel's that stay open; none where it does not say.
#[derive(Debug, Default)]
pub(crate) struct Counts(OnceCell<Option<[File; 2]>>);

impl Counts {
    /// Whether there is no TCP socket, so that nothing listens.
    pub(crate) fn are_zero(&self) -> bool {
        let open = || Some([File::open("/proc/net/sockstat").ok()?, File::open("/proc/net/sockstat6").ok()?]);
        let none = |files: &[File; 2]| files.iter().all(|file| in_use(file) == Some(0));
        self.0.get_or_init(open).as_ref().is_some_and(none)
    }
}

/// Of the line `TCP: inuse N …`, or `TCP6: inuse N`.
fn in_use(file: &File) -> Option<u32> {
    let mut text = [0; 512];
    let length = file.read_at(&mut text, 0).ok()?;
    let lines = std::str::from_utf8(&text[..length]).ok()?.lines();
    let mut words = lines
        .map(str::split_whitespace)
        .find_map(|mut words| matches!(words.next(), Some("TCP:" | "TCP6:")).then_some(words))?;
    (words.next()? == "inuse").then(|| words.next()?.parse().ok())?
}

/// `Err`: this kernel does not answer such questions.
pub(crate) fn listening(most: usize) -> Result<Vec<PortInfo>, Errno> {
    let mut ports = Vec::new();
    let mut answer = [0; ANSWER];
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, Some(netlink::SOCK_DIAG))?;
    for family in FAMILIES {
        send(&socket, &question(family), SendFlags::empty())?;
        // The kernel has the answer ready when it has taken the question: nothing is waited for.
        loop {
            let (count, _) = recv(&socket, &mut answer, RecvFlags::empty())?;
            if !read(&answer[..count], &mut ports)? {
                break;
            }
            if ports.len() >= most {
                return Ok(ports);
            }
        }
    }
    Ok(ports)
}

fn question(family: AddressFamily) -> [u8; REQUEST] {
    let mut bytes = [0; REQUEST];
    bytes[..4].copy_from_slice(&72u32.to_ne_bytes());
    bytes[4..6].copy_from_slice(&BY_FAMILY.to_ne_bytes());
    bytes[6..8].copy_from_slice(&DUMP.to_ne_bytes());
    bytes[HEADER] = u8::try_from(family.as_raw()).unwrap_or(0);
    bytes[HEADER + 1] = TCP;
    bytes[HEADER + 4..HEADER + 8].copy_from_slice(&LISTEN.to_ne_bytes());
    bytes
}

/// Adds what one answer has. `false`: it was the last.
fn read(mut bytes: &[u8], ports: &mut Vec<PortInfo>) -> Result<bool, Errno> {
    while let Some(header) = bytes.get(..HEADER) {
        let length = usize::try_from(u32::from_ne_bytes([header[0], header[1], header[2], header[3]]))
            .map_err(|_| Errno::PROTO)?;
        match u16::from_ne_bytes([header[4], header[5]]) {
            DONE => return Ok(false),
            ERROR => return Err(Errno::PROTO),
            _ => {}
        }
        let body = bytes.get(HEADER..length).ok_or(Errno::PROTO)?;
        ports.extend(listener(body));
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(true)
}

/// `struct inet_diag_msg`: family, state, two bytes, then ports and addresses in the network's order.
fn listener(message: &[u8]) -> Option<PortInfo> {
    let port = u16::from_be_bytes([*message.get(4)?, *message.get(5)?]);
    let bytes: [u8; 16] = message.get(8..24)?.try_into().ok()?;
    let address = if u16::from(message[0]) == AddressFamily::INET.as_raw() {
        IpAddr::V4(Ipv4Addr::new(bytes[0], bytes[1], bytes[2], bytes[3]))
    } else {
        IpAddr::V6(Ipv6Addr::from(bytes))
    };
    Some(PortInfo { port, address: address.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listeners_are_found_and_connections_are_not() {
        let server = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = server.local_addr().unwrap();
        let client = std::net::TcpStream::connect(address).unwrap();
        let mine = PortInfo { port: address.port(), address: "127.0.0.1".into() };
        let all = listening(4096).expect("a kernel with sock_diag");
        assert_eq!(all.iter().filter(|port| **port == mine).count(), 1, "{all:?}");
        let other = client.local_addr().unwrap().port();
        assert!(!all.iter().any(|port| port.port == other), "{all:?}");
        if let Ok(six) = std::net::TcpListener::bind("[::1]:0") {
            let mine = PortInfo { port: six.local_addr().unwrap().port(), address: "::1".into() };
            assert!(listening(4096).unwrap().contains(&mine));
        }
    }

    #[test]
    fn sockets_are_counted() {
        let counted = |path: &str| in_use(&File::open(path).unwrap()).expect("a number of TCP sockets");
        let counts = Counts::default();
        let (four, six) = (counted("/proc/net/sockstat"), counted("/proc/net/sockstat6"));
        assert_eq!(counts.are_zero(), four == 0 && six == 0);
        let _server = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(!counts.are_zero());
        assert_eq!(in_use(&File::open("/dev/null").unwrap()), None);
    }

    #[test]
    fn nonsense_is_not_read() {
        let mut ports = Vec::new();
        assert_eq!(read(&[], &mut ports), Ok(true));
        let mut bytes = question(AddressFamily::INET);
        bytes[..4].copy_from_slice(&1000u32.to_ne_bytes());
        assert_eq!(read(&bytes, &mut ports), Err(Errno::PROTO), "longer than it is");
        bytes[..4].copy_from_slice(&3u32.to_ne_bytes());
        assert_eq!(read(&bytes, &mut ports), Err(Errno::PROTO), "shorter than its own header");
        assert!(ports.is_empty());
    }
}
