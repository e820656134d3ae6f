//! network: reaching anything beyond the box. A box without network has `lo` and nothing else, so everything
//! fails at once; a connection that merely hangs has found a way out and counts as a breach.

pub(crate) mod families;

use crate::facts::Facts;
use crate::isolate::step;
use crate::outcome::{
    NO_FILE, Outcome, breach, errno_of, expect_errno, held, merge, name, none_found, skipped,
};
use crate::sys::sys;
use crate::table::Probe;
use rustix::io::Errno;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream, UdpSocket};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::time::Duration;

/// An unreachable network says so at once; loopback answers in microseconds.
const PATIENCE: Duration = Duration::from_millis(700);

const PORT: &[&str] = &["host_tcp_port"];

pub(crate) const PROBES: &[Probe] = &[
    Probe::light("host-loopback", "connect to a port of the host's loopback", host_loopback).needs(PORT),
    Probe::light("host-addresses", "connect to the host by its addresses", host_addresses).needs(PORT),
    Probe::light("host-abstract-socket", "connect to an abstract unix socket of the host", host_abstract)
        .needs(&["host_abstract"]),
    Probe::light("agent-socket-connect", "connect to an agent's socket by its host path", agent_socket)
        .needs(&["agent_socket"]),
    Probe::light("interfaces", "have a network interface besides lo", interfaces),
    Probe::light("routes", "have a route to anywhere", routes),
    Probe::light("metadata-service", "reach the cloud's metadata service", |_| {
        merge([tcp("169.254.169.254", 80), tcp("fd00:ec2::254", 80), tcp("100.100.100.200", 80)])
    }),
    Probe::light("private-networks", "reach usual addresses of private networks", |_| {
        merge(
            [("10.0.0.1", 80), ("172.17.0.1", 2375), ("192.168.1.1", 80), ("10.96.0.1", 443)]
                .map(|(host, port)| tcp(host, port)),
        )
    }),
    Probe::light("internet", "reach the internet", |_| {
        merge([tcp("1.1.1.1", 443), tcp("8.8.8.8", 53), tcp("2606:4700:4700::1111", 443)])
    }),
    Probe::light("dns-public", "ask a public name server", |_| {
        merge([dns("8.8.8.8"), dns("1.1.1.1"), dns("2001:4860:4860::8888")])
    }),
    Probe::light("dns-configured", "ask the configured name servers", dns_configured),
    Probe::light("multicast", "send to the local network by multicast and broadcast", multicast),
    Probe::light("netlink-route", "add addresses, routes and interfaces", families::netlink_route),
    Probe::light("interface-ioctl", "bring up or change an interface", families::interface_ioctl),
];

/// Errors that say "not from here" at once.
const UNREACHABLE: &[Errno] = &[
    Errno::NETUNREACH,
    Errno::HOSTUNREACH,
    Errno::NETDOWN,
    Errno::ADDRNOTAVAIL,
    Errno::CONNREFUSED,
    Errno::AFNOSUPPORT,
    Errno::PERM,
    Errno::ACCESS,
    Errno::NOSYS,
];

fn tcp(host: &str, port: u16) -> Outcome {
    let Ok(ip) = host.parse::<IpAddr>() else { return skipped(format!("{host} is not an address")) };
    let what = format!("tcp {}", SocketAddr::new(ip, port));
    step(&what, || match TcpStream::connect_timeout(&SocketAddr::new(ip, port), PATIENCE) {
        Ok(_) => breach(format!("{what}: connected")),
        Err(error) if error.kind() == std::io::ErrorKind::TimedOut => {
            breach(format!("{what}: not refused, packets go somewhere"))
        }
        // A refusal from another machine has come over a network; only on loopback is it the box's own.
        Err(error) if errno_of(&error) == Errno::CONNREFUSED && !ip.to_canonical().is_loopback() => {
            breach(format!("{what}: someone answered with a refusal"))
        }
        Err(error) => expect_errno::<()>(&what, Err(errno_of(&error)), UNREACHABLE),
    })
}

fn port(facts: &Facts) -> Option<u16> {
    facts.number("host_tcp_port").and_then(|port| u16::try_from(port).ok())
}

fn host_loopback(facts: &Facts) -> Outcome {
    let Some(port) = port(facts) else { return skipped("host_tcp_port is not a port") };
    merge(["127.0.0.1", "127.0.0.53", "::1", "::ffff:127.0.0.1"].map(|host| tcp(host, port)))
}

/// Addresses that mean "this machine" but are not loopback, then those the host named.
fn host_addresses(facts: &Facts) -> Outcome {
    let Some(port) = port(facts) else { return skipped("host_tcp_port is not a port") };
    let any = ["0.0.0.0", "::"].map(|host| {
        // Zero means loopback to the kernel, so a refusal is the box's own.
        let outcome = tcp(host, port);
        if outcome.detail.contains("refusal") {
            held(format!("tcp {host}:{port}: ECONNREFUSED in the box"))
        } else {
            outcome
        }
    });
    let named: Vec<Outcome> = facts.parts("host_addrs").map(|host| tcp(host, port)).collect();
    merge(any.into_iter().chain(named))
}

fn host_abstract(facts: &Facts) -> Outcome {
    let name = facts.text("host_abstract").trim_start_matches('@');
    let Ok(address) = std::os::unix::net::SocketAddr::from_abstract_name(name) else {
        return skipped("not a socket name");
    };
    let stream = step("connect @", || {
        expect_errno(
            "connect",
            UnixStream::connect_addr(&address).map_err(|error| errno_of(&error)),
            UNREACHABLE,
        )
    });
    let datagram = step("send @", || {
        let sent = UnixDatagram::unbound().and_then(|socket| socket.connect_addr(&address));
        expect_errno("datagram", sent.map_err(|error| errno_of(&error)), UNREACHABLE)
    });
    merge([stream, datagram])
}

fn agent_socket(facts: &Facts) -> Outcome {
    let path = facts.text("agent_socket");
    let ways = [path.to_owned(), format!("/proc/1/root{path}"), format!("/proc/self/root/../../../..{path}")];
    let allowed = [UNREACHABLE, NO_FILE].concat();
    merge(ways.map(|way| {
        step(&way, || {
            let connected = UnixStream::connect(&way);
            // Longer than a socket address can hold: reachable only by a shorter name, so stat tells.
            if connected.as_ref().is_err_and(|error| error.raw_os_error().is_none()) {
                return expect_errno(&way, fs::metadata(&way).map_err(|error| errno_of(&error)), &allowed);
            }
            expect_errno(&way, connected.map_err(|error| errno_of(&error)), &allowed)
        })
    }))
}

fn interfaces(_: &Facts) -> Outcome {
    // The kernel's own numbering needs no /proc or /sys; names are asked by index.
    let mut found = Vec::new();
    let socket = match sys!(SYS_socket, libc::AF_UNIX, libc::SOCK_DGRAM, 0) {
        Ok(socket) => socket,
        Err(errno) => return skipped(format!("no socket to ask with: {}", name(errno))),
    };
    let mut asked = false;
    for index in 1..512_u32 {
        let mut request = [0_u8; 40];
        request[16..20].copy_from_slice(&index.to_ne_bytes());
        match sys!(SYS_ioctl, socket, libc::SIOCGIFNAME, &mut request) {
            Ok(_) => {
                asked = true;
                let text: Vec<u8> = request.iter().copied().take(16).take_while(|byte| *byte != 0).collect();
                let text = String::from_utf8_lossy(&text).into_owned();
                if text != "lo" {
                    found.push(text);
                }
            }
            Err(Errno::NODEV | Errno::NXIO) => asked = true,
            Err(_) => {}
        }
    }
    let _ = sys!(SYS_close, socket);
    let listed = fs::read_to_string("/proc/net/dev").unwrap_or_default();
    for line in listed.lines().skip(2) {
        let text = line.split(':').next().unwrap_or_default().trim();
        if text != "lo" && !text.is_empty() && !found.iter().any(|known| known == text) {
            found.push(text.to_owned());
        }
    }
    // Tunnels that the kernel adds to every new namespace by itself lead nowhere while they are down.
    let found: Vec<String> = found.into_iter().filter(|text| !dormant_tunnel(text)).collect();
    if !asked && listed.is_empty() {
        skipped("interfaces cannot be listed")
    } else {
        none_found("interfaces besides lo", &found)
    }
}

fn dormant_tunnel(text: &str) -> bool {
    const FALLBACK: &[&str] =
        &["tunl0", "gre0", "gretap0", "erspan0", "ip_vti0", "ip6_vti0", "sit0", "ip6tnl0", "ip6gre0"];
    let up = fs::read_to_string("/proc/net/route").is_ok_and(|routes| routes.contains(text));
    FALLBACK.contains(&text) && !up
}

fn routes(_: &Facts) -> Outcome {
    let v4 = fs::read_to_string("/proc/net/route");
    let v6 = fs::read_to_string("/proc/net/ipv6_route");
    if v4.is_err() && v6.is_err() {
        return skipped("/proc/net shows no routes");
    }
    let v4 = v4.unwrap_or_default();
    let v6 = v6.unwrap_or_default();
    let leading_out = |line: &&str| !line.trim_end().ends_with("lo") && !line.starts_with("lo");
    let found: Vec<String> = v4
        .lines()
        .skip(1)
        .filter(leading_out)
        .chain(v6.lines().filter(leading_out))
        .map(str::to_owned)
        .collect();
    none_found("routes", &found)
}

/// A question for `example.com`; that it could be sent is already too much.
fn dns(server: &str) -> Outcome {
    let Ok(ip) = server.parse::<IpAddr>() else { return skipped(format!("{server} is not an address")) };
    let what = format!("dns {server}");
    step(&what, || {
        let query = b"\x12\x34\x01\0\0\x01\0\0\0\0\0\0\x07example\x03com\0\0\x01\0\x01";
        let bind: IpAddr =
            if ip.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { std::net::Ipv6Addr::UNSPECIFIED.into() };
        let asked = UdpSocket::bind((bind, 0)).and_then(|socket| {
            socket.set_read_timeout(Some(PATIENCE))?;
            socket.connect((ip, 53))?;
            socket.send(query)?;
            Ok(socket)
        });
        match asked {
            Err(error) => expect_errno::<()>(&what, Err(errno_of(&error)), UNREACHABLE),
            Ok(socket) => match socket.recv(&mut [0_u8; 512]) {
                Ok(n) => breach(format!("{what}: answered with {n} bytes")),
                Err(error) if ip.is_loopback() && errno_of(&error) == Errno::CONNREFUSED => {
                    held(format!("{what}: no one listens in the box"))
                }
                Err(_) => breach(format!("{what}: the question could be sent")),
            },
        }
    })
}

fn dns_configured(_: &Facts) -> Outcome {
    let config = match fs::read_to_string("/etc/resolv.conf") {
        Ok(config) => config,
        Err(error) => return held(format!("/etc/resolv.conf: {}", name(errno_of(&error)))),
    };
    let servers: Vec<&str> =
        config.lines().filter_map(|line| line.strip_prefix("nameserver")).map(str::trim).take(3).collect();
    if servers.is_empty() {
        held("no name server is configured")
    } else {
        merge(servers.into_iter().map(dns))
    }
}

fn multicast(_: &Facts) -> Outcome {
    let send = |target: SocketAddr, broadcast: bool| {
        let what = format!("udp {target}");
        step(&what, || {
            let bind: IpAddr = if target.is_ipv4() {
                Ipv4Addr::UNSPECIFIED.into()
            } else {
                std::net::Ipv6Addr::UNSPECIFIED.into()
            };
            let sent = UdpSocket::bind((bind, 0)).and_then(|socket| {
                socket.set_broadcast(broadcast)?;
                socket.send_to(b"carrel-probe", target)
            });
            expect_errno(&what, sent.map_err(|error| errno_of(&error)), UNREACHABLE)
        })
    };
    merge([
        send(SocketAddr::from(([224, 0, 0, 251], 5353)), false),
        send(SocketAddr::from(([255, 255, 255, 255], 67)), true),
        send(SocketAddr::from(([0xff02, 0, 0, 0, 0, 0, 0, 0xfb], 5353)), false),
    ])
}
