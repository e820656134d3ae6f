//! What the host tells the probe about the outside: names to look for, never the secrets themselves.

use std::collections::BTreeMap;

/// Every fact a probe may ask for, with its meaning. `--fact` refuses other keys, so that a typo on the
/// host side cannot turn a probe into a silent skip.
pub(crate) const KNOWN: &[(&str, &str)] = &[
    ("confirmed_box", "1: the caller vouches that this process is inside a sandbox"),
    ("canary_path", "a file that exists on the host only"),
    ("canary_sha256", "hex digest of the canary's content; without it any readable file there is a breach"),
    ("host_tcp_port", "the host listens on 127.0.0.1:PORT"),
    ("host_addrs", "the host's own addresses, comma-separated"),
    ("host_abstract", "the host listens on this abstract unix socket"),
    ("host_pid", "pid of a process on the host, as the host sees it"),
    ("host_start", "when that was started, in the kernel's ticks"),
    ("host_hostname", "the host's name"),
    ("host_env_name", "a variable in the host's environment"),
    ("env_allow", "further variable names that are expected, comma-separated"),
    ("other_workspace", "host path of another sandbox's workspace"),
    ("other_session_marker", "a process of another session of this sandbox has this in its command line"),
    ("agent_socket", "host path of an agent socket"),
    ("memory_mb", "memory limit"),
    ("pids", "process limit"),
    ("disk_mb", "disk limit of the workspace"),
    ("nofile", "descriptor limit of one process"),
    ("cpus", "CPU limit, may be fractional"),
    ("max_inodes", "most files that the workspace may hold"),
    ("flood_mb", "how much output-flood prints (default 64)"),
];

/// The facts of one invocation, and the descriptors this program was started with.
#[derive(Debug)]
pub(crate) struct Facts {
    values: BTreeMap<String, String>,
    /// Descriptors above 2 that were open before `main` opened anything.
    pub(crate) inherited: Vec<i32>,
}

impl Facts {
    pub(crate) fn new(inherited: Vec<i32>) -> Self {
        Facts { values: BTreeMap::new(), inherited }
    }

    /// Takes one `key=value`.
    pub(crate) fn add(&mut self, text: &str) -> Result<(), String> {
        let (key, value) = text.split_once('=').ok_or_else(|| format!("fact {text:?} is not key=value"))?;
        if !KNOWN.iter().any(|(known, _)| *known == key) {
            return Err(format!("unknown fact {key:?}"));
        }
        self.values.insert(key.to_owned(), value.to_owned());
        Ok(())
    }

    pub(crate) fn get(&self, key: &str) -> Option<&str> {
        self.values.get(key).map(String::as_str).filter(|value| !value.is_empty())
    }

    /// The fact as text, empty when absent: for probes that declare it in `needs` and so never run without.
    pub(crate) fn text(&self, key: &str) -> &str {
        self.get(key).unwrap_or_default()
    }

    pub(crate) fn number(&self, key: &str) -> Option<u64> {
        self.get(key).and_then(|value| value.parse().ok())
    }

    /// The parts of a comma-separated fact.
    pub(crate) fn parts(&self, key: &str) -> impl Iterator<Item = &str> {
        self.text(key).split(',').map(str::trim).filter(|part| !part.is_empty())
    }

    pub(crate) fn confirmed(&self) -> bool {
        self.get("confirmed_box") == Some("1")
    }
}
