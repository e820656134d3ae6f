//! network, sockets: kinds of sockets that a box does not need, each a piece of kernel to attack.

use crate::facts::Facts;
use crate::isolate::{all_refused, step};
use crate::outcome::{Outcome, REFUSED, expect_errno, merge, name, skipped};
use crate::sys::sys;
use crate::table::Probe;
use rustix::io::Errno;

pub(crate) const PROBES: &[Probe] = &[
    Probe::light("raw-sockets", "open raw IP sockets", |_| {
        sockets(&[
            ("raw icmp", libc::AF_INET, libc::SOCK_RAW, libc::IPPROTO_ICMP),
            ("raw tcp", libc::AF_INET, libc::SOCK_RAW, libc::IPPROTO_TCP),
            ("raw ip", libc::AF_INET, libc::SOCK_RAW, libc::IPPROTO_RAW),
            ("raw icmp6", libc::AF_INET6, libc::SOCK_RAW, libc::IPPROTO_ICMPV6),
        ])
    }),
    Probe::light("packet-sockets", "open packet sockets", |_| {
        sockets(&[
            ("packet raw", libc::AF_PACKET, libc::SOCK_RAW, 0x0300),
            ("packet dgram", libc::AF_PACKET, libc::SOCK_DGRAM, 0x0300),
        ])
    }),
    Probe::light("ping-socket", "open an ICMP echo socket", |_| {
        sockets(&[
            ("ping", libc::AF_INET, libc::SOCK_DGRAM, libc::IPPROTO_ICMP),
            ("ping6", libc::AF_INET6, libc::SOCK_DGRAM, libc::IPPROTO_ICMPV6),
        ])
    }),
    Probe::light("vsock", "talk to the hypervisor over vsock", |_| {
        sockets(&[
            ("vsock stream", libc::AF_VSOCK, libc::SOCK_STREAM, 0),
            ("vsock dgram", libc::AF_VSOCK, libc::SOCK_DGRAM, 0),
        ])
    }),
    Probe::light("af-alg", "use the kernel's cryptography over AF_ALG", |_| {
        sockets(&[("alg", libc::AF_ALG, libc::SOCK_SEQPACKET, 0)])
    }),
    Probe::light("socket-families", "open sockets of rarely used families", |_| sockets(RARE)),
    Probe::light("socket-protocols", "open sockets of rarely used IP protocols", |_| {
        sockets(&[
            ("sctp", libc::AF_INET, libc::SOCK_SEQPACKET, libc::IPPROTO_SCTP),
            ("dccp", libc::AF_INET, 6, libc::IPPROTO_DCCP),
            ("udplite", libc::AF_INET, libc::SOCK_DGRAM, libc::IPPROTO_UDPLITE),
            ("l2tp", libc::AF_INET, libc::SOCK_DGRAM, 115),
        ])
    }),
    Probe::light("netlink-families", "open netlink sockets other than routing", |_| {
        sockets(&[
            ("netlink xfrm", libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_XFRM),
            ("netlink audit", libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_AUDIT),
            ("netlink netfilter", libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_NETFILTER),
            ("netlink connector", libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_CONNECTOR),
            ("netlink scsi", libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_SCSITRANSPORT),
            ("netlink crypto", libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_CRYPTO),
            ("netlink uevent", libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_KOBJECT_UEVENT),
        ])
    }),
];

const RARE: &[(&str, i32, i32, i32)] = &[
    ("ax25", libc::AF_AX25, libc::SOCK_DGRAM, 0),
    ("ipx", libc::AF_IPX, libc::SOCK_DGRAM, 0),
    ("appletalk", libc::AF_APPLETALK, libc::SOCK_DGRAM, 0),
    ("netrom", libc::AF_NETROM, libc::SOCK_SEQPACKET, 0),
    ("x25", libc::AF_X25, libc::SOCK_SEQPACKET, 0),
    ("rose", libc::AF_ROSE, libc::SOCK_SEQPACKET, 0),
    ("key", libc::AF_KEY, libc::SOCK_RAW, 2),
    ("rds", libc::AF_RDS, libc::SOCK_SEQPACKET, 0),
    ("pppox", libc::AF_PPPOX, libc::SOCK_STREAM, 0),
    ("llc", libc::AF_LLC, libc::SOCK_STREAM, 0),
    ("infiniband", libc::AF_IB, libc::SOCK_RAW, 0),
    ("can", libc::AF_CAN, libc::SOCK_RAW, 1),
    ("tipc", libc::AF_TIPC, libc::SOCK_STREAM, 0),
    ("bluetooth", libc::AF_BLUETOOTH, libc::SOCK_RAW, 1),
    ("iucv", libc::AF_IUCV, libc::SOCK_STREAM, 0),
    ("rxrpc", libc::AF_RXRPC, libc::SOCK_DGRAM, libc::AF_INET),
    ("isdn", libc::AF_ISDN, libc::SOCK_RAW, 0),
    ("phonet", libc::AF_PHONET, libc::SOCK_DGRAM, 0),
    ("ieee802154", libc::AF_IEEE802154, libc::SOCK_DGRAM, 0),
    ("nfc", libc::AF_NFC, libc::SOCK_SEQPACKET, 0),
    ("kcm", 41, libc::SOCK_DGRAM, 0),
    ("qipcrtr", 42, libc::SOCK_DGRAM, 0),
    ("smc", 43, libc::SOCK_STREAM, 0),
    ("xdp", libc::AF_XDP, libc::SOCK_RAW, 0),
    ("mctp", 45, libc::SOCK_DGRAM, 0),
];

/// Refused, or not in this kernel at all: either way there is no such socket.
fn sockets(kinds: &[(&str, i32, i32, i32)]) -> Outcome {
    let allowed = [
        REFUSED,
        &[
            Errno::AFNOSUPPORT,
            Errno::PROTONOSUPPORT,
            Errno::SOCKTNOSUPPORT,
            Errno::PROTOTYPE,
            Errno::OPNOTSUPP,
        ],
    ]
    .concat();
    merge(kinds.iter().map(|(what, family, kind, protocol)| {
        step(what, || expect_errno(what, sys!(SYS_socket, *family, *kind, *protocol), &allowed))
    }))
}

const NLM_REQUEST_ACK_CREATE: u16 = 1 | 4 | 0x400;

/// One netlink request, and the errno of its acknowledgement.
fn request(kind: u16, body: &[u8]) -> Result<u64, Errno> {
    let socket =
        sys!(SYS_socket, libc::AF_NETLINK, libc::SOCK_RAW | libc::SOCK_CLOEXEC, libc::NETLINK_ROUTE)?;
    let mut message = Vec::with_capacity(16 + body.len());
    let length = u32::try_from(16 + body.len()).unwrap_or_default();
    message.extend_from_slice(&length.to_ne_bytes());
    message.extend_from_slice(&kind.to_ne_bytes());
    message.extend_from_slice(&NLM_REQUEST_ACK_CREATE.to_ne_bytes());
    message.extend_from_slice(&[0_u8; 8]);
    message.extend_from_slice(body);
    let mut address = [0_u8; 12];
    address[..2].copy_from_slice(&16_u16.to_ne_bytes()); // AF_NETLINK, to the kernel
    sys!(SYS_sendto, socket, message.as_slice(), message.len(), 0, &address, 12)?;
    let mut reply = [0_u8; 4096];
    let got = sys!(SYS_recvfrom, socket, &mut reply, 4096, 0, 0, 0)?;
    if got < 20 {
        return Err(Errno::IO);
    }
    let code = i32::from_ne_bytes([reply[16], reply[17], reply[18], reply[19]]);
    if code == 0 { Ok(0) } else { Err(Errno::from_raw_os_error(-code)) }
}

fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend_from_slice(&u16::try_from(4 + value.len()).unwrap_or_default().to_ne_bytes());
    bytes.extend_from_slice(&kind.to_ne_bytes());
    bytes.extend_from_slice(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// A dummy interface, an address and a route: each changes only the box's own network, if it works at all.
pub(super) fn netlink_route(_: &Facts) -> Outcome {
    let mut link = vec![0_u8; 16]; // struct ifinfomsg
    let info = attribute(1, b"dummy");
    link.extend(attribute(3, b"carrelprobe\0"));
    link.extend(attribute(18, &info)); // IFLA_LINKINFO { IFLA_INFO_KIND }
    let mut address = vec![2_u8, 32, 0, 0, 1, 0, 0, 0]; // struct ifaddrmsg: AF_INET /32 on lo
    address.extend(attribute(2, &[192, 0, 2, 1])); // IFA_LOCAL, a documentation address
    let mut route = vec![2_u8, 32, 0, 0, 254, 3, 0, 1, 0, 0, 0, 0]; // struct rtmsg: unicast in the main table
    route.extend(attribute(1, &[192, 0, 2, 2]));
    route.extend(attribute(4, &1_u32.to_ne_bytes())); // over lo
    let allowed = [REFUSED, &[Errno::AFNOSUPPORT, Errno::PROTONOSUPPORT]].concat();
    all_refused(
        &[
            ("netlink new link", &|| request(16, &link)),
            ("netlink new address", &|| request(20, &address)),
            ("netlink new route", &|| request(24, &route)),
        ],
        &allowed,
    )
}

/// Sets the flags that `lo` already has, which needs the same right as changing them.
pub(super) fn interface_ioctl(_: &Facts) -> Outcome {
    step("interface ioctl", || {
        let socket = match sys!(SYS_socket, libc::AF_INET, libc::SOCK_DGRAM, 0) {
            Ok(socket) => socket,
            Err(errno) => return skipped(format!("no socket: {}", name(errno))),
        };
        let mut flags = [0_u8; 40];
        flags[..2].copy_from_slice(b"lo");
        if let Err(errno) = sys!(SYS_ioctl, socket, libc::SIOCGIFFLAGS, &mut flags) {
            return skipped(format!("SIOCGIFFLAGS: {}", name(errno)));
        }
        let mut mtu = [0_u8; 40];
        mtu[..2].copy_from_slice(b"lo");
        let _ = sys!(SYS_ioctl, socket, libc::SIOCGIFMTU, &mut mtu);
        merge([
            expect_errno("SIOCSIFFLAGS(lo)", sys!(SYS_ioctl, socket, libc::SIOCSIFFLAGS, &flags), REFUSED),
            expect_errno("SIOCSIFMTU(lo)", sys!(SYS_ioctl, socket, libc::SIOCSIFMTU, &mtu), REFUSED),
        ])
    })
}
