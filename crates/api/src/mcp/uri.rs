//! `carrel://` addresses: files, execs and briefs of a sandbox, environments.

use carrel_proto::{
    files::GuestPath,
    id::{ExecId, SandboxId, SessionName},
    problem::{Code, Problem},
};

pub(super) const FILES: &str = "carrel://sandboxes/{id}/files/{+path}";
pub(super) const EXECS: &str = "carrel://sandboxes/{id}/execs/{exec}";
pub(super) const BRIEF: &str = "carrel://sandboxes/{id}/brief/{session}";
pub(super) const ENVIRONMENTS: &str = "carrel://environments";

/// What an address means.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Address {
    Environments,
    File { sandbox: SandboxId, path: GuestPath },
    Exec { sandbox: SandboxId, exec: ExecId },
    Brief { sandbox: SandboxId, session: SessionName },
}

impl Address {
    pub(super) fn parse(text: &str) -> Result<Self, Problem> {
        if text == ENVIRONMENTS {
            return Ok(Address::Environments);
        }
        let unknown = || {
            Problem::new(Code::NotFound, format!("there is no resource `{text}`"))
                .hint(format!("addresses are {ENVIRONMENTS}, {FILES}, {EXECS} and {BRIEF}"))
        };
        let rest = text.strip_prefix("carrel://sandboxes/").ok_or_else(unknown)?;
        let mut parts = rest.splitn(3, '/');
        let (Some(id), Some(kind), Some(what)) = (parts.next(), parts.next(), parts.next()) else {
            return Err(unknown());
        };
        let sandbox = id.parse().map_err(|_| unknown())?;
        match kind {
            "files" => {
                let bytes = decode(what).ok_or_else(unknown)?;
                let path = if bytes.is_empty() { Ok(GuestPath::root()) } else { GuestPath::parse(&bytes) };
                let path =
                    path.map_err(|error| Problem::new(Code::PathOutside, format!("`{what}`: {error}")))?;
                Ok(Address::File { sandbox, path })
            }
            "execs" => Ok(Address::Exec { sandbox, exec: what.parse().map_err(|_| unknown())? }),
            "brief" => Ok(Address::Brief { sandbox, session: what.parse().map_err(|_| unknown())? }),
            _ => Err(unknown()),
        }
    }
}

pub(super) fn file(sandbox: &SandboxId, path: &[u8]) -> String {
    format!("carrel://sandboxes/{sandbox}/files/{}", encode(path))
}

pub(super) fn exec(sandbox: &SandboxId, exec: &ExecId) -> String {
    format!("carrel://sandboxes/{sandbox}/execs/{exec}")
}

pub(super) fn brief(sandbox: &SandboxId, session: &SessionName) -> String {
    format!("carrel://sandboxes/{sandbox}/brief/{session}")
}

fn encode(path: &[u8]) -> String {
    let mut text = String::with_capacity(path.len());
    for byte in path {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' => {
                text.push(char::from(*byte));
            }
            byte => text.push_str(&format!("%{byte:02X}")),
        }
    }
    text
}

fn decode(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
        bytes.push(digit(rest.next()?)? << 4 | digit(rest.next()?)?);
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_survive_and_stay_inside() {
        let id = SandboxId::from_random([7; 10]);
        for name in [&b"a b/\xff%.txt"[..], "ü\n".as_bytes(), b"plain.py"] {
            let text = file(&id, name);
            assert!(text.is_ascii());
            let path = GuestPath::parse(name).unwrap();
            assert_eq!(Address::parse(&text).unwrap(), Address::File { sandbox: id.clone(), path });
        }
        // `..` is refused where paths are resolved, which is below the workspace and nowhere else.
        for bad in [
            "execs/../x",
            "execs/",
            "brief/",
            "brief/a/b",
            "other/x",
            "files",
            "files/%zz",
            "files/%2",
            "files//etc/passwd",
        ] {
            let text = format!("carrel://sandboxes/{id}/{bad}");
            assert!(Address::parse(&text).is_err(), "{text}");
        }
        for bad in ["", "file:///etc/passwd", "carrel://", "carrel://sandboxes//files/x"] {
            assert!(Address::parse(bad).is_err(), "{bad}");
        }
        let session = SessionName::main();
        assert_eq!(
            Address::parse(&brief(&id, &session)).unwrap(),
            Address::Brief { sandbox: id.clone(), session }
        );
        assert_eq!(
            Address::parse(&format!("carrel://sandboxes/{id}/files/")).unwrap(),
            Address::File { sandbox: id, path: GuestPath::root() }
        );
    }
}
