//! Ports of a sandbox: what listens in it, and connections into it.

use carrel_backend::{IsolationLevel, port::PortStream};
use carrel_proto::{
    message::{Event, PortInfo, Request},
    problem::{Code, Problem},
};

use crate::{Engine, registry::Record};

impl Engine {
    /// What listens in the sandbox, by port.
    pub async fn ports(&self, record: &Record) -> Result<Vec<PortInfo>, Problem> {
        own_network(record)?;
        match self.ask(record, &Request::Ports).await? {
            Event::Ports { ports } => Ok(ports),
            _ => Err(Problem::new(Code::Protocol, "the agent did not list its ports")),
        }
    }

    /// A TCP connection to a port of the sandbox. What flows through it is no call: it keeps the sandbox from being idle
    /// only at its start.
    pub async fn dial(&self, record: &Record, port: u16) -> Result<PortStream, Problem> {
        own_network(record)?;
        if port == 0 {
            return Err(Problem::new(Code::InvalidArgument, "0 is no port"));
        }
        self.connect(record).await?.dial(port).await
    }
}

/// Without a network of its own a box's ports are the host's, and those are not its to give.
fn own_network(record: &Record) -> Result<(), Problem> {
    if record.spec.isolation == IsolationLevel::Jail {
        return Ok(());
    }
    Err(Problem::new(Code::Unsupported, "weak isolation has no network of its own, so it has no ports")
        .hint("the server listens on the host itself: connect to it there"))
}
