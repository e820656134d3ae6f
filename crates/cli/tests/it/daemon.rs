//! `carrel serve`: its doors, who comes in, and how it begins and ends.

use std::{
    net::TcpStream,
    os::{
        fd::OwnedFd,
        unix::fs::PermissionsExt,
        unix::net::{UnixDatagram, UnixListener, UnixStream},
    },
    process::{Command, Stdio},
    sync::Arc,
};

use rustix::process::Signal;
use tokio_rustls::rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned, crypto::ring};

use crate::{
    serving::{Daemon, PATIENCE, ask, unix},
    support::{Ended, Place, sandboxes},
};

#[test]
fn one_daemon_per_socket_and_a_dead_ones_is_replaced() {
    let place = Place::new();
    let mut first = Daemon::start(&place, &[]);
    let mode = |path: &std::path::Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&place.socket()), 0o600);
    assert_eq!(mode(place.socket().parent().unwrap()), 0o700);
    let second = place.run(&["serve", "--json"]);
    assert_eq!((second.code, &second.json()["error"]["code"]), (125, &"conflict".into()), "{}", second.err);
    let about = unix(&place, "GET /v1/daemon", "").json();
    assert_eq!(about["pid"], first.child.id());
    // Killed, it leaves its socket behind.
    first.signal(Signal::KILL);
    first.wait();
    assert!(place.socket().exists());
    let third = Daemon::start(&place, &[]);
    assert_eq!(unix(&place, "GET /v1/daemon", "").json()["pid"], third.child.id());
    third.stop();
    assert!(!place.socket().exists());
}

/// Several at once for one state directory, each on a socket of its own; the one that has won is killed, again and again.
#[test]
fn one_daemon_per_state_directory_however_many_race_for_it() {
    let place = Place::new();
    if !sandboxes(&place) {
        return;
    }
    place.run(&["run", "-s", "work", "n = 0"]).with(0);
    let socket = |number: usize| place.path().join(format!("run/{number}.sock")).display().to_string();
    for round in 1..=4 {
        let mut daemons: Vec<(String, Daemon)> = (0..3)
            .map(|number| (socket(number), place.command(&["serve", "-v", "--socket", &socket(number)])))
            .map(|(socket, command)| (socket, Daemon::spawn(command)))
            .collect();
        let mut won = Vec::new();
        for (socket, daemon) in &mut daemons {
            if daemon.listens() {
                won.push((socket, daemon));
                continue;
            }
            assert_eq!(daemon.wait(), Some(125), "{}", daemon.said());
            assert!(daemon.said().contains("serves") && daemon.said().contains("hint:"), "{}", daemon.said());
            assert!(!std::path::Path::new(socket).exists(), "whoever lost has left its socket");
        }
        assert_eq!(won.len(), 1, "round {round}");
        let (socket, winner) = won.pop().unwrap();
        let about = ask(UnixStream::connect(&*socket).unwrap(), "GET /v1/daemon", "", "").json();
        assert_eq!(about["pid"], winner.child.id());
        // What was done through the ones that were killed is there.
        let mut count = place.command(&["run", "-s", "work", "n += 1; n"]);
        let count = count.env("CARREL_SOCKET", &*socket).output().unwrap();
        assert_eq!(Ended::of(count).with(0), format!("{round}\n"));
        winner.signal(Signal::KILL);
        winner.wait();
        std::fs::remove_file(socket).unwrap();
    }
    let mut last = Daemon::start(&place, &[]);
    assert_eq!(place.run(&["run", "-s", "work", "n"]).with(0), "4\n");
    let refused = place.run(&["serve", "--json", "--socket", &socket(9)]);
    assert_eq!(
        (refused.code, &refused.json()["error"]["code"]),
        (125, &"conflict".into()),
        "{}",
        refused.err
    );
    last.signal(Signal::KILL);
    last.wait();
}

#[test]
fn tcp_asks_for_a_token_and_for_its_own_name() {
    let place = Place::new();
    let token =
        place.run(&["token", "create", "--name", "ci", "--quota", "sandboxes=1", "--expires", "30d"]).with(0);
    let bearer = format!("Authorization: Bearer {}\r\n", token.trim());
    let mut daemon =
        Daemon::start(&place, &["--listen", "127.0.0.1:0", "--allow-origin", "https://app.example.com"]);
    let address = daemon.tcp();
    let get = |headers: &str| {
        let answer = ask(TcpStream::connect(&address).unwrap(), "GET /v1/sandboxes", headers, "");
        (
            answer.status,
            if answer.status < 400 {
                String::new()
            } else {
                answer.json()["code"].as_str().unwrap().to_owned()
            },
        )
    };
    let no = |status: u16, code: &str| (status, code.to_owned());
    assert_eq!(get(&bearer), (200, String::new()));
    assert_eq!(get(""), no(401, "unauthorized"));
    assert_eq!(get("Authorization: Bearer carrel_tok_x_y\r\n"), no(401, "unauthorized"));
    assert_eq!(get(&format!("{bearer}Host: evil.example.com\r\n")), no(403, "forbidden"));
    assert_eq!(get(&format!("{bearer}Origin: https://evil.example.com\r\n")), no(403, "forbidden"));
    assert_eq!(get(&format!("{bearer}Origin: https://app.example.com\r\n")).0, 200);
    // What the command line uses is not for TCP.
    let answer = ask(TcpStream::connect(&address).unwrap(), "GET /v1/daemon", &bearer, "");
    assert_eq!(answer.status, 403);
    // A revoked token is worthless within seconds.
    let listed = place.run(&["token", "list", "--json"]).json();
    let id = listed["tokens"][0]["id"].as_str().unwrap().to_owned();
    assert_eq!(listed["tokens"][0]["quota"]["sandboxes"], 1);
    place.run(&["token", "revoke", &id]).with(0);
    assert!(place.run(&["token", "list"]).with(0).contains("revoked"));
    daemon.stop();
    let mut daemon = Daemon::start(&place, &["--listen", "127.0.0.1:0"]);
    let address = daemon.tcp();
    assert_eq!(ask(TcpStream::connect(&address).unwrap(), "GET /v1/sandboxes", &bearer, "").status, 401);
    // The audit names who did what, and never a secret.
    daemon.stop();
    let audit = std::fs::read_to_string(place.path().join("state/audit.jsonl")).unwrap();
    assert!(audit.contains(&id) && audit.contains("\"status\":401"), "{audit}");
    assert!(!audit.contains(token.trim()), "{audit}");
}

#[test]
fn without_tokens_only_on_the_loopback() {
    let place = Place::new();
    let ended = place.run(&["serve", "--listen", "0.0.0.0:0", "--insecure-no-auth"]);
    assert_eq!(ended.code, 125);
    assert!(ended.err.contains("for the loopback"), "{}", ended.err);
    let ended = place.run(&["serve", "--listen", "nonsense"]);
    assert!(ended.err.contains("--listen: `nonsense` is not ADDRESS:PORT"), "{}", ended.err);
    let ended = place.run(&["serve", "--tls-cert", "x.pem"]);
    assert!(ended.err.contains("give both --tls-cert and --tls-key"), "{}", ended.err);
    let mut daemon = Daemon::start(&place, &["--listen", "127.0.0.1:0", "--insecure-no-auth"]);
    let address = daemon.tcp();
    assert_eq!(ask(TcpStream::connect(&address).unwrap(), "GET /v1/sandboxes", "", "").status, 200);
    daemon.stop();
}

#[test]
fn tls_with_a_certificate_of_ones_own() {
    let place = Place::new();
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    std::fs::write(place.work().join("cert.pem"), made.cert.pem()).unwrap();
    std::fs::write(place.work().join("key.pem"), made.signing_key.serialize_pem()).unwrap();
    let args =
        ["--listen", "127.0.0.1:0", "--tls-cert", "cert.pem", "--tls-key", "key.pem", "--insecure-no-auth"];
    let mut daemon = Daemon::start(&place, &args);
    assert!(daemon.hear("listening on http").contains("https://"));
    let address = daemon.tcp();
    assert_eq!(trusting(&address, &made.cert), Some(200));
    daemon.stop();
}

/// A client that trusts this certificate and no other; `None` if the daemon shows another one.
fn trusting(address: &str, certificate: &rcgen::Certificate) -> Option<u16> {
    let mut roots = RootCertStore::empty();
    roots.add(certificate.der().clone()).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let mut connection = ClientConnection::new(Arc::new(config), "localhost".try_into().unwrap()).unwrap();
    let mut stream = TcpStream::connect(address).unwrap();
    while connection.is_handshaking() {
        connection.complete_io(&mut stream).ok()?;
    }
    Some(ask(StreamOwned::new(connection, stream), "GET /v1/sandboxes", "", "").status)
}

#[test]
fn a_hangup_reads_certificates_again_and_broken_ones_change_nothing() {
    let place = Place::new();
    let write = || {
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        std::fs::write(place.work().join("cert.pem"), made.cert.pem()).unwrap();
        std::fs::write(place.work().join("key.pem"), made.signing_key.serialize_pem()).unwrap();
        made.cert
    };
    let first = write();
    let args =
        ["--listen", "127.0.0.1:0", "--tls-cert", "cert.pem", "--tls-key", "key.pem", "--insecure-no-auth"];
    let mut daemon = Daemon::start(&place, &args);
    let address = daemon.tcp();
    assert_eq!(trusting(&address, &first), Some(200));
    let second = write();
    daemon.signal(Signal::HUP);
    daemon.hear("the certificates were read again");
    assert_eq!(trusting(&address, &first), None);
    assert_eq!(trusting(&address, &second), Some(200));
    // Half of a renewal: the key of another certificate.
    let other = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    std::fs::write(place.work().join("cert.pem"), other.cert.pem()).unwrap();
    daemon.signal(Signal::HUP);
    daemon.hear("the certificates stay as they were");
    assert_eq!(trusting(&address, &second), Some(200));
    daemon.stop();
}

/// `carrel serve` with this as the third descriptor, as systemd starts it.
fn handed_over(place: &Place, listener: OwnedFd, more: &str) -> Command {
    let carrel = place.command(&[]);
    let mut command = Command::new("sh");
    // A pid that is the daemon's own.
    let script =
        format!("exec 3<&0 0</dev/null; export LISTEN_PID=$$ LISTEN_FDS=1; exec \"$0\" serve -v {more}");
    command.arg("-c").arg(script).arg(carrel.get_program()).current_dir(place.work());
    for (name, value) in carrel.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command.stdin(Stdio::from(listener)).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

#[test]
fn no_token_is_for_the_loopback_also_on_systemds_sockets() {
    let place = Place::new();
    let listener = std::net::TcpListener::bind("0.0.0.0:0").unwrap();
    let ended = handed_over(&place, listener.into(), "--insecure-no-auth").output().unwrap();
    let ended = Ended::of(ended);
    assert_eq!(ended.code, 125, "{}", ended.err);
    assert!(ended.err.contains("is for the loopback, and 0.0.0.0:"), "{}", ended.err);
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut daemon = Daemon::spawn(handed_over(&place, listener.into(), "--insecure-no-auth"));
    let address = daemon.tcp();
    assert_eq!(ask(TcpStream::connect(&address).unwrap(), "GET /v1/sandboxes", "", "").status, 200);
    daemon.stop();
}

#[test]
fn systemd_hands_its_socket_over_and_is_told_of_every_step() {
    let place = Place::new();
    std::fs::create_dir(place.path().join("run")).unwrap();
    let listener = UnixListener::bind(place.socket()).unwrap();
    let told = UnixDatagram::bind(place.path().join("notify")).unwrap();
    told.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut command = handed_over(&place, OwnedFd::from(listener.try_clone().unwrap()), "");
    command.env("NOTIFY_SOCKET", place.path().join("notify"));
    let daemon = Daemon::spawn(command);
    let hear = |word: &str| {
        let mut buffer = [0; 256];
        let count = told.recv(&mut buffer).unwrap();
        let text = String::from_utf8_lossy(&buffer[..count]).into_owned();
        assert!(text.contains(word), "{text}");
    };
    hear("READY=1");
    assert_eq!(unix(&place, "GET /v1/daemon", "").json()["pid"], daemon.child.id());
    daemon.signal(Signal::HUP);
    hear("RELOADING=1");
    hear("READY=1");
    daemon.signal(Signal::TERM);
    hear("STOPPING=1");
    let mut daemon = daemon;
    assert_eq!(daemon.wait(), Some(0));
    // It is systemd's: the next daemon gets the same one.
    assert!(place.socket().exists());
    drop(listener);
}

#[test]
fn a_daemon_of_another_state_directory_is_not_used() {
    let place = Place::new();
    let other = place.command(&["serve", "-v", "--state", "elsewhere"]);
    let mut daemon = Daemon::spawn(other);
    daemon.hear("listening on unix:");
    let ended = Ended::of(place.command(&["ls", "-v"]).output().unwrap());
    assert_eq!(ended.code, 0, "{}", ended.err);
    // Its state directory was not there, so that no daemon can serve it.
    let ended = Ended::of(place.command(&["ls", "-v"]).output().unwrap());
    assert!(ended.err.contains("is not used: it serves"), "{}", ended.err);
    let shown = place.run(&["doctor", "--json"]).json();
    assert!(shown["daemon"].is_null());
    daemon.stop();
}
